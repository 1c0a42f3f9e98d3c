"""Transactions at a broker: half, end, check, and what a new master makes of an unfinished end."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest
from lone_broker import (
    HeldConfirms,
    Rig,
    crashed,
    end_header,
    end_of,
    expire_all_but_last,
    lone_broker,
    messages,
    refuse,
    send_header,
    spoil,
    until,
)

from batonmq.broker.tables.offset_clamp import OffsetClamp
from batonmq.broker.transaction import producer_check, transaction_service
from batonmq.broker.transaction.producer_check import ProducerCheck
from batonmq.broker.transaction.transaction_records import (
    checked_once_more,
    committed,
    parse_op,
    real_place,
)
from batonmq.broker.write import log_features
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.bodies import HeartbeatData, ProducerData
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.records.codec import NewMessage, decode_record, message_to_store
from batonmq.protocol.role_view import RoleView
from batonmq.protocol.topic_name import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_GROUP,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
)
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient
from tests.shared.turns import counted_turns

COMMIT, ROLLBACK, UNKNOWN = "8", "12", "0"
HOUR_MS = 3_600_000
NO_CHECKS = {"transaction_time_out": HOUR_MS}
SOON = {"transaction_time_out": 300, "transaction_check_interval": 100}
ONE_CHECK = {"transaction_check_interval": 3 * HOUR_MS}  # where the clock is 2 hours ahead


pytestmark = pytest.mark.usefixtures("clock")


@pytest.fixture
def rig(tmp_path: Path) -> AbstractAsyncContextManager[Rig]:
    return lone_broker(tmp_path, broker=NO_CHECKS)


async def half(
    rig: Rig, key: str = "K1", *, topic: str = "T", **properties: str
) -> RemotingCommand:
    sent = await rig.send(
        topic, b"body", queue=1, TRAN_MSG="true", PGROUP="pg", UNIQ_KEY=key, TAGS="A", **properties
    )
    assert sent.code == 0, sent.remark
    return sent


def record_of(rig: Rig, sent: RemotingCommand) -> memoryview:
    _, offset = decode_offset_msg_id(sent.ext["msgId"])
    record = rig.service.store.queries.look_message_by_offset(offset)
    assert record is not None
    return record


def write_again(rig: Rig, sent: RemotingCommand) -> None:
    """The half message, as for its check, without the op of the first one."""
    rig.service.store.appender.put_message(checked_once_more(record_of(rig, sent), 1))
    rig.service.path.schedule_flush()


async def test_a_half_is_invisible_until_it_is_committed(rig):
    sent = await half(rig)
    assert sent.ext["transactionId"] == "K1" and sent.ext["queueId"] == "1"
    assert end_of(rig, "T", 1) == 0
    (waiting,) = await messages(rig, TRANS_HALF_TOPIC)
    assert waiting.properties["REAL_TOPIC"] == "T" and waiting.properties["REAL_QID"] == "1"
    assert waiting.properties["__transactionId__"] == "K1" and waiting.sys_flag & 0xC == 0
    assert (await rig.ask(37, end_header(sent, UNKNOWN))).code == 0
    assert end_of(rig, "T", 1) == 0 and end_of(rig, TRANS_OP_HALF_TOPIC) == 0
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
    (came,) = await messages(rig, "T", 1)
    assert (came.body, came.tags, came.sys_flag & 0xC) == (b"body", "A", 8)
    assert came.prepared_transaction_offset == waiting.physical_offset
    (op,) = await messages(rig, TRANS_OP_HALF_TOPIC)
    assert (op.body, op.tags) == (b"0,", "d")


async def test_r30_a_second_commit_is_refused_and_a_rollback_leaves_nothing(rig):
    first, second = await half(rig, "K1"), await half(rig, "K2")
    answers = await asyncio.gather(*(rig.ask(37, end_header(first, COMMIT)) for _ in range(4)))
    assert sorted(answer.code for answer in answers) == [0, 1, 1, 1]
    assert (await rig.ask(37, end_header(second, ROLLBACK))).code == 0
    again = await rig.ask(37, end_header(second, COMMIT))
    assert again.code == 1 and "ended" in (again.remark or "")
    assert end_of(rig, "T", 1) == 1
    await until(lambda: len(rig.service.features.transactions) == 0)


async def test_r30_an_answered_end_outlives_a_crash(tmp_path):
    """And one that was not given does not: it is open again. What was ended stands in the second
    file of the queue of half messages, its op in the first one of the queue of ops."""
    files = 2 * UNIT_SIZE

    async with lone_broker(tmp_path, broker=NO_CHECKS, mapped_file_size_consume_queue=files) as rig:
        _, open_one, ended = [await half(rig, key) for key in ("K1", "K2", "K3")]
        assert (await rig.ask(37, end_header(ended, COMMIT))).code == 0
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        (tmp_path / "config" / name).unlink(missing_ok=True)
    (tmp_path / "abort").touch()
    async with lone_broker(tmp_path, broker=NO_CHECKS, mapped_file_size_consume_queue=files) as rig:
        assert (await rig.ask(37, end_header(ended, COMMIT))).code == 1
        assert (await rig.ask(37, end_header(open_one, COMMIT))).code == 0
        assert end_of(rig, "T", 1) == 2


async def test_r30_a_log_that_ends_between_a_commit_and_its_op_commits_once(tmp_path):
    """The new master finds the commit without an op: it writes the op, and refuses a second end."""
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        sent = await half(rig)
        path, record = rig.service.path, record_of(rig, sent)
        place = real_place(message_to_store(record).properties)
        assert place == ("T", 1)
        path.put_message(committed(record, decode_record(record).physical_offset, place))
        path.schedule_flush()
        await until(lambda: end_of(rig, "T", 1) == 1)
    crashed(tmp_path)
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) == 1)
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 1
        assert end_of(rig, "T", 1) == 1


async def test_r30_a_commit_of_what_was_checked_is_known_by_its_last_copy(tmp_path, monkeypatch):
    """1 a half is checked, so it is in the log twice. 2 its producer ends it by the first copy, and
    the log ends behind the commit. 3 the new master writes the op, and commits nothing again."""
    checked_once = {"transaction_time_out": 0, "transaction_check_interval": 3_600_000}
    async with lone_broker(tmp_path, broker=checked_once) as rig, Asked(rig, UNKNOWN):
        sent = await half(rig)
        await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) == 1)
        refuse(rig, monkeypatch, TRANS_OP_HALF_TOPIC)
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 14
        await until(lambda: end_of(rig, "T", 1) == 1)
    crashed(tmp_path)
    async with lone_broker(tmp_path, broker=checked_once) as rig:
        await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) == 2)
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 1
        assert end_of(rig, "T", 1) == 1


@pytest.mark.parametrize(
    ("changed", "code", "named"),
    [
        ({"producerGroup": "other"}, 1, "producerGroup"),
        ({"tranStateTableOffset": "5"}, 1, "tranStateTableOffset"),
        ({"commitLogOffset": "1"}, 1, "commitLogOffset"),
        ({"commitLogOffset": "x"}, 29, "commitLogOffset"),
        ({"producerGroup": ""}, 29, "producerGroup"),
    ],
)
async def test_an_end_of_something_else_is_refused_by_name(rig, changed, code, named):
    sent = await half(rig)
    refused = await rig.ask(37, end_header(sent, COMMIT, **changed))
    assert refused.code == code and named in (refused.remark or "")
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0, "it is still open"


async def test_what_a_transaction_may_not_be(tmp_path):
    """Delayed, timed or part of a batch (MESSAGE_ILLEGAL), or sent where transactions are off."""

    async with lone_broker(tmp_path / "on") as rig:
        await rig.send("T")
        end = rig.service.store.max_phy_offset
        for wish in ({"DELAY": "3"}, {"TIMER_DELAY_SEC": "5"}):
            refused = await rig.send("T", TRAN_MSG="true", PGROUP="pg", **wish)
            assert refused.code == 13 and next(iter(wish)) in (refused.remark or "")
        items = [BatchItem(b"x", encode_properties({"TRAN_MSG": "true"}).encode())]
        batch = await rig.ask(320, send_header("T", 0, {}) | {"m": "true"}, encode_batch(items))
        assert batch.code == 13
        assert rig.service.store.max_phy_offset == end
    async with lone_broker(tmp_path / "off", broker={"reject_transaction_message": True}) as rig:
        assert (await rig.send("T", TRAN_MSG="true")).code == 16


class Asked:
    """A producer that is asked for the state of its transactions, and answers `outcome`."""

    def __init__(self, rig: Rig, outcome: str) -> None:
        self.rig, self.outcome = rig, outcome
        self.requests: list[RemotingCommand] = []
        self.answers: set[asyncio.Task[Any]] = set()
        processors = Processors()
        processors.register(39, self._check)
        self.client = RemotingClient(processors)

    def _check(self, request: RemotingCommand, _: Connection) -> None:
        self.requests.append(request)
        ext = request.ext
        fields = {name: ext[name] for name in ("tranStateTableOffset", "commitLogOffset")}
        fields |= {"producerGroup": "pg", "fromTransactionCheck": "true"}
        fields["commitOrRollback"] = self.outcome
        end = RemotingCommand.request(37, fields)
        task = asyncio.ensure_future(self.client.invoke(self.rig.service.address, end, 5000))
        self.answers.add(task)

    async def __aenter__(self) -> Self:
        data = HeartbeatData(client_id="p1", producer_data_set=[ProducerData(group_name="pg")])
        request = RemotingCommand.request(34, {}, data.encode())
        reply = await self.client.invoke(self.rig.service.address, request, 5000)
        assert reply.code == 0
        return self

    async def __aexit__(self, *_: object) -> None:
        while open_answers := [answer for answer in self.answers if not answer.done()]:
            await asyncio.wait(open_answers)
        await self.client.close()


def test_r58_no_longer_name_of_a_producer_group_is_kept_than_a_heartbeat_may_have(monkeypatch):
    """10,000 names of 160 KiB would take 1.6 GB."""
    monkeypatch.setattr(producer_check, "SENDERS_MAX", 2)
    check, channel = ProducerCheck(Mock(next_producer=lambda _: None), "a", b""), Mock(closed=False)
    for length, known in ((1024, channel), (1025, None)):
        check.sent_half("g" * length, channel)
        assert check.channel("g" * length, "T") is known
    for group in ("a", "b", "a", "c"):
        check.sent_half(group, channel)
    assert [check.channel(group, "T") is channel for group in "abc"] == [False, True, True]


@pytest.mark.counts_turns
async def test_r58_an_end_that_names_an_offset_far_ahead_reads_the_queue_in_turns(rig, monkeypatch):
    """If halves come faster than they are read, one END_TRANSACTION could read them all at once."""
    features, count = rig.service.features.transactions, 1_000
    monkeypatch.setattr(features, "_wake", lambda: None)
    sent = [await half(rig, f"K{number}") for number in range(count)]
    with counted_turns() as turns:
        reply = await rig.ask(37, end_header(sent[0], COMMIT) | {"tranStateTableOffset": "1" * 18})
    assert "tranStateTableOffset is" in reply.remark
    assert features._table.next_half == count and turns.lines < 20_000
    assert (await rig.ask(37, end_header(sent[-1], COMMIT))).code == 0


async def test_r58_open_transactions_have_a_limit(rig, monkeypatch):
    monkeypatch.setattr(transaction_service, "OPEN_MAX", 2)
    first, _ = [await half(rig, key) for key in ("K1", "K2")]
    await until(lambda: len(rig.service.features.transactions) == 2)
    properties = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "K3"}
    refused = await rig.send("T", b"body", **properties)
    assert refused.code == 2 and "2 transactions are open" in refused.remark
    assert (await rig.send("T", b"no half")).code == 0
    assert (await rig.ask(37, end_header(first, COMMIT))).code == 0
    await until(lambda: len(rig.service.features.transactions) == 1)
    assert (await half(rig, "K3")).code == 0


async def test_an_end_that_meets_the_check_of_its_half_ends_the_copy(tmp_path, clock):
    """The copy for the check and its op are not confirmed yet when the producer ends the first
    half: the end waits, and ends the copy. A second end is refused."""
    broker = NO_CHECKS | ONE_CHECK
    async with lone_broker(tmp_path, broker=broker) as rig, Asked(rig, UNKNOWN) as producer:
        sent = await half(rig)
        held, end = HeldConfirms(rig.service.path), rig.service.store.max_phy_offset
        clock.ahead_ms = 2 * HOUR_MS
        await until(lambda: rig.service.store.max_phy_offset > end)
        ends = [asyncio.ensure_future(rig.ask(37, end_header(sent, COMMIT))) for _ in range(2)]
        await rig.ask(45)
        assert not any(each.done() for each in ends)
        held.release()
        answers = await asyncio.gather(*ends)
        assert sorted(each.code for each in answers) == [0, 1]
        assert end_of(rig, "T", 1) == 1
        await until(lambda: len(rig.service.features.transactions) == 0 and producer.requests)


async def test_an_open_half_is_checked_back_and_committed_once(tmp_path):
    broker = {"transaction_time_out": 0}
    async with lone_broker(tmp_path, broker=broker) as rig, Asked(rig, COMMIT) as producer:
        await half(rig)
        await until(lambda: end_of(rig, "T", 1) == 1)
        (asked,) = producer.requests
        assert asked.ext["topic"] == TRANS_HALF_TOPIC and asked.ext["transactionId"] == "K1"
        shown = decode_record(asked.body)
        assert (shown.topic, shown.queue_id, shown.body) == ("T", 1, b"body")
        assert shown.properties["TRANSACTION_CHECK_TIMES"] == "1"
        assert shown.physical_offset == int(asked.ext["commitLogOffset"])
        await until(lambda: len(rig.service.features.transactions) == 0)
        assert len(producer.requests) == 1 and end_of(rig, "T", 1) == 1


async def test_one_that_stays_unknown_ends_in_the_topic_for_those(tmp_path):
    often = {"transaction_time_out": 0, "transaction_check_interval": 100}
    broker = often | {"transaction_check_max": 2}
    async with lone_broker(tmp_path, broker=broker) as rig, Asked(rig, UNKNOWN) as producer:
        await half(rig)
        await until(lambda: end_of(rig, TRANS_CHECK_MAX_TIME_TOPIC) == 1)
        assert len(producer.requests) == 2
        (lost,) = await messages(rig, TRANS_CHECK_MAX_TIME_TOPIC)
        assert lost.body == b"body" and lost.properties["REAL_TOPIC"] == "T"
        assert end_of(rig, "T", 1) == 0
        config = rig.service.topics.get(TRANS_CHECK_MAX_TIME_TOPIC)
        assert config is not None and (config.read_queue_nums, config.perm) == (1, 6)
        await until(lambda: len(rig.service.features.transactions) == 0)
        # 323: it is checked from the start, and the producer knows by now.
        given_up, producer.outcome = {"topic": lost.topic, "msgId": lost.msg_id}, COMMIT
        assert (await rig.ask(323, given_up)).code == 0
        await until(lambda: end_of(rig, "T", 1) == 1)
        (came,) = await messages(rig, "T", 1)
        assert came.body == b"body" and len(producer.requests) == 3
        await until(lambda: len(rig.service.features.transactions) == 0)


async def test_a_half_is_checked_and_not_given_up_when_the_clock_leaps(tmp_path, clock):
    """Its producer committed: the check learns it, and no end is refused."""
    # The store's clock does not leap with the checks': each copy is due at once, so many are made.
    often = NO_CHECKS | {"transaction_check_max": 1_000_000}
    async with lone_broker(tmp_path, broker=often) as rig, Asked(rig, COMMIT) as producer:
        await half(rig)
        clock.ahead_ms = 40 * HOUR_MS
        await until(lambda: producer.requests)
        clock.ahead_ms = 0
        await until(lambda: end_of(rig, "T", 1) == 1)
        assert end_of(rig, TRANS_CHECK_MAX_TIME_TOPIC) == 0
        await asyncio.gather(*producer.answers)


async def test_only_a_half_that_waits_or_was_given_up_is_checked_again(rig):
    """RESUME_CHECK_HALF_MESSAGE (323)."""
    sent, plain = await half(rig), await rig.send("T")
    transactions = rig.service.features.transactions
    again = {"topic": "T", "msgId": sent.ext["msgId"]}
    assert (await rig.ask(323, again)).code == 0
    await until(lambda: len(transactions) == 1 and end_of(rig, TRANS_OP_HALF_TOPIC) == 1)
    assert end_of(rig, TRANS_HALF_TOPIC) == 2
    for message_id, code, why in (
        (sent.ext["msgId"], 1, "no half message that waits"),
        (plain.ext["msgId"], 1, "no half message"),
        (sent.ext["msgId"][:16] + "00000000000FFFFF", 1, "no half message"),
        ("nonsense", 29, "nonsense"),
    ):
        refused = await rig.ask(323, {"topic": "T", "msgId": message_id})
        assert refused.code == code and why in (refused.remark or "")
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
    assert len(await messages(rig, "T", 1)) == 1 and not len(transactions)


async def test_r39_a_half_of_a_deleted_topic_does_not_come_into_one_made_again(rig, clock):
    sent, transactions = await half(rig), rig.service.features.transactions
    assert (await rig.ask(215, {"topic": "T"})).code == 0
    await until(lambda: "T" not in rig.service.store.deleting_topics)
    await rig.send("T")
    for code, fields in ((37, end_header(sent, COMMIT)), (323, {"msgId": sent.ext["msgId"]})):
        refused = await rig.ask(code, fields)
        assert refused.code == 17 and "deleted since" in (refused.remark or "")
    assert len(transactions) == 1
    clock.ahead_ms = 2 * HOUR_MS
    await until(lambda: not len(transactions))
    assert end_of(rig, "T", 1) == 0 and end_of(rig, TRANS_HALF_TOPIC) == 1, "no check"


async def test_without_a_producer_no_check_is_counted(tmp_path, caplog):
    """The sender of the half has disconnected: the half waits unchanged."""
    caplog.set_level("INFO")
    async with lone_broker(tmp_path, broker=SOON) as rig:
        other = RemotingClient()
        header = send_header("T", 0, {"TRAN_MSG": "true", "PGROUP": "pg"})
        request = RemotingCommand.request(310, header, b"x")
        await other.invoke(rig.service.address, request, 5000)
        await other.close()
        await until(lambda: caplog.text.count("transaction_not_checked group=pg") > 1)
        assert end_of(rig, TRANS_HALF_TOPIC) == 1
        async with Asked(rig, COMMIT):
            await until(lambda: end_of(rig, "T") == 1)


async def test_an_end_later_than_the_immunity_is_left_to_the_check(rig):
    """604. The message's birth is years ago."""
    sent = await half(rig, CHECK_IMMUNITY_TIME_IN_SECONDS="10")
    late = await rig.ask(37, end_header(sent, COMMIT))
    assert late.code == 604
    checked = await rig.ask(37, end_header(sent, COMMIT, fromTransactionCheck="true"))
    assert checked.code == 0


async def test_r30_r45_a_commit_whose_op_was_refused_is_ended_without_asking(tmp_path, monkeypatch):
    """1. The commit is in the log, its op is refused, and so is the end. 2. There is disk space
    again: the master writes the op, and the message is there once."""
    async with lone_broker(tmp_path, broker=SOON) as rig:
        asked: list[object] = []
        monkeypatch.setattr(rig.service.features.producers, "ask", lambda *what: asked.append(what))
        sent = await half(rig)
        with monkeypatch.context() as full:
            refuse(rig, full, TRANS_OP_HALF_TOPIC)
            assert (await rig.ask(37, end_header(sent, COMMIT))).code == 14
        await until(lambda: len(rig.service.features.transactions) == 0)
        assert (end_of(rig, "T", 1), end_of(rig, TRANS_HALF_TOPIC)) == (1, 1)
        assert not asked


@pytest.mark.parametrize(
    ("again", "code", "commits_since"), [(COMMIT, 0, 0), (ROLLBACK, 1, 0), (COMMIT, 0, 5000)]
)
async def test_r30_r45_r56_an_end_that_comes_again_before_the_op_of_the_first_commits_nothing_more(
    rig, monkeypatch, again, code, commits_since
):
    """The commit is in the log, its op was refused. What comes again writes the op alone, however
    many commits came meanwhile."""
    sent, transactions = await half(rig), rig.service.features.transactions
    rig.service.path.hold.begin()  # else the master writes the op by itself
    with monkeypatch.context() as full:
        refuse(rig, full, TRANS_OP_HALF_TOPIC)
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 14
    if commits_since:
        rig.service.store.recent_commits.cut(0)  # it keeps the newest 4096
    assert (await rig.ask(37, end_header(sent, again))).code == code
    if not code:
        assert end_of(rig, TRANS_OP_HALF_TOPIC) == 1
    rig.service.path.hold.release()
    await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) == 1 and len(transactions) == 0)
    assert end_of(rig, "T", 1) == 1


async def test_r45_r56_a_refused_op_goes_with_the_next(rig, monkeypatch):
    """That one is of another transaction. Later it might be unknown that the first is committed."""
    first, second = await half(rig), await half(rig, key="K2")
    rig.service.path.hold.begin()  # else the master writes the op by itself
    with monkeypatch.context() as full:
        refuse(rig, full, TRANS_OP_HALF_TOPIC)
        assert (await rig.ask(37, end_header(first, COMMIT))).code == 14
    assert (await rig.ask(37, end_header(second, COMMIT))).code == 0
    await until(lambda: len(rig.service.features.transactions) == 0)
    assert (end_of(rig, "T", 1), end_of(rig, TRANS_OP_HALF_TOPIC)) == (2, 1)
    rig.service.path.hold.release()


async def test_r30_a_new_master_commits_nothing_again_while_it_writes_the_op(tmp_path, monkeypatch):
    """It has read the half message and knows its commit; a full disk refuses the op, and the
    producer ends the transaction once more."""
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        sent = await half(rig)
        refuse(rig, monkeypatch, TRANS_OP_HALF_TOPIC)
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 14
        await until(lambda: end_of(rig, "T", 1) == 1)
    crashed(tmp_path)
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        rig.service.path.hold.begin()  # else the master writes the op by itself
        with monkeypatch.context() as full:
            refuse(rig, full, TRANS_OP_HALF_TOPIC)
            assert (await rig.ask(37, end_header(sent, COMMIT))).code == 14
        assert end_of(rig, TRANS_OP_HALF_TOPIC) == 0
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
        assert (end_of(rig, "T", 1), end_of(rig, TRANS_OP_HALF_TOPIC)) == (1, 1)


async def test_r30_a_copy_for_a_check_without_the_op_of_the_first_takes_its_place(tmp_path):
    """The log of a new master ends between the two."""

    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        write_again(rig, await half(rig))
        rig.service.features.transactions.end()
        await until(lambda: end_of(rig, TRANS_HALF_TOPIC) == 2)
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        await until(lambda: len(rig.service.features.transactions) == 1)
        (op,) = await messages(rig, TRANS_OP_HALF_TOPIC)
        assert op.body == b"0,"


async def test_an_end_that_could_not_be_carried_out_can_be_asked_for_again(rig):
    sent, topics = await half(rig), rig.service.topics.topics
    config = topics.get("T")
    assert config is not None and topics.delete("T")
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 17
    topics.put(config)
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0


async def test_r30_a_commit_that_was_cut_is_no_commit(rig):
    """1. A master writes the commit and the op, and is deposed; both are cut. 2. It is elected
    again: the transaction is open, and its commit puts the message where it belongs."""
    sent = await half(rig)
    store, transactions = rig.service.store, rig.service.features.transactions
    held, end = HeldConfirms(rig.service.path), store.max_phy_offset
    cut = asyncio.ensure_future(rig.ask(37, end_header(sent, COMMIT)))
    await until(lambda: store.max_phy_offset > end)
    transactions.end()
    rig.service.path.acks.fail_all(14, "the role changed")
    assert (await cut).code == 14
    store.slave_log.truncate_to(end)
    store.prepare_master()
    held.release()
    transactions.begin()
    await until(lambda: len(transactions) == 1)
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
    (came,) = await messages(rig, "T", 1)
    assert came.body == b"body" and len(transactions) == 0


async def test_r44_a_half_whose_end_was_cut_by_an_unclean_election_is_open_again(rig):
    """The group's progress is beyond it by then: read from there, it would never be checked."""
    sent, other = await half(rig), await half(rig, "K2")
    service, offsets = rig.service, rig.service.tables.offsets
    store, transactions = service.store, service.features.transactions
    assert (await rig.ask(37, end_header(other, ROLLBACK, msgId="K2"))).code == 0
    end = store.max_phy_offset
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
    await until(lambda: offsets.query(TRANS_GROUP, TRANS_HALF_TOPIC, 0) == 2)
    transactions.end()
    store.slave_log.truncate_to(end, unclean_epoch=True)
    store.prepare_master()
    view = RoleView("C", "broker-a", 0, master_epoch=5, unclean_epoch=5)
    await OffsetClamp(service.tables, store).for_view(view)
    transactions.begin()
    assert (await rig.ask(37, end_header(other, ROLLBACK, msgId="K2"))).code == 1, "it ended"
    assert len(transactions) == 1
    assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
    assert [came.body for came in await messages(rig, "T", 1)] == [b"body"]


async def test_r4_ends_of_one_mastership_are_not_written_in_the_next(rig):
    first, second = await half(rig), await half(rig, "K2")
    transactions = rig.service.features.transactions
    channel = next(iter(rig.service.endpoint.server.connections))
    request = RemotingCommand.request(37, end_header(first, ROLLBACK))
    ended = asyncio.ensure_future(transactions.end_transaction(request, channel))
    await asyncio.sleep(0)
    transactions.end()
    transactions.begin()
    with pytest.raises(BrokerRefusal, match="the role of this broker changed"):
        await ended
    assert (await rig.ask(37, end_header(second, ROLLBACK, msgId="K2"))).code == 0
    (op,) = await messages(rig, TRANS_OP_HALF_TOPIC)
    assert op.body == b"1,"


async def test_a_new_master_continues_when_half_messages_expire_while_it_reads_them(tmp_path):
    async with lone_broker(
        tmp_path, broker=NO_CHECKS, mapped_file_size_consume_queue=2 * UNIT_SIZE
    ) as rig:
        for number in range(6):
            await half(rig, f"K{number}")
        transactions = rig.service.features.transactions
        transactions.end()
        progress = TRANS_GROUP
        rig.service.tables.offsets.commit(progress, TRANS_HALF_TOPIC, 0, 0)
        transactions.begin()
        expire_all_but_last(rig, TRANS_HALF_TOPIC)
        sent = await half(rig, "last")
        assert (await rig.ask(37, end_header(sent, COMMIT, msgId="last"))).code == 0


async def test_r30_a_producer_is_asked_when_the_check_is_confirmed(tmp_path, clock):
    """Also for a half that a Java producer marks as prepared (sysFlag 4). A master whose role ends
    meanwhile asks no producer."""
    broker = NO_CHECKS | ONE_CHECK
    async with lone_broker(tmp_path, broker=broker) as rig, Asked(rig, UNKNOWN) as producer:
        header = send_header("T", 1, {"TRAN_MSG": "true", "PGROUP": "pg"}) | {"f": "4"}
        assert (await rig.ask(310, header, b"body")).code == 0
        transactions, store = rig.service.features.transactions, rig.service.store
        await until(lambda: len(transactions) == 1)
        held, end = HeldConfirms(rig.service.path), store.max_phy_offset
        clock.ahead_ms = 2 * HOUR_MS
        await until(lambda: store.max_phy_offset > end)
        await rig.ask(45)
        assert not producer.requests
        held.release()
        await until(lambda: len(producer.requests) == 1)
        await asyncio.gather(*producer.answers)
        held, end = HeldConfirms(rig.service.path), store.max_phy_offset
        clock.ahead_ms = 4 * HOUR_MS
        await until(lambda: store.max_phy_offset > end)
        rig.service.path.acks.fail_all(14, "the role changed")
        rig.service.role_left()
        held.release()
        await rig.ask(45)
        assert len(producer.requests) == 1


async def test_r30_ops_are_read_though_half_messages_keep_coming(rig, monkeypatch):
    """Else what has ended stays open for as long as a steady load lasts."""
    first, service = await half(rig), rig.service.features.transactions
    await until(lambda: len(service) == 1)
    queries, appender = rig.service.store.queries, rig.service.store.appender
    record, read = record_of(rig, first), queries.units

    def units(topic: str, *place: int) -> list[tuple[int, int, int]]:
        """Each time that the half messages are read another one is on its way."""
        if topic == TRANS_HALF_TOPIC:
            another = message_to_store(record)
            key = b"K%d" % (appender.end + 2)
            another.properties = another.properties.replace(b"K1", key)
            appender.put_message(another)
            rig.service.path.schedule_flush()
        return read(topic, *place)

    monkeypatch.setattr(queries, "units", units)
    assert (await rig.ask(37, end_header(first, COMMIT))).code == 0
    offsets = rig.service.tables.offsets
    await until(lambda: offsets.query(TRANS_GROUP, TRANS_HALF_TOPIC, 0) == 1)
    monkeypatch.undo()


async def test_r30_an_end_and_a_second_start_of_checks_at_once_deliver_once(rig):
    """37 and then 323, before the end is confirmed: the second of them is refused."""
    sent = await half(rig)
    held = HeldConfirms(rig.service.path)
    ending = asyncio.create_task(rig.ask(37, end_header(sent, COMMIT)))
    await asyncio.sleep(0)  # it is sent
    resumed = await rig.ask(323, {"msgId": sent.ext["msgId"]})
    held.release()
    assert ((await ending).code, resumed.code) == (0, 1) and "being ended" in (resumed.remark or "")
    await until(lambda: len(rig.service.features.transactions) == 0)
    assert (end_of(rig, "T", 1), end_of(rig, TRANS_HALF_TOPIC)) == (1, 1)


@pytest.mark.parametrize("code", [37, 323])
async def test_r30_while_a_new_master_reads_its_halves_none_ends_or_is_resumed(
    rig, monkeypatch, code
):
    sent = await half(rig)
    monkeypatch.setattr(transaction_service, "LOADING_S_MAX", 0)
    rig.service.features.transactions._loaded = Mock(wait=asyncio.Event().wait)
    refused = await rig.ask(code, end_header(sent, COMMIT) | {"msgId": sent.ext["msgId"]})
    assert refused.code == 14 and "still reading" in (refused.remark or "")


async def test_r30_what_was_given_up_is_taken_back_once(tmp_path):
    """Requests 323: two in one turn, one while the copy waits, one when that is committed, and one
    for a message without a key."""
    async with lone_broker(tmp_path, broker=NO_CHECKS | {"transaction_check_interval": 100}) as rig:
        table = rig.service.features.transactions
        await half(rig, TRANSACTION_CHECK_TIMES="99")
        await until(lambda: end_of(rig, TRANS_CHECK_MAX_TIME_TOPIC) == 1)
        keyless = encode_properties({"REAL_TOPIC": "T", "REAL_QID": "1"}).encode()
        place = (TRANS_CHECK_MAX_TIME_TOPIC, 0, b"as Java may have", keyless)
        rig.service.store.appender.put_message(NewMessage(*place, 0, None, None, 0, bytes(8)))
        rig.service.path.schedule_flush()
        await until(lambda: end_of(rig, TRANS_CHECK_MAX_TIME_TOPIC) == 2)
        await until(lambda: not len(table))
        given_up, unnamed = await messages(rig, TRANS_CHECK_MAX_TIME_TOPIC)
        again = {"msgId": given_up.msg_id}
        both = await asyncio.gather(rig.ask(323, again), rig.ask(323, again))
        assert sorted(one.code for one in both) == [0, 1]
        await until(lambda: len(table) == 1)
        assert (await rig.ask(323, again)).code == 1
        (copy,) = (await messages(rig, TRANS_HALF_TOPIC))[1:]
        end = {"tranStateTableOffset": "1", "commitLogOffset": str(copy.physical_offset)}
        fields = {"producerGroup": "pg", "commitOrRollback": COMMIT} | end
        assert (await rig.ask(37, fields)).code == 0
        rig.service.role_left()
        rig.service.master_opened()
        late = await rig.ask(323, again)
        nameless = await rig.ask(323, {"msgId": unnamed.msg_id})
        assert late.code == 1 and "taken back or ended" in (late.remark or "")
        assert nameless.code == 1 and "no UNIQ_KEY" in (nameless.remark or "")
        assert (end_of(rig, "T", 1), end_of(rig, TRANS_HALF_TOPIC)) == (1, 2)


async def test_r30_many_ends_of_one_turn_are_all_written(tmp_path, monkeypatch):
    monkeypatch.setattr(transaction_service, "OP_OFFSETS_MAX", 2)
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        sends = [await half(rig, f"K{number}") for number in range(5)]
        ends = [rig.ask(37, end_header(sent, ROLLBACK)) for sent in sends]
        assert [each.code for each in await asyncio.gather(*ends)] == [0] * 5
        ops = await messages(rig, TRANS_OP_HALF_TOPIC)
        assert sorted(end for op in ops for end in parse_op(op.body)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("checks", ["0", "99"], ids=["check", "give up"])
async def test_r30_r45_a_copy_that_a_full_disk_refuses_ends_nothing_and_is_tried_again(
    tmp_path, clock, monkeypatch, caplog, checks
):
    """A half that is checked, or given up, is copied before its op: the op alone would lose an
    acknowledged message. While a switch drains the log nothing is copied (R33)."""
    monkeypatch.setattr(log_features, "REFUSED_MS", 1)
    places = TRANS_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
    broker = NO_CHECKS | {"transaction_check_interval": HOUR_MS}
    async with lone_broker(tmp_path, broker=broker) as rig, Asked(rig, UNKNOWN):
        transactions = rig.service.features.transactions
        await half(rig, TRANSACTION_CHECK_TIMES=checks)
        await until(lambda: len(transactions) == 1)
        with monkeypatch.context() as full:
            refuse(rig, full, *places)
            clock.ahead_ms = 2 * HOUR_MS
            await until(lambda: caplog.text.count("transaction_check_waits") > 1)
            assert end_of(rig, TRANS_OP_HALF_TOPIC) == 0 and len(transactions) == 1
            rig.service.path.hold.begin()
        await rig.ask(45)
        assert sum(end_of(rig, place) for place in places) == 1
        rig.service.path.hold.release()
        await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) > 0)
        assert sum(end_of(rig, place) for place in places) == 2


async def test_r17_g8_a_half_message_that_went_bad_makes_the_log_suspect(tmp_path):
    """So a replica that has it whole becomes master: no transaction waits for it without end."""

    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        await half(rig)
        await rig.send("T", b"last")
        await rig.pull("T")
    log = spoil(tmp_path, b"body")
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        trust = rig.service.store.trust
        await until(lambda: bool(trust.reason))
        assert str(log) in trust.reason


async def test_r44_progress_beyond_the_queues_leaves_nothing_out(rig):
    for topic in (TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC):
        rig.service.tables.offsets.commit(TRANS_GROUP, topic, 0, 99)
    rig.service.role_left()
    rig.service.master_opened()
    await half(rig)
    await until(lambda: len(rig.service.features.transactions) == 1)


async def test_r30_a_commit_that_names_two_open_copies_is_known_by_the_last(tmp_path, monkeypatch):
    """1. A half is written again for its check; the op of the first copy is refused, and that of
    the commit that comes then. 2. A new master ends both copies, and commits none."""
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        sent = await half(rig)
        with monkeypatch.context() as full:
            refuse(rig, full, TRANS_OP_HALF_TOPIC)
            write_again(rig, sent)
            await until(lambda: len(rig.service.features.transactions) == 2)
            assert (await rig.ask(37, end_header(sent, COMMIT))).code == 14
            await until(lambda: end_of(rig, "T", 1) == 1)
            rig.service.features.transactions.end()
    crashed(tmp_path)
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) > 0)
        await until(lambda: len(rig.service.features.transactions) == 0)
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 1
        assert end_of(rig, "T", 1) == 1


async def test_r30_a_half_that_another_replaced_is_ended_without_a_third_copy(
    tmp_path, monkeypatch
):
    """The op of the first was refused when its copy was read, so the check finds it open."""
    broker = NO_CHECKS | {"transaction_check_interval": 100}
    async with lone_broker(tmp_path, broker=broker) as rig:
        asked: list[object] = []
        monkeypatch.setattr(rig.service.features.producers, "ask", lambda *what: asked.append(what))
        sent = await half(rig)
        with monkeypatch.context() as full:
            refuse(rig, full, TRANS_OP_HALF_TOPIC)
            write_again(rig, sent)
            await until(lambda: len(rig.service.features.transactions) == 2)
        await until(lambda: len(rig.service.features.transactions) == 1)
        (op,) = await messages(rig, TRANS_OP_HALF_TOPIC)
        assert op.body == b"0," and end_of(rig, TRANS_HALF_TOPIC) == 2 and not asked


@pytest.mark.parametrize("unread", ["half", "op"])
async def test_r30_nothing_is_ended_or_checked_before_halves_and_ops_are_read(rig, clock, unread):
    """A new master finds a half, or an op, that is not confirmed yet: what seems to be open may
    have ended."""
    async with Asked(rig, UNKNOWN):
        sent, other, store = await half(rig), await half(rig, "K2"), rig.service.store
        held, end = HeldConfirms(rig.service.path), store.max_phy_offset
        if unread == "half":
            late = asyncio.ensure_future(half(rig, "K3"))
        else:
            late = asyncio.ensure_future(rig.ask(37, end_header(other, ROLLBACK, msgId="K2")))
        await until(lambda: store.max_phy_offset > end)
        rig.service.role_left()
        rig.service.master_opened()
        clock.ahead_ms, end = 2 * HOUR_MS, store.max_phy_offset
        ended = asyncio.ensure_future(rig.ask(37, end_header(sent, COMMIT)))
        await rig.ask(45)
        await rig.ask(45)
        assert not ended.done() and store.max_phy_offset == end
        clock.ahead_ms = 0
        held.release()
        assert (await ended).code == 0 and end_of(rig, "T", 1) == 1
        await asyncio.gather(late, return_exceptions=True)


async def test_r30_a_half_that_the_log_no_longer_has_stops_no_other(rig, monkeypatch):
    """Its unit is there still: only whole files of a queue go."""
    sends = [await half(rig, f"K{number}") for number in range(3)]
    transactions, queries = rig.service.features.transactions, rig.service.store.queries
    (gone, _, _), *_ = queries.units(TRANS_HALF_TOPIC, 0, 0, 1)
    real = queries.record_at

    def record_at(phy_offset: int, size: int) -> memoryview | None:
        return None if phy_offset == gone else real(phy_offset, size)

    monkeypatch.setattr(queries, "record_at", record_at)
    transactions.begin()
    for sent in sends[1:]:
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
    assert len(transactions) == 0


async def test_r36_a_master_that_is_cut_off_writes_no_op_until_it_takes_writes_again(rig):
    sent, gate = await half(rig), rig.service.path.gate
    gate.update(lease=False, required_set_whole=False)
    write_again(rig, sent)
    await until(lambda: len(rig.service.features.transactions) == 2)
    assert end_of(rig, TRANS_OP_HALF_TOPIC) == 0
    gate.update(lease=True, required_set_whole=False)
    await until(lambda: end_of(rig, TRANS_OP_HALF_TOPIC) == 1)


async def test_r30_an_end_that_names_a_message_which_is_no_half_ends_nothing(rig):
    """The committed message has the producer's group, and the queue offset of another half that is
    open: that one would be ended, and its message never be seen."""
    assert (await rig.send("T", queue=1)).code == 0
    assert (await rig.ask(37, end_header(await half(rig, "K1"), COMMIT))).code == 0
    came = (await messages(rig, "T", 1))[-1]
    waiting = await half(rig, "K2")
    assert (came.queue_offset, came.properties["PGROUP"]) == (1, "pg")
    assert waiting.ext["queueOffset"] == "1"
    wrong = end_header(waiting, COMMIT, commitLogOffset=str(came.physical_offset))
    assert (await rig.ask(37, wrong)).code == 1
    assert (await rig.ask(37, end_header(waiting, COMMIT))).code == 0
    keys = [each.properties["UNIQ_KEY"] for each in await messages(rig, "T", 1)]
    assert keys == ["KEY1", "K1", "K2"]
