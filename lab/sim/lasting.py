"""Partial faults that last for seconds, before the other faults of a life begin.

One thing breaks, and in most lives the master ends in the middle of it. If the group could be
served in spite of that, it must be (`lab.sim.service`).
"""

from lab.sim.cuts import ROLES, break_host, roles_of
from lab.sim.hosts import Host
from lab.sim.kinds import PlannedFault
from lab.sim.service import ServedKinds
from lab.sim.world import Violation

_FIRST = ("L", "L", "L", "M", "M", "F1", "S1", "S2")
"""The role at one end of a broken link: mostly one that decides something."""
_SLOW_LINK_S = 0.25
_THIRDS = 3
_ALONE = 4
_TERMS = 3
"""More than an election whose votes were split, and one more for an offered lead (R50)."""


class LastingFaults(ServedKinds):
    def lasting_link(self, fault: PlannedFault) -> str | None:
        two = self._two(fault)
        return self._cut(fault, "link", [two, two[::-1]]) if two else None

    def lasting_one_way(self, fault: PlannedFault) -> str | None:
        two = self._two(fault)
        return self._cut(fault, "one way", [two]) if two else None

    def unanswered_master(self, fault: PlannedFault) -> str | None:
        """What a name server, which is a controller as well, answers is lost on the way to the
        master (R32)."""
        master = self.cluster.master
        if master is None:
            return None
        return self._cut(fault, "one way", [(self._controller(fault), master)])

    def lasting_zone(self, fault: PlannedFault) -> str | None:
        """A controller and a broker are cut off from all others, or the leading controller from
        all brokers (R50)."""
        brokers = list(self.cluster.brokers.values())
        alone = self._roles().get("L") if int(fault.pick2 * 1000) % _ALONE == 0 else None
        if alone is not None:
            out: list[tuple[Host, Host]] = [(alone, broker) for broker in brokers]
            return self._cut(fault, "zone", out + [way[::-1] for way in out])
        inside = (self._controller(fault), brokers[int(fault.pick2 * len(brokers))])
        outside = [host for host in self.cluster.hosts if host not in inside]
        ways = [(one, other) for one in inside for other in outside]
        return self._cut(fault, "zone", ways + [way[::-1] for way in ways])

    def lasting_slow_link(self, fault: PlannedFault) -> str | None:
        two = self._two(fault)
        if two is None:
            return None
        self._slow(*two, _SLOW_LINK_S, fault.for_s)
        return self._begin(fault, "slow link", " and ".join(host.name for host in two))

    def lasting_slow_disk(self, fault: PlannedFault) -> str | None:
        """Not of a broker whose flush the acks wait for: such a group cannot be served."""
        flushed = self.cluster.settings.sync_flush or self.cluster.settings.ha_sync_flush
        hosts = self.cluster.hosts
        host = self._controller(fault) if flushed else hosts[int(fault.pick * len(hosts))]
        return self._hit(fault, host, "slow disk")

    def lasting_full_disk(self, fault: PlannedFault) -> str | None:
        return self._hit(fault, self._controller(fault), "full disk")

    def lasting_pause(self, fault: PlannedFault) -> str | None:
        return self._hit(fault, self._controller(fault), "pause")

    def _roles(self) -> dict[str, Host]:
        """Empty while there is no master, or no controller leads."""
        try:
            return roles_of(self.cluster)
        except Violation:
            return {}

    def _two(self, fault: PlannedFault) -> tuple[Host, Host] | None:
        role = self._roles()
        if not role:
            return None
        one = _FIRST[int(fault.pick * len(_FIRST))]
        others = [each for each in ROLES if each != one]
        return role[one], role[others[int(fault.pick2 * len(others))]]

    def _cut(self, fault: PlannedFault, kind: str, ways: list[tuple[Host, Host]]) -> str:
        network = self.cluster.network
        for one, other in ways:
            way = (one.address, other.address)
            network.one_way.add(way)
            self._later(fault, network.heal_link, way)
        return self._begin(fault, kind, ", ".join(f"{one.name} to {two.name}" for one, two in ways))

    def _hit(self, fault: PlannedFault, host: Host, kind: str) -> str:
        break_host(host, kind)
        self._later(fault, self._mend, host)
        return self._begin(fault, kind, host.name)

    @staticmethod
    def _mend(host: Host) -> None:
        host.disk.plan.slow_s, host.disk.plan.full = 0.0, False
        if host.process is not None:
            host.process.resume()

    def _begin(self, fault: PlannedFault, kind: str, what: str) -> str:
        self._expect(kind, f"a lasting {kind} ({what})")
        third = int(fault.pick2 * 1000) % _THIRDS
        if third:
            end = self._kill_master if third == 1 else self._silence_master
            self.cluster.later(fault.for_s / 2, end, fault, what)
        self._later(fault, self._service.end)
        self._later(fault, self._check_term, self._term(), what)
        return f"{what} for {fault.for_s:.2f} s"

    def _term(self) -> int:
        return max(host.term for host in self.cluster.controllers.values())

    def _check_term(self, before: int, what: str) -> None:
        """R51: a partial fault moves the lead, and then the term stands still."""
        rose = self._term() - before
        if rose > _TERMS:
            self.cluster.violate(f"R51: the term rose {rose} times while {what} lasted")

    def _kill_master(self, fault: PlannedFault, what: str) -> None:
        master = self.cluster.master
        if master is not None:
            master.kill()
            self._then(fault, "kill", what, master)
            self.cluster.later(fault.for_s / 2, master.start)

    def _silence_master(self, fault: PlannedFault, what: str) -> None:
        master = self.cluster.master
        if master is None:
            return
        self._isolate(master, fault.for_s / 2)
        self._then(fault, "silence", what, master)

    def _then(self, fault: PlannedFault, kind: str, what: str, master: Host) -> None:
        self.cluster.tell("fault", f"{fault.kind}: {master.name} ends by {kind}")
        self._expect(kind, f"{fault.kind} ({what}) and {kind} of {master.name}")
