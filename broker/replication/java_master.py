"""What is special about a Java master: all that this broker has to ask one.

Java's controllers know a broker by its remoting address only, so a slave asks the master itself for
its HA address, its identity and its epochs. Java's epoch list refuses an epoch that begins where
the one before began, as after an election without a write in between. So a Java master may act in
an epoch that its list lacks; the version of its topic table has it. Origin: AdminBrokerProcessor,
EpochFileCache.appendEntry and ReplicasManager.changeToMaster in Java.
"""

from __future__ import annotations

from typing import Final

from batonmq.ha.java_peer import PeerIdentity
from batonmq.protocol.bodies import EpochEntryCache, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.role_view import RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient

TIMEOUT_MS: Final = 1000


class JavaMasterClient:
    """Implements `batonmq.ha.java_peer.JavaMaster`. Every method raises BatonError where the broker
    does not answer or refuses."""

    def __init__(self, client: RemotingClient) -> None:
        self._client = client

    async def ha_address(self, view: RoleView) -> str:
        """ "" while it is no master."""
        reply = await self._ask(view, RequestCode.EXCHANGE_BROKER_HA_INFO)
        return reply.ext.get("masterHaAddress") or ""

    async def identity(self, view: RoleView) -> PeerIdentity:
        """Raises ValueError, too, for a reply that makes no sense."""
        reply = await self._ask(view, RequestCode.GET_BROKER_EPOCH_CACHE)
        cache = EpochEntryCache.decode(reply.body)
        last = max((entry.epoch for entry in cache.epoch_list), default=-1)
        table_epoch = -1
        if last < view.master_epoch:
            topics = await self._ask(view, RequestCode.GET_ALL_TOPIC_CONFIG)
            table = TopicConfigAndMappingSerializeWrapper.decode(topics.body)
            table_epoch = table.data_version.state_version
        return PeerIdentity(
            cache.cluster_name, cache.broker_name, cache.broker_id, last, table_epoch
        )

    async def _ask(self, view: RoleView, code: int) -> RemotingCommand:
        request = RemotingCommand.request(code)
        return await self._client.call(view.master_address, request, TIMEOUT_MS)
