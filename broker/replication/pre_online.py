"""What a master does with each other member of its group before it registers (pre-online).

While it was away a slave may have acted for it (`enableSlaveActingMaster`): groups committed their
offsets there. The master tells that member its HA address (906), waits for its connection, and
takes back what is further than its own (43, 45). A member with a longer log is named instead: this
master has lost what that one holds, and must not write another history over it.
Origin: BrokerPreOnlineService in Java, which takes whole tables by their versions, and does not
look at the log.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.tables.slave_sync import BrokerTables
from batonmq.ha.classic.service import ClassicHAService
from batonmq.process.turns import in_turns, result_of
from batonmq.protocol.bodies import ConsumerOffsetSerializeWrapper, HARuntimeInfo
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.json_body import decoded_in_steps
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

ASK_MS: Final = 3000
CONNECT_S: Final = 10.0
"""How long the member has to connect; Java's slaves look at a new address every 5 s."""
LOOK_S: Final = 0.05


class PreOnline:
    """`meet` once for each member."""

    def __init__(
        self,
        store: MessageStore,
        tables: BrokerTables,
        ha: ClassicHAService,
        client: RemotingClient,
    ) -> None:
        self._store = store
        self._tables = tables
        self._ha = ha
        self._client = client

    async def meet(self, address: str, own: dict[str, str]) -> str:
        """`own`: the fields of 906. Why that member keeps this master from its role, "" if it does
        not. Raises BatonError, or ValueError for nonsense."""
        reply = await self._ask(address, RequestCode.GET_BROKER_HA_STATUS)
        end = HARuntimeInfo.decode(reply.body).ha_client_runtime_info.max_offset
        own_end = self._store.max_phy_offset
        if end > own_end:
            return (
                f"its log ends at {end}, above the end of this one, {own_end}: it holds what this"
                " master has lost; make it the master, or stop it and empty its store"
            )
        await self._ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO, own)
        await self._connected(address.rpartition(":")[0])
        reply = await self._ask(address, RequestCode.GET_ALL_CONSUMER_OFFSET)
        offsets = await result_of(decoded_in_steps(ConsumerOffsetSerializeWrapper, reply.body))
        topics = self._tables.topics
        here = {
            key: of_queues
            for key, of_queues in offsets.offset_table.items()
            if key.partition("@")[0] in topics
        }
        taken, ends = 0, partial(queue_end, self._store)
        async for count in in_turns(self._tables.offsets.taken_back(here, ends)):
            taken += count
        delays = await self._ask(address, RequestCode.GET_ALL_DELAY_OFFSET)
        if delays.body:
            self._tables.delays.apply_from_master(delays.body)
        log.info("pre_online_met address=%s offsets_taken=%d", address, taken)
        return ""

    async def _connected(self, host: str) -> None:
        """Until a slave follows from there, or the time is over."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while not self._ha.is_followed_from(host):  # noqa: ASYNC110  seen by its reports
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            log.warning("pre_online_without_slave host=%s waited_s=%g", host, CONNECT_S)

    async def _ask(
        self, address: str, code: int, ext: dict[str, str] | None = None
    ) -> RemotingCommand:
        return await self._client.call(address, RemotingCommand.request(code, ext), ASK_MS)
