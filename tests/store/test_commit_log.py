"""Segments that are made ahead, left over, or start again."""

import errno
import os
from unittest.mock import Mock

import pytest

from batonmq.protocol.errors import CorruptLogError
from batonmq.store.commit_log import Segment
from tests.shared.failing_disk import failing, walk_errors

SEGMENT = 8192


def names(rig):
    return sorted(path.name for path in (rig.root / "commitlog").glob("0*"))


def test_what_an_allocation_left_over_goes_at_the_next_start(rig):
    """It was killed before the file was whole: it holds room that is never used."""
    rig.open_master().close()
    left = rig.root / "commitlog" / ".baton" / f"{5 * SEGMENT:020d}"
    left.write_bytes(bytes(SEGMENT))
    rig.open()
    assert not left.exists()


def test_one_segment_is_made_ahead_and_none_of_a_log_that_is_closed(rig, store):
    """Also where the log ends at a border: the one behind it is the one ahead."""
    store.log.ensure_segment(0)
    store.log.preallocate_next()
    assert names(rig) == [f"{0:020d}"]
    rig.put_confirmed(store, b"kept")
    for _ in range(2):
        store.log.preallocate_next()
        assert names(rig) == [f"{0:020d}", f"{SEGMENT:020d}"]
    store = rig.beside("empty").open()
    store.abandon()
    store.log.preallocate_next()  # its thread had waited for the lock
    assert names(rig) == []


def test_r45_a_segment_that_cannot_be_made_ahead_refuses_no_put(rig, store, monkeypatch):
    """There is space in the one that is written, and there may be some when the next one is due."""
    rig.put_confirmed(store, b"a")
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(Segment, "create", full)
    store.log.preallocate_next()
    assert store.health.full
    with pytest.raises(OSError, match="No space"):  # its job is repeated
        store.log.allocate_missing()
    store.disk_space._judge()
    rig.put_confirmed(store, b"goes on")


@pytest.mark.parametrize("fails", ["once", ""])
def test_a_disk_that_fails_at_a_segment_ahead_is_not_full(rig, store, fails):
    """It was called full. The roll tries again, and ends the broker if that fails, too."""
    rig.put_confirmed(store, b"a")
    with failing(f"posix_fallocate * EIO {fails}"):
        store.log.preallocate_next()
        assert store.health.full == "" and not store.health.has_failed
        if not fails:  # a probe for disk space that something else lacks tries it, too
            store.log.allocate_missing()
        if fails:
            rig.put_confirmed(store, *[bytes(1000)] * 20)
            return
        with pytest.raises(OSError, match="Input/output error"):
            rig.put_confirmed(store, *[bytes(1000)] * 20)
    assert store.health.has_failed


def test_r45_a_segment_that_cannot_be_mapped_keeps_no_descriptor(rig, store):
    """Each retry would keep one, with all blocks of a file that has no name any more."""
    rig.put_confirmed(store, b"a")
    with failing("map_read * ENOMEM"):
        store.log.preallocate_next()
        before = len(os.listdir("/proc/self/fd"))
        store.log.preallocate_next()
        assert len(os.listdir("/proc/self/fd")) == before
    assert names(rig) == [f"{0:020d}"]
    store.log.allocate_missing()
    assert len(names(rig)) == 2


def test_r45_a_segment_made_while_the_first_one_expires_comes_behind_the_last(rig, store):
    """The thread that makes it looks when the list is shorter, and the log begins where it did."""

    class Seen(list):
        def pop(self, at=-1):
            segment = super().pop(at)
            store.log.preallocate_next()
            return segment

    rig.put_confirmed(store, *[bytes(1000)] * 20)
    store.log.segments = Seen(store.log.segments)
    store.log.take_first_segment()
    assert not store.health.full
    starts = [segment.start_offset for segment in store.log.segments]
    assert starts == [SEGMENT * number for number in range(1, len(starts) + 1)]


@pytest.mark.parametrize("begin", [SEGMENT, 3 * SEGMENT])
def test_r27_nothing_of_a_log_that_begins_anew_is_flushed(rig, begin):
    """Under haSyncFlush its acks would vouch for bytes that are in the page cache only."""
    store = rig.open()
    store.slave_log.reset_for_empty_start(2 * SEGMENT)
    store.slave_log.reset_for_empty_start(begin)
    assert store.log.flushed_offset == store.max_phy_offset == store.min_phy_offset == begin


@pytest.mark.parametrize("how_long", [" once", ""], ids=["once", "for a while"])
def test_r45_wherever_making_a_segment_failed_it_is_made_later(rig, how_long):
    """Also where nothing could be removed meanwhile: what the attempt left is not taken for a
    segment of somebody else, and no segment that is used is touched."""

    def attempt(rule, number):
        rig.root = rig.folder / f"failing-{number}{how_long}"
        store = rig.open_master()
        rig.put_confirmed(store, b"kept")
        failed = False
        with failing(rule.replace(" once", how_long)):
            try:
                store.log.ensure_segment(SEGMENT)
            except OSError:
                failed = True
        store.log.ensure_segment(2 * SEGMENT)
        segments = [rig.segment(place) for place in range(3)]
        assert [each.name for each in segments] == names(rig)
        assert {(each.stat().st_size, each.stat().st_nlink) for each in segments} == {(SEGMENT, 1)}
        assert rig.read_bodies(store) == [b"kept"]
        store.close()
        return failed

    assert walk_errors("changes commitlog ENOSPC", attempt) > 5


def test_a_segment_of_somebody_else_is_never_replaced(rig, store):
    rig.put_confirmed(store, b"kept")
    theirs = rig.root / "commitlog" / f"{SEGMENT:020d}"
    theirs.write_bytes(b"theirs")
    for _ in range(2):
        with pytest.raises(FileExistsError):
            store.log.ensure_segment(SEGMENT)
    assert theirs.read_bytes() == b"theirs"


def test_r47_a_rotten_name_of_a_history_is_another_name(rig):
    """A broker that cannot decode the file would never follow or lead again."""
    log = rig.open_master().log
    log.lineage.enter("0f" * 16)
    (rig.root / "commitlog" / ".baton" / "lineage").write_bytes(b"0f\xff\x00")
    log.lineage._name = None
    assert log.lineage.name.isascii() and log.lineage.name not in ("", "0f" * 16)


@pytest.mark.parametrize("content", [b"", b"0f\xff\x00", b"0f\x00"])
def test_g8_a_log_id_that_is_none_is_named_with_its_file(rig, content):
    """A log with another id would pass for a log of another replica."""
    rig.open_master().close()
    path = rig.root / "commitlog" / ".baton" / "log_id"
    path.write_bytes(content)
    with pytest.raises(CorruptLogError, match=r"log_id at offset 0: no log id; move the whole"):
        _ = rig.open().log.log_id
