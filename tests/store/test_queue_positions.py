"""The next offset of a queue never falls, though its messages have expired (R38)."""

import os
import random
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest

from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.runtime import disk
from batonmq.store.errors import PutRefused, PutUnavailable, StoreFailedError
from batonmq.store.log_scan import LogScanner
from batonmq.store.position_rounds import PositionRounds
from batonmq.store.queue_positions import (
    POSITIONS_QUEUE,
    QueuePositions,
    decode_positions,
    position_record,
)
from batonmq.store.reader import GetMessageStatus
from tests.shared.failing_disk import failing, walk_errors

SEGMENT = 8192


def age(root, count):
    for path in sorted((root / "commitlog").glob("0*"))[:count]:
        os.utime(path, (0, 0))


def rounds_of(store):
    """Every position record of the log, in order, with its place."""
    scanner = LogScanner(store.log, store.min_phy_offset, store.max_phy_offset, check_crc=True)
    found = []
    while (head := scanner.next()) is not None:
        if (head.topic, head.queue_id) == (METADATA_TOPIC.encode(), POSITIONS_QUEUE):
            found.append((head.physical_offset, decode_positions(scanner.body(head))))
    return found


def fill(rig, store, segments, *, topic="U"):
    """Put messages, each in a turn of its own, until the log has entered so many new segments."""
    target = store.max_phy_offset // SEGMENT + segments
    while store.max_phy_offset // SEGMENT < target:
        rig.put_confirmed(store, bytes(1000), topic=topic)
    rig.put_confirmed(store, b"last", topic=topic)


def replica_of(rig, master, name, offset=None):
    """A new replica whose log begins at `offset`, caught up with its master."""
    start = master.min_phy_offset if offset is None else offset
    replica = rig.beside(name).open()
    if start:
        replica.slave_log.reset_for_empty_start(start)
    replica.slave_log.append_replicated(start, rig.log_of(master, start))
    replica.advance_confirm_offset(master.confirm_offset)
    return replica


def with_expired(rig, count=5, **config):
    """A master with `count` messages of T/0 that have all expired, two segments with them."""
    master = rig.open_master(**config)
    rig.put_confirmed(master, *[b"old"] * count, topic="T")
    fill(rig, master, 3)
    age(rig.root, 2)
    assert master.expirer.clean_expired(manual=True) == 2
    return master


def test_r38_a_replica_that_joined_later_numbers_on(rig):
    """A group that was offline meanwhile loses nothing there."""
    master = with_expired(rig, 60)
    later = replica_of(rig, master, "later")
    assert later.queries.get_message("T", 0, 60, 32).status is GetMessageStatus.OFFSET_OVERFLOW_ONE
    assert later.positions.whole_from == later.min_phy_offset == 2 * SEGMENT
    later.positions.master_begins_at(2 * SEGMENT)
    assert later.positions.whole_from == 0, "it lacks nothing that the group has"
    end = later.prepare_master()
    put = rig.put(later, b"new", topic="T")
    later.end_turn()
    later.advance_confirm_offset(later.max_phy_offset)
    assert put.queue_offset == 60
    found = later.queries.get_message("T", 0, 60, 32)
    assert (found.status, found.min_offset) == (GetMessageStatus.FOUND, 60)

    master.stop_writes()
    master.slave_log.append_replicated(end, rig.log_of(later, end))
    master.advance_confirm_offset(later.max_phy_offset)
    master.prepare_master()
    assert rig.read_bodies(master, "T") == rig.read_bodies(later, "T") == [b"new"]
    assert master.queries.max_offset_in_queue("T", 0) == 61


@pytest.mark.parametrize("way", ["close", "kill", "flush and kill", "message and close"])
def test_r38_positions_without_a_message_outlive_the_process(rig, way):
    """The queue has no file yet; behind the checkpoint the log does not show its position again."""
    master = with_expired(rig, 45)  # more than a queue file of 20 units
    later = replica_of(rig, master, "later")
    if "message" in way:
        later.prepare_master()
        rig.put_confirmed(later, b"first", topic="T")
    if "close" in way:
        later.close()
    else:
        if "flush" in way:
            later.checkpoints.flush_derived()
        rig.kill(later)
    later = rig.open_master()
    assert rig.put(later, b"next", topic="T").queue_offset == 45 + ("message" in way)
    later.end_turn()
    later.advance_confirm_offset(later.max_phy_offset)
    assert rig.read_bodies(later, "T") == [b"first"] * ("message" in way) + [b"next"]
    later.checkpoints.flush_derived()
    later.close()
    assert rig.read_bodies(rig.open_master(), "T")[-1:] == [b"next"]


@pytest.mark.parametrize("damage", ["length", "file gone", "queue gone"])
def test_r38_a_rebuilt_queue_numbers_on(rig, damage):
    master = with_expired(rig)
    master.close()
    (path,) = (rig.root / "consumequeue" / "T" / "0").iterdir()
    if damage == "length":
        os.truncate(path, 100)
    elif damage == "file gone":
        path.unlink()
    else:
        disk.rmtree(rig.root / "consumequeue")
    master = rig.open_master()
    assert master.positions.whole_from == master.min_phy_offset
    assert rig.put(master, b"new", topic="T").queue_offset == 5


def test_r38_a_log_may_begin_at_any_segment(rig):
    """Idle queues, busy queues and new ones, whatever segment a replica begins with."""
    random_of = random.Random(7)
    master = rig.open_master(mapped_file_size_consume_queue=40_000)
    for turn in range(400):
        topic = f"T{random_of.randrange(1 + turn // 60)}"
        rig.put_confirmed(master, bytes(200), topic=topic, queue_id=random_of.randrange(3))
    segments = master.max_phy_offset // SEGMENT
    assert segments > 8
    queues = [(queue.topic, queue.queue_id) for queue in master._queues.queues.values()]
    for segment in range(1, segments + 1):
        later = replica_of(rig, master, f"from-{segment}", segment * SEGMENT)
        assert later.positions.whole_from == segment * SEGMENT
        for queue in queues:
            assert later.queries.next_offset_in_queue(
                *queue
            ) == master.queries.next_offset_in_queue(*queue), (segment, queue)


def test_r38_without_a_whole_round_a_replica_is_not_joinable(rig, master):
    rig.put_confirmed(master, b"old", topic="T")
    master.positions.due_at = 1 << 63  # as a Java master, which states nothing
    fill(rig, master, 2)
    later = replica_of(rig, master, "later", SEGMENT)
    assert later.positions.whole_from == later.max_phy_offset + 1
    assert later.runtime_info()["queuePositionsKnown"] == "false"
    later.checkpoints.flush_derived()
    later = rig.reopen(later)
    assert later.positions.whole_from > later.max_phy_offset

    master.positions.due_at = 0
    start = master.max_phy_offset
    assert master.positions.put_if_due()
    master.advance_confirm_offset(master.end_turn())
    later.slave_log.append_replicated(start, rig.log_of(master, start))
    assert later.positions.whole_from > later.max_phy_offset, "known when the round is confirmed"
    later.advance_confirm_offset(master.max_phy_offset)
    assert later.positions.whole_from == SEGMENT
    assert later.queries.next_offset_in_queue("T", 0) == 1


def test_r38_a_segment_expires_only_behind_a_confirmed_round(rig, master):
    master.positions.due_at = 1 << 63
    fill(rig, master, 3)
    age(rig.root, 3)
    assert master.expirer.clean_expired(manual=True) == 0
    master.positions.due_at = 0
    assert master.positions.put_if_due()
    end = master.end_turn()
    assert master.expirer.clean_expired(manual=True) == 0
    master.advance_confirm_offset(end)
    assert master.expirer.clean_expired(manual=True) == 3


def test_r38_a_full_disk_takes_the_round_that_expiry_waits_for(rig, master):
    master.positions.due_at = 1 << 63
    fill(rig, master, 2)
    rig.disk_ratio = 0.95
    assert master.expirer.clean_expired() == 0
    with pytest.raises(PutUnavailable):
        rig.put(master)
    master.positions.due_at = 0
    assert master.positions.put_if_due()
    with pytest.raises(PutUnavailable):
        rig.put(master)
    master.advance_confirm_offset(master.end_turn())
    assert master.expirer.clean_expired() == 2
    rig.disk_ratio = 0.1
    master.expirer.clean_expired()
    rig.put(master)


def test_r38_a_slave_of_a_java_master_lets_segments_expire_without_rounds(rig, master):
    master.positions.due_at = 1 << 63
    fill(rig, master, 4)
    slave = replica_of(rig, master, "slave")
    slave.positions.master_begins_at(None)
    age(rig.root, 4)
    assert slave.expirer.clean_expired(manual=True) == 4


def test_r27_a_slave_keeps_what_its_master_has_though_its_own_disk_is_nearly_full(rig, master):
    """Else it loses acknowledged messages that the group still has, and is refused by R13 for as
    long as the master has them."""
    fill(rig, master, 4)
    slave = replica_of(rig, master, "slave")
    rig.disk_ratio = 0.86
    assert slave.expirer.clean_expired() == 0, "nothing is known of the master's log"
    slave.positions.master_begins_at(0)
    assert slave.expirer.clean_expired() == 0
    slave.positions.master_begins_at(2 * SEGMENT)
    assert slave.expirer.clean_expired() == 2
    assert slave.expirer.clean_expired() == 0
    assert slave.min_phy_offset == 2 * SEGMENT
    slave.prepare_master()
    assert slave.expirer.clean_expired() > 0, "as a master it decides"


def test_r13_a_master_that_let_segments_go_comes_back_as_a_whole_member(rig, master):
    """Its disk was nearly full. The next master still has what the group no longer promises."""
    fill(rig, master, 3)
    rig.disk_ratio = 0.86
    assert master.expirer.clean_expired() == 3
    assert master.positions.whole_from == 3 * SEGMENT
    master.stop_writes()
    assert (master.min_phy_offset, master.positions.whole_from) == (3 * SEGMENT, 0)
    master.close()
    assert rig.open().positions.whole_from == 0


@pytest.mark.parametrize("end", ["learns", "leads"])
def test_r13_a_log_that_began_at_a_last_segment_is_short_until_the_group_begins_there(
    rig, master, end
):
    fill(rig, master, 3)
    later = replica_of(rig, master, "later", 2 * SEGMENT)
    later.positions.master_begins_at(0)
    later.positions.master_begins_at(SEGMENT)
    later.checkpoints.flush_derived()
    later = rig.reopen(later)
    assert later.positions.whole_from == 2 * SEGMENT
    assert f"begun at {2 * SEGMENT}" in later.positions.why_not_whole
    if end == "learns":
        later.positions.master_begins_at(2 * SEGMENT)
        assert not later.positions.why_not_whole
    else:
        later.prepare_master()
        assert later.positions.whole_from == 2 * SEGMENT
        later.stop_writes()
    later.checkpoints.flush_derived()
    assert rig.reopen(later).positions.whole_from == 0


def test_r38_a_new_master_states_positions_if_its_segment_lacks_a_round(rig, master):
    """The round of the master before may have been cut off with it."""
    rig.put_confirmed(master, b"old", topic="T")
    master.positions.due_at = 1 << 63
    fill(rig, master, 2)
    slave = replica_of(rig, master, "slave")
    slave.prepare_master()
    assert slave.positions.put_if_due() and not slave.positions.put_if_due()
    end = slave.end_turn()
    slave.advance_confirm_offset(end)
    slave.stop_writes()
    slave.prepare_master()
    assert not slave.positions.put_if_due()
    ((_, record),) = rounds_of(slave)
    assert record.whole and record.since == 2 * SEGMENT and record.positions["T"] == {0: 1}


def test_r38_a_round_of_many_queues_comes_in_pieces(rig):
    """10,000 queues: no piece is larger than a message may be, none is built in more than its own
    turn, and a queue with a newer message is left out."""
    rig.config = msgspec.structs.replace(
        rig.config, mapped_file_size_commit_log=1 << 22, mapped_file_size_consume_queue=20
    )
    master = rig.open_master(max_message_size=20_000)
    topics = [f"a-topic-with-a-name-of-usual-length-{n}" for n in range(1250)]
    for topic in topics:
        for queue_id in range(8):
            rig.put(master, topic=topic, queue_id=queue_id)
    while master.appender.end < 1 << 22:
        rig.put(master, bytes(19_000), topic="U")
    rig.put(master, topic=topics[0], queue_id=3)
    turns = 0
    while master.appender.end >= master.positions.due_at:
        rig.put(master, topic="U")
        master.advance_confirm_offset(master.end_turn())
        turns += 1
    records = rounds_of(master)
    assert len(records) == turns > 10 and [r.whole for _, r in records[-2:]] == [False, True]
    sizes = [len(record.encode()) for _, record in records]
    assert max(sizes) <= 20_000
    assert sum(sizes) < 600_000
    stated = {
        (topic, queue_id): position
        for _, record in records
        for topic, positions in record.positions.items()
        for queue_id, position in positions.items()
    }
    assert stated.pop((topics[0], 3), 2) == 2
    assert len(stated) >= 9_999 and set(stated.values()) == {1}
    later = replica_of(rig, master, "later", 1 << 22)
    assert later.positions.whole_from == 1 << 22
    assert later.queries.next_offset_in_queue(topics[-1], 7) == 1
    assert later.queries.next_offset_in_queue(topics[0], 3) == 2


def test_r38_rounds_do_not_feed_on_themselves(rig, master):
    """Where a round is as large as a segment, the log grows by a multiple of it before the next."""
    for queue_id in range(300):
        rig.put_confirmed(master, topic="T", queue_id=queue_id)
    fill(rig, master, 40)
    records = rounds_of(master)
    size = sum(len(record.encode()) for _, record in records)
    assert size < master.max_phy_offset / 4
    assert sum(record.whole for _, record in records) > 3


def test_r38_what_a_deletion_in_the_log_takes_is_not_stated(rig, master):
    """Stated behind the deletion, the position would outlive it at the other replicas."""
    rig.put_confirmed(master, b"old", topic="Gone")
    rig.put_confirmed(master, b"old", topic="T")
    master.deleting_topics["Gone"] = 1
    fill(rig, master, 1)
    ((_, record),) = rounds_of(master)
    assert "Gone" not in record.positions and record.positions["T"] == {0: 1}


def test_r38_positions_from_behind_a_cut_count_no_more(rig, master):
    """1. A replica that joined later knows T/0 by a round. 2. An unclean election cuts that round
    and messages of T before it. 3. It knows no position until the new master has stated them."""
    rig.put_confirmed(master, b"1", topic="T")
    master.positions.due_at = 1 << 63
    fill(rig, master, 2)
    cut = master.max_phy_offset
    rig.put_confirmed(master, b"kept nowhere", topic="W")
    master.positions.due_at = 0
    fill(rig, master, 1)
    later = replica_of(rig, master, "later", SEGMENT)
    assert later.queries.next_offset_in_queue("T", 0) == 1
    later.slave_log.truncate_to(cut, unclean_epoch=True)
    assert later.positions.whole_from > later.max_phy_offset
    assert later.queries.next_offset_in_queue("T", 0) == 0
    assert later.queries.next_offset_in_queue("W", 0) == 0
    later = rig.reopen(later)
    assert later.positions.whole_from > later.max_phy_offset
    later.close()


def test_r38_a_part_of_a_round_is_no_round(rig, master):
    """Its master was deposed between two pieces: the queues of the others are stated nowhere. So
    nothing expires for it, and a replica that has just that part does not know every position."""
    fill(rig, master, 2)
    master.positions.due_at = 1 << 63
    before, start = master._files.positions.stated_from, master.max_phy_offset
    fill(rig, master, 1)
    later = replica_of(rig, master, "later", start - start % SEGMENT + SEGMENT)
    at, since = master.max_phy_offset, later.min_phy_offset
    for whole in (False, True):
        body = position_record({"T": {0: 9}}, since, whole=whole).encode()
        master.appender.put_message(
            NewMessage(METADATA_TOPIC, POSITIONS_QUEUE, body, b"", 0, None, None, 0, bytes(8))
        )
        master.advance_confirm_offset(master.end_turn())
        later.slave_log.append_replicated(at, rig.log_of(master, at))
        at = later.advance_confirm_offset(master.max_phy_offset)
        assert master._files.positions.stated_from == (since if whole else before)
        assert (later.positions.whole_from <= at) is whole
        assert later.queries.next_offset_in_queue("T", 0) == 9


def test_r38_an_unreadable_statement_is_skipped(store, caplog):
    """A later version's, or a Java client's joke: nothing is placed, nothing ends."""
    nested = b'{"v":1,"x":%b%b}' % (b"[" * 1_500, b"]" * 1_500)
    later = b'{"v":2,"positions":{"T":{"0":9}},"since":0,"whole":true}'
    for body in (b"[]", later, b"\xff", nested):
        store.appender.put_message(
            NewMessage(METADATA_TOPIC, POSITIONS_QUEUE, body, b"", 0, None, None, 0, bytes(8))
        )
    store.advance_confirm_offset(store.end_turn())
    assert caplog.text.count("position_record_skipped") == 4
    assert store.queries.next_offset_in_queue("T", 0) == 0


def test_r38_every_disk_call_of_a_new_beginning_may_fail(rig):
    """Whichever call fails, and whatever is there at the next start: never a wrong number."""
    master = with_expired(rig)
    data = rig.log_of(master, 2 * SEGMENT)

    def attempt(rule, number):
        rig.root = rig.folder / f"failing-{number}"
        replica, failed = rig.open(), False
        with failing(rule.replace("once", "")):  # also the calls after it
            try:
                replica.slave_log.reset_for_empty_start(2 * SEGMENT)
            except (OSError, StoreFailedError):
                failed = True
        replica = rig.reopen(replica)
        if replica.min_phy_offset != 2 * SEGMENT:
            replica.slave_log.reset_for_empty_start(2 * SEGMENT)
        assert replica.positions.whole_from > replica.max_phy_offset
        replica.slave_log.append_replicated(2 * SEGMENT, data)
        replica.advance_confirm_offset(replica.max_phy_offset)
        assert replica.positions.whole_from == 2 * SEGMENT
        assert replica.queries.next_offset_in_queue("T", 0) == 5
        replica.close()
        return failed

    assert walk_errors("* * EIO", attempt) > 10


def test_g8_a_damaged_file_of_positions_is_named_and_built_anew(rig, caplog):
    """Whichever byte flips: the log holds the positions, too."""
    later = replica_of(rig, with_expired(rig), "later")
    later.checkpoints.flush_derived()
    later.close()
    path = rig.root / "queuePositions"
    whole = path.read_bytes()
    assert b'"T":{"0":5}' in whole
    for position in range(0, len(whole) - 1, 7):
        path.write_bytes(whole)
        rig.flip(path, position)
        caplog.clear()
        later = rig.open()
        assert "queue_positions_damaged" in caplog.text and str(path) in caplog.text
        assert later.positions.whole_from == later.min_phy_offset
        assert later.queries.next_offset_in_queue("T", 0) == 5
        later.close()


def test_r38_a_cut_that_cannot_store_what_became_of_positions_ends_the_store(
    rig, master, monkeypatch
):
    """The next start does it, for the log ends there."""
    rig.put_confirmed(master, b"1", topic="T")
    fill(rig, master, 1)
    cut = master.max_phy_offset
    fill(rig, master, 1)
    later = replica_of(rig, master, "later", SEGMENT)
    assert later._files.positions.stated_from == 2 * SEGMENT
    monkeypatch.setattr(later._files.positions, "_store_now", _refuse)
    with pytest.raises(StoreFailedError):
        later.slave_log.truncate_to(cut, unclean_epoch=True)
    later = rig.reopen(later)
    assert later.max_phy_offset == cut and later._files.positions.stated_from == 0


def _refuse():
    raise OSError(5, "injected")


def test_r38_a_round_that_is_taken_over_counts_when_it_is_confirmed(rig, master):
    """Until then it may be cut again, and with it what a shorter log would have to go by."""
    rig.put_confirmed(master, b"old", topic="T")
    confirmed = master.confirm_offset
    fill(rig, master, 3)
    slave = replica_of(rig, master, "slave", 0)
    assert slave._files.positions.stated_from == 3 * SEGMENT
    behind = rig.beside("behind").open()
    behind.slave_log.append_replicated(0, rig.log_of(master, 0))
    behind.advance_confirm_offset(confirmed)
    end = behind.prepare_master()
    assert behind._files.positions.stated_from == 0
    behind.advance_confirm_offset(end)
    assert behind._files.positions.stated_from == 3 * SEGMENT


def test_r38_positions_are_known_by_a_whole_round_that_began_with_the_log(tmp_path):
    """And no longer, if the log is cut within it."""
    path = tmp_path / "queuePositions"
    positions = QueuePositions(path)
    positions.begin_at(2 * SEGMENT)
    positions.note_round(SEGMENT, 3 * SEGMENT)
    assert not positions.are_known, "what it leaves out may stand before this log's first byte"
    positions.note_round(2 * SEGMENT, 4 * SEGMENT)
    assert positions.are_known and positions.stated_from == 2 * SEGMENT
    positions.note_round(SEGMENT, 5 * SEGMENT)
    assert positions.stated_from == 2 * SEGMENT
    for write in positions.writes_due():
        write()
    positions = QueuePositions(path)
    assert not positions.log_ends_at(4 * SEGMENT, 2 * SEGMENT)
    assert positions.stated_from == 2 * SEGMENT
    positions.log_ends_at(4 * SEGMENT - 1, 2 * SEGMENT)
    assert positions.stated_from == QueuePositions(path).stated_from == 0


def test_r38_r39_a_deleted_topic_leaves_no_position(rig):
    """Nor at the next start: a replica that went on at 5 would number the topic made again in
    another way than the others."""
    later = replica_of(rig, with_expired(rig), "later")
    later.checkpoints.flush_derived()
    assert later.queries.next_offset_in_queue("T", 0) == 5
    later.delete_topic("T")
    later.close()
    later = rig.open()
    assert later.queries.next_offset_in_queue("T", 0) == 0
    assert "T" not in later._files.positions.placed


def test_r38_queues_that_are_rebuilt_want_a_round_from_the_begin_of_the_log(tmp_path):
    """Also at the next start: what was stated before was of the queues that were lost."""
    path = tmp_path / "queuePositions"
    positions = QueuePositions(path)
    positions.begin_at(2 * SEGMENT)
    positions.note_round(2 * SEGMENT, 4 * SEGMENT)
    assert positions.are_known
    positions.want_from(3 * SEGMENT)
    assert not positions.are_known and positions.stated_from == 0
    positions = QueuePositions(path)
    positions.note_round(2 * SEGMENT, 4 * SEGMENT)
    assert not positions.are_known
    positions.note_round(3 * SEGMENT, 5 * SEGMENT)
    assert positions.are_known


def test_r38_a_write_that_waited_does_not_bring_positions_of_the_old_log_back(tmp_path):
    positions = QueuePositions(tmp_path / "queuePositions")
    positions.note_placed("T", 0, 9, SEGMENT)
    (waiting,) = positions.writes_due()
    positions.begin_at(2 * SEGMENT)
    waiting()
    again = QueuePositions(tmp_path / "queuePositions")
    assert (again.placed, again.are_known) == ({}, False)


def test_r38_a_round_is_whole_with_its_last_queue_and_leaves_no_piece_out():
    """Three queues, one a piece; the second piece finds no space at first."""
    idle = SimpleNamespace(last_physical_end=0)
    queues = {
        ("T", n): SimpleNamespace(
            topic="T", topic_bytes=b"T", queue_id=n, next_offset=5, handler=None, consume_queue=idle
        )
        for n in range(3)
    }
    table = Mock(queues=queues, get=lambda topic, queue_id: queues[topic, queue_id])
    table.positions.stated_from = -1
    put = Mock(side_effect=[Mock(size=100), PutRefused("full"), *[Mock(size=100)] * 9])
    rounds = PositionRounds(
        SimpleNamespace(max_message_size=50),
        SimpleNamespace(segment_size=SEGMENT),
        table,
        Mock(end=SEGMENT + 1, put_though_full=put),
        set(),
    )
    rounds.begin_mastership()
    assert [rounds.put_if_due() for _ in range(5)] == [True, False, True, True, False]
    stated = [decode_positions(call.args[0].body) for call in put.call_args_list]
    assert [list(record.positions["T"]) for record in stated] == [[0], [1], [1], [2]]
    assert [record.whole for record in stated] == [False, False, False, True]
