"""DurableJournal: what it wrote is there after a kill, what it did not sync is not half there."""

import errno
import os
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from failing_disk import failing
from raft_files import opened

from batonmq.controller.raft.journal import DurableJournal, JournalDamage, read_journal
from batonmq.controller.raft.snapshot import LogEntry
from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk


def filled(folder: Path, count: int) -> DurableJournal:
    journal = opened(folder)
    journal.setCurrentTerm(1, "n0")
    for index in range(1, count + 1):
        journal.add(b"command %d" % index, index, 1)
    journal.sync()
    return journal


def killed(folder: Path) -> Path:
    """A copy of the folder as a kill at this moment leaves it."""
    return Path(shutil.copytree(folder, folder.with_name("killed"), dirs_exist_ok=True))


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that were synced, in order."""
    seen: list[int] = []
    fdatasync = disk.fdatasync

    def counted(fd: int) -> None:
        seen.append(fd)
        fdatasync(fd)

    monkeypatch.setattr(disk, "fdatasync", counted)
    return seen


def test_cut_and_add_is_one_group_and_agreeing_entries_are_not_written_again(tmp_path, syncs):
    journal = filled(tmp_path, 4)
    before, size = len(syncs), journal.size_bytes
    journal.deleteEntriesFrom(1)
    for index in range(2, 5):
        journal.add(b"command %d" % index, index, 1)
    journal.sync()
    assert (len(syncs), journal.size_bytes) == (before, size), "nothing had changed"
    journal.deleteEntriesFrom(2)
    journal.add(b"other 3", 3, 2)
    journal.sync()
    assert len(syncs) == before + 1
    journal.close()


def test_a_journal_beside_a_snapshot_begins_with_the_entries_of_the_snapshot(tmp_path):
    journal = filled(tmp_path, 10)
    head = (journal[5], journal[6])
    journal.close()
    again = opened(tmp_path, head)
    assert (again[0], again[1], len(again)) == (*head, 5)
    assert again.getRaftCommitIndex() == head[1][1]
    assert again.holds(10, 1)
    assert again.holds(2, 0), "in the snapshot"
    assert not again.holds(10, 2) and not again.holds(11, 1)
    again.close()


def test_a_snapshot_that_the_journal_did_not_follow_takes_its_place(tmp_path):
    """A leader's snapshot was stored, then the node died before its journal began with it: what
    the journal holds is older, or was never committed."""
    heads: list[tuple[LogEntry, LogEntry]] = [
        ((b"a", index, 3), (b"b", index + 1, 3)) for index in (40, 9, 4)
    ]
    for number, head in enumerate(heads):
        filled(tmp_path / str(number), 10).close()
        for _ in range(2):
            again = opened(tmp_path / str(number), head)
            assert again[:] == list(head)
            assert again.getRaftCommitIndex() == head[1][1]
            again.close()


def test_a_gap_between_snapshot_and_journal_is_fatal(tmp_path):
    """An older copy of the snapshot was put back, or none."""
    journal = filled(tmp_path, 10)
    early, late = (journal[1], journal[2]), (journal[5], journal[6])
    journal.close()
    opened(tmp_path, late).close()
    near = (((b"a", 4, 1), (b"b", 5, 1)), ((b"b", 5, 1), late[0]))
    for head in (early, *near):
        what = f"begins with entry 6, but the snapshot ends with {head[1][1]}"
        with pytest.raises(JournalDamage, match=what):
            opened(tmp_path, head)
    assert opened(tmp_path, late)[:2] == list(late), "a refused start has changed nothing"
    with pytest.raises(JournalDamage, match="no snapshot holds what came before"):
        opened(tmp_path)


def test_g7_a_journal_that_is_gone_is_not_a_new_one(tmp_path):
    journal = filled(tmp_path, 4)
    head = (journal[1], journal[2])
    journal.close()
    (tmp_path / "journal").unlink()
    for snapshot in (None, head):
        with pytest.raises(JournalDamage, match="is missing beside the other files"):
            opened(tmp_path, snapshot)


def test_r53_a_journal_that_a_full_disk_kept_long_is_not_continued_behind_a_gap(tmp_path):
    """Other nodes committed entries that are in the snapshot, and not in this file."""
    journal = filled(tmp_path, 3)
    with failing("pwrite * ENOSPC"):
        for index in range(4, 7):
            journal.add(b"command %d" % index, index, 1)
        assert not journal.sync()
        journal.deleteEntriesTo(4)
    assert journal.sync()
    kept = journal[:]
    again = opened(killed(tmp_path), (kept[0], kept[1]))
    assert again[:] == kept and len(kept) == 2
    for each in (journal, again):
        each.close()


def test_r53_without_room_for_a_vote_nothing_that_follows_counts_as_durable(tmp_path):
    journal = filled(tmp_path, 2)
    with failing("fsync meta.tmp ENOSPC"):
        journal.setCurrentTerm(9, "n2")
        assert not journal.sync()
    assert journal.sync()
    again = opened(killed(tmp_path))
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (9, "n2")
    for each in (journal, again):
        each.close()


def test_r53_what_was_replaced_on_a_full_disk_is_written_once_there_is_room(tmp_path):
    """Also if the log was to be shortened meanwhile."""
    journal = filled(tmp_path, 3)
    with failing("pwrite * ENOSPC"):
        journal.deleteEntriesFrom(2)
        journal.add(b"other 3", 3, 2)
        assert not journal.sync()
        journal.deleteEntriesTo(1)
    assert journal.sync()
    journal.close()
    assert opened(tmp_path)[:] == [(b"command 1", 1, 1), (b"command 2", 2, 1), (b"other 3", 3, 2)]


def test_r53_a_start_on_a_full_disk_continues_no_journal_that_the_snapshot_replaces(tmp_path):
    """A kill came between a leader's snapshot and the new journal. An entry that is acknowledged
    behind the snapshot would be cut from the old file."""
    filled(tmp_path, 6).close()
    head = ((b"a", 9, 2), (b"b", 10, 2))
    with failing("open journal.tmp ENOSPC once"):
        journal = opened(tmp_path, head)
    journal.add(b"acknowledged", 11, 2)
    assert journal.sync()
    journal.close()
    assert opened(tmp_path, head)[:] == [*head, (b"acknowledged", 11, 2)]


def test_a_close_that_fails_loses_nothing_and_is_not_done_twice(tmp_path, monkeypatch):
    """The number of the descriptor may be that of another file by then."""
    journal = filled(tmp_path, 2)
    close = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(disk, "close", close)
    journal.close()
    journal.close()
    close.assert_called_once()


def test_damage_in_the_middle_is_named_and_not_cut(tmp_path):
    journal = opened(tmp_path)
    journal.setCurrentTerm(1, None)
    for index in range(1, 4):
        journal.add(b"command %d" % index, index, 1)
        journal.sync()
    journal.close()
    data = bytearray((tmp_path / "journal").read_bytes())
    data[30] ^= 0xFF
    (tmp_path / "journal").write_bytes(data)
    # A BatonError: a start that meets it says so in one line.
    with pytest.raises(BatonError, match="at offset 8: a damaged group"):
        opened(tmp_path)


def test_a_bad_vote_is_damage(tmp_path):
    filled(tmp_path, 2).close()
    (tmp_path / "meta").write_bytes(b"garbage")
    with pytest.raises(JournalDamage, match="meta: checksum differs"):
        opened(tmp_path)


def test_torn_or_flipped_images_give_a_prefix_or_are_refused(tmp_path):
    """3,600 images: cut at any byte, one byte flipped, or a stretch of zeros as a lost page leaves
    it. Never a wrong entry, never a gap; and what is refused is named. The reader
    is the one that a start uses."""
    rng = random.Random(20260117)
    source = tmp_path / "source"
    journal = opened(source)
    journal.setCurrentTerm(1, None)
    states = [[]]
    index = 0
    for _ in range(12):
        if index > 3 and rng.random() < 0.3:
            keep = rng.randrange(1, index)
            journal.deleteEntriesFrom(keep)
            index = keep
        for _ in range(rng.randrange(1, 4)):
            index += 1
            journal.add(rng.randbytes(rng.randrange(1, 40)), index, rng.randrange(1, 5))
        journal.sync()
        states.append(journal[:])
    journal.close()
    data = (source / "journal").read_bytes()
    refused = cut = 0
    for trial in range(3_600):
        image = bytearray(data)
        if trial % 3 == 0:
            image = image[: rng.randrange(8, len(image))]
        elif trial % 3 == 1:
            image[rng.randrange(len(image))] ^= 1 << rng.randrange(8)
        else:
            begin = rng.randrange(8, len(image))
            end = min(begin + rng.randrange(1, 200), len(image))
            image[begin:end] = bytes(end - begin)
        try:
            content = read_journal(bytes(image), source / "journal")
        except JournalDamage as damage:
            assert str(source / "journal") in str(damage)
            refused += 1
            continue
        assert content.entries in states
        if trial % 3 == 0:
            cut += 1
            assert content.end <= len(image)
    assert refused > 1_000
    assert cut == 1_200, "a torn tail is never damage"


def test_a_torn_tail_is_cut_off(tmp_path):
    """Else it would stand behind the groups of this process, for a later start to judge."""
    filled(tmp_path, 3).close()
    path = tmp_path / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(range(1, 200)))
    opened(tmp_path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_disk_that_refuses_the_journal_ends_the_node(tmp_path, call):
    journal = filled(tmp_path, 2)
    journal.add(b"x", 3, 1)
    why = r"cannot write the log: .*journal: Input/output error; the disk fails"
    with failing(f"{call} * EIO"), pytest.raises(AssertionError, match=why):
        journal.setRaftCommitIndex(3)
    journal.close()


def test_a_disk_that_refuses_the_vote_or_a_new_file_ends_the_node(tmp_path):
    journal = filled(tmp_path, 4)
    why = r"cannot store term and vote: .*meta\.tmp: Input/output error; the disk fails"
    with failing("fsync * EIO"):
        with pytest.raises(AssertionError, match=why):
            journal.setCurrentTerm(9, "n2")
        with pytest.raises(AssertionError, match="cannot write the log again"):
            journal.deleteEntriesTo(2)
    again = opened(killed(tmp_path))
    assert (again.getCurrentTerm(), len(again)) == (1, 4), "the old files stand"
    again.close()


def test_g7_a_journal_that_lost_its_entries_beside_a_snapshot_is_damage(tmp_path):
    """A snapshot's journal begins with the snapshot's last entries, and is replaced as a whole: a
    file cut down to its first bytes has lost what this node acknowledged."""
    head = ((b"a", 7, 2), (b"b", 8, 2))
    journal = opened(tmp_path)
    journal.setCurrentTerm(2, "n1")
    journal.clear()
    journal.add(*head[0])
    journal.add(*head[1])
    journal.add(b"c", 9, 2)
    journal.sync()
    journal.close()
    with (tmp_path / "journal").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(JournalDamage, match="holds no entry, but there is a snapshot"):
        opened(tmp_path, head)


def test_an_entry_that_does_not_follow_the_last_one_is_damage(tmp_path):
    """Committed entries would move to other indexes."""
    journal = filled(tmp_path, 3)
    journal.add(b"behind a gap", 5, 1)
    journal.close()
    with pytest.raises(JournalDamage, match="entry 5 behind 3"):
        opened(tmp_path)
