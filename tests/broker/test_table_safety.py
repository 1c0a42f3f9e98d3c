"""Topics and groups are on every set member before they are answered, and stay there (R31)."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from lone_broker import tables_in

from batonmq.broker.admin_processor import AdminProcessor
from batonmq.broker.config import BrokerConfig
from batonmq.broker.role_gate import RoleGate
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.queue_locks import LockChange
from batonmq.broker.tables.slave_sync import Followed, SlaveSourceProcessor, SlaveSynchronize
from batonmq.broker.tables.topics import MetadataChange, TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors


class Tables:
    """The three tables of one replica; `log` holds the metadata records it wrote."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.tables = tables_in(folder)
        self.topics, self.groups = self.tables.topics, self.tables.groups
        self.offsets, self.delays = self.tables.offsets, self.tables.delays
        self.log: list[bytes] = []
        self.dropped: list[str] = []
        self.changes = 0
        self.carried_out = 0
        self.log_end = 1 << 40
        self.service = TopicService(
            self.tables,
            Counter(),
            settings=BrokerConfig(),
            append=self._append,
            changed=self._count,
            dropped=self.dropped.append,
            deleted=lambda topic: None,
        )

    def _append(self, body: bytes) -> int:
        self.log.append(body)
        return 100 * len(self.log)

    def _count(self, topics: object) -> None:
        self.changes += 1

    @property
    def records(self) -> list[MetadataChange]:
        return [MetadataChange.decode(body) for body in self.log]


@pytest.fixture
def master(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "master")


@pytest.fixture
def slave(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "slave")


class Wire:
    """A master's answers to its slave; `before_reply[code]` runs once, when one is under way."""

    def __init__(self, master: Tables, master_epoch: int) -> None:
        self.gate = RoleGate()
        self.gate.opening(master_epoch)
        self.gate.open()
        self.log_begin = 0
        self.processors = Processors()
        SlaveSourceProcessor(
            master.tables, self.gate, lambda: self.log_begin, lambda: master.carried_out, lambda: 0
        ).register(self.processors)
        self.before_reply: dict[int, Any] = {}

    async def invoke(
        self, address: str, request: RemotingCommand, timeout_ms: int
    ) -> RemotingCommand:
        handler: Any = self.processors.handlers[request.code]
        reply: RemotingCommand = await handler(request, Mock())
        self.before_reply.pop(request.code, lambda: None)()
        return reply


def following(slave: Tables, wire: Wire, master_epoch: int) -> tuple[SlaveSynchronize, Followed]:
    sync = SlaveSynchronize(wire, slave.tables, 1, lambda: None, Mock(max_phy_offset=slave.log_end))
    followed = Followed("127.0.0.1:10911", master_epoch)
    sync.follow(followed)
    return sync, followed


def topic(name: str) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=2, write_queue_nums=2, perm=6)


def test_r31_a_fetched_table_does_not_undo_what_the_log_showed_meanwhile(master, slave):
    """1. A slave asks for the topic table. 2. The answer is under way when a topic is created,
    confirmed and answered; the log shows it to the slave. 3. The answer, which lacks the topic,
    arrives. Were it taken, the slave could be elected right now, without the topic."""
    master.topics.put(topic("Old"))
    wire = Wire(master, 3)
    sync, followed = following(slave, wire, 3)

    def created() -> None:
        master.service.put_topic(topic("New"))
        slave.service.apply_record(master.log[-1], 100)

    wire.before_reply[RequestCode.GET_ALL_TOPIC_CONFIG] = created
    asyncio.run(sync.synchronize(followed))
    assert slave.topics.get("New") == topic("New")
    asyncio.run(sync.synchronize(followed))
    assert slave.topics.get("New") == topic("New")
    assert slave.topics.get("Old") == topic("Old")


def test_r30_fetched_locks_do_not_undo_what_the_log_showed_meanwhile(master, slave):
    """1. The answer with the queue locks is under way. 2. A lock is granted, confirmed and
    answered; the log shows it to the slave. Were the answer taken, the slave as the next master
    would give the queue to a second owner."""
    wire = Wire(master, 3)
    sync, followed = following(slave, wire, 3)
    change = LockChange(group="g", client_id="a", queues=[("T", 0)])

    def granted() -> None:
        master.tables.locks.apply(change, 1)
        slave.tables.locks.apply(change, 1)

    wire.before_reply[RequestCode.BATON_GET_QUEUE_LOCKS] = granted
    for _ in range(2):
        asyncio.run(sync.synchronize(followed))
        assert slave.tables.locks.wrapper().locks == {"g": {"a": [("T", 0)]}}


def test_r27_a_slave_learns_where_the_log_of_its_master_begins(master, slave):
    """From a master only; a Java master does not say."""
    wire = Wire(master, 3)
    sync, followed = following(slave, wire, 3)
    heard: list[int | None] = []
    sync.on_log_begin = heard.append
    for wire.log_begin in (0, 4096):
        asyncio.run(sync.synchronize(followed))
    assert heard == [0, 4096]
    wire.gate.fence()
    asyncio.run(sync.synchronize(followed))
    assert heard == [0, 4096]
    java = Mock(return_value=RemotingCommand.response_to(RemotingCommand.request(43)))
    sync._ask = AsyncMock(side_effect=java)
    sync._fetch_tables = AsyncMock(return_value=True)
    asyncio.run(sync.synchronize(followed))
    assert heard == [0, 4096, None]


def test_r31_tables_of_a_former_master_are_not_taken(master, slave):
    """1. The master dies, and starts again at the same address while no controller is there: its
    tables are those of its last checkpoint. 2. Its slave knows no newer view and asks it."""
    slave.service.apply_record(MetadataChange(topics={"T": topic("T")}).encode(), 100)
    slave.offsets.commit("g", "T", 0, 7)
    master.offsets.commit("g", "T", 0, 5)
    wire = Wire(master, 3)
    wire.gate.fence()
    sync, followed = following(slave, wire, 3)
    asyncio.run(sync.synchronize(followed))
    assert slave.topics.get("T") == topic("T")
    assert slave.offsets.offsets_of("g", "T") == {0: 7}
    wire.gate.open()
    asyncio.run(sync.synchronize(followed))
    assert slave.topics.get("T") is None
    assert slave.offsets.offsets_of("g", "T") == {0: 5}


def test_r31_a_master_deletes_a_topic_when_that_is_confirmed(tmp_path):
    """1. The record is in the log only: table and queues stand, writes are refused with 2.

    2. It is confirmed: the topic goes, and may be made again.
    """
    tables = Tables(tmp_path / "master")
    tables.service.put_topic(topic("T"))
    tables.service.delete_topic("T")
    assert tables.topics.get("T") == topic("T")
    assert tables.dropped == []
    for write in (
        lambda: tables.service.for_send("T", "TBW102", 4),
        lambda: tables.service.put_topic(topic("T")),
    ):
        with pytest.raises(BrokerRefusal, match="being deleted"):
            write()
    tables.service.own_record_confirmed(tables.log[0], 100)
    assert tables.dropped == []
    tables.service.own_record_confirmed(tables.log[1], 200)
    assert tables.topics.get("T") is None
    assert tables.dropped == ["T"]
    tables.service.put_topic(topic("T"))
    assert tables.topics.get("T") == topic("T")


def test_r31_a_deletion_that_was_never_confirmed_costs_nothing(tmp_path):
    """The master is deposed, and its record is cut: the topic was never deleted."""
    tables = Tables(tmp_path / "master")
    tables.service.put_topic(topic("T"))
    tables.service.delete_topic("T")
    tables.service.role_left()
    assert tables.service.for_send("T", "TBW102", 4) == topic("T")
    assert tables.dropped == []


def test_r31_a_new_master_deletes_what_it_took_over_when_it_is_confirmed(tmp_path):
    """The tail that it takes over deletes a topic and creates it again."""
    tables = Tables(tmp_path / "slave")
    records = [
        MetadataChange(topics={"T": topic("T")}).encode(),
        MetadataChange(deleted_topics=["T"]).encode(),
        MetadataChange(topics={"T": topic("T")}).encode(),
    ]
    tables.service.apply_record(records[0], 100)
    for record in records[1:]:
        tables.service.take_over_record(record, 100)
    assert tables.topics.get("T") == topic("T")
    assert tables.dropped == []
    for record in records[1:]:
        tables.service.own_record_confirmed(record, 200)
    assert tables.topics.get("T") == topic("T")
    assert tables.dropped == ["T"]


def test_r31_a_group_goes_with_its_offsets_when_that_is_confirmed(master, slave):
    """1. The record is in the log only: the group and its offsets stand. 2. It is confirmed, while
    offsets from before are under way to the slave: they bring nothing back."""
    for tables in (master, slave):
        tables.groups.put(SubscriptionGroupConfig(group_name="g"))
        tables.offsets.commit("g", "T", 0, 5)
        tables.offsets.commit("h", "T", 0, 6)
    wire = Wire(master, 3)
    sync, followed = following(slave, wire, 3)

    def deleted() -> None:
        master.service.delete_group("g", with_offsets=True)
        assert "g" in master.groups and master.offsets.query("g", "T", 0) == 5
        master.service.own_record_confirmed(master.log[-1], 100)
        slave.service.apply_record(master.log[-1], 100)
        master.carried_out = 100

    wire.before_reply[RequestCode.GET_ALL_CONSUMER_OFFSET] = deleted
    for _ in range(2):
        asyncio.run(sync.synchronize(followed))
        for tables in (master, slave):
            assert "g" not in tables.groups and tables.offsets.query("g", "T", 0) == -1
            assert tables.offsets.query("h", "T", 0) == 6


def test_r31_what_a_group_may_not_read_is_a_record_too(master, slave):
    for reading in (True, False):
        master.service.forbid("g", "T", reading=reading)
        slave.service.apply_record(master.log[-1], 100)
        assert slave.groups.is_forbidden("g", "T") is reading
        assert slave.groups.wrapper().forbidden_table == master.groups.wrapper().forbidden_table


@pytest.mark.parametrize("method", ["update_topic", "delete_topic"])
async def test_r31_asking_again_waits_for_the_record_too(tmp_path, method):
    """1. A topic is changed; the request ends with 12, since a slave does not follow. 2. The same
    is asked again: the table has it, the slave has not. It is not answered before it has."""
    tables = Tables(tmp_path / "master")
    tables.topics.put(topic("T"))
    path = WritePath(Mock(), ack_wait_ms=3000, sync_flush=False, clock_ms=lambda: 0)
    acks = path.acks
    acks.begin_epoch(1)
    path.gate.opening(1)
    path.gate.open()
    admin = AdminProcessor(path, tables.service, Mock(), Mock(), AsyncMock(), BrokerConfig())
    ext = {"topic": "T", "readQueueNums": "4", "writeQueueNums": "4", "perm": "6"}
    request = RemotingCommand.request(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
    for number in (1, 2):
        asked = asyncio.ensure_future(getattr(admin, method)(request, None))
        await asyncio.sleep(0)
        assert len(tables.log) == number and not asked.done()
        acks.confirm(100 * number - 1, 0)
        await asyncio.sleep(0)
        assert not asked.done()
        if number == 1:
            acks.fail_all(12, "not replicated in time")
            await asyncio.wait([asked])
            assert asked.exception() is not None
        else:
            acks.confirm(100 * number, 0)
            assert (await asked).code == 0


def test_r39_offsets_under_way_do_not_outlive_the_deletion_of_their_topic(master, slave):
    """1. A slave asks for offsets. 2. The answer is under way when a topic is deleted, confirmed,
    and the log shows it to the slave. 3. The answer, which has offsets of it, arrives."""
    master.topics.put(topic("T"))
    master.offsets.commit("g", "T", 0, 5)
    master.offsets.commit("g", "Other", 0, 7)
    wire = Wire(master, 3)
    sync, followed = following(slave, wire, 3)

    def deleted() -> None:
        master.service.delete_topic("T")
        for tables in (master, slave):
            tables.service.apply_record(master.log[-1], 100)
        master.carried_out = 100

    wire.before_reply[RequestCode.GET_ALL_CONSUMER_OFFSET] = deleted
    asyncio.run(sync.synchronize(followed))
    assert slave.offsets.query("g", "T", 0) == -1
    asyncio.run(sync.synchronize(followed))
    assert slave.offsets.query("g", "Other", 0) == 7
    assert slave.offsets.query("g", "T", 0) == -1
    assert slave.dropped == master.dropped == ["T"]


def test_r39_a_new_master_that_has_not_deleted_yet_brings_no_offset_back(master, slave):
    """Its confirmOffset lags behind what the old master had confirmed at this slave."""
    for tables in (master, slave):
        tables.offsets.commit("g", "T", 0, 5)
    deletion = MetadataChange(deleted_topics=["T"]).encode()
    slave.service.apply_record(deletion, 100)
    sync, followed = following(slave, Wire(master, 3), 3)
    asyncio.run(sync.synchronize(followed))
    assert slave.offsets.query("g", "T", 0) == -1
    master.service.own_record_confirmed(deletion, 100)
    master.offsets.commit("g", "T", 0, 2)  # of a topic made again
    master.carried_out = 150
    asyncio.run(sync.synchronize(followed))
    assert slave.offsets.query("g", "T", 0) == 2


def test_r39_a_replica_that_was_away_keeps_the_offsets_of_a_topic_made_again(master, slave):
    """It gets the master's offsets at once, and finds the deletion in the log only later."""
    slave.offsets.commit("g", "T", 0, 5)
    slave.offsets.commit("g", "T", 1, 9)
    slave.offsets.commit("h", "T", 0, 5)
    master.offsets.commit("g", "T", 0, 2)
    master.carried_out = 150
    sync, followed = following(slave, Wire(master, 3), 3)
    asyncio.run(sync.synchronize(followed))
    slave.service.apply_record(MetadataChange(deleted_topics=["T"]).encode(), 100)
    assert slave.offsets.offsets_of("g", "T") == {0: 2}
    assert slave.offsets.query("h", "T", 0) == -1


def test_r39_deleted_offsets_are_on_the_disk_before_a_checkpoint(tmp_path):
    """Below it the log does not show the deletion again."""
    tables = Tables(tmp_path / "a")
    tables.offsets.commit("g", "T", 0, 5)
    for write in tables.tables.writes_due():
        write()
    tables.offsets.commit("g", "Other", 0, 1)
    before = len(tables.tables.shown_by_the_log())
    assert before == 0, "commits alone wait for their own interval"
    tables.service.apply_record(MetadataChange(deleted_topics=["T"]).encode(), 100)
    for write in tables.tables.shown_by_the_log():
        write()
    again = ConsumerOffsetManager(tmp_path / "a" / "consumerOffset.json")
    again.load()
    assert again.query("g", "T", 0) == -1 and again.query("g", "Other", 0) == 1
