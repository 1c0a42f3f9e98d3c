"""A group leaves its controllers for a while: one broker writes in classic mode, and comes back.

The operator follows docs/migrate.md: all brokers stop, the last master continues alone without
controllers, takes writes, and stops or is killed; its machine may be rebooted. Then it comes back
under the controllers, and once it leads again the others come: emptied, or as they are (R48).
"""

from collections.abc import Callable

from lab.sim.clients import Operator
from lab.sim.cluster import SimCluster
from lab.sim.hosts import BrokerHost
from lab.sim.kinds import Kinds, PlannedFault

_LOOK_S = 0.1
_CLASSIC_S = 1.0
_NAMED_S = 0.7


class ModeFaults(Kinds):
    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster)
        self._operator = Operator(cluster)

    def change_of_mode(self, fault: PlannedFault) -> str | None:
        hosts = list(self.cluster.brokers.values())
        keeper = self.cluster.master
        if keeper is None or not all(host.service for host in hosts):
            return None
        for host in hosts:
            host.in_hand = True
        others = [host for host in hosts if host is not keeper]
        for host in others:
            host.stop()
        self._once(lambda: not any(host.is_up for host in others), self._stop, fault, keeper)
        return f"{keeper.name} continues alone, without controllers"

    def _once(self, done: Callable[[], bool], then: Callable[..., None], *args: object) -> None:
        if done():
            then(*args)
        else:
            self.cluster.later(_LOOK_S, self._once, done, then, *args)

    def _stop(self, fault: PlannedFault, keeper: BrokerHost) -> None:
        keeper.stop()
        self._once(lambda: not keeper.is_up, self._become_classic, fault, keeper)

    def _become_classic(self, fault: PlannedFault, keeper: BrokerHost) -> None:
        keeper.classic = True
        keeper.start_by_hand()
        self.cluster.later(_CLASSIC_S, self._end_classic, fault, keeper)

    def _end_classic(self, fault: PlannedFault, keeper: BrokerHost) -> None:
        end = keeper.kill if fault.pick < 0.3 else keeper.stop
        end()
        self._once(lambda: not keeper.is_up, self._come_back, fault, keeper)

    def _come_back(self, fault: PlannedFault, keeper: BrokerHost) -> None:
        """In half of the lives after a reboot, but not after a kill: then what was not flushed
        would be lost."""
        if 0.3 <= fault.pick < 0.8:
            keeper.boot += 1
        keeper.classic, keeper.in_hand = False, False
        self.cluster.tell("fault", f"change of mode: {keeper.name} is back under controllers")
        keeper.start()
        self._name(fault, keeper)

    def _name(self, fault: PlannedFault, keeper: BrokerHost) -> None:
        """The operator names it until it leads: it holds all that was acknowledged."""
        if keeper.is_open:
            self._let_others_come(fault, keeper)
            return
        if keeper.broker_id:
            self._operator.elect(keeper.broker_id)
        self.cluster.later(_NAMED_S, self._name, fault, keeper)

    def _let_others_come(self, fault: PlannedFault, keeper: BrokerHost) -> None:
        for host in self.cluster.brokers.values():
            if host is keeper:
                continue
            if fault.pick2 < 0.5:
                host.wipe()
            else:
                self.cluster.promises.lineage.doubtful.append(host)
            host.in_hand = False
            host.start()
        how = "emptied" if fault.pick2 < 0.5 else "as they are"
        self.cluster.tell("fault", f"change of mode: the others come, {how}")
