"""What a slave fetches from its master beside the log, and how a master answers it.

Changes of topics and groups, and the progress of delays, are records of the log
(`broker.tables.topics`, `broker.schedule.delivery_progress`). Their state before the slave's first
byte is fetched once it follows a master, and again when a version differs. Consumer offsets are not
in the log. They are fetched twice a second, with the masterEpoch; lower epochs are ignored (R31).

The requests go to the master's port - 2, as a Java slave sends them, or to its main port where that
fails. Until all of them are answered for the followed epoch the replica does not join (R42);
`failure` says why. Offsets and progress rest on records of POP and of deliveries, so they are taken
only once the log here has these records. Else a replica that is behind, elected uncleanly, would
skip messages that its own log shows neither in flight nor delivered (R30).

Our own fields are extFields that Java ignores. A table is one answer with its total, so a Java
slave that reads pages stops after the first. Our slaves accept pages: an answer larger than a frame
comes in pages of its bytes (R58). Origin: Java `SlaveSynchronize`.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from batonmq.auth.policy import UserWrapper
from batonmq.broker.request_fields import system_error
from batonmq.broker.role_gate import RoleGate
from batonmq.broker.tables.broker_tables import BrokerTables
from batonmq.broker.tables.consumer_offset import OffsetTable
from batonmq.broker.tables.queue_locks import QueueLockTable
from batonmq.protocol.bodies import (
    MessageRequestModeSerializeWrapper,
    SubscriptionGroupWrapper,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, RemoteProtocolError, ResponseError
from batonmq.protocol.json_body import B, Body, decoded_in_steps, encoded_pieces
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Handler, Processors, Response
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.backoff import Backoff, pause_ms
from batonmq.runtime.tasks import pass_on_assertion
from batonmq.runtime.turns import in_turns, result_of
from batonmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

RPC_TIMEOUT_MS = 1000
RPC_TIMEOUT_MAX_MS = 10_000
"""Big tables need longer than a second: the limit doubles each time both ports have failed."""
JAVA_PAUSE_MS = 1000
"""A Java master has no versions for us: each answer brings whole tables."""
RETRY_FIRST_MS = 100
"""A new master that has not opened yet has no time for tables."""
LOG_WAIT_S = 1.0
"""How long fetched progress waits for this log to have the records that it counts; then it is
fetched again."""
LOG_POLL_S = 0.01
STALE_AFTER_S = 5.0
"""If a slave's tables were not those of its master for this long, it reports that: in `failure`,
and to the master, which then chooses it in no planned switch (R42)."""
PIECES_AT_ONCE = 2
"""Pieces of an answer's JSON that are made in one turn; each has 256 entries."""
EXT_MASTER_EPOCH = "batonMasterEpoch"
NO_MASTER_EPOCH = -1
"""In the answer of a broker that is not master: no slave accepts its tables."""
EXT_TABLE_VERSION = "batonTableVersion"
EXT_OFFSET_VERSION = "batonOffsetVersion"
EXT_CARRIED_OUT = "batonCarriedOut"
"""The log offset up to which the master had carried out deletions when it answered (R39), and up to
which the progress that it sends counts records (R30)."""

EXT_LOG_BEGIN = "batonLogBegin"
"""Where the master's log begins: a slave keeps everything from there on (R27)."""

EXT_PAGES = "batonPages"
"""In a request: its answer may come in pages, and this is the size of a page in bytes."""
EXT_BODY_ID, EXT_BODY_SIZE, EXT_BODY_FROM = "batonBodyId", "batonBodySize", "batonBodyFrom"
"""In an answer: the name and size of a body, of which this is the first page. In a request: the
name, and the offset of the wanted page."""
PAGE_SIZE = 8 * 1024 * 1024
TABLE_SIZE_MAX = 1 << 30
"""Bytes of JSON: far more than a broker with all its topics and groups has."""
BODIES_KEPT = 4


def vip_address(address: str) -> str:
    """The address with the broker's port - 2, which serves the same handlers."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"


@dataclass(frozen=True, slots=True)
class Followed:
    """The master that is followed, and in which epoch."""

    address: str
    master_epoch: int


class SlaveSynchronize:
    """A task that fetches the tables of the current master. `followed` is None on a master."""

    def __init__(
        self,
        client: RemotingClient,
        tables: BrokerTables,
        interval_ms: int,
        tables_changed: Callable[[], None],
        store: MessageStore,
    ) -> None:
        self._client = client
        self._tables = tables
        self._store = store
        self._interval_s = interval_ms / 1000
        self._tables_changed = tables_changed
        self.followed: Followed | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # The version in a reply from before the tables: if they change while they are fetched, they
        # are fetched again. A version from after them would hide that change.
        self._table_version = ""
        self._offset_version = ""
        self._retry = Backoff(RETRY_FIRST_MS, interval_ms)
        self._failures = 0
        self.on_tables: Callable[[int], None] = lambda master_epoch: None
        """Called when all tables of the master of that epoch are here; with NO_MASTER_EPOCH when
        they are stale for STALE_AFTER_S."""
        self.held_epoch = NO_MASTER_EPOCH
        """The masterEpoch of the tables that were fetched last."""
        self.failure = ""
        """Why they cannot be fetched, or are stale; "" while they are up to date."""
        self._caught_up_s: float | None = None  # loop time when they were up to date; None: not yet
        self.on_log_begin: Callable[[int | None], None] = lambda offset: None
        """Called with the begin of the master's log; None: a Java master does not send it."""
        self._by_main_port = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="slave-synchronize")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def follow(self, followed: Followed | None) -> None:
        """From now on fetches the tables of this master; None: of no broker."""
        self.followed = followed
        self._table_version = self._offset_version = ""
        self.held_epoch = NO_MASTER_EPOCH
        self.failure = ""
        self._caught_up_s = None
        self._failures = 0
        self._by_main_port = False
        self._retry.reset()
        self._wake.set()

    def fetch_offsets_again(self) -> None:
        """Offsets were changed here: fetches the master's again, though these did not change."""
        self._offset_version = self._table_version = ""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            followed = self.followed
            # Cleared before the work: a change of the master during it must end the next pause.
            self._wake.clear()
            if followed is None:
                await self._wake.wait()
                continue
            try:
                is_caught_up = await self.synchronize(followed)
                self._failures = 0
            # Whatever it is, also an answer that makes no sense: nothing else would fetch them.
            except Exception as exc:
                is_caught_up = False
                self._note_failure(followed, exc)
            if is_caught_up:
                self._retry.reset()
                pause_s = self._interval_s if self._offset_version else JAVA_PAUSE_MS / 1000
            else:
                self._note_stale(followed)
                pause_s = self._retry.next_ms() / 1000
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _note_failure(self, followed: Followed, exc: Exception) -> None:
        pass_on_assertion(exc, "a slave's fetch of tables failed")
        # Another master may be followed by now: this failure says nothing about that one.
        if followed is not self.followed:
            return
        if self._failures == 0:
            log.warning(
                "slave_sync_failed master=%s reason=%s",
                followed.address,
                exc,
                exc_info=not isinstance(exc, BatonError),
            )
        self._failures += 1
        # A firewall may block one of the two ports. That the log arrives proves nothing, since HA
        # has a port of its own (R42).
        self._by_main_port = not self._by_main_port
        if self._failures > 1:  # both ports
            self.failure = f"tables of {followed.address}: {exc} ({self._failures} times in a row)"

    def _note_stale(self, followed: Followed) -> None:
        if followed is not self.followed:
            return
        now_s = asyncio.get_running_loop().time()
        if self._caught_up_s is None:
            self._caught_up_s = now_s
        stale_s = now_s - self._caught_up_s
        if stale_s < STALE_AFTER_S:
            return
        if not self.failure:
            self.failure = f"tables of {followed.address}: not followed for {stale_s:.0f} s"
        if self.held_epoch != NO_MASTER_EPOCH:
            log.warning("slave_sync_stale master=%s reason=%s", followed.address, self.failure)
            try:
                self.on_tables(NO_MASTER_EPOCH)
            except Exception as exc:  # the next round reports it again
                self._note_failure(followed, exc)
            else:
                self.held_epoch = NO_MASTER_EPOCH

    def _target(self, followed: Followed) -> tuple[str, int]:
        """Address and time-out (ms) of the next attempt, at the port that answered last."""
        address = followed.address if self._by_main_port else vip_address(followed.address)
        return address, pause_ms(RPC_TIMEOUT_MS, RPC_TIMEOUT_MAX_MS, 1 + self._failures // 2)

    async def synchronize(self, followed: Followed) -> bool:
        """Fetches the tables once; returns whether all are as the master has them. Raises
        BatonError, ValueError."""
        target, held = self._target(followed), self._offset_version
        reply = await self._ask(
            target, RequestCode.GET_ALL_CONSUMER_OFFSET, {EXT_OFFSET_VERSION: held}
        )
        # A Java master sends no epoch: it is taken for that of the followed master.
        epoch = reply.get_int(EXT_MASTER_EPOCH, followed.master_epoch)
        if followed is not self.followed or epoch < followed.master_epoch:
            # It is not master, or not yet again after a restart: its tables may be older than what
            # the log has shown here.
            return False
        # No body: nothing has changed at the master. But meanwhile the offsets here did, by
        # `fetch_offsets_again`: a new log has none.
        if not reply.body and held != self._offset_version:
            return False
        self.on_log_begin(_offset(reply, EXT_LOG_BEGIN))
        carried_out = _offset(reply, EXT_CARRIED_OUT)
        offsets = None
        if reply.body:
            offsets = await result_of(decoded_in_steps(OffsetTable, reply.body))
        has_log = offsets is None or await self._log_reaches(carried_out, followed)
        if followed is not self.followed:
            return False
        if has_log and offsets is not None and not self._take(offsets, epoch, carried_out):
            return False
        if has_log:
            self._offset_version = reply.ext.get(EXT_OFFSET_VERSION, "")
        version = reply.ext.get(EXT_TABLE_VERSION, "")
        if not version or version != self._table_version:
            if not await self._fetch_tables(target, followed, ours=EXT_MASTER_EPOCH in reply.ext):
                return False
            self._table_version = version
        if has_log:
            self._note_held(epoch)
        return has_log

    def _take(self, table: OffsetTable, epoch: int, carried_out: int | None) -> bool:
        """Takes over the master's offsets; False if they are older than what this replica knows."""
        own, offsets = self._tables.offsets, table.offset_table
        version, resets = table.data_version, table.baton_resets
        if own.apply_from_master(epoch, offsets, carried_out, version, resets):
            return True
        # The master may need this replica's acks to carry out a deletion, so it must be able to
        # join. The newer offsets here are replaced in a next round.
        if carried_out is not None and carried_out < own.deletions.end:
            self._note_held(epoch)
        return False

    async def _log_reaches(self, offset: int | None, followed: Followed) -> bool:
        """Whether this log reaches `offset`; waits for that for LOG_WAIT_S. None: of a Java master,
        which does not send it."""
        # A member's log does at once: the offset was confirmed when the master answered.
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + LOG_WAIT_S
        while offset is not None and self._store.max_phy_offset < offset:
            if followed is not self.followed or loop.time() >= give_up_s:
                return False
            await asyncio.sleep(LOG_POLL_S)
        return True

    def _note_held(self, epoch: int) -> None:
        self.failure = ""
        self._caught_up_s = asyncio.get_running_loop().time()
        if self.held_epoch != epoch:
            self.held_epoch = epoch
            self.on_tables(epoch)

    async def _fetch_tables(
        self, target: tuple[str, int], followed: Followed, *, ours: bool
    ) -> bool:
        """Fetches the tables other than offsets. False, to be fetched again: the answers may be
        older than the tables here, or this log lacks records that their progress counts. `ours`:
        the master is no Java broker."""
        tables = self._tables
        locks, modes = tables.locks, tables.request_modes
        before = tables.version, locks.data_version, modes.data_version
        topics = await self._table(
            target, RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigAndMappingSerializeWrapper
        )
        groups = await self._table(
            target, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupWrapper
        )
        delays = await self._ask(target, RequestCode.GET_ALL_DELAY_OFFSET, {})
        by_pop = await self._if_known(target, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
        users = None
        if ours and tables.users.rulebook is not None:  # it checks users
            users = await self._if_known(target, RequestCode.BATON_GET_USERS)
        # A Java master keeps queue locks in memory only, and has the progress of timers in a reply
        # of its own.
        if ours:
            held, timers = await self._ask(target, RequestCode.BATON_GET_QUEUE_LOCKS, {}), None
        else:
            held, timers = None, await self._if_known(target, RequestCode.GET_TIMER_CHECK_POINT)
        has_log = await self._log_reaches(_offset(delays, EXT_CARRIED_OUT), followed)
        now = tables.version, locks.data_version, modes.data_version
        if followed is not self.followed or now != before:
            # Another master, or the log has shown a change that these answers cannot have (R31).
            return False
        if has_log:
            tables.delays.apply_from_master(delays.body)
        if timers is not None:
            tables.delays.apply_timer_check(timers.body)
        if held is not None:
            locks.replace_all(QueueLockTable.decode(held.body))
        if by_pop is not None:
            modes.replace_all(MessageRequestModeSerializeWrapper.decode(by_pop.body))
        if users is not None:
            tables.users.replace_all(UserWrapper.decode(users.body))
        changed = tables.topics.replace_all(topics.topic_config_table, topics.data_version)
        if not tables.groups.replace_all(groups) and not changed:
            return has_log
        self._tables_changed()
        of_topics, of_groups = len(topics.topic_config_table), len(groups.subscription_group_table)
        text = "tables_followed master=%s topics=%d groups=%d"
        log.info(text, followed.address, of_topics, of_groups)
        return has_log

    async def _if_known(self, target: tuple[str, int], code: int) -> RemotingCommand | None:
        """The reply; None from a master that does not know the request: an earlier version, or one
        without timers."""
        try:
            return await self._ask(target, code, {})
        except ResponseError as refused:
            log.debug("slave_sync_without code=%d reason=%s", code, refused)
            return None

    async def _table(self, target: tuple[str, int], code: int, kind: type[B]) -> B:
        return await result_of(decoded_in_steps(kind, (await self._ask(target, code, {})).body))

    async def _ask(
        self, target: tuple[str, int], code: int, ext: dict[str, str]
    ) -> RemotingCommand:
        reply = await self._ask_once(target, code, ext | {EXT_PAGES: str(PAGE_SIZE)})
        pages, got, size = [reply.body], len(reply.body), reply.get_int(EXT_BODY_SIZE, 0)
        # It would be collected until memory ends.
        if size > TABLE_SIZE_MAX:
            raise RemoteProtocolError(
                f"{target[0]} announces a table of {size} bytes, at most {TABLE_SIZE_MAX} are taken"
            )
        while got < size:
            wanted = {EXT_BODY_ID: reply.require(EXT_BODY_ID), EXT_BODY_FROM: str(got)}
            page = (await self._ask_once(target, code, wanted)).body
            # Else this would ask for the rest without an end.
            if not page:
                raise RemoteProtocolError(f"{target[0]} sent an empty page of a table at {got}")
            pages.append(page)
            got += len(page)
        reply.body = b"".join(pages)
        return reply

    async def _ask_once(
        self, target: tuple[str, int], code: int, ext: dict[str, str]
    ) -> RemotingCommand:
        address, timeout_ms = target
        reply = await self._client.invoke(address, RemotingCommand.request(code, ext), timeout_ms)
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark or "", address)
        return reply


class Pages:
    """Bodies that were too large for one answer; the newest few are kept."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        # A slave may ask for the next page of a body that the process before this one has cut.
        self._process = secrets.token_hex(8)
        self._count = 0

    def paged(self, handler: Handler) -> Handler:
        """`handler`, with answers in pages for requests that accept them."""

        async def answer(request: RemotingCommand, connection: Connection) -> Response:
            name = request.ext.get(EXT_BODY_ID)
            if name is not None:
                return self._page(request, name)
            reply = handler(request, connection)
            if not isinstance(reply, RemotingCommand):
                reply = None if reply is None else await reply
            if reply is not None and EXT_PAGES in request.ext:
                # R58: the size comes from outside. No page is empty, or too large for a frame.
                self._cut(reply, max(1, min(request.require_int(EXT_PAGES), PAGE_SIZE)))
            return reply

        return answer

    def _cut(self, reply: RemotingCommand, size: int) -> None:
        body = reply.body
        if len(body) <= size:
            return
        # A slave that still reads the oldest body is refused, and fetches the table again.
        while len(self._bodies) >= BODIES_KEPT:
            del self._bodies[next(iter(self._bodies))]
        self._count += 1
        name = f"{self._process}.{self._count}"
        self._bodies[name] = body
        reply.ext = reply.ext | {EXT_BODY_ID: name, EXT_BODY_SIZE: str(len(body))}
        reply.body = body[:size]

    def _page(self, request: RemotingCommand, name: str) -> RemotingCommand:
        body, begin = self._bodies.get(name), request.require_int(EXT_BODY_FROM)
        if body is None or not 0 <= begin < len(body):
            raise system_error(f"no page of table {name} at {begin} is kept: ask again")
        page = body[begin : begin + PAGE_SIZE]
        # The last page: if it gets lost the slave fetches the whole table again.
        if begin + len(page) == len(body):
            del self._bodies[name]
        return RemotingCommand.response_to(request, body=page)


class SlaveSourceProcessor:
    """Answers with the present tables and the masterEpoch of this broker, which is NO_MASTER_EPOCH
    while it is not master."""

    def __init__(
        self,
        tables: BrokerTables,
        gate: RoleGate,
        log_begin: Callable[[], int],
        confirm_offset: Callable[[], int],
        timers_until_ms: Callable[[], int],
    ) -> None:
        """`confirm_offset`: up to it the records of the log are carried out. `timers_until_ms`: the
        time up to which all timed messages are delivered."""
        self._tables = tables
        self._gate = gate
        self._log_begin = log_begin
        self._confirm_offset = confirm_offset
        self._timers_until_ms = timers_until_ms
        self._pages = Pages()

    def register(self, processors: Processors) -> None:
        for code, handler in (
            (RequestCode.GET_ALL_TOPIC_CONFIG, self.all_topics),
            (RequestCode.GET_ALL_CONSUMER_OFFSET, self.all_consumer_offsets),
            (RequestCode.GET_ALL_DELAY_OFFSET, self.all_delay_offsets),
            (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.all_groups),
            (RequestCode.BATON_GET_QUEUE_LOCKS, self.all_locks),
            (RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, self.all_request_modes),
        ):
            processors.register(code, self._pages.paged(handler), large=True)
        processors.register(RequestCode.GET_TIMER_CHECK_POINT, self.timer_check_point)

    async def all_topics(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        table = self._tables.topics
        body = TopicConfigAndMappingSerializeWrapper(
            data_version=table.data_version, topic_config_table=dict(table.table)
        )
        return await reply_in_turns(request, body, {"totalTopicNum": str(len(table))})

    async def all_groups(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        table = self._tables.groups
        return await reply_in_turns(request, table.wrapper(), {"totalGroupNum": str(len(table))})

    async def all_locks(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """BATON_GET_QUEUE_LOCKS (60002): who has which queue."""
        return await reply_in_turns(request, self._tables.locks.wrapper())

    async def all_consumer_offsets(
        self, request: RemotingCommand, _: Connection
    ) -> RemotingCommand:
        """GET_ALL_CONSUMER_OFFSET (43). Without a body if the slave has this version already. All
        values are of the moment at which the request came."""
        master_epoch = self._gate.master_epoch if self._gate.is_master else NO_MASTER_EPOCH
        version = f"{master_epoch}.{self._tables.offsets.change_count}"
        ext = {
            EXT_MASTER_EPOCH: str(master_epoch),
            EXT_OFFSET_VERSION: version,
            EXT_TABLE_VERSION: self._tables.version,
            EXT_CARRIED_OUT: str(self._confirm_offset()),
            EXT_LOG_BEGIN: str(max(0, self._log_begin())),
        }
        if request.ext.get(EXT_OFFSET_VERSION) == version:
            return RemotingCommand.response_to(request, ext=ext)
        return await reply_in_turns(request, self._tables.offsets.wrapper(), ext)

    def timer_check_point(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        check = self._tables.delays.timer_check(self._timers_until_ms())
        return RemotingCommand.response_to(request, body=check)

    def all_delay_offsets(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        ext = {EXT_CARRIED_OUT: str(self._confirm_offset())}
        body = self._tables.delays.wrapper().encode()
        return RemotingCommand.response_to(request, ext=ext, body=body)

    async def all_request_modes(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """GET_ALL_MESSAGE_REQUEST_MODE (402). A group that is not in it has the default mode."""
        return await reply_in_turns(request, self._tables.request_modes.wrapper())


def _offset(reply: RemotingCommand, name: str) -> int | None:
    """An offset of the master's log; None if it does not send it."""
    return reply.require_int(name) if name in reply.ext else None


async def reply_in_turns(
    request: RemotingCommand, body: Body, ext: Mapping[str, str] | None = None
) -> RemotingCommand:
    """A reply with the JSON of `body`, whose tables must not change meanwhile."""
    pieces = [piece async for piece in in_turns(encoded_pieces(body), PIECES_AT_ONCE)]
    return RemotingCommand.response_to(request, ext=ext, body=b"".join(pieces))
