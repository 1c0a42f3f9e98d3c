"""What each kind of fault does to a cluster, and the end of all of them."""

from collections.abc import Sequence

from lab.sim.clients import Client, Operator, SimConsumer
from lab.sim.cluster import SimCluster
from lab.sim.disk import DiskPlan
from lab.sim.disturb import DisturbFaults
from lab.sim.hosts import BrokerHost, ControllerHost, Host
from lab.sim.kinds import Kinds, PlannedFault
from lab.sim.lasting import LastingFaults
from lab.sim.modes import ModeFaults
from lab.sim.returns import ReturnFaults
from lab.sim.service import Service
from lab.sim.strain import StrainFaults
from lab.sim.wear import WearFaults

_LOOK_S = 0.2
_LEASE_OVER_S = 1.2
_TRIES = 5
_BOTH_S = 3.5
_AWAY_S = 4.0


class HostFaults(Kinds):
    """Processes end, hang, or have a wrong clock."""

    def _brokers(self) -> list[BrokerHost]:
        return [host for host in self.cluster.brokers.values() if host.is_up]

    def _lead(self) -> ControllerHost | None:
        for host in self.cluster.controllers.values():
            if host.service is not None and host.service.gate.open:
                return host
        return None

    def kill_broker(self, fault: PlannedFault) -> str | None:
        host = self._of(self._brokers(), fault.pick)
        return self._down(fault, host, host.kill) if host else None

    def kill_master(self, fault: PlannedFault) -> str | None:
        host = self._of([host for host in self._brokers() if host.is_open], fault.pick)
        return self._down(fault, host, host.kill) if host else None

    def stop_broker(self, fault: PlannedFault) -> str | None:
        host = self._of(self._brokers(), fault.pick)
        return self._down(fault, host, host.stop) if host else None

    def rolling_restart(self, fault: PlannedFault) -> str | None:
        """Each member is stopped, which hands over if it is the master, and started again; the next
        one once it is back in the set."""
        if self._rolling:
            return None
        self._rolling = True
        first = int(3 * fault.pick)
        hosts = list(self.cluster.brokers.values())
        self._roll([*hosts[first:], *hosts[:first]])
        return f"from {hosts[first].name} on"

    def _roll(self, left: list[BrokerHost]) -> None:
        if not left or self.over:
            self._rolling = False
            return
        self.cluster.tell("fault", f"rolling restart: {left[0].name} is stopped")
        left[0].stop()
        self.cluster.later(_LOOK_S, self._roll_on, left)

    def _roll_on(self, left: list[BrokerHost]) -> None:
        """Its next start, or the next one."""
        if not left[0].is_up:
            left[0].start()
        elif left[0].wanted and self._is_member(left[0]):
            self._roll(left[1:])
            return
        if not self.over:
            self.cluster.later(_LOOK_S, self._roll_on, left)

    def kill_controller(self, fault: PlannedFault) -> str | None:
        host = self._of([h for h in self.cluster.controllers.values() if h.is_up], fault.pick)
        return self._down(fault, host, host.kill) if host else None

    def kill_lead(self, fault: PlannedFault) -> str | None:
        host = self._lead()
        return self._down(fault, host, host.kill) if host else None

    def pause(self, fault: PlannedFault) -> str | None:
        host = self._of(self._up(), fault.pick)
        if host is None or host.process is None or host.process.paused:
            return None
        host.process.pause()
        self._later(fault, host.process.resume)
        return f"{host.name} for {fault.for_s:.2f} s"

    def crash_at_callback(self, fault: PlannedFault) -> str | None:
        host = self._of(self._up(), fault.pick)
        if host is None or host.process is None:
            return None
        callbacks = int(fault.pick2 * 400)
        host.process.die_after(callbacks)
        self._later(fault, host.start)
        return f"{host.name} at the {callbacks}th from now"

    def clock_jump(self, fault: PlannedFault) -> str | None:
        host = self._of(self.cluster.hosts, fault.pick)
        return self._jump(fault, host, (fault.pick2 - 0.5) * 2)

    def clock_leap(self, fault: PlannedFault) -> str | None:
        """By hours, of a broker."""
        host = self._of(self._brokers(), fault.pick)
        return self._jump(fault, host, (fault.pick2 - 0.3) * 12)

    def _jump(self, fault: PlannedFault, host: Host | None, hours: float) -> str | None:
        if host is None:
            return None
        self.cluster.clocks.jump(host.address, hours * 3600)
        self._later(fault, self.cluster.clocks.jumps.pop, host.address, None)
        return f"{host.name} by {hours:.2f} hours"


class DiskFaultKinds(Kinds):
    """Power is lost, a process ends at a call to its disk, disks are slow."""

    def lose_power(self, fault: PlannedFault) -> str | None:
        """Where something is acknowledged unflushed, one machine at a time: the host may lose what
        it acked, and another member has it."""
        host = self._broker(fault)
        if not self.cluster.settings.acks_are_flushed and not self.is_held_elsewhere(host):
            return None
        return self._down(fault, host, host.lose_power)

    def lose_power_of_controller(self, fault: PlannedFault) -> str | None:
        host = self._controller(fault)
        return self._down(fault, host, host.lose_power)

    def lose_power_of_all_controllers(self, fault: PlannedFault) -> str | None:
        for host in self.cluster.controllers.values():
            self._down(fault, host, host.lose_power)
        return f"for {fault.for_s:.2f} s"

    def crash_at_disk_call(self, fault: PlannedFault) -> str | None:
        host = self._of(self._up(), fault.pick)
        if host is None or host.disk.plan.crash_at is not None:
            return None
        calls = 1 + int(fault.pick2 * 40)
        host.disk.plan.crash_at = (calls, calls % 2 == 0)
        self._later(fault, host.start)
        return f"{host.name} at the {calls}th from now"

    def replace_disk(self, fault: PlannedFault) -> str | None:
        """The machine is down until it has left the set, and comes back with an empty disk. Not
        where bits of another disk flipped: its disk may hold the only good copy of them."""
        host = self._broker(fault)
        if host.service is None or not self._is_member(host):
            return None
        rot = self.cluster.promises.rot
        if any(rot.of(other) for other in self.cluster.brokers.values() if other is not host):
            return None
        broker_id = host.broker_id
        host.kill()
        self._later(fault, self._replace, host, broker_id)
        return f"{host.name} is down"

    def _replace(self, host: BrokerHost, broker_id: int) -> None:
        group = self.cluster.promises.group
        if host.is_up or group is None:
            return
        if broker_id in group.sync_state_set:
            self.cluster.later(_LOOK_S, self._replace, host, broker_id)
            return
        host.wipe()
        self.cluster.tell("fault", f"replace disk: {host.name} comes back with an empty one")
        host.start()

    def fail_disk_call(self, fault: PlannedFault) -> str | None:
        """EIO, once, at a controller: a broker is suspect after it, and where it was the last of
        the set the group rightly waits for an operator."""
        hosts = [host for host in self.cluster.controllers.values() if host.is_up]
        return self._fail_call(fault, self._of(hosts, fault.pick))

    def short_write(self, fault: PlannedFault) -> str | None:
        host = self._of(self._up(), fault.pick)
        if host is None:
            return None
        host.disk.plan.short_write = 1 + int(fault.pick2 * 10)
        return f"{host.name} at the {host.disk.plan.short_write}th from now"

    def full_disk(self, fault: PlannedFault) -> str | None:
        host = self._broker(fault)
        host.disk.plan.full = True
        self._later(fault, setattr, host.disk.plan, "full", False)
        return f"{host.name} for {fault.for_s:.2f} s"

    def disk_fills_up(self, fault: PlannedFault) -> str | None:
        """Not wholly: old segments expire at any hour, or any segment, or writes are refused."""
        host = self._broker(fault)
        self._fill(fault, host, (0.8, 0.87, 0.87, 0.93)[int(fault.pick2 * 4)])
        return f"{host.name} to {100 * host.disk.plan.used:.0f} %"

    def _fill(self, fault: PlannedFault, host: BrokerHost, used: float) -> None:
        host.disk.plan.used = used
        self._later(fault, setattr, host.disk.plan, "used", DiskPlan().used)

    def hours_pass(self, fault: PlannedFault) -> str | None:
        hours = 1 + int(fault.pick * 4)
        self.cluster.promises.note_written()
        self.cluster.clocks.passed_s += 3600 * hours
        return f"{hours} of them"

    def left_behind(self, fault: PlannedFault) -> str | None:
        """It is down until the log of its group begins behind the end of its own."""
        host = self._of(self._slaves(), fault.pick)
        if host is None or host.service is None:
            return None
        end = host.service.store.max_phy_offset
        host.kill()
        self._once_expired(host, end, self.cluster.now_s + _AWAY_S, host.start)
        return f"{host.name}, at {end}"

    def slow_disk(self, fault: PlannedFault) -> str | None:
        host = self._of(self._up(), fault.pick)
        if host is None:
            return None
        host.disk.plan.slow_s = 0.02 + 0.3 * fault.pick2
        self._later(fault, setattr, host.disk.plan, "slow_s", 0.0)
        return f"{host.name}, up to {host.disk.plan.slow_s:.2f} s"


class NetworkFaults(Kinds):
    """Links are cut, slow, or break."""

    def cut(self, fault: PlannedFault) -> str | None:
        one, other = self._two(fault)
        self._block(one, other, fault.for_s)
        return f"{one.name} and {other.name} for {fault.for_s:.2f} s"

    def cut_one_way(self, fault: PlannedFault) -> str | None:
        one, other = self._two(fault)
        way = (one.address, other.address)
        self.cluster.network.one_way.add(way)
        self._later(fault, self.cluster.network.heal_link, way)
        return f"{one.name} to {other.name} for {fault.for_s:.2f} s"

    def isolate(self, fault: PlannedFault) -> str | None:
        """From all servers. Clients still reach it: a master has a tail that no member confirms,
        and half of the time it is one, for so long that another is elected."""
        host: Host | None = self._of(self.cluster.hosts, fault.pick)
        for_s = fault.for_s
        master = self.cluster.master
        if master is not None and fault.pick2 < 0.5:
            host, for_s = master, fault.for_s + 1.0
        assert host is not None
        self._isolate(host, for_s)
        return f"{host.name} for {for_s:.2f} s"

    def _two(self, fault: PlannedFault) -> tuple[Host, Host]:
        hosts = self.cluster.hosts
        one = hosts[int(fault.pick * len(hosts))]
        rest = [host for host in hosts if host is not one]
        return one, rest[int(fault.pick2 * len(rest))]

    def slow_network(self, fault: PlannedFault) -> str | None:
        self.cluster.network.slow = True
        self._later(fault, setattr, self.cluster.network, "slow", False)
        return f"for {fault.for_s:.2f} s"

    def slow_link(self, fault: PlannedFault) -> str | None:
        one, other = self._two(fault)
        self._slow(one, other, 0.02 + 0.2 * fault.pick2, fault.for_s)
        return f"{one.name} and {other.name} for {fault.for_s:.2f} s"

    def reset(self, fault: PlannedFault) -> str | None:
        self.cluster.network.reset_one()
        return "a connection"


class ClientFaults(Kinds):
    """Clients come and go; an operator names masters."""

    def __init__(self, cluster: SimCluster, clients: Sequence[Client]) -> None:
        super().__init__(cluster)
        self.clients = clients
        self.operator = Operator(cluster)
        self._target: tuple[BrokerHost, int] | None = None  # of an unclean election

    def switch(self, fault: PlannedFault) -> str | None:
        """An operator names the next master."""
        group = self.cluster.promises.group
        target = self._of(group.sync_state_set, fault.pick) if group is not None else None
        if target is None:
            return None
        self.operator.elect(target)
        return f"to broker id {target}"

    def unclean_election(self, fault: PlannedFault) -> str | None:
        """A replica falls out of the set and behind; then the others are killed, or out of sight of
        it and of the controllers, and an operator elects that replica."""
        host = self._of(self._slaves(), fault.pick)
        if host is None or self._target is not None:
            return None
        self._target = (host, host.broker_id)
        host.kill()
        self.cluster.later(_LOOK_S, self._once_outside, fault)
        return f"{host.name} falls behind"

    def _once_outside(self, fault: PlannedFault) -> None:
        group = self.cluster.promises.group
        if self._target is None or group is None or self.over:
            return
        host, broker_id = self._target
        if broker_id in group.sync_state_set:
            self.cluster.later(_LOOK_S, self._once_outside, fault)
            return
        for other in self.cluster.brokers.values():
            if other is not host and fault.pick2 < 0.5:
                other.kill()
            elif other is not host:
                for far in (host, *self.cluster.controllers.values()):
                    self.cluster.network.block(other.address, far.address)
        host.start()
        how = "are killed" if fault.pick2 < 0.5 else "are out of sight"
        self.cluster.tell("fault", f"unclean election: the others {how}")
        self.cluster.later(_LEASE_OVER_S, self._elect, fault, _TRIES)

    def _elect(self, fault: PlannedFault, tries: int) -> None:
        group = self.cluster.promises.group
        if self._target is None or group is None or self.over:
            return
        winner, broker_id = self._target
        if tries and group.master_broker_id != broker_id:
            self.operator.elect(broker_id, unclean=True, cut=int(fault.pick2 * 4) % 2 == 1)
            self.cluster.later(2 * _LOOK_S, self._elect, fault, tries - 1)
            return
        both_s = _BOTH_S if 0.5 <= fault.pick2 < 0.75 and tries else 0.0
        self.cluster.later(both_s, self._come_together, fault, winner)

    def _come_together(self, fault: PlannedFault, winner: BrokerHost) -> None:
        """Clients may have found the new master by then, while some were at the old one (R44)."""
        if self._target is None or self.over:
            return
        self._target = None
        self.cluster.network.heal()
        if int(fault.pick2 * 8) % 2:
            winner.kill()  # the only one of its set: it has to come back as master
        for host in self.cluster.brokers.values():
            host.start()

    def kill_client(self, fault: PlannedFault) -> str | None:
        client = self._of(self.clients, fault.pick)
        if client is None:
            return None
        client.kill()
        self._later(fault, client.start)
        return client.name

    def leave(self, fault: PlannedFault) -> str | None:
        reader = self._of([c for c in self.clients if isinstance(c, SimConsumer)], fault.pick)
        if reader is None:
            return None
        reader.leave()
        self._later(fault, reader.start)
        return reader.name


class Faults:
    """Carries them out. `clients` are those that may be killed or may leave."""

    def __init__(self, cluster: SimCluster, clients: Sequence[Client], service: Service) -> None:
        self.cluster = cluster
        self._service = service
        self.counts: dict[str, int] = {}
        self._of_clients = ClientFaults(cluster, clients)
        self._kinds = (
            HostFaults(cluster),
            DiskFaultKinds(cluster),
            WearFaults(cluster),
            StrainFaults(cluster, clients),
            DisturbFaults(cluster),
            NetworkFaults(cluster),
            LastingFaults(cluster, service),
            ReturnFaults(cluster, service),
            ModeFaults(cluster),
            self._of_clients,
        )

    def schedule(self, faults: Sequence[PlannedFault]) -> None:
        for fault in faults:
            self.cluster.later(fault.at_s, self._begin, fault)

    def _begin(self, fault: PlannedFault) -> None:
        name = fault.kind.replace(" ", "_")
        (handler,) = (getattr(kinds, name) for kinds in self._kinds if hasattr(kinds, name))
        detail = handler(fault)
        if detail is not None:
            self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
            self.cluster.tell("fault", f"{fault.kind}: {detail}")

    def elect_longest(self) -> None:
        """R17: the last of the set may have lost what it acked. Then an operator names a master."""
        group, brokers = self.cluster.promises.group, self.cluster.brokers.values()
        if group is None or (group.master_broker_id and any(host.is_open for host in brokers)):
            return
        held = {
            host.broker_id: self.cluster.promises.held_by(host)
            for host in brokers
            if host.service is not None
        }
        if held:
            self.cluster.promises.given_up.operator_compares = True
            self.cluster.tell("fault", f"an operator elects the longest of {held}")
            self._of_clients.operator.elect(max(held, key=lambda one: held[one]), unclean=True)

    def end(self) -> None:
        """Every fault ends: the network is whole, and every process runs."""
        cluster = self.cluster
        self._service.end()
        for kinds in self._kinds:
            kinds.over = True
        cluster.network.heal()
        cluster.network.slow = False
        cluster.clocks.jumps.clear()  # what a clock ahead dates from now on would wait as long
        for host in cluster.hosts:
            host.disk.plan.full = False
            host.disk.plan = type(host.disk.plan)()
            if host.process is not None:
                host.process.resume()
                host.process.die_after(None)
            host.start()
