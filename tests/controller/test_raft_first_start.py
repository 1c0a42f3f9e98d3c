"""kill -9 at every step of a controller's start: the next start works, and forgets nothing."""

import os
import shutil
from pathlib import Path
from typing import Literal

import pytest
from kill_walk import walk_kills
from raft_files import fatal, snapshots

from batonmq.controller.raft.journal import DurableJournal, JournalDamage
from batonmq.controller.raft.membership import Membership, check_members
from batonmq.controller.raft.snapshot import LogEntry
from batonmq.runtime.secret_file import make_password, read_passwords

NO_OP = b"\x01"
MEMBERS = Membership("c", ("n0@host:1",))
Moment = Literal["before", "during"]
MOMENTS: tuple[Moment, ...] = ("before", "during")


def first_start(folder: Path) -> DurableJournal:
    """What RaftLog.start does with a folder, and pysyncobj's first entry."""
    journal = DurableJournal(folder, None, fatal)
    check_members(folder, MEMBERS)
    if not len(journal):
        journal.add(NO_OP, 1, journal.getCurrentTerm())
        journal.sync()
    return journal


def elected(folder: Path) -> DurableJournal:
    """A first start up to the first command of a leader of term 1."""
    journal = first_start(folder)
    if journal.getCurrentTerm() == 0:
        journal.setCurrentTerm(1, "n0")
    journal.join()
    if len(journal) == 1:
        journal.add(b"first command", 2, 1)
    journal.sync()
    return journal


@pytest.mark.parametrize("moment", MOMENTS)
def test_g7_a_first_start_killed_at_any_step_is_followed_by_another(tmp_path, moment):
    def check(folder: Path) -> None:
        journal = elected(folder)
        assert journal[:] == [(NO_OP, 1, 0), (b"first command", 2, 1)]
        assert (journal.getCurrentTerm(), journal.joining) == (1, False)
        journal.close()
        first_start(folder).close()

    kills = walk_kills(lambda n: tmp_path / str(n), elected, check, moment)
    assert kills >= {"before": 20, "during": 4}[moment]


@pytest.mark.parametrize(("term", "joins"), [(0, False), (1, False), (0, True)])
def test_g7_a_journal_without_its_vote_is_new_only_in_term_0(tmp_path, term, joins):
    """Folders that an interrupted first start left: the journal with its first entry, no meta."""
    journal = first_start(tmp_path)
    if term:
        journal.setCurrentTerm(term, "n0")
        journal.add(b"acknowledged", 2, term)
    if joins:
        journal.join()
    journal.close()
    (tmp_path / "meta").unlink()
    if term or joins:
        with pytest.raises(JournalDamage, match="does not know how it voted"):
            first_start(tmp_path)
        return
    again = first_start(tmp_path)
    assert (again[:], again.joining) == ([(NO_OP, 1, 0)], True)
    again.close()
    assert (tmp_path / "meta").exists()


def opened(folder: Path) -> DurableJournal:
    head = snapshots(folder).head
    journal = DurableJournal(folder, head, fatal)
    check_members(folder, MEMBERS)
    return journal


@pytest.mark.parametrize("moment", MOMENTS)
def test_g7_a_snapshot_killed_at_any_step_loses_no_entry(tmp_path, moment):
    """A snapshot up to entry 8 of 10, then the journal shortened, as compaction does it."""
    entries: list[LogEntry] = [(NO_OP, 1, 0), *((b"command %d" % i, i, 1) for i in range(2, 11))]
    whole = tmp_path / "whole"
    journal = first_start(whole)
    journal.setCurrentTerm(1, "n0")
    journal.join()
    for entry in entries[1:]:
        journal.add(*entry)
    journal.close()

    def prepared(number: int) -> Path:
        return shutil.copytree(whole, tmp_path / str(number))

    def compact(folder: Path) -> None:
        journal = opened(folder)
        position = 7 - (journal[0][1] - 1)
        snapshots(folder).serialize((None, journal[position], journal[position - 1], None), 7)
        journal.deleteEntriesTo(position - 1)
        journal.close()

    def check(folder: Path) -> None:
        for again in range(2):
            journal = opened(folder)
            assert journal[:] == entries[-len(journal) :] and len(journal) >= 4
            assert (journal.getCurrentTerm(), journal.joining) == (1, False)
            journal.close()
            if not again:
                compact(folder)

    kills = walk_kills(prepared, compact, check, moment)
    assert kills >= {"before": 10, "during": 2}[moment]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_password_is_whole_or_not_there(tmp_path, moment):
    """`batonmq up` makes one where there is none: a half one would stop every start after it."""

    def made(folder: Path) -> None:
        path = folder / "password"
        folder.mkdir(exist_ok=True)
        if not path.exists():
            make_password(path)
        read_passwords(path)
        assert os.stat(path).st_mode & 0o777 == 0o600

    kills = walk_kills(lambda n: tmp_path / str(n), made, made, moment)
    assert kills >= {"before": 4, "during": 1}[moment]
