"""The store folders of a Java 5.3.3 cluster open, read in full, and are gone on from."""

import json
import shutil
from pathlib import Path

import pytest

from batonmq.protocol.records.codec import decode_record, decode_records
from batonmq.store.message_store import MessageStore

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"
END = 6760
SIZES = {
    "mapped_file_size_commit_log": 1_048_576,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 1000,
    "max_index_num": 4000,
}


@pytest.fixture(params=["b0", "b1"])
def golden(request, rig):
    """A rig on a copy of one broker's store, and the decoded lines of its log."""
    shutil.copytree(GOLDEN / request.param, rig.root)
    lines = (rig.root / "commitlog.decoded.jsonl").read_text().splitlines()
    return rig, [json.loads(line) for line in lines]


def by_queue(records):
    queues = {}
    for record in records:
        if record["sysFlag"] & 0xC in (0, 8):
            queues.setdefault((record["topic"], record["queueId"]), []).append(record)
    return queues


def check_readable(store: MessageStore, records) -> None:
    """Every record by place, through its queue, and by each of its keys."""
    for record in records:
        found = decode_record(store.queries.look_message_by_offset(record["physicalOffset"]))
        assert found.body.hex() == record["bodyHex"]
        assert found.properties == record["properties"]
        topic, properties = record["topic"], record["properties"]
        keys = [properties.get("UNIQ_KEY"), *properties.get("KEYS", "").split(" ")]
        for key in filter(None, keys):
            hits = store.queries.query_message(topic, key, 64, 0, 2**62).parts
            assert record["physicalOffset"] in [decode_record(hit).physical_offset for hit in hits]
    for (topic, queue_id), queue in by_queue(records).items():
        result = store.queries.get_message(topic, queue_id, 0, 32)
        messages = decode_records(b"".join(result.parts))
        assert [m.physical_offset for m in messages] == [r["physicalOffset"] for r in queue]
        assert result.max_offset == len(queue)


def test_every_message_is_readable_through_queue_and_index(golden):
    rig, records = golden
    store = rig.open(**SIZES)
    assert not store.trust.reason
    assert (store.min_phy_offset, store.confirm_offset, store.max_phy_offset) == (0, END, END)
    epochs = [(entry.epoch, entry.start_offset) for entry in store.epochs.entries]
    assert epochs == [(1, 0), (2, 6269), (3, 6516)]
    check_readable(store, records)


def test_a_broker_goes_on_from_it(golden):
    """The next message takes the next place and number, and survives a kill with all before it."""
    rig, _ = golden
    store = rig.open(**SIZES)
    assert store.prepare_master() == END
    before = store.queries.max_offset_in_queue("GoldTopic", 1)
    result = rig.put(store, b"ours", topic="GoldTopic", queue_id=1, uniq_key=b"NEW")
    assert (result.physical_offset, result.queue_offset) == (END, before)
    store.advance_confirm_offset(store.end_turn())
    store.checkpoints.flush_derived()
    store = rig.reopen(store, **SIZES)
    assert rig.read_bodies(store, "GoldTopic", 1)[-1] == b"ours"
    assert len(store.queries.query_message("GoldTopic", "NEW", 9, 0, 2**62).parts) == 1
    assert store.confirm_offset == result.end_offset


def test_queues_built_from_the_log_are_javas_own_bytes(golden):
    """Delay levels, transactions, retries and batches included: same units in the same files."""
    rig, records = golden
    before = {
        path.relative_to(rig.root): path.read_bytes()
        for path in (rig.root / "consumequeue").rglob("0*")
        if path.is_file() and len(path.name) == 20
    }
    shutil.rmtree(rig.root / "consumequeue")
    shutil.rmtree(rig.root / "index")
    store = rig.open(**SIZES)
    check_readable(store, records)
    store.close()
    after = {
        path.relative_to(rig.root): path.read_bytes()
        for path in (rig.root / "consumequeue").rglob("0*")
        if path.is_file() and len(path.name) == 20
    }
    assert len(before) == 9 and after == before


def test_an_unclean_java_stop_is_recovered(golden):
    """`abort` is there, and no recovery point of ours: the log is read from where Java would."""
    rig, records = golden
    (rig.root / "abort").write_text("1234")
    store = rig.open(**SIZES)
    assert (store.confirm_offset, store.trust.reason) == (END, "")
    check_readable(store, records)


def test_a_java_log_with_a_record_torn_in_its_properties(golden):
    """Java's records have no property CRC here; the body CRC does not see such a tear."""
    rig, records = golden
    last = records[-1]
    checkpoint = bytearray((rig.root / "checkpoint").read_bytes())
    checkpoint[32:40] = last["physicalOffset"].to_bytes(8, "big")
    (rig.root / "checkpoint").write_bytes(checkpoint)
    rig.overwrite(rig.root / "commitlog" / f"{0:020d}", END - 10, bytes(10))
    shutil.rmtree(rig.root / "consumequeue")  # else it tells that the record was confirmed (R24)
    store = rig.open(**SIZES)
    assert not store.trust.reason and store.max_phy_offset == last["physicalOffset"]
    check_readable(store, records[:-1])
