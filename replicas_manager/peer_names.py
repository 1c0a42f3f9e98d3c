"""Which processes run at the addresses of a group's replicas, as they say themselves (1007).

RocketMQ's controllers know ids and addresses. What ours have registered beside them, incarnation,
log id and HA address, the brokers are asked for each time that the group is read. A Java broker
says nothing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BatonError
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.replicas_manager.remoting_requests import ProcessName

log = logging.getLogger(__name__)

TIMEOUT_MS: Final = 1000


class PeerNames:
    """`changed` is called when a process was heard to be another than before. `spawn` starts a
    task that its owner ends."""

    def __init__(
        self,
        client: RemotingClient,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._spawn = spawn
        self._changed = changed
        self._known: dict[tuple[int, str], ProcessName] = {}
        self._asking: set[tuple[int, str]] = set()

    def ask(self, view: RoleView, own_id: int) -> None:
        """Every other replica, dead or alive to the controllers. A replica that was made anew has
        another id at the same address: there both are asked for."""
        for replica in view.replicas:
            key = (replica.broker_id, replica.address)
            if replica.broker_id != own_id and replica.address and key not in self._asking:
                self._asking.add(key)
                self._spawn(self._ask(replica, (view.cluster_name, view.broker_name)))

    def filled_in(self, view: RoleView, own: Replica, raft_index: int) -> RoleView:
        """`view` with the names known by now, and `own` as this process."""
        replicas = tuple(self._named(one, own) for one in view.replicas)
        named = replace(view, replicas=replicas, raft_index=raft_index)
        master = named.replica(view.master_broker_id or 0)
        if master is None:
            return named
        return replace(
            named, master_incarnation=master.incarnation, master_ha_address=master.ha_address
        )

    def _named(self, replica: Replica, own: Replica) -> Replica:
        if replica.broker_id == own.broker_id:
            return replace(own, address=replica.address, alive=replica.alive)
        name = self._known.get((replica.broker_id, replica.address), ProcessName())
        return replace(
            replica,
            incarnation=name.incarnation,
            log_id=name.log_id,
            ha_address=name.ha_address,
        )

    async def _ask(self, replica: Replica, group: tuple[str, str]) -> None:
        key = (replica.broker_id, replica.address)
        try:
            request = RemotingCommand.request(RequestCode.GET_BROKER_EPOCH_CACHE)
            reply = await self._client.call(replica.address, request, TIMEOUT_MS)
            name = ProcessName.of(reply, replica, group)
        except BatonError as error:
            log.debug("replica_not_named address=%s why=%s", replica.address, error)
            return
        finally:
            self._asking.discard(key)
        if name != self._known.get(key, ProcessName()):
            self._known[key] = name
            log.info("replica_named broker_id=%d address=%s name=%s", *key, name)
            self._changed()
