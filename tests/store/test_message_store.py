"""The store as a master: put, confirm, read."""

import errno
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.protocol.properties import PROPERTIES_SIZE_MAX
from batonmq.protocol.records.codec import NewMessage, decode_record, decode_records
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import SCHEDULE_TOPIC
from batonmq.runtime.lock_file import FolderLock, FolderLockedError
from batonmq.store import appender, dispatch
from batonmq.store.consume_queue import Boundary
from batonmq.store.errors import PutIllegal, PutPropertiesTooLong, PutUnavailable, StoreFormatError
from batonmq.store.reader import GetMessageStatus
from batonmq.store.recovery import ConfirmedByLog
from batonmq.store.upkeep import byte_count
from tests.shared.failing_disk import failing

FOREVER_MS = 2**62


def put_batch(rig, store, *bodies):
    return store.appender.put_batch(
        [NewMessage("T", 0, body, b"", 0, None, None, 1, rig.host) for body in bodies]
    )


# Putting.


def test_a_put_is_in_the_log_after_its_turn_and_visible_once_confirmed(rig, store):
    """G4: a record is written at the end of the turn, and no one sees it before it is confirmed."""
    first = rig.put(store, b"one")
    second = rig.put(store, b"two")
    assert store.max_phy_offset == 0
    assert second.physical_offset == first.end_offset and second.queue_offset == 1
    assert store.end_turn() == store.max_phy_offset == second.end_offset
    assert store.queries.max_offset_in_queue("T", 0) == 0
    assert store.queries.look_message_by_offset(0) is None
    assert store.advance_confirm_offset(first.end_offset) == first.end_offset
    assert rig.read_bodies(store) == [b"one"]
    assert store.queries.look_message_by_offset(second.physical_offset) is None
    store.advance_confirm_offset(second.end_offset)
    assert rig.read_bodies(store) == [b"one", b"two"]
    assert (
        decode_record(store.queries.look_message_by_offset(second.physical_offset)).body == b"two"
    )


def test_a_delay_begins_with_its_put_not_with_the_turn(rig, store):
    """A long turn began before a delayed message was sent: by the turn's time it came early."""
    rig.put(store, b"first of the turn")
    rig.now_ms += 7
    delayed = NewMessage(SCHEDULE_TOPIC, 0, b"x", b"DELAY\x011", 0, None, None, 1, rig.host)
    put = store.appender.put_message(delayed)
    store.advance_confirm_offset(store.end_turn())
    ((_, _, due_ms),) = store.queries.units(SCHEDULE_TOPIC, 0, 0, 1)
    assert put.store_timestamp == rig.now_ms
    assert due_ms == rig.now_ms + store.config.delay_levels.delay_ms(1)


def test_r15_confirm_offset_never_falls_and_is_a_message_end(rig, store):
    """An ack within a record confirms the records before it; a lower one changes nothing."""
    ends = [rig.put(store).end_offset for _ in range(3)]
    store.end_turn()
    assert store.advance_confirm_offset(ends[1] + 5) == ends[1]
    assert store.advance_confirm_offset(ends[0]) == ends[1]
    assert store.advance_confirm_offset(ends[2] + 1000) == ends[2]


def test_a_record_that_does_not_fit_goes_to_the_next_segment_behind_a_blank(rig, store):
    """The end of a file keeps 8 bytes for a blank; offsets and bytes agree on both sides of it."""
    while rig.put(store, bytes(900)).physical_offset < 8192:
        pass
    store.advance_confirm_offset(store.end_turn())
    result = store.queries.get_message("T", 0, 0, 32)
    assert [r.physical_offset for r in decode_records(b"".join(result.parts))][-1] == 8192
    assert len(result.parts) == result.message_count == 9
    assert store.log.view(0, 20000).nbytes == 8192


def test_one_record_may_fill_a_segment_to_the_last_place(rig, store):
    size = rig.put(store, b"").size
    assert rig.put(store, bytes(8192 - 8 - 2 * size)).physical_offset == size
    assert rig.put(store, b"").physical_offset == 8192
    with pytest.raises(PutIllegal):
        rig.put(store, bytes(8192 - 8 - size + 1))
    assert rig.put(store, bytes(8192 - 8 - size)).physical_offset == 16384


def test_a_batch_is_never_split_over_two_segments(rig, store):
    """Its records are adjacent and numbered on; what does not fit goes to the next segment."""
    rig.put(store, bytes(6000))
    results = put_batch(rig, store, bytes(500), bytes(500), bytes(500), bytes(500))
    assert [r.physical_offset // 8192 for r in results] == [1, 1, 1, 1]
    assert [r.queue_offset for r in results] == [1, 2, 3, 4]
    assert all(a.end_offset == b.physical_offset for a, b in pairwise(results))
    with pytest.raises(PutIllegal):
        put_batch(rig, store, *[bytes(1000)] * 9)
    store.advance_confirm_offset(store.end_turn())
    assert [len(body) for body in rig.read_bodies(store)] == [6000, 500, 500, 500, 500]


def test_limits_of_a_message(rig):
    store = rig.open_master(max_message_size=2048)
    with pytest.raises(PutIllegal):
        rig.put(store, bytes(2049))
    with pytest.raises(PutPropertiesTooLong):
        rig.put(store, keys=bytes(32767))
    with pytest.raises(PutIllegal):
        put_batch(rig, store, b"x", bytes(2049))
    assert rig.put(store, bytes(2048)).queue_offset == 0


def test_a_store_that_is_no_master_takes_no_puts(rig):
    store = rig.open()
    with pytest.raises(PutUnavailable):
        rig.put(store)
    store.prepare_master()
    rig.put(store)
    assert store.stop_writes() == store.max_phy_offset > 0
    with pytest.raises(PutUnavailable):
        rig.put(store)


def test_prepared_and_rollback_records_take_no_place_in_their_queue(rig, store):
    """Transaction bits 4 and 0xC: queue offset 0, no unit; only the prepared one is indexed."""
    prepared = rig.put(store, b"half", uniq_key=b"P", sys_flag=0x4)
    rollback = rig.put(store, b"undo", uniq_key=b"R", sys_flag=0xC)
    plain = rig.put(store, b"plain")
    assert (prepared.queue_offset, rollback.queue_offset, plain.queue_offset) == (0, 0, 0)
    store.advance_confirm_offset(store.end_turn())
    assert rig.read_bodies(store) == [b"plain"]
    assert len(store.queries.query_message("T", "P", 9, 0, FOREVER_MS).parts) == 1
    assert store.queries.query_message("T", "R", 9, 0, FOREVER_MS).parts == []


def test_long_topics_and_ipv6_hosts(rig):
    """Record format V2 and the longer host fields survive put, restart and read."""
    topic = "%RETRY%" + "g" * 140
    store = rig.open_master()
    born = bytes(16) + b"\0\0\x2a\x9f"
    store.appender.put_message(
        NewMessage(topic, 1, b"v2", b"", 0, None, None, born_timestamp=1, born_host=born)
    )
    store.advance_confirm_offset(store.end_turn())
    store = rig.reopen(store, confirm_rule=ConfirmedByLog())
    assert rig.read_bodies(store, topic, 1) == [b"v2"]
    assert store.queries.message_store_timestamp(topic, 1, 0) == rig.now_ms


# Listeners and system records.


def test_arrival_is_told_once_per_queue_and_advance(rig, store):
    seen = []
    store.arrival_listeners.append(lambda *arrival: seen.append(arrival))
    for queue_id in (0, 1, 0):
        rig.put(store, queue_id=queue_id)
    store.advance_confirm_offset(store.end_turn())
    assert sorted(seen) == [("T", 0, 2), ("T", 1, 1)]


def test_r31_system_records_reach_their_handler_in_log_order_and_have_no_queue(rig):
    """Topic changes travel in the log: master, slave and a restarted replica apply them alike."""
    applied = []

    def hook(store):
        store.on_system_record["SYS"] = lambda head, body: applied.append((head.topic, body))

    rig.before_open = hook
    store = rig.open_master()
    rig.put(store, b"create", topic="SYS")
    rig.put(store, b"message")
    rig.put(store, b"delete", topic="SYS")
    store.advance_confirm_offset(store.end_turn())
    assert applied == [(b"SYS", b"create"), (b"SYS", b"delete")]
    assert (
        store.queries.get_message("SYS", 0, 0, 1).status is GetMessageStatus.NO_MATCHED_LOGIC_QUEUE
    )
    assert [store.queries.max_offset_in_queue(topic, 0) for topic in ("SYS", "T")] == [0, 1]
    rig.kill(store)
    applied.clear()
    rig.open(confirm_rule=ConfirmedByLog())
    assert applied == [(b"SYS", b"create"), (b"SYS", b"delete")]


@pytest.mark.parametrize("is_written", [False, True])
def test_r31_a_replica_announces_queues_that_its_log_or_a_file_shows(rig, store, is_written):
    """Units may reach the disk before a checkpoint; the table of topics then lacks theirs."""
    rig.put_confirmed(store, b"x", topic="New", queue_id=3)
    if is_written:
        rig.write_queues_back(store)
    rig.kill(store)
    shown = []
    rig.before_open = lambda store: setattr(
        store, "on_unknown_topic", lambda topic, queue_id: shown.append((topic, queue_id))
    )
    rig.open(confirm_rule=ConfirmedByLog())
    assert shown == [("New", 3)]


def test_r31_what_the_log_showed_is_made_durable_before_the_checkpoint_passes_it(rig):
    """1 a slave learns a topic from its log. 2 a checkpoint passes that record. 3 kill -9.

    The record is not shown again, so what it changed must be on disk before 2.
    """
    on_disk, in_memory = set(), set()

    def hook(store):
        store.on_unknown_topic = lambda topic, queue_id: in_memory.add(topic)
        store.before_checkpoint = lambda: [lambda: on_disk.update(in_memory)]

    rig.before_open = hook
    store = rig.open_master()
    rig.put_confirmed(store, b"x", topic="A")
    store = rig.reopen(store, confirm_rule=ConfirmedByLog())
    assert (in_memory, on_disk) == ({"A"}, set())
    store.checkpoints.flush_derived()
    assert on_disk == {"A"}


def test_a_deleted_topic_numbers_alike_on_master_and_slave(rig):
    """1 master puts m0; deletion D; m1 before D is confirmed. 2 D is dispatched on both.

    On a slave m1 shows up with queue offset 1 behind D. The master must number the same, or the
    slave would drop what the master puts next.
    """

    def hook(store):
        store.on_system_record["SYS"] = lambda head, body: store.delete_topic(body.decode())

    rig.before_open = hook
    store = rig.open_master()
    rig.put_confirmed(store, b"m0")
    deletion = rig.put(store, b"T", topic="SYS")
    rig.put(store, b"m1")
    store.end_turn()
    store.advance_confirm_offset(deletion.end_offset)
    assert store.queries.max_offset_in_queue("T", 0) == 0
    rig.put_confirmed(store, b"m2")
    state = (store.queries.min_offset_in_queue("T", 0), store.queries.max_offset_in_queue("T", 0))
    assert rig.read_bodies(store) == [b"m1", b"m2"] and state == (1, 3)
    replica = rig.reopen(store, confirm_rule=ConfirmedByLog())
    assert rig.read_bodies(replica) == [b"m1", b"m2"]


# Reading.


def test_statuses_of_offsets_outside_the_queue(rig, store):
    status = lambda offset: store.queries.get_message("T", 0, offset, 32)  # noqa: E731
    assert status(0).status is GetMessageStatus.NO_MATCHED_LOGIC_QUEUE
    rig.put_confirmed(store, b"a", b"b")
    assert status(2).status is GetMessageStatus.OFFSET_OVERFLOW_ONE
    assert status(2).next_begin_offset == 2
    assert status(9).status is GetMessageStatus.OFFSET_OVERFLOW_BADLY
    assert status(9).next_begin_offset == 2
    assert status(-1).status is GetMessageStatus.OFFSET_TOO_SMALL
    assert status(-1).next_begin_offset == 0


def test_r28_a_new_master_holds_a_pull_between_its_visible_end_and_its_log_end(rig, store):
    """1 a consumer read up to 3 from the old master. 2 the new one knows 1 as confirmed so far.

    Correcting the consumer back to 1 would deliver twice; it is held instead.
    """
    ends = [rig.put(store).end_offset for _ in range(3)]
    store.end_turn()
    store.advance_confirm_offset(ends[0])
    held = store.queries.get_message("T", 0, 3, 32)
    assert held.status is GetMessageStatus.OFFSET_OVERFLOW_ONE
    assert held.next_begin_offset == 3 and held.max_offset == 1
    assert store.queries.next_offset_in_queue("T", 0) == 3
    assert store.queries.get_message("T", 0, 4, 32).next_begin_offset == 1
    assert store.queries.max_offset_in_queue("T", 0) == 1
    assert store.queries.offset_in_queue_by_time("T", 0, FOREVER_MS, Boundary.LOWER) == 1


def test_r28_nothing_of_a_queue_is_told_before_it_is_confirmed(rig, store):
    rig.put(store, uniq_key=b"U")
    store.end_turn()
    assert store.queries.get_message("T", 0, 0, 32).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert store.queries.get_message("T", 0, 1, 32).next_begin_offset == 1
    assert store.queries.query_message("T", "U", 9, 0, FOREVER_MS).parts == []


def test_r28_a_slave_corrects_no_reader(rig, store):
    """Its queue may lag behind the master's, and its log may begin elsewhere."""
    expired = rig.put_confirmed(store, b"a")
    rig.put_confirmed(store, b"b")
    store._queues.get("T", 0).consume_queue.correct_min_offset(expired)
    store.stop_writes()
    asked = [store.queries.get_message("T", 0, offset, 32) for offset in (0, 2, 7)]
    assert [(each.status, each.next_begin_offset) for each in asked] == [
        (GetMessageStatus.OFFSET_TOO_SMALL, 0),
        (GetMessageStatus.OFFSET_OVERFLOW_ONE, 2),
        (GetMessageStatus.OFFSET_OVERFLOW_BADLY, 7),
    ]


def test_r28_a_key_finds_nothing_above_the_confirmed_end(rig, store):
    """The index of the run before may reach further than this one has shown: what is there may be
    cut, and other records may come to the same place."""
    shown = rig.put_confirmed(store, b"a", uniq_key=b"U")
    rig.put_confirmed(store, b"b", uniq_key=b"U")
    store._dispatcher.restart_at(shown)
    found = store.queries.query_message("T", "U", 9, 0, FOREVER_MS).parts
    assert [record.body for record in decode_records(b"".join(found))] == [b"a"]
    assert store.queries.look_message_by_offset(shown) is None


def test_a_pull_is_filtered_by_tag_and_ends_at_its_limits(rig, store):
    for number in range(12):
        rig.put(store, b"%d" % number, tag="A" if number % 3 == 0 else "B")
    store.advance_confirm_offset(store.end_turn())
    wanted = frozenset({tags_code("A")})
    result = store.queries.get_message("T", 0, 1, 2, None, wanted)
    assert [r.body for r in decode_records(b"".join(result.parts))] == [b"3", b"6"]
    assert result.next_begin_offset == 9
    none = store.queries.get_message("T", 0, 10, 9, None, wanted)
    assert (none.status, none.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 12)
    size = store.queries.get_message("T", 0, 0, 1).size
    assert store.queries.get_message("T", 0, 0, 32, 2 * size).message_count == 2
    assert store.queries.get_message("T", 0, 0, 32, 1).message_count == 1


def test_a_pull_from_disk_is_shorter_than_one_from_memory(rig):
    store = rig.open_master(
        max_transfer_count_on_message_in_memory=10, max_transfer_count_on_message_in_disk=3
    )
    rig.put_confirmed(store, *[b"m"] * 20)
    assert store.queries.get_message("T", 0, 0, 32).message_count == 10
    rig.kill(store)
    store = rig.open(
        confirm_rule=ConfirmedByLog(),
        max_transfer_count_on_message_in_disk=3,
        access_message_in_memory_max_ratio=0,
    )
    result = store.queries.get_message("T", 0, 0, 32)
    assert result.message_count == 3 and result.suggest_pulling_from_slave


def test_key_query_compares_the_real_key(rig, store):
    """The index knows hashes only: "Aa" and "BB" share one in Java."""
    rig.put_confirmed(store, b"1", uniq_key=b"Aa", keys=b"k1 k2")
    rig.put_confirmed(store, b"2", uniq_key=b"BB", keys=b"k2")
    found = lambda key: [  # noqa: E731
        decode_record(part).body
        for part in store.queries.query_message("T", key, 9, 0, FOREVER_MS).parts
    ]
    assert found("Aa") == [b"1"] and found("BB") == [b"2"]
    assert found("k2") == [b"1", b"2"] and found("k") == []
    assert store.queries.query_message("T", "k2", 1, 0, FOREVER_MS).index_last_update_phyoffset > 0


def test_offsets_by_time(rig, store):
    for _ in range(3):
        rig.now_ms += 1000
        rig.put_confirmed(store, b"m")
    last = rig.now_ms
    by_time = lambda ms, b: store.queries.offset_in_queue_by_time("T", 0, ms, b)  # noqa: E731
    assert by_time(last - 1500, Boundary.LOWER) == 1
    assert by_time(last - 1500, Boundary.UPPER) == 0
    assert by_time(last + 1, Boundary.LOWER) == 3
    assert store.queries.earliest_message_time("T", 0) == last - 2000
    assert store.queries.message_store_timestamp("T", 0, 2) == last
    assert store.queries.message_store_timestamp("T", 0, 3) == -1


def test_an_offset_within_a_record_is_no_message(rig, store):
    rig.put_confirmed(store, b"body")
    assert store.queries.look_message_by_offset(7) is None
    assert store.queries.look_message_by_offset(-1) is None


# One process, and the shape of files.


def test_a_second_store_on_the_same_folder_is_refused(rig):
    rig.open()
    with pytest.raises(FolderLockedError) as refused:
        rig.open()
    assert refused.value.pid == os.getpid()


def test_a_second_process_is_refused_and_the_error_names_the_first(rig):
    """A second broker on one data directory."""
    rig.open()
    script = (
        "import sys; from pathlib import Path; from batonmq.runtime.lock_file import FolderLock\n"
        "try: FolderLock(Path(sys.argv[1])).acquire()\n"
        "except Exception as error: print(error)"
    )
    command = [sys.executable, "-c", script, str(rig.root / "lock")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"process {os.getpid()}" in output
    assert (rig.root / "lock").read_bytes() == b"lock"


def test_a_disk_without_locks_is_not_a_folder_in_use(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refused)
    with pytest.raises(OSError, match=f"no lock: No locks available: '{tmp_path}/lock'"):
        FolderLock(tmp_path / "lock").acquire()


def test_a_segment_of_another_length_stops_the_start_by_name(rig, store):
    rig.put_confirmed(store, b"m")
    store.close()
    with pytest.raises(StoreFormatError, match="mappedFileSizeCommitLog is 4096"):
        rig.open(mapped_file_size_commit_log=4096)
    with rig.segment(0).open("ab") as file:
        file.write(b"x")
    with pytest.raises(StoreFormatError, match="8193 bytes"):
        rig.open()
    os.truncate(rig.segment(0), 8192)
    rig.segment(0).rename(rig.segment(0).with_name(f"{100:020}"))
    with pytest.raises(StoreFormatError, match="at a multiple of 8192"):
        rig.open()


def test_an_empty_last_file_is_deleted(rig, store):
    rig.put_confirmed(store, b"m")
    store.close()
    rig.segment(1).touch()
    store = rig.open()
    assert rig.read_bodies(store) == [b"m"] and not rig.segment(1).exists()


def test_the_log_id_stays_with_its_log(rig):
    store = rig.open()
    log_id = store.log.log_id
    store.close()
    assert rig.open().log.log_id == log_id


def test_runtime_info_has_javas_names(rig, store):
    rig.put_confirmed(store, b"m")
    info = store.runtime_info()
    assert info["commitLogMaxOffset"] == info["confirmOffset"] == str(store.max_phy_offset)
    assert info["putMessageTimesTotal"] == "1" and info["commitLogMinOffset"] == "0"
    assert float(info["putMessageAverageSize"]) == store.max_phy_offset
    size = r"[\d.]+ [KMGTPE]iB"
    assert re.fullmatch(rf"Total : {size}, Free : {size}\.", info["commitLogDirCapacity"])
    assert byte_count(1023) == "1023 B" and byte_count(1536) == "1.5 KiB"
    assert byte_count(5 << 40) == "5.0 TiB"


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2500)), max_size=30))
def test_turns_of_any_shape_read_back_in_order(store_in, shape):
    """Whatever the sizes, queues, turns and rolls: each queue reads back what was put there."""
    with store_in() as (rig, store):
        put = {queue_id: [] for queue_id, _ in shape}
        for number, (queue_id, size) in enumerate(shape):
            body = b"%06d" % number + bytes(size)
            put[queue_id].append(body)
            rig.put(store, body, queue_id=queue_id)
            if size % 3 == 0:
                store.advance_confirm_offset(store.end_turn())
        store.advance_confirm_offset(store.end_turn())
        for queue_id, bodies in put.items():
            assert rig.read_bodies(store, "T", queue_id) == bodies


@pytest.mark.parametrize("crc", [False, True])
def test_properties_leave_room_for_the_crc_that_is_added(rig, crc):
    store = rig.open_master(enabled_append_prop_crc=crc, mapped_file_size_commit_log=1 << 20)
    most = PROPERTIES_SIZE_MAX - (21 if crc else 0)
    long = b"K\x01" + b"v" * (most - 3) + b"\x02"
    for properties, is_taken in ((long, True), (long + b"\x02", False)):
        message = NewMessage("T", 0, b"x", properties, 0, None, None, 0, rig.host)
        if is_taken:
            store.appender.put_message(message)
        else:
            with pytest.raises(PutPropertiesTooLong):
                store.appender.put_message(message)
    store.advance_confirm_offset(store.end_turn())
    assert rig.read_bodies(store) == [b"x"]


def test_a_refused_put_leaves_its_time_to_no_later_one(rig, store):
    with pytest.raises(PutIllegal):
        rig.put(store, bytes(8190))
    rig.now_ms += 5_000
    assert rig.put(store, b"later").store_timestamp == rig.now_ms


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("host", [b"\x7f\0\0\1\0\0\x2a\x9f", bytes(16) + b"\0\0\x2a\x9f"])
@pytest.mark.parametrize("at_once", [3, 1024])
def test_a_batch_that_is_encoded_ahead_has_the_bytes_of_one_that_is_not(
    rig, tmp_path, crc, host, at_once, monkeypatch
):
    """Also over the end of a segment, and behind other messages."""
    monkeypatch.setattr(appender, "_PLACED_AT_ONCE", at_once)
    logs, placed, totals = [], [], []
    for number, ahead in enumerate((False, True)):
        rig.root = tmp_path / f"store-{number}"
        store = rig.open_master(enabled_append_prop_crc=crc)
        for _ in range(2):
            rig.put(store, bytes(1500))
            messages = [
                NewMessage(
                    "T", 1, b"b" * n, b"TAGS\x01t%d\x02" % n, 7, b"k%d" % n, b"u%d" % n, 5, host, n
                )
                for n in range(20)
            ]
            if ahead:
                batch = store.appender.encoded_batch("T", 1)
                for message in messages:
                    batch.add(message)
                result = store.appender.put_encoded(batch)
                assert (result.queue_offset, result.end_offset, result.physical_offsets) == (
                    placed.pop(0)
                )
            else:
                results = store.appender.put_batch(messages)
                offsets = [each.physical_offset for each in results]
                placed.append((results[0].queue_offset, results[-1].end_offset, offsets))
        rig.put_confirmed(store, b"after")
        logs.append(bytes(store.log.view(0, 8192)) + bytes(store.log.view(8192, 8192)))
        assert len(rig.read_bodies(store, queue_id=1)) == 40
        totals.append(store.appender.messages_total)
    assert logs[0] == logs[1] and totals[0] == totals[1] > 40


def _batch(store, count):
    batch = store.appender.encoded_batch("T", 0)
    for n in range(count):
        batch.add(NewMessage("T", 0, b"b%03d" % n, b"KEYS\x01k\x02", 0, b"k", None, 5, bytes(8)))
    return store.appender.put_encoded(batch)


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(appender, "_PLACED_AT_ONCE", 4)
    monkeypatch.setattr(dispatch, "_PENDING_AT_ONCE", 3)


def _bodies(first, last):
    return [b"b%03d" % n for n in range(first, last)]


def test_r58_a_large_batch_is_written_over_several_turns(rig, small_slices, store):
    """Each turn ends at a record, whatever is put meanwhile comes behind it, and what is written
    may be confirmed."""
    rig.put(store, b"before")
    result = _batch(store, 10)
    rig.put(store, b"after")
    second = _batch(store, 3)
    expected = [b"before", *_bodies(0, 10), b"after", *_bodies(0, 3)]
    for shown in (5, 9, 12, 15):
        end = store.end_turn(whole=False)
        assert store.appender.is_placing == (shown < 15)
        assert store.advance_confirm_offset(end) == end
        assert rig.read_bodies(store) == expected[:shown]
    assert end == second.end_offset > result.end_offset
    assert store.appender.messages_total == 15
    assert len(store.queries.query_message("T", "k", 64, 0, 2**62).parts) == 13


def test_r58_a_turn_that_must_be_whole_writes_all_of_a_batch(rig, small_slices, store):
    _batch(store, 10)
    store.end_turn(whole=False)
    end = store.stop_writes()
    assert end == store.appender.end and not store.appender.has_buffered
    assert store.advance_confirm_offset(end) == end
    assert rig.read_bodies(store) == _bodies(0, 10)


def test_r45_what_a_full_disk_keeps_of_a_batch_is_forgotten(rig, small_slices, store):
    """The broker leaves its role: what is written stays, and the rest gives its offsets back."""
    _batch(store, 10)
    store.end_turn(whole=False)
    with failing("pwrite * ENOSPC once"):
        end = store.stop_writes()
    assert store.advance_confirm_offset(end) == end == store.max_phy_offset
    assert rig.read_bodies(store) == _bodies(0, 4)
    store.prepare_master()
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, b"next")
    assert rig.read_bodies(store) == [*_bodies(0, 4), b"next"]


def test_r45_a_batch_that_found_no_space_is_written_when_there_is_some(rig, small_slices, store):
    _batch(store, 10)
    with failing("pwrite * ENOSPC"):
        for _ in range(2):
            assert store.end_turn(whole=False) == 0
        assert not store.appender.is_placing, "it waits for the next round of upkeep"
    store.checkpoints.flush_derived()
    assert store.advance_confirm_offset(store.max_phy_offset) == store.appender.end
    assert rig.read_bodies(store) == _bodies(0, 10)
    assert store.appender.messages_total == 10


def test_r39_a_batch_that_waits_goes_to_the_new_queue_of_its_topic(rig, small_slices, store):
    rig.put_confirmed(store, b"old")
    _batch(store, 10)
    end = store.end_turn()
    store.delete_topic("T")
    rig.put(store, b"next")
    assert store.advance_confirm_offset(store.end_turn()) > end
    queue = store._queues.get("T", 0)
    assert (queue.consume_queue.min_offset, queue.consume_queue.max_offset) == (1, 12)
    assert rig.read_bodies(store) == [*_bodies(0, 10), b"next"]
