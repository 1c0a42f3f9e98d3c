"""Disks of another time come back: a volume of an earlier cluster, controllers without memory.

One of these comes before the other faults of a life. What could not be decided is not drawn: while
controllers know less than before, the replicas that know the newest epoch run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lab.sim.clients import Operator
from lab.sim.cluster import SimCluster
from lab.sim.decisions import NewestCommit
from lab.sim.hosts import BrokerHost
from lab.sim.kinds import PlannedFault
from lab.sim.records import log_end
from lab.sim.service import BOUNDS_S, ServedKinds, Service

_LOOK_S = 0.2
_AWAY_S = 0.3
_OPERATOR_S = 0.7
_LOST_AFTER = 0.3
"""So much of the time of such a fault is over when the controllers' disks are lost."""


class ReturnFaults(ServedKinds):
    def __init__(self, cluster: SimCluster, service: Service) -> None:
        super().__init__(cluster, service)
        self._operator = Operator(cluster)

    def foreign_volume(self, fault: PlannedFault) -> str | None:
        """A broker's disk is replaced by one of an earlier cluster, most often by that of the same
        id: at once, or once it has left the set, or once its id was forgotten as well. Where
        segments expire, once the log of the group begins behind the end of the volume's: no byte is
        left to compare (R47). Others have all that it had."""
        host = self._broker(fault)
        if host.service is None or not self.is_held_elsewhere(host):
            return None
        broker_id = host.broker_id
        volumes = self.cluster.old_volumes
        number = int(fault.pick2 * 997) % 5
        volume = volumes[number if number < len(volumes) else (broker_id - 1) % len(volumes)]
        host.kill()
        self._expect(fault.kind, f"{host.name} gets a foreign volume")
        self._later(fault, self._service.end)
        if self.cluster.settings.expires:
            end = log_end(volume)
            until_s = self.cluster.now_s + fault.for_s
            self._once_expired(host, end, until_s, partial(self._return, host, volume))
            return f"{host.name} gets {volume.name} of an earlier cluster, which ends at {end}"
        waits = (0, 1, 2)[int(fault.pick2 * 3)]
        if waits:
            self.cluster.later(_LOOK_S, self._once_outside, host, broker_id, waits == 2, volume)
        else:
            self.cluster.later(_AWAY_S, self._return, host, volume)
        how = ("at once", "once outside of the set", "once forgotten")[waits]
        return f"{host.name} gets {volume.name} of an earlier cluster, {how}"

    def _once_outside(self, host: BrokerHost, broker_id: int, cleans: bool, volume: Path) -> None:
        group = self.cluster.promises.group
        if host.is_up or self.over:
            return
        if group is None or broker_id in group.sync_state_set:
            self.cluster.later(_LOOK_S, self._once_outside, host, broker_id, cleans, volume)
            return
        if cleans:
            self._operator.clean(broker_id)
        self.cluster.later(2 * _LOOK_S, self._return, host, volume)

    def _return(self, host: BrokerHost, volume: Path) -> None:
        if host.is_up or self.over:
            return
        host.lose_power()
        host.disk.become(volume)
        self.cluster.promises.lineage.strays.append(host)
        self.cluster.tell("fault", f"foreign volume: {host.name} starts on it")
        host.start()

    def lost_controllers(self, fault: PlannedFault) -> str | None:
        """All disks of controllers are lost."""
        self._lose(fault, self._wipe_controllers, NewestCommit())
        return f"after {_LOST_AFTER * fault.for_s:.2f} s"

    def restored_controllers(self, fault: PlannedFault) -> str | None:
        """The same, and older copies of them are put back."""
        kept = {
            host: host.disk.copy_to(Path("kept") / f"{fault.at_s:.3f}" / host.name)
            for host in self.cluster.controllers.values()
        }

        def restore() -> None:
            for host, folder in kept.items():
                host.disk.become(folder)

        self._lose(fault, restore, self.cluster.promises.known)
        return f"with copies of now, after {_LOST_AFTER * fault.for_s:.2f} s"

    def _wipe_controllers(self) -> None:
        for host in self.cluster.controllers.values():
            host.disk.wipe()

    def _lose(self, fault: PlannedFault, change: Callable[[], None], known: NewestCommit) -> None:
        """Before it, in some lives the master is another one, so that copies are older than that.
        One slave may be away at that time."""
        lost_s = _LOST_AFTER * fault.for_s
        if fault.pick < 0.5:
            self._meet(lambda host: host.is_open, fault.for_s / 20)
        if fault.pick2 < 0.5:
            away_s = lost_s - _LOOK_S
            self.cluster.later(away_s, self._meet, lambda host: not host.is_open, 2 * _OPERATOR_S)
        self.cluster.later(lost_s, self._swap, fault, change, known)

    def _meet(self, chosen: Callable[[BrokerHost], bool], for_s: float) -> None:
        host = next((host for host in self._running() if chosen(host)), None)
        if host is not None:
            host.kill()
            self.cluster.later(for_s, host.start)

    def _running(self) -> list[BrokerHost]:
        return [host for host in self.cluster.brokers.values() if host.service is not None]

    def _swap(self, fault: PlannedFault, change: Callable[[], None], known: NewestCommit) -> None:
        """A machine that stops, and starts with another disk."""
        if self.over:
            return
        self.cluster.tell("fault", f"{fault.kind}: now")
        for host in self.cluster.controllers.values():
            host.lose_power()
        change()
        self.cluster.promises.controllers_know(known)
        if all(host.is_up for host in self.cluster.brokers.values()):
            # The set is whole, so its master continues (R36) until an operator names one.
            self._service.expect(fault.kind, BOUNDS_S[fault.kind])
            self.cluster.later((1 - _LOST_AFTER) * fault.for_s, self._service.end)
        for host in self.cluster.controllers.values():
            self.cluster.later(_AWAY_S, host.start)
        self.cluster.later(_AWAY_S + 2 * _OPERATOR_S, self._name, fault, 0)

    def _name(self, fault: PlannedFault, tries: int) -> None:
        """An operator names a master until there is one: at first anyone, then the replica that
        holds most. Neither may lose anything: it is no unclean election (R49)."""
        group, promises = self.cluster.promises.group, self.cluster.promises
        known = max((host.knows for host in self._running()), default=(0, 0))
        recorded = (group.master_epoch, group.sync_state_set_epoch) if group else (0, 0)
        if group is not None and group.master_broker_id and recorded >= known:
            return
        held = {
            host.broker_id: promises.held_by(host) for host in self._running() if host.broker_id
        }
        if held:
            longest = max(held, key=lambda one: held[one])
            anyone = self._of(sorted(held), fault.pick2)
            chosen = longest if tries else anyone
            self.cluster.tell("fault", f"{fault.kind}: an operator names {chosen} of {held}")
            assert chosen is not None
            self._operator.elect(chosen)
        self.cluster.later(_OPERATOR_S, self._name, fault, tries + 1)
