"""Whether a log of another history stays out, and is named, watched from outside (R47, R49).

A stray is a broker whose disk another history wrote: an earlier cluster of the same names. Until
an operator has emptied it, it is no member of the set and no master, no client gets a message of
it, and `mqctl health` names it.
"""

import asyncio
from collections.abc import Callable, Sequence

from batonmq.client.admin.admin import Admin
from batonmq.controller.rules.groups import BrokerGroup, ReplicaRecord
from batonmq.mqctl.health import poll
from batonmq.protocol.errors import BatonError
from lab.sim.clients import CLIENT_OPTIONS, Operator
from lab.sim.hosts import (
    BROKER_PORT,
    BROKERS,
    CONTROLLER_ADDRESSES,
    GROUP,
    NAME_SERVERS,
    BrokerHost,
    broker_host,
)
from lab.sim.loop import SimProcess
from lab.sim.world import World

_LOOKS_S = 0.5
_OPERATOR = "10.0.2.98"
_EXPECTED = tuple((GROUP, f"{broker_host(number)}:{BROKER_PORT}") for number in BROKERS)
"""As the launcher's cluster.json says."""


class Lineage:
    """`check` is to be called all the time. `group` is the newest that any controller applied."""

    def __init__(self, world: World, group: Callable[[], BrokerGroup | None]) -> None:
        self._world = world
        self._group = group
        self.strays: list[BrokerHost] = []
        self.doubtful: list[BrokerHost] = []
        """Those whose log may belong to the group's history, or not: members, or named."""
        self._problems: Sequence[str] = []

    def check(self) -> None:
        for host in self.strays:
            fault = self._fault_of(host)
            if fault:
                self._world.violate(f"R47: {host.incarnation}, whose log is another's, {fault}")

    def _fault_of(self, host: BrokerHost) -> str:
        group, manager = self._group(), host.manager
        if group is None or manager is None:
            return ""
        if host.is_open:
            return "opens as master"
        if group.master_incarnation == manager.incarnation:
            return f"is elected for epoch {group.master_epoch}"
        record = group.replica(manager.broker_id)
        if record is None or record.incarnation != manager.incarnation or record.suspect:
            return ""
        if manager.broker_id in group.sync_state_set:
            return f"is a member of {group.sync_state_set}"
        return ""

    def look(self) -> None:
        """From now on an operator looks at `mqctl health`, and empties the disk of each stray that
        it names."""
        if self.strays or self.doubtful:
            SimProcess(self._world.loop, _OPERATOR).spawn(self._look())

    def unnamed(self) -> str:
        """Which strays health has not named yet, "" if none."""
        outside = [host for host in self.doubtful if not self._is_member(host)]
        names = ", ".join(host.name for host in (*self.strays, *outside))
        return f"R47: health does not name {names}, it says {self._problems}" if names else ""

    async def _look(self) -> None:
        async with Admin(NAME_SERVERS, client_options=CLIENT_OPTIONS, timeout_ms=1_000) as admin:
            while self.unnamed():
                await asyncio.sleep(_LOOKS_S)
                try:
                    findings = await poll(admin, admin.controller(CONTROLLER_ADDRESSES), _EXPECTED)
                except BatonError as error:
                    self._world.tell("operator", f"health: {error}")
                    continue
                self._problems = findings.problems()
                self._world.tell("operator", f"health: {self._problems}")
                for hosts in (self.strays, self.doubtful):
                    for host in [host for host in hosts if self._names(host)]:
                        hosts.remove(host)
                        self._world.later(0.0, self._put_right, host)

    def _is_member(self, host: BrokerHost) -> bool:
        group = self._group()
        return group is not None and host.broker_id in group.sync_state_set

    def _put_right(self, host: BrokerHost) -> None:
        """Its disk is emptied, and what the controllers recorded of that process is forgotten."""
        group, manager = self._group(), host.manager
        record = group.replica(manager.broker_id) if group and manager else None
        host.wipe()
        if record is not None and manager and record.incarnation == manager.incarnation:
            self._forget(record)
        host.start()

    def _forget(self, record: ReplicaRecord) -> None:
        """Once the controllers know that its process is gone."""
        group = self._group()
        if group is not None and group.replica(record.broker_id) == record:
            Operator(self._world).clean(record.broker_id)
            self._world.later(2 * _LOOKS_S, self._forget, record)

    def _names(self, host: BrokerHost) -> bool:
        """By what it says of itself, since it does not answer, or for an epoch that the controllers
        do not know."""
        return any(
            line.startswith(f"broker {host.address}:")
            or f": broker {host.broker_id} knows of " in line
            for line in self._problems
        )
