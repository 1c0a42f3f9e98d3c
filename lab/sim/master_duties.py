"""What a master must do and must not do for long, watched from outside.

R12, R41: acks count of the processes that the controllers have registered. R14: with a lease it
does not wait for a member that is down, or hangs. R36: it takes writes with a
lease, or with its whole required set, and refuses them without both. R38: it states the positions
of its queues, without which nothing may expire.
"""

from collections.abc import Callable, Collection

from batonmq.controller.rules.groups import BrokerGroup
from batonmq.runtime.clock import boot_ms
from lab.sim.hosts import BrokerHost
from lab.sim.world import World

_REMOVED_S = 2.0  # R14: after 0.6 s, by a controller that may be slow
_JUDGED_S = 0.6
_STATED_MAX = 1 << 30
"""R38: within so many bytes a master states positions; lives write much less."""


class Standing:
    """`check` is to be called all the time."""

    def __init__(
        self,
        world: World,
        brokers: Collection[BrokerHost],
        group: Callable[[], BrokerGroup | None],
        host_of: Callable[[int], BrokerHost | None],
    ) -> None:
        self._world = world
        self._brokers = brokers
        self._group = group
        self._host_of = host_of
        self._since_s: dict[tuple[str, str], float] = {}

    def check(self) -> None:
        wrong = {}
        for host in self._brokers:
            wrong.update(self._of_master(host))
        now_s = self._world.now_s
        self._since_s = {what: self._since_s.get(what, now_s) for what in wrong}
        for what, since_s in self._since_s.items():
            if now_s - since_s > wrong[what]:
                who, text = what
                self._world.violate(f"{text}, at {who} for {now_s - since_s:.2f} s")

    def _of_master(self, host: BrokerHost) -> dict[tuple[str, str], float]:
        """What is wrong now -> for how long it may be."""
        service, process, group = host.service, host.process, self._group()
        if service is None or process is None or process.paused or group is None:
            return {}
        if process.busy_until_s > process.loop.now_s:
            return {}
        gate, manager, ha = service.path.gate, host.manager, host.ha
        assert manager is not None and ha is not None
        if not gate.is_master or gate.is_stopping:
            return {}
        wrong = {}
        leased = manager.lease_valid(process.run(boot_ms))
        takes = gate.refusal is None
        if takes != (leased or ha.required_set_whole):
            how = "takes" if takes else "refuses"
            wrong[host.incarnation, f"R36: a master {how} writes, lease {leased}"] = _JUDGED_S
        store = service.store
        if store.positions.due_at - store.max_phy_offset > _STATED_MAX:
            wrong[host.incarnation, "R38: a master states no positions"] = _JUDGED_S
        if ha._master is not None and gate.master_epoch == group.master_epoch:  # knows who is who
            for connection in ha._master.core._following.values():
                record = group.replica(connection.broker_id)
                named = connection.handshake.identity if connection.handshake else None
                if record and named and named.incarnation != record.incarnation:
                    text = f"R12, R41: acks of another process of {connection.broker_id} count"
                    wrong[host.incarnation, text] = _REMOVED_S
        if leased and manager.incarnation == group.master_incarnation:
            for broker_id in group.sync_state_set:
                member = self._host_of(broker_id)
                if member is None or member is host:
                    continue
                if member.process is None or member.process.paused:
                    wrong[host.incarnation, f"R14: {member.name} is away and a member"] = _REMOVED_S
        return wrong
