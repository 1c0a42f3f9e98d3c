"""Transactions: a half message waits until its producer ends it; if that does not happen, the
broker asks the producer.

Half messages are in RMQ_SYS_TRANS_HALF_TOPIC. END_TRANSACTION (37) with a commit puts the message
into its own topic. Each end puts the half's queue offset into an op record of
RMQ_SYS_TRANS_OP_HALF_TOPIC; all ends of a loop turn share one op. The reply waits until the op is
confirmed, so an answered end is never checked or committed again (R30). A half that stays open is
checked: it is written again with a higher count, and a producer of its group gets
CHECK_TRANSACTION_STATE (39). After too many checks it is moved to TRANS_CHECK_MAX_TIME_TOPIC.

The shell around `transaction_records`. Origin: EndTransactionProcessor,
TransactionalMessageServiceImpl and TransactionalOpBatchService.
"""

import asyncio
import logging
from functools import partial
from typing import Final

from batonmq.auth.guard import Require, allow_all
from batonmq.auth.rights import publish_needs
from batonmq.broker.config import BrokerSections
from batonmq.broker.request_fields import flag, number, stored_at, system_error, text
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.topic_config import topic_config
from batonmq.broker.tables.topics import TopicService, readable_queue
from batonmq.broker.transaction.producer_check import ProducerCheck
from batonmq.broker.transaction.transaction_records import (
    NEVER,
    QUEUE,
    CheckRules,
    Due,
    Half,
    TransactionTable,
    checked_once_more,
    committed,
    half_of,
    immunity_ms,
    op,
    parse_op,
    real_place,
    transaction_key,
)
from batonmq.broker.write import log_features
from batonmq.broker.write.log_features import LogFeature
from batonmq.broker.write.write_path import WritePath, outcome_of
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.message import MessageExt
from batonmq.protocol.properties import CHECK_IMMUNITY_TIME_IN_SECONDS, PGROUP, REAL_TOPIC, UNIQ_KEY
from batonmq.protocol.records.codec import (
    NewMessage,
    decode_record,
    message_to_store,
    raw_properties,
)
from batonmq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK
from batonmq.protocol.topic_name import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_GROUP,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.turns import in_slices
from batonmq.store.errors import PutIllegal, PutRefused

log = logging.getLogger(__name__)

SLICE: Final = 64
"""Records that are read, or halves that are checked, in one turn."""
OPEN_MAX: Final = 1 << 19
"""Open transactions (R58): one takes about a kilobyte, without a producer for half the time that
the log is kept."""
OP_OFFSETS_MAX: Final = 400
"""Halves that one op names: with offsets of nine digits 4000 bytes, Java writes at most 4096."""
LOADING_S_MAX: Final = 3.0
"""How long an end of a transaction waits for a new master to read its open halves."""


class TransactionService(LogFeature):
    TOPICS = (TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC)

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        topics: TopicService,
        offsets: ConsumerOffsetManager,
        producers: ProducerCheck,
    ) -> None:
        super().__init__(path)
        self.require: Require = allow_all
        """Checks the right to end a transaction."""
        self._topics = topics
        self._offsets = offsets
        self._producers = producers
        self._config = config
        self._table = TransactionTable(check_rules(config))
        self._loaded = asyncio.Event()
        self._load_to = [0, 0]
        self._torn: list[int] = []
        """Halves whose commit or copy is in the log without an op."""
        self._ops: list[int] = []
        self._op_done: asyncio.Future[None] | None = None
        self._last_op: asyncio.Future[None] | None = None
        """The newest op; done when it is confirmed."""
        self._owed: list[int] = []
        """Halves that were committed, but whose op was refused: the next op names them."""
        producers.came = self._producer_came
        self._resumed: set[int] = set()
        """Physical offsets of the given-up messages that this mastership has resumed."""
        self._wall_at_zero_ms = wall_ms() - boot_ms()
        """Wall clock at boot; with `boot_ms` a time that no change of the clock moves."""

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.END_TRANSACTION, self.end_transaction)
        processors.register(RequestCode.RESUME_CHECK_HALF_MESSAGE, self.resume_check)

    def _continue(self) -> None:
        starts, ends = [], []
        for topic in self.TOPICS:
            least, most = self._range_of(topic, QUEUE)
            starts.append(min(max(self._offsets.query(TRANS_GROUP, topic, QUEUE), least), most))
            ends.append(most)
        self._table = TransactionTable(check_rules(self._config), *starts)
        self._load_to = ends

    def _forget(self) -> None:
        self._loaded.clear()
        self._torn.clear()
        self._ops.clear()
        self._owed.clear()
        self._resumed.clear()
        if self._op_done is not None and not self._op_done.done():
            self._op_done.set_exception(_changed())
            _retrieved(self._op_done)
        self._op_done = None

    def half_comes(self, group: str, channel: Connection | None) -> None:
        """Before a half message is put. `channel`: of its producer; None: a replica passed it on.
        Raises BrokerRefusal if too many are open."""
        if len(self._table) >= OPEN_MAX:
            why = f"{OPEN_MAX} transactions are open: no more are taken before some have ended"
            raise BrokerRefusal(ResponseCode.SYSTEM_BUSY, why)
        if channel is not None:
            self._producers.sent_half(group, channel)

    def _producer_came(self, group: str) -> None:
        """A producer connected. After a failover halves may be due before any producer is known."""
        if self._table.group_came(group) and self._is_running:
            self._wake_in(0)

    def __len__(self) -> int:
        return len(self._table)

    def _read(self) -> bool:
        more = self._read_slice()
        halves, ops = self._load_to
        is_caught_up = self._table.next_half >= halves and self._table.next_op >= ops
        # Not before: until all ops are read, a half that has ended looks open.
        if not self._loaded.is_set() and is_caught_up:
            self._loaded.set()
            self._end_torn()
        return more

    def _slice(self, now_ms: int) -> int:
        if self._owed and self._store.appender.is_writable:
            self._write_op([])
        if not self._loaded.is_set():
            return log_features.MAX_PAUSE_MS
        pause_ms = self._check_due(now_ms)
        self._keep_progress()
        return pause_ms

    # Reading the queues.

    def _first_offsets(self) -> list[int]:
        """The first offsets of both queues, which grow as the log expires."""
        least = self._store.queries.min_offset_in_queue
        return [least(topic, QUEUE) for topic in self.TOPICS]

    def _read_slice(self) -> bool:
        """Reads a slice of both queues; returns whether there is more. Ops are read after all half
        messages, because they name these. Raises CorruptLogError."""
        queries, table = self._store.queries, self._table
        table.skip_to(*self._first_offsets())
        halves = queries.units(TRANS_HALF_TOPIC, QUEUE, table.next_half, SLICE)
        commits = self._store.recent_commits if halves and not self._loaded.is_set() else ()
        for phy_offset, size, _ in halves:
            record = queries.record_at(phy_offset, size)
            if record is None:
                table.half_gone(table.next_half)
                continue
            try:
                half = half_of(record)
            except Exception as error:  # R54: skip only this one
                self._path.aside.add("transactions", f"half message at {phy_offset}", error)
                table.half_gone(table.next_half)
                continue
            replaced = table.half_seen(half)
            if replaced is not None:
                self._torn.append(replaced)
            # The last master's log ended between the commit and its op: without the op the half
            # would be checked, and could be committed a second time.
            if phy_offset in commits:
                self._torn.append(table.next_half - 1)
        if halves and table.next_half < queries.max_offset_in_queue(TRANS_HALF_TOPIC, QUEUE):
            return True
        ops = queries.units(TRANS_OP_HALF_TOPIC, QUEUE, table.next_op, SLICE)
        for phy_offset, size, _ in ops:
            record = queries.record_at(phy_offset, size)
            ended = parse_op(message_to_store(record).body) if record is not None else []
            table.op_seen(table.next_op, ended)
        if self._loaded.is_set():
            self._end_torn()
        return bool(ops) and table.next_op < queries.max_offset_in_queue(TRANS_OP_HALF_TOPIC, QUEUE)

    def _end_torn(self) -> None:
        """Writes the op that the log lacks for these half messages."""
        if self._path.gate.refusal is not None:
            return
        torn, self._torn = [one for one in self._torn if self._table.is_open(one)], []
        if torn:
            self._write_op(torn)

    def _keep_progress(self) -> None:
        """Commits the progress. Only confirmed records were read, so this is safe (R30)."""
        if self._path.gate.refusal is None:
            half, ops = self._table.progress()
            self._offsets.commit(TRANS_GROUP, TRANS_HALF_TOPIC, QUEUE, half)
            self._offsets.commit(TRANS_GROUP, TRANS_OP_HALF_TOPIC, QUEUE, ops)

    # The end of a transaction.

    async def end_transaction(
        self, request: RemotingCommand, channel: Connection
    ) -> RemotingCommand:
        """Commits or rolls back (END_TRANSACTION, 37); answered when the op is confirmed."""
        gate = self._path.gate
        gate.require_open()
        group = text(request, "producerGroup")
        queue_offset = number(request, "tranStateTableOffset")
        phy_offset = number(request, "commitLogOffset")
        outcome = number(request, "commitOrRollback")
        from_check = flag(request, "fromTransactionCheck")
        if outcome not in (TRANSACTION_COMMIT, TRANSACTION_ROLLBACK):
            # The producer does not know yet: a check will ask again.
            return RemotingCommand.response_to(request)
        await self._until_loaded()
        await self._read_until(queue_offset)
        record = self._store.queries.look_message_by_offset(phy_offset)
        half = decode_record(record) if record is not None else None
        if record is None or half is None or half.topic != TRANS_HALF_TOPIC:
            raise system_error(f"no half message at commitLogOffset {phy_offset}")
        _check_same(half, group, queue_offset, phy_offset)
        self.require(request, channel, publish_needs(half.properties.get(REAL_TOPIC, "")))
        if not from_check:
            _check_immunity(half, wall_ms())
        key = transaction_key(raw_properties(record))
        offsets = self._table.to_end(queue_offset, key)
        # The check or end that was under way is over: begin again with what it left.
        if not offsets and await self._other_end_is_over(queue_offset, key):
            return await self.end_transaction(request, channel)
        if not offsets:
            raise system_error(f"the transaction of half message {queue_offset} has ended already")
        # The commit may already be in the log without its op: do not commit twice.
        committed_before = any(map(self._is_committed, offsets))
        try:
            if outcome == TRANSACTION_COMMIT and not committed_before:
                self._commit(record, half, self._table.place_of(offsets[-1]))
            done = self._write_op(offsets)
        # Also if the request is cancelled: else it would count as being ended, and never be
        # checked.
        except BaseException:
            self._table.not_ended(offsets, wall_ms())
            raise
        # Shielded: other requests of this turn wait for the same op.
        await asyncio.shield(done)
        if committed_before and outcome != TRANSACTION_COMMIT:
            raise system_error(
                f"the transaction of half message {queue_offset} was committed before"
            )
        return RemotingCommand.response_to(request)

    async def _read_until(self, queue_offset: int) -> None:
        """The half may have been confirmed just now, and not been read yet. In slices, since anyone
        may name an offset that is far ahead (R58)."""
        while self._table.next_half <= queue_offset and self._read_slice():
            if self._table.next_half <= queue_offset:
                await asyncio.sleep(0)

    async def _other_end_is_over(self, queue_offset: int, key: bytes) -> bool:
        """Waits while a check (which writes a copy) or an earlier request ends a half of this
        transaction. True if there was one, and it is over."""
        was = is_ending = self._table.is_ending(queue_offset, key)
        while is_ending and self._last_op is not None:
            was_done = self._last_op.done()
            if not was_done:
                # Shielded: others wait for the same op.
                await asyncio.shield(self._last_op)
            await in_slices(self._read_slice)
            is_ending = self._table.is_ending(queue_offset, key)
            if was_done:
                break
        return was and not is_ending

    def _is_committed(self, queue_offset: int) -> bool:
        place = self._table.place_of(queue_offset)
        return queue_offset in self._owed or place in self._store.recent_commits

    async def resume_check(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Starts the checks of an open or given-up half message from the beginning
        (RESUME_CHECK_HALF_MESSAGE, 323); `msgId` is its offsetMsgId. Answered when that is
        confirmed. Java accepts any message, and so could commit a transaction twice."""
        self._path.gate.require_open()
        await self._until_loaded()
        message_id = text(request, "msgId")
        record = self._store.queries.look_message_by_offset(stored_at(message_id))
        half = decode_record(record) if record is not None else None
        if record is None or half is None or not half.properties.get(REAL_TOPIC):
            raise system_error(f"no half message {message_id} is stored here")
        _require_same_topic(self._topics, half)
        copy = checked_once_more(record, 0)
        if half.topic == TRANS_HALF_TOPIC and self._table.is_open(half.queue_offset):
            await self._check_from_the_start(half, copy, transaction_key(raw_properties(record)))
        elif half.topic == TRANS_CHECK_MAX_TIME_TOPIC:
            await self._reopen(half, copy)
        else:
            raise system_error(
                f"message {message_id} of topic {half.topic} is no half message that waits or was"
                f" given up ({TRANS_CHECK_MAX_TIME_TOPIC})"
            )
        return RemotingCommand.response_to(request)

    async def _check_from_the_start(self, half: MessageExt, copy: NewMessage, key: bytes) -> None:
        """Writes an open half message again, with a check count of 0."""
        offsets = self._table.to_end(half.queue_offset, key)
        if not offsets:
            raise system_error(f"half message {half.msg_id} is being ended or checked right now")
        try:
            self._store.appender.put_message(copy, stored=True)
            done = self._write_op(offsets)
        except BaseException:
            self._table.not_ended(offsets, wall_ms())
            raise
        await asyncio.shield(done)

    async def _reopen(self, half: MessageExt, copy: NewMessage) -> None:
        """Makes a given-up half message open again, at most once."""
        # A later record with its UNIQ_KEY shows that it was resumed before, or committed. Without a
        # key or an index that cannot be known, and a second copy could be committed twice.
        name, place = f"half message {half.msg_id}", half.physical_offset
        key = half.properties.get(UNIQ_KEY, "")
        if not key:
            raise system_error(f"{name} has no UNIQ_KEY: it is unknown whether it has ended since")
        if not self._config.store.message_index_enable:
            raise system_error(
                f"{name}: without messageIndexEnable it is unknown whether it has ended since"
            )
        for topic in (TRANS_HALF_TOPIC, half.properties[REAL_TOPIC]):
            found = self._store.queries.query_message(topic, key, SLICE, 0, NEVER)
            if any(decode_record(one).physical_offset > place for one in found.parts):
                raise system_error(
                    f"{name} was taken back or ended since: topic {topic} has its key"
                )
        if self._table.is_waiting(transaction_key(copy.properties)) or place in self._resumed:
            raise system_error(f"{name}: a half message of its key waits already")
        copy.topic, copy.queue_id = TRANS_HALF_TOPIC, QUEUE
        put = self._store.appender.put_message(copy, stored=True)
        self._resumed.add(place)
        self._path.schedule_flush()
        await self._path.wait_confirmed(put.end_offset, name)

    async def _until_loaded(self) -> None:
        """Waits until a new master has read the open halves. Raises BrokerRefusal."""
        try:
            async with asyncio.timeout(LOADING_S_MAX):
                await self._loaded.wait()
        except TimeoutError:
            raise BrokerRefusal(
                ResponseCode.SERVICE_NOT_AVAILABLE, "this master is still reading its transactions"
            ) from None

    def _commit(self, record: memoryview, half: MessageExt, latest_offset: int) -> None:
        """Puts the message into its own topic. `latest_offset`: physical offset of the half's last
        copy, by which a new master finds the commit."""
        _require_same_topic(self._topics, half)
        place = real_place(message_to_store(record).properties)
        if place is None:
            raise system_error(f"half message {half.queue_offset} has no REAL_TOPIC and REAL_QID")
        place = place[0], readable_queue(self._topics.existing(place[0]), place[1])
        put = self._path.put_message(committed(record, latest_offset, place), stored=True)
        # Until its op is put: an end that fails in between must not commit it again.
        self._store.recent_commits.append(latest_offset, put.physical_offset)
        self._path.schedule_flush()

    def _write_op(self, offsets: list[int]) -> asyncio.Future[None]:
        """Adds these half messages to the op of this turn. The future is done when the op is
        confirmed."""
        loop = asyncio.get_running_loop()
        if self._op_done is None:
            self._op_done = self._last_op = loop.create_future()
            loop.call_soon(self._put_ops, self._op_done)
        self._ops += offsets
        return self._op_done

    def _put_ops(self, done: asyncio.Future[None]) -> None:
        if done.done():
            return
        offsets, self._ops, self._op_done = self._owed + self._ops, [], None
        path, outcome = self._path, outcome_of(done, "end of the transaction")
        done.add_done_callback(_retrieved)
        try:
            for at in range(0, len(offsets), OP_OFFSETS_MAX):
                put = self._store.appender.put_message(
                    op(offsets[at : at + OP_OFFSETS_MAX], wall_ms())
                )
        except PutRefused as error:
            self._table.not_ended(offsets, wall_ms())
            # Committed ones must get their op, whatever their producers do now.
            is_open = self._table.is_open
            self._owed = [one for one in offsets if is_open(one) and self._is_committed(one)]
            outcome(ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
            return
        self._owed = []
        path.acks.add_waiter(put.end_offset, path.clock_ms(), outcome)
        path.schedule_flush()

    # Checks.

    def _check_due(self, now_ms: int) -> int:
        """Checks a slice of the due halves; returns the pause in ms until the next slice."""
        table = self._table
        table.rules = check_rules(self._config)
        for _ in range(SLICE):
            # The age by the monotonic clock too: no half is given up because the wall clock leaps.
            believed_ms = min(now_ms, self._wall_at_zero_ms + boot_ms())
            due = table.next_due(now_ms, believed_ms)
            if due is None:
                break
            try:
                self._carried_out(
                    f"check of half {due.half.queue_offset}", partial(self._check, due, now_ms)
                )
            except PutRefused as error:
                log.warning("transaction_check_waits reason=%s", error)
                return log_features.REFUSED_MS
        return max(0, min(table.wake_ms - now_ms, log_features.MAX_PAUSE_MS))

    def _check(self, due: Due, now_ms: int) -> bool:
        """On any error the half stays open."""
        try:
            self._act_on(due, now_ms)
        except BaseException as error:
            may_succeed = isinstance(error, PutRefused) and not isinstance(error, PutIllegal)
            self._table.later(due.half, now_ms, log_features.REFUSED_MS if may_succeed else None)
            raise
        return True

    def _act_on(self, due: Due, now_ms: int) -> None:
        half = due.half
        record = self._store.queries.record_at(half.phy_offset, half.size)
        is_ended = due.action == "end" or self._is_committed(half.queue_offset)
        topic = (real_place(raw_properties(record)) or ("", 0))[0] if record is not None else ""
        is_ended = is_ended or self._topics.deleted_since(topic, half.phy_offset)
        if record is None or is_ended:
            self._write_op([half.queue_offset])
        elif topic in self._store.deleting_topics:  # an unconfirmed deletion may be cut
            self._table.later(half, now_ms, log_features.REFUSED_MS)
        elif due.action == "give up":
            self._give_up(half, record)
        elif (channel := self._producers.channel(half.group, topic)) is None:
            log.info("transaction_not_checked group=%s: no producer of it is here", half.group)
            self._table.no_producer(half, now_ms)
        else:
            self._ask_producer(half, record, channel)

    def _ask_producer(self, half: Half, record: memoryview, channel: Connection) -> None:
        copy = checked_once_more(record, half.checks + 1)
        place = real_place(copy.properties) or ("", 0)
        put = self._store.appender.put_message(copy, stored=True)
        done = self._write_op([half.queue_offset])
        self._path.schedule_flush()

        def ask(op_done: asyncio.Future[None]) -> None:
            # Only now, with the copy confirmed: an end that names it must find it after a failover,
            # too.
            if not op_done.cancelled() and op_done.exception() is None:
                self._producers.ask(channel, copy, put, place)

        done.add_done_callback(ask)

    def _give_up(self, half: Half, record: memoryview) -> None:
        log.warning(
            "transaction_given_up group=%s checks=%d half=%d",
            half.group,
            half.checks,
            half.queue_offset,
        )
        topic = TRANS_CHECK_MAX_TIME_TOPIC
        if self._topics.get(topic) is None:
            self._topics.put_topic(topic_config(topic, 1))
        message = message_to_store(record)
        message.topic, message.queue_id = topic, QUEUE
        self._store.appender.put_message(message, stored=True)
        self._write_op([half.queue_offset])
        self._path.schedule_flush()


def check_rules(config: BrokerSections) -> CheckRules:
    """The rules by the broker's settings, which may change while it runs."""
    broker = config.broker
    return CheckRules(
        timeout_ms=broker.transaction_time_out,
        interval_ms=broker.transaction_check_interval,
        check_max=broker.transaction_check_max,
        age_max_ms=config.store.file_reserved_time * 3_600_000 // 2,
    )


def _require_same_topic(topics: TopicService, half: MessageExt) -> None:
    """Raises BrokerRefusal(TOPIC_NOT_EXIST) if the half's topic was deleted since, even if it was
    created again (R39)."""
    topic = half.properties.get(REAL_TOPIC, "")
    if topics.deleted_since(topic, half.physical_offset):
        raise BrokerRefusal(
            ResponseCode.TOPIC_NOT_EXIST, f"topic {topic} was deleted since: the half is gone"
        )


def _retrieved(done: asyncio.Future[None]) -> None:
    # Maybe no request waits for it: without this asyncio would log an exception never retrieved.
    if not done.cancelled():
        done.exception()


def _changed() -> BrokerRefusal:
    return BrokerRefusal(
        ResponseCode.SERVICE_NOT_AVAILABLE, "the role of this broker changed: the check decides"
    )


def _check_same(half: MessageExt, group: str, queue_offset: int, phy_offset: int) -> None:
    """Raises BrokerRefusal if the request does not name exactly this half message."""
    for what, asked, has in (
        ("producerGroup", group, half.properties.get(PGROUP, "")),
        ("tranStateTableOffset", queue_offset, half.queue_offset),
        ("commitLogOffset", phy_offset, half.physical_offset),
    ):
        if asked != has:
            raise system_error(f"{what} is {asked}, the half message has {has}")


def _check_immunity(half: MessageExt, now_ms: int) -> None:
    """Raises BrokerRefusal(ILLEGAL_OPERATION) for an end so late that checks may have begun."""
    given = half.properties.get(CHECK_IMMUNITY_TIME_IN_SECONDS)
    if given is None:
        return
    limit_ms = max(immunity_ms(given), immunity_ms(""))
    if now_ms - half.born_timestamp > limit_ms:
        raise BrokerRefusal(
            ResponseCode.ILLEGAL_OPERATION,
            f"the end came later than {limit_ms} ms after the message's birth: the check decides",
        )
