"""TopicService and the log (R31): each change is a record, and a record makes the change again."""

from pathlib import Path

import pytest
from heartbeats import heartbeat
from lone_broker import send_header
from test_table_safety import Tables

from batonmq.broker.tables.queue_locks import LockChange
from batonmq.broker.tables.topics import MetadataChange, TopicService
from batonmq.protocol.bodies import (
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    TopicConfig,
)
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "tables")


@pytest.fixture
def service(tables: Tables) -> TopicService:
    return tables.service


async def test_r31_a_topic_made_by_its_first_message_is_logged_with_its_queues(rig):
    """Without the record a slave makes it out of the message: with queueId + 1 queues, not with
    those that the client was shown."""
    service = rig.service
    seen: list[MetadataChange] = []
    put = service.path.put_system_record
    service.topics._append = lambda body: (
        seen.append(MetadataChange.decode(body)) or put("rmq_sys_BATON_METADATA", body)
    )
    assert (await rig.send(topic="Made", queue=0)).code == 0
    config = service.tables.topics.get("Made")
    assert config is not None and config.write_queue_nums == 4
    assert [dict(change.topics) for change in seen] == [{"Made": config}]


async def test_topics_that_clients_in_unit_mode_make_are_marked(rig):
    """As in Java: 1 is a topic of such clients, 2 a retry topic of their group."""
    for topic, flag in (("Unit", 1), ("%RETRY%sends", 2), ("Plain", 0)):
        header = send_header(topic, 0, {}) | {"k": str(flag > 0).lower()}
        assert (await rig.ask(310, header, b"x")).code == 0
        assert rig.service.topics.existing(topic).topic_sys_flag == flag
    beat = heartbeat("c", "Unit", group="beats")
    beat.consumer_data_set[0].unit_mode = True
    await rig.ask(34, body=beat.encode())
    assert rig.service.topics.existing("%RETRY%beats").topic_sys_flag == 2


def test_r31_each_change_is_a_record_with_its_whole_content(service, tables):
    topic = TopicConfig(topic_name="T", read_queue_nums=3, write_queue_nums=2, perm=4)
    group = SubscriptionGroupConfig(group_name="g", consume_enable=False)
    assert service.put_topic(topic) == 100
    assert service.put_group(group) == 200
    assert service.delete_topic("T") == 300
    assert tables.records == [
        MetadataChange(topics={"T": topic}),
        MetadataChange(groups={"g": group}),
        MetadataChange(deleted_topics=["T"]),
    ]


def test_r31_a_group_made_by_its_first_pull_is_logged_where_writes_are_taken(service, tables):
    made = service.group("g", writable=True)
    assert tables.records == [MetadataChange(groups={"g": made})]
    service.group("h", writable=False)
    assert len(tables.records) == 1 and service.groups.get("h") is None


def test_r31_a_new_master_takes_over_what_is_not_confirmed_yet(service, tables):
    """Topics and groups count at once; a deletion closes its topic and destroys nothing."""
    service.put_topic(TopicConfig(topic_name="Old"))
    topic = TopicConfig(topic_name="New", write_queue_nums=3)
    group = SubscriptionGroupConfig(group_name="g")
    change = MetadataChange(topics={"New": topic}, groups={"g": group}, deleted_topics=["Old"])
    changes = tables.changes
    service.take_over_record(change.encode(), 900)
    assert service.get("New") == topic and service.groups.get("g") == group
    assert service.get("Old") is not None and tables.dropped == []
    assert tables.changes > changes, "name servers must hear of it"
    with pytest.raises(BrokerRefusal, match="being deleted"):
        service.for_send("Old", "TBW102", 4)
    with pytest.raises(BrokerRefusal, match="being deleted"):
        service.put_topic(TopicConfig(topic_name="Old"))
    service.own_record_confirmed(change.encode(), 900)
    assert service.get("Old") is None and tables.dropped == ["Old"]
    assert service.get("New") == topic


def test_r31_a_confirmed_record_makes_the_change_on_a_replica(service, tables):
    topic = TopicConfig(topic_name="T", write_queue_nums=3)
    service.apply_record(MetadataChange(topics={"T": topic}).encode(), 900)
    service.apply_record(MetadataChange(topics={"T": topic}).encode(), 900)
    assert service.get("T") == topic and tables.records == []
    service.apply_record(MetadataChange(deleted_topics=["T"]).encode(), 900)
    assert service.get("T") is None and tables.dropped == ["T"]


def test_r31_a_role_that_is_left_forgets_its_unconfirmed_deletions(service):
    service.put_topic(TopicConfig(topic_name="T"))
    service.delete_topic("T")
    service.role_left()
    assert service.for_send("T", "TBW102", 4).topic_name == "T"


def test_r39_a_topic_that_is_deleted_twice_opens_when_both_are_confirmed(service, tables):
    """A client asks again before the first is confirmed; or a new master has two in its tail, and
    the topic made again between them. Else what is sent between the two goes with the second."""
    topic = TopicConfig(topic_name="T")
    service.put_topic(topic)
    service.delete_topic("T")
    service.delete_topic("T")
    service.own_record_confirmed(tables.records[-2].encode(), 200)
    with pytest.raises(BrokerRefusal, match="being deleted"):
        service.put_topic(topic)
    service.own_record_confirmed(tables.records[-1].encode(), 300)
    service.put_topic(topic)
    assert service.for_send("T", "TBW102", 4) == topic


def test_r31_a_queue_that_the_log_shows_exists_on_the_slave(service):
    service.seen_in_log("T", 2)
    seen = service.get("T")
    assert seen is not None and (seen.read_queue_nums, seen.write_queue_nums) == (3, 3)
    service.seen_in_log("T", 1)
    assert service.get("T") == seen
    service.seen_in_log("T", 3)
    grown = service.get("T")
    assert grown is not None and grown.read_queue_nums == 4
    service.seen_in_log("rmq_sys_BATON_METADATA", 0)
    assert service.get("rmq_sys_BATON_METADATA") is None


def test_r31_a_record_of_a_newer_version_changes_nothing(service, tables):
    for body in (b'{"v": 99, "topics": {}}', b"\xff"):
        for arrives in ("apply_record", "take_over_record", "own_record_confirmed"):
            with pytest.raises(RemoteProtocolError, match="metadata record"):
                getattr(service, arrives)(body, 900)
    assert tables.records == [] and tables.dropped == []


def test_r31_locks_and_request_modes_of_the_log_are_those_of_a_replica(service):
    lock = LockChange(group="g", client_id="a", queues=[("T", 0)])
    mode = SetMessageRequestModeRequestBody(consumer_group="g", topic="T", mode="POP")
    service.apply_record(MetadataChange(locks=[lock], request_modes=[mode]).encode(), 900)
    assert service.locks.wrapper().locks == {"g": {"a": [("T", 0)]}}
    modes = service.request_modes.wrapper().message_request_mode_map
    assert modes["T"]["g"].mode == "POP"
    given_back = LockChange(group="g", client_id="a", queues=[("T", 0)], released=True)
    service.apply_record(MetadataChange(locks=[given_back]).encode(), 1_000)
    assert not service.locks.wrapper().locks.get("g", {}).get("a")


@pytest.mark.parametrize(
    ("template", "wanted", "queues"), [("TBW102", 4, 4), ("TBW102", 99, 8), ("", 4, 1)]
)
def test_a_retry_topic_is_made_with_as_many_queues_as_its_first_send_allows(
    service, template, wanted, queues
):
    """A pull consumer that gives a message back without a route sends it to a queue of the
    template (AbstractSendMessageProcessor.msgCheck)."""
    made = service.for_send("%RETRY%g", template, wanted)
    assert (made.read_queue_nums, made.write_queue_nums) == (queues, queues)
    assert service.get("%RETRY%g") == made


def test_r39_a_deletion_that_is_taken_over_twice_ends_with_its_record(service):
    """1 elected with an unconfirmed deletion in the log. 2 elected again before it is confirmed. 3
    it is confirmed: the topic can be made again, which was refused until the next master."""
    topic = TopicConfig(topic_name="T")
    body = MetadataChange(deleted_topics=["T"]).encode()
    for _ in range(2):
        service.take_over_record(body, 100)
    with pytest.raises(BrokerRefusal, match="is being deleted"):
        service.put_topic(topic)
    service.own_record_confirmed(body, 100)
    service.put_topic(topic)
    assert "T" in service.topics


# At the moment of a take-over.

HOST = host_bytes("127.0.0.1", 10911)


def opened(folder: Path) -> tuple[MessageStore, list[MetadataChange]]:
    store = MessageStore(
        StoreConfig(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 16,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        store_host=HOST,
        confirm_rule=ConfirmedBySet(),
    )
    applied: list[MetadataChange] = []
    store.on_system_record[METADATA_TOPIC] = lambda head, body: applied.append(
        MetadataChange.decode(body)
    )
    store.open()
    return store, applied


def put(store: MessageStore, topic: str, body: bytes) -> None:
    store.appender.put_message(
        NewMessage(topic, 0, body, b"", 0, None, None, born_timestamp=1, born_host=b"\0" * 8)
    )


def test_r31_a_new_master_knows_the_topics_of_its_unconfirmed_tail(tmp_path):
    """1. The master creates a topic and takes a message for it; both records reach the slave, and
    the message is acknowledged. 2. The master dies before the slave has the new
    confirmOffset. 3. The slave becomes master: it knows the topic before its first put."""
    master, _ = opened(tmp_path / "a")
    slave, applied = opened(tmp_path / "b")
    master.prepare_master()
    change = MetadataChange(topics={"New": TopicConfig(topic_name="New", write_queue_nums=3)})
    put(master, METADATA_TOPIC, change.encode())
    put(master, "New", b"acknowledged")
    end = master.end_turn()
    slave.slave_log.append_replicated(0, bytes(master.log.view(0, end)))
    assert applied == [] and slave.confirm_offset == 0

    assert slave.prepare_master() == end
    assert [list(change.topics) for change in applied] == [["New"]]
    assert applied[0].topics["New"].write_queue_nums == 3
    assert slave.queries.next_offset_in_queue("New", 0) == 1
    slave.advance_confirm_offset(end)
    assert slave.queries.max_offset_in_queue("New", 0) == 1
    master.close()
    slave.close()


def test_r31_a_takeover_shows_what_is_unconfirmed_and_again_when_it_is(tmp_path):
    """A deletion must destroy nothing before it is confirmed, so it is shown with that mark."""
    master, _ = opened(tmp_path / "a")
    slave, _ = opened(tmp_path / "b")
    shown: list[tuple[bool, list[str]]] = []
    slave.on_system_record[METADATA_TOPIC] = lambda head, body: shown.append(
        (slave.shows_unconfirmed, MetadataChange.decode(body).deleted_topics)
    )
    master.prepare_master()
    put(master, METADATA_TOPIC, MetadataChange(deleted_topics=["Old"]).encode())
    end = master.end_turn()
    slave.slave_log.append_replicated(0, bytes(master.log.view(0, end)))
    slave.prepare_master()
    assert shown == [(True, ["Old"])]
    slave.advance_confirm_offset(end)
    assert shown == [(True, ["Old"]), (False, ["Old"])]
    master.close()
    slave.close()
