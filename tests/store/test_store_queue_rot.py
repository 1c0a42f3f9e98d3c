"""Bytes of a consume queue that went bad on the disk: noticed, named, rebuilt from the log."""

import errno
import os
import re
import shutil

import pytest
from kill_walk import walk_kills

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.tags import tags_code
from batonmq.runtime import disk
from batonmq.store import reader, recovery
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.errors import CutUnfinishedError
from batonmq.store.log_scan import check_record
from tests.shared.failing_disk import failing

COUNT = 37
FILE_SIZE = 400
TOPIC = "T"


def filled(rig, *, tags=()):
    """A closed store with COUNT confirmed messages in two queue files."""
    store = rig.open_master()
    for number in range(COUNT):
        rig.put(store, b"m%02d" % number, tag=tags[number % 2] if tags else "")
    store.end_turn()
    store.advance_confirm_offset(store.max_phy_offset)
    store.close()


def place(rig, index):
    """File of a unit, and its position there."""
    start = index * UNIT_SIZE // FILE_SIZE * FILE_SIZE
    path = rig.root / "consumequeue" / TOPIC / "0" / f"{start:020d}"
    return path, index * UNIT_SIZE - start


def bodies(rig, store, wanted=None):
    """All messages of the queue, pulled batch by batch."""
    found, offset = [], 0
    while True:
        result = store.queries.get_message(TOPIC, 0, offset, 32, None, wanted)
        if result.next_begin_offset <= offset:
            return found
        found += re.findall(rb"m\d\d", b"".join(bytes(part) for part in result.parts))
        offset = result.next_begin_offset
        if offset >= store.queries.max_offset_in_queue(TOPIC, 0):
            return found


@pytest.mark.parametrize("stop", ["clean", "kill"])
def test_g8_a_queue_that_the_disk_cannot_read_is_built_from_the_log(rig, stop, caplog):
    """No start fails for good at what the log gives back."""
    filled(rig)
    if stop == "kill":
        rig.kill(rig.open_master())
    with failing("pread /consumequeue EIO"):
        store = rig.open_master()
        store.advance_confirm_offset(store.max_phy_offset)
    assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]
    assert "consume_queue_damaged" in caplog.text and "Input/output error" in caplog.text
    assert not store.health.queue_failure, "it is built again"
    assert rig.put(store).queue_offset == COUNT


HUNDRED = [b"m%02d" % number for number in range(100)]


@pytest.fixture
def bad_files(rig, monkeypatch):
    """Call it: from then on all files of the queue but the last three cannot be read."""
    bad = set()

    def pread(fd, size, position):
        if os.fstat(fd).st_ino in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, size, position)

    def spoil():
        files = sorted(path for path in place(rig, 0)[0].parent.iterdir() if path.is_file())
        bad.update(path.stat().st_ino for path in files[:-3])
        monkeypatch.setattr(disk, "pread", pread)

    return spoil


def test_g8_a_start_builds_a_queue_of_which_it_cannot_read_an_old_file(rig, store, bad_files):
    """It reads the last files, and of old ones where units are cut. Tables get no record twice."""
    rig.put_confirmed(store, b"1", topic="Table")
    rig.put_confirmed(store, *HUNDRED[:30])
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, *HUNDRED[30:])
    rig.write_queues_back(store)
    rig.kill(store)
    bad_files()
    taken = []
    rig.before_open = lambda store: store.on_system_record.update(
        Table=lambda head, body: taken.append(body)
    )
    store = rig.open_master()
    store.advance_confirm_offset(store.max_phy_offset)
    assert bodies(rig, store) == HUNDRED and taken == [b"1"]
    assert not store.trust.reason and rig.put(store).queue_offset == 100


@pytest.mark.parametrize("how", ["clean", "killed"])
def test_g8_a_queue_that_a_reader_could_not_read_is_built_by_the_next_start(
    rig, store, how, bad_files
):
    """Which would not read old files by itself, and serve some messages never again."""
    rig.put_confirmed(store, *HUNDRED)
    store.checkpoints.flush_derived()
    rig.kill(store)
    store = rig.open_master()
    bad_files()
    for _ in range(2):
        with pytest.raises(CorruptLogError, match="Input/output error") as refused:
            store.queries.get_message(TOPIC, 0, 0, 32)
        assert refused.value.file == str(place(rig, 0)[0])
    assert store.queries.get_message(TOPIC, 0, 90, 10).message_count == 10
    assert store.queries.message_store_timestamp(TOPIC, 0, 0) == -1
    assert store.health.queue_failure.endswith("a restart rebuilds it")
    stop(rig, store, how)
    store = rig.open_master()
    assert bodies(rig, store) == HUNDRED and not store.trust.reason


def test_a_queue_that_can_neither_be_read_nor_marked_is_in_health(rig, store, bad_files):
    """No restart would build it again, and none would report it."""
    rig.put_confirmed(store, *HUNDRED)
    store.checkpoints.flush_derived()
    bad_files()
    with failing("mkdir unreadable EROFS"), pytest.raises(CorruptLogError):
        store.queries.get_message(TOPIC, 0, 0, 32)
    assert "Input/output error" in store.health.queue_failure
    assert "it cannot be marked for a rebuild" in store.health.queue_failure
    assert "the file system is read-only" in store.health.queue_failure


def test_r37_a_cut_that_cannot_read_a_queue_says_nothing_of_the_log(rig, store, bad_files):
    """The next start drops that queue first, then finishes the cut."""
    rig.put_confirmed(store, *HUNDRED)
    store.checkpoints.flush_derived()
    at, store._on_fatal = offset_of(store, 30), lambda error: None
    bad_files()
    with pytest.raises(CutUnfinishedError, match="Input/output error"):
        store.slave_log.truncate_to(at, unclean_epoch=True)
    store.close()
    store = rig.open_master()
    store.advance_confirm_offset(store.max_phy_offset)
    assert bodies(rig, store) == HUNDRED[:30] and not store.trust.reason


@pytest.mark.parametrize("at", range(UNIT_SIZE))
@pytest.mark.parametrize("index", [0, 7, COUNT - 2])
def test_g8_a_flipped_byte_of_a_unit_is_mended_before_anything_is_served(rig, at, index, caplog):
    filled(rig)
    path, position = place(rig, index)
    whole = path.read_bytes()
    rig.flip(path, position + at)
    store = rig.open_master()
    assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]
    store.close()
    assert path.read_bytes() == whole
    assert "consume_queue" in caplog.text and str(path.parent) in caplog.text


@pytest.mark.parametrize(
    ("stop", "damage"), [("clean", "hole"), ("killed", "hole"), ("clean", "end")]
)
def test_g8_a_start_that_builds_a_queue_anew_may_be_killed_at_any_disk_call(rig, stop, damage):
    """The damaged queue is removed by then: the next start must know that it is to be built, though
    there is another one."""
    filled(rig)
    store = rig.open_master()
    rig.put_confirmed(store, b"other", topic="Other")
    store.close()
    if stop == "killed":
        rig.kill(rig.open())
    if damage == "end":
        path, position = place(rig, COUNT - 1)
        rig.flip(path, position + 4)
    else:
        path, position = place(rig, 7)
        rig.overwrite(path, position, bytes(UNIT_SIZE))
    damaged = rig.root

    def prepare(number):
        return shutil.copytree(damaged, rig.folder / f"{stop}-{number}")

    def start(folder):
        rig.root = folder
        store = rig.open()
        assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]
        store.close()

    assert walk_kills(prepare, start, start) > 10


@pytest.mark.parametrize("at", range(12))  # of its place and size
@pytest.mark.parametrize("stop", ["clean", "killed", "killed later"])
def test_g8_a_bad_last_unit_says_nothing_of_the_log(rig, at, stop):
    """The log has its message, at another place: so the unit is wrong, and the replica as good as
    before."""
    filled(rig)
    if stop != "clean":
        store = rig.open_master()
        if stop == "killed later":
            rig.put_confirmed(store, b"elsewhere", topic="Other")
            store.checkpoints.flush_derived()
        rig.kill(store)
    path, position = place(rig, COUNT - 1)
    rig.flip(path, position + at)
    store = rig.open()
    assert not store.trust.reason
    assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]


def test_g8_a_tags_code_that_went_bad_hides_no_message(rig):
    filled(rig, tags=("A", "B"))
    path, position = place(rig, 6)
    rig.flip(path, position + UNIT_SIZE - 1)
    store = rig.open_master()
    wanted = frozenset({tags_code("A")})
    assert bodies(rig, store, wanted) == [b"m%02d" % number for number in range(0, COUNT, 2)]
    store.close()


def test_g8_r58_bad_units_of_messages_that_are_not_wanted_are_mended_one_in_each_read(rig):
    """A sector has 25 units, and the search for the message of one may take 64 MiB of the log."""
    filled(rig, tags=("A", "B"))
    for index in range(3, 12):
        path, position = place(rig, index)
        rig.flip(path, position + 5)
    store = rig.open_master()
    ends, wanted = [3], frozenset({tags_code("none")})
    for _ in range(9):
        found = store.queries.get_message(TOPIC, 0, ends[-1], 32, None, wanted)
        assert found.message_count == 0
        ends.append(found.next_begin_offset)
    assert ends == [*range(3, 12), FILE_SIZE // UNIT_SIZE]
    assert len(bodies(rig, store)) == COUNT
    store.close()


def test_g8_a_unit_that_points_to_another_message_is_not_believed(rig):
    filled(rig)
    path, _ = place(rig, 3)
    data = bytearray(path.read_bytes())
    data[3 * UNIT_SIZE : 4 * UNIT_SIZE] = data[9 * UNIT_SIZE : 10 * UNIT_SIZE]
    path.write_bytes(data)
    store = rig.open_master()
    assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]
    store.close()


def test_g8_a_bad_record_is_not_served_from_a_queue_that_was_built_anew(rig):
    """A queue built from an old part of the log does not vouch for it: dispatching does not check
    what recovery did not read."""
    filled(rig)
    store = rig.open_master()
    store.advance_confirm_offset(rig.put_confirmed(store, b"newest"))
    store.close()
    path, position = place(rig, (COUNT + 1) // 2)  # where the search for the log's end begins
    rig.flip(path, position)  # beyond the log, with good ones behind
    with rig.segment().open("r+b") as log:
        data = log.read()
        log.seek(data.index(b"m09"))
        log.write(b"M")
    store = rig.open()
    assert not store.trust.reason
    assert store.queries.max_offset_in_queue(TOPIC, 0) == COUNT + 1
    assert store.queries.get_message(TOPIC, 0, 0, 32).next_begin_offset == 9
    for _ in range(2):
        with pytest.raises(CorruptLogError):
            store.queries.get_message(TOPIC, 0, 9, 32)
    assert store.queries.get_message(TOPIC, 0, 10, 1).message_count == 1


def test_g8_an_old_record_is_checked_once(rig, monkeypatch):
    filled(rig)
    checked = []

    def noting(log, offset):
        checked.append(offset)
        return check_record(log, offset)

    monkeypatch.setattr("batonmq.store.reader.check_record", noting)
    store = rig.open_master()
    for _ in range(2):
        assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]
    assert len(checked) == len(set(checked)) == COUNT


def test_g8_a_bad_unit_is_mended_though_the_one_before_it_is_bad_too(rig):
    filled(rig)
    path, position = place(rig, 6)
    rig.flip(path, position + 6)
    rig.flip(path, position + UNIT_SIZE + 7)
    store = rig.open_master()
    assert b"m07" in bytes(store.queries.get_message(TOPIC, 0, 7, 1).parts[0])
    assert bodies(rig, store) == [b"m%02d" % number for number in range(COUNT)]


def test_g8_that_a_unit_is_good_says_nothing_of_one_of_another_block(rig, monkeypatch):
    monkeypatch.setattr(reader, "_BLOCK_UNITS", 8)
    filled(rig)
    path, position = place(rig, 9)
    rig.flip(path, position + 7)
    store = rig.open_master()
    assert rig.read_bodies(store) == [b"m%02d" % number for number in range(COUNT)]


@pytest.mark.parametrize("content", [b"", bytes(FILE_SIZE), b"\xff" * FILE_SIZE])
@pytest.mark.parametrize("stop", ["clean", "killed", "killed later"])
@pytest.mark.parametrize("count", [2, 27])  # the queue's only file, and its last one
def test_g8_a_queue_whose_last_file_lost_its_units_is_built_from_the_log(
    rig, store, content, stop, count
):
    """It would number on from a lower place, over messages that the log still has."""
    written = [b"m%02d" % number for number in range(count)]
    rig.put_confirmed(store, *written)
    rig.put_confirmed(store, b"other", topic="Other")
    store.checkpoints.flush_derived()
    if stop == "killed later":
        rig.put_confirmed(store, b"later", topic="Other")
    store.close() if stop == "clean" else rig.kill(store)
    place(rig, count - 1)[0].write_bytes(content)
    store = rig.open_master()
    assert store.queries.next_offset_in_queue(TOPIC, 0) == count
    rig.put_confirmed(store, b"m99")
    assert bodies(rig, store) == [*written, b"m99"]


def stop(rig, store, how):
    """`later`: killed, with units of other queues behind the checkpoint, in their files."""
    if how == "killed later":
        rig.put_confirmed(store, *[b"later"] * 90, topic="Other")
        rig.put_confirmed(store, *[b"new"] * 30, topic="New")
        rig.write_queues_back(store)
    store.close() if how == "clean" else rig.kill(store)


STOPS = ["clean", "killed", "killed later"]
SIXTY = [b"m%02d" % number for number in range(60)]


def lose_last_file(path):
    path.unlink()


def lose_second_half(path):
    path.write_bytes(path.read_bytes()[: FILE_SIZE // 2] + bytes(FILE_SIZE // 2))


def lose_folder(path):
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("damage", [lose_last_file, lose_second_half, lose_folder])
@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("others", [0, 3])
def test_r38_a_queue_that_lost_its_newest_units_numbers_none_again(rig, store, damage, how, others):
    rig.put_confirmed(store, *SIXTY[:40])
    for number in range(others):
        rig.put_confirmed(store, *SIXTY[:number], topic=f"Other{number}")
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, *SIXTY[40:])
    store.checkpoints.flush_derived()
    stop(rig, store, how)
    damage(place(rig, 59)[0])
    store = rig.open_master()
    assert store.queries.next_offset_in_queue(TOPIC, 0) == 60
    rig.put_confirmed(store, b"m99")
    assert bodies(rig, store) == [*SIXTY, b"m99"]
    store.close()
    assert bodies(rig, rig.open_master()) == [*SIXTY, b"m99"]


def expire_first_segment(rig, store):
    """Of the log, and of the queue what was in it."""
    store.positions.put_if_due()
    store.advance_confirm_offset(store.end_turn())
    os.utime(rig.segment(), (0, 0))
    assert store.expirer.clean_expired(manual=True) == 1
    return store.queries.min_offset_in_queue(TOPIC, 0)


@pytest.mark.parametrize("lost", [(0,), (0, 1), (1,)], ids=["first", "two", "middle"])
@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("has_expired", [False, True])
def test_g8_a_queue_that_lost_its_oldest_files_is_built_from_the_log(
    rig, store, lost, how, has_expired
):
    """No message would be numbered twice, but those of the lost files would never be served."""
    rig.put_confirmed(store, *[b"old"] * (25 if has_expired else 0))
    rig.put_confirmed(store, *[bytes(900)] * (16 if has_expired else 0), topic="Other")
    begin = store.queries.next_offset_in_queue(TOPIC, 0)
    rig.put_confirmed(store, *SIXTY * 2)
    store.checkpoints.flush_derived()
    if has_expired:
        assert 20 < expire_first_segment(rig, store) <= begin
    store.checkpoints.flush_derived()
    stop(rig, store, how)
    files = sorted((rig.root / "consumequeue" / TOPIC / "0").iterdir())
    assert len(files) > 4 and (int(files[0].name) > 0) == has_expired
    for number in lost:
        files[number].unlink()
    store = rig.open_master()
    assert rig.read_bodies(store)[-120:] == SIXTY * 2
    rig.put_confirmed(store, b"m99")
    assert store.queries.next_offset_in_queue(TOPIC, 0) == begin + 121
    store.close()
    assert rig.read_bodies(rig.open_master())[-121:] == [*SIXTY * 2, b"m99"]


def test_g8_an_expiry_that_is_killed_at_any_disk_call_raises_no_alarm(rig, store, caplog):
    """Whichever of log and queue files were removed by then."""
    rig.put_confirmed(store, *[b"old"] * 50)
    rig.put_confirmed(store, *[b"old"] * 25, queue_id=1)
    rig.put_confirmed(store, *[bytes(900)] * 16, topic="Other")
    rig.put_confirmed(store, *SIXTY)
    rig.put_confirmed(store, *SIXTY[:30], queue_id=1)
    store.checkpoints.flush_derived()
    store.close()
    filled = rig.root

    def prepare(number):
        return shutil.copytree(filled, rig.folder / f"copy-{number}")

    def live(folder):
        rig.root = folder
        store = rig.open_master()
        assert expire_first_segment(rig, store)
        store.checkpoints.flush_derived()
        store.close()

    def check(folder):
        rig.root = folder
        for _ in range(2):
            store = rig.open()
            assert rig.read_bodies(store)[-60:] == SIXTY
            assert rig.read_bodies(store, queue_id=1)[-30:] == SIXTY[:30]
            store.close()
        assert "consume_queues_begin_late" not in caplog.text

    assert walk_kills(prepare, live, check) > 10


def offset_of(store, index):
    return store._queues.get(TOPIC, 0).consume_queue.unit_at(index)[0]


def delete_topic(rig, store):
    store.delete_topic(TOPIC)


def delete_topic_in_a_round(rig, store):
    """The round counted the queues before they were deleted."""
    rig.put_confirmed(store, b"other", topic="Other")
    work = store.checkpoints.begin()
    paths = store._files.consume_queues.write_back()
    store.delete_topic(TOPIC)
    store.checkpoints.finish(work, paths, [])


def delete_and_use_again(rig, store):
    store.delete_topic(TOPIC)
    rig.put_confirmed(store, *SIXTY[:3])


def cut_below_the_checkpoint(rig, store):
    store.slave_log.truncate_to(offset_of(store, 25), unclean_epoch=True)
    store.prepare_master()


def cut_behind_the_checkpoint(rig, store):
    rig.put_confirmed(store, *SIXTY[:30])
    store.slave_log.truncate_to(offset_of(store, 70), unclean_epoch=True)
    store.prepare_master()


def expire(rig, store):
    rig.put_confirmed(store, *SIXTY * 3, topic="Other")
    store.positions.put_if_due()
    store.advance_confirm_offset(store.end_turn())
    rig.disk_ratio = 0.9
    assert store.expirer.clean_expired(manual=True)
    rig.disk_ratio = 0.1
    assert not rig.read_bodies(store)


def get_a_position(rig, store):
    """R38: of queues without a file, inside a file, and behind a gap."""
    for queue_id, position in ((0, 65), (1, 77), (2, 40)):
        queue = store._queues.of_bytes(b"T", queue_id)
        store._queues._take_position(queue, position, store.max_phy_offset)
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, b"first", queue_id=1)


def leave(rig, store):
    """Nothing changes."""


CHANGES = [
    leave, delete_topic, delete_topic_in_a_round, delete_and_use_again, cut_below_the_checkpoint,
    cut_behind_the_checkpoint, expire, get_a_position,
]  # fmt: skip


def check_total(store):
    """The totals, kept unit by unit, are what the queues say."""
    queues = store._files.consume_queues
    shares = [queue._share for queue in queues.queues()]
    assert queues.ends_total == sum(end for _, end in shares)
    assert queues.begins_total == sum(begin for begin, _ in shares)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("is_written", [False, True])
def test_r38_what_queues_lose_in_operation_is_no_damage(rig, change, how, is_written, monkeypatch):
    """A false alarm would read the log, and perhaps build all queues, at each start."""
    alarms = []

    def note(real):
        def noting(*arguments):
            alarms.append(real(*arguments))
            return alarms[-1]

        monkeypatch.setattr(recovery, real.__name__, noting)

    note(recovery._are_ends_low)
    note(recovery._begin_late)
    store = rig.open_master()
    rig.put_confirmed(store, *SIXTY)
    store.checkpoints.flush_derived()
    change(rig, store)
    check_total(store)
    if is_written:
        store.checkpoints.flush_derived()
    stop(rig, store, how)
    for _ in range(2):
        store = rig.open()
        check_total(store)
        store.close()
    assert len(alarms) == 6 and not any(alarms)
    totals = StoreCheckpoint(rig.root / "checkpoint").queue_totals
    assert totals is not None and totals.begins >= 0
