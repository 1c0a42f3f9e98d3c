"""Topics and groups through the log (R31), at the moment of a take-over."""

from pathlib import Path

from batonmq.broker.tables.topics import MetadataChange
from batonmq.protocol.bodies import TopicConfig
from batonmq.protocol.message_id import host_bytes
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet

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
