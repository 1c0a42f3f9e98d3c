"""G7: what a node stored before it answered is there after a power cut; files only synced in part
are not trusted. `power_cut` keeps of each file and folder what was synced, and nothing else."""

import shutil
from pathlib import Path

import pytest
from failing_disk import failing, walk_errors
from power_cut import CHANGES, every_power_cut, watching
from pysyncobj.config import SERIALIZER_STATE
from raft_files import opened, snapshots

from batonmq.controller.raft.journal import DurableJournal
from batonmq.controller.raft.membership import (
    Greeting,
    MembersChangedError,
    Membership,
    check_members,
)
from batonmq.controller.raft.snapshot import LogEntry, decode_snapshot


def entry(index: int, term: int = 1) -> LogEntry:
    return b"command %d" % index, index, term


def add(journal: DurableJournal, *entries: LogEntry) -> None:
    for command, index, term in entries:
        journal.add(command, index, term)


@pytest.mark.parametrize(
    "stored",
    [[(7, None), (7, "n2")], [(7, "n2"), (8, None)]],
    ids=[
        "a vote in the term that was stored before",
        "a term without a vote after one with a vote",
    ],
)
def test_g7_what_is_stored_last_of_term_and_vote_is_durable(tmp_path, stored):
    """pysyncobj stores a new term first, without a vote, and the vote in a second call."""
    with watching(tmp_path / "raft") as cut:
        journal = opened(cut.root / "n1")
        for term, voted_for in stored:
            journal.setCurrentTerm(term, voted_for)
        left = cut.leave(tmp_path / "left")
        journal.close()
    again = opened(left / "n1")
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == stored[-1]
    again.close()


SYNCED = [entry(index) for index in range(1, 7)]


def _append(journal: DurableJournal) -> list[LogEntry]:
    add(journal, entry(7))
    journal.sync()
    return [*SYNCED, entry(7)]


def _commit(journal: DurableJournal) -> list[LogEntry]:
    add(journal, entry(7))
    journal.setRaftCommitIndex(7)
    return [*SYNCED, entry(7)]


def _replace(journal: DurableJournal) -> list[LogEntry]:
    journal.deleteEntriesFrom(4)
    add(journal, entry(5, 2), entry(6, 2), entry(7, 2))
    journal.sync()
    return [*SYNCED[:4], entry(5, 2), entry(6, 2), entry(7, 2)]


def _replace_by_fewer(journal: DurableJournal) -> list[LogEntry]:
    journal.deleteEntriesFrom(4)
    add(journal, entry(5, 2))
    journal.sync()
    return [*SYNCED[:4], entry(5, 2)]


def _cut(journal: DurableJournal) -> list[LogEntry]:
    journal.deleteEntriesFrom(3)
    journal.sync()
    return SYNCED[:3]


def _close(journal: DurableJournal) -> list[LogEntry]:
    add(journal, entry(7))
    journal.close()
    return [*SYNCED, entry(7)]


@pytest.mark.parametrize("act", [_append, _commit, _replace, _replace_by_fewer, _cut, _close])
def test_g7_each_change_of_the_log_is_durable_on_return_and_whole_before(act, tmp_path):
    root, after = tmp_path / "raft", []
    journal = opened(root)
    journal.setCurrentTerm(1, "n1")
    add(journal, *SYNCED)
    journal.close()

    def change(folder: Path) -> None:
        after[:] = [act(opened(folder))]

    cuts = 0
    for what, left, returned in every_power_cut(root, change, tmp_path / "left"):
        again = opened(left)
        found = again[:]
        again.close()
        cuts += 1
        assert found == (after[0] if returned else SYNCED), what
    assert cuts >= 4


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_r40_what_a_start_shows_after_a_failed_sync_is_on_the_disk(call, tmp_path):
    """A failed sync ends the node. The kernel shows the lost bytes to the next start, and its next
    sync returns 0 over them: what this start answers by must be written again. Each sync of a life
    fails once; so does one of a start, which ends it."""

    def attempt(rule: str, number: int) -> bool:
        with failing(rule) as struck, watching(tmp_path / f"raft-{number}") as cut:
            for _ in range(2):  # the second one after a clean stop
                try:
                    _life(cut.root)
                except (AssertionError, OSError):
                    assert struck
                    again = opened(cut.root, None)
                    shown = again[:], again.getCurrentTerm(), again.getVotedForNodeId()
                    shown_joining = again.joining
                    left = opened(cut.leave(tmp_path / f"left-{number}"))
                    found = left[:], left.getCurrentTerm(), left.getVotedForNodeId()
                    assert (found, left.joining) == (shown, shown_joining), number
                    again.close()
                    left.close()
        return bool(struck)

    assert walk_errors(f"{call} * EIO", attempt) > 6


def _life(root: Path) -> None:
    journal = opened(root)
    term = journal.getCurrentTerm() + 1
    journal.setCurrentTerm(term, "n2")
    for index in range(1 + len(journal), 4 + len(journal)):
        add(journal, entry(index, term))
        journal.sync()
    journal.deleteEntriesFrom(len(journal) - 1)
    journal.join()
    journal.close()


FULL = [*((call, error) for call in ("open", *CHANGES) for error in ("ENOSPC", "EDQUOT"))]


@pytest.mark.parametrize(("call", "error"), [*FULL, ("open", "EMFILE"), ("open", "ENFILE")])
def test_r53_a_full_disk_at_any_call_ends_no_node_and_loses_nothing(call, error, tmp_path):
    """What a failed sync should have written is gone for good unless it is written again."""

    def attempt(rule: str, number: int) -> bool:
        root, heads = tmp_path / f"raft-{number}", [None, None, (entry(3), entry(4, 2))]
        images: list[tuple[int, Path, list[LogEntry], int]] = []
        with failing(rule) as struck, watching(root) as cut:
            try:
                journal = opened(root)
            except OSError:
                return bool(struck)  # a start does not wait: the next one begins again
            journal.join()
            for step, act in enumerate((_first, _second, _shortened)):
                act(journal)
                assert journal.sync() or journal.sync() or journal.sync(), "there is room again"
                left, killed = (tmp_path / f"{how}-{number}-{step}" for how in ("cut", "killed"))
                shutil.copytree(root, killed)
                for image in (cut.leave(left), killed):
                    images.append((step, image, journal[:], journal.getCurrentTerm()))
            journal.close()
        for step, left, entries, term in images:
            again = opened(left, heads[step])
            assert (again[:], again.getCurrentTerm(), again.joining) == (entries, term, False)
            again.close()
        return bool(struck)

    walk_errors(f"{call} * {error}", attempt)


def _first(journal: DurableJournal) -> None:
    journal.setCurrentTerm(1, "n2")
    add(journal, entry(1), entry(2), entry(3))


def _second(journal: DurableJournal) -> None:
    journal.setCurrentTerm(2, "n2")
    add(journal, entry(4, 2), entry(5, 2))


def _shortened(journal: DurableJournal) -> None:
    journal.deleteEntriesTo(2)
    add(journal, entry(6, 2))


@pytest.mark.parametrize(("call", "error"), [*FULL, ("open", "EMFILE")])
def test_r53_a_full_disk_keeps_a_snapshot_from_being_stored_only_for_a_while(
    call, error, tmp_path, monkeypatch
):
    monkeypatch.setattr("batonmq.controller.raft.snapshot._FULL_RETRY_S", 0)

    def attempt(rule: str, number: int) -> bool:
        with failing(rule) as struck, watching(tmp_path / str(number)) as cut:
            taken = snapshots(cut.root, "new")
            failures = []
            for _ in range(3):
                if taken.checkSerializing()[0] == SERIALIZER_STATE.NOT_SERIALIZING:
                    taken.serialize((None, entry(7), entry(6), None), 6)
                    failures.append(taken.failure)
            assert taken.last_index == 7 and not all(failures)
            assert any(failures) == bool(struck), "it is in health meanwhile"
            left = cut.leave(tmp_path / f"left-{number}") / "snapshot"
            assert decode_snapshot(left.read_bytes())[0] == {"state": "new"}
        return bool(struck)

    walk_errors(f"{call} * {error}", attempt)


def test_r40_a_start_on_a_full_disk_needs_no_room(tmp_path):
    """A quorum whose disk filled up starts again: its files are written again in place."""
    journal = opened(tmp_path)
    journal.setCurrentTerm(1, "n1")
    add(journal, *SYNCED)
    journal.close()
    with failing("room * ENOSPC"):
        again = opened(tmp_path)
    assert again[:] == SYNCED
    again.close()


def test_g7_a_prefix_that_was_cut_leaves_the_old_journal_or_the_new(tmp_path):
    root = tmp_path / "raft"
    journal = opened(root)
    journal.setCurrentTerm(1, "n1")
    add(journal, *SYNCED)
    journal.close()
    head = SYNCED[2], SYNCED[3]

    def shorten(folder: Path) -> None:
        opened(folder).deleteEntriesTo(2)

    for what, left, returned in every_power_cut(root, shorten, tmp_path / "left"):
        again = opened(left, head)
        assert again[:] == SYNCED[2:], what
        again.close()
        if returned:
            begun = (left / "journal").read_bytes()
            assert b"command 1" not in begun and b"command 6" in begun


def test_g7_having_joined_is_durable_with_the_entries_that_completed_the_log(tmp_path):
    """With them or not at all, also if the log is shortened afterwards."""
    root = tmp_path / "raft"
    journal = opened(root)
    journal.setCurrentTerm(1, None)
    add(journal, *SYNCED)
    journal.close()

    def join(folder: Path) -> None:
        joining = opened(folder)
        add(joining, entry(7))
        joining.join()
        joining.sync()
        size = joining.size_bytes
        assert joining.sync() and joining.size_bytes == size, "nothing had changed"

    for what, left, returned in every_power_cut(root, join, tmp_path / "left"):
        again = opened(left)
        assert (again.joining, again[6:]) == ((False, [entry(7)]) if returned else (True, [])), what
        again.deleteEntriesTo(2)
        again.close()
        again = opened(left, (SYNCED[2], SYNCED[3]))
        assert again.joining is not returned
        again.close()


def test_g7_a_snapshot_is_durable_before_the_log_is_shortened(tmp_path):
    """pysyncobj cuts the log once `checkSerializing` says success."""
    root = tmp_path / "raft"
    root.mkdir()

    snapshots(root, "old").serialize((None, entry(4), entry(3), ()), 3)

    def take(folder: Path) -> None:
        taken = snapshots(folder, "new")
        taken.serialize((None, entry(9), entry(8), ()), 8)
        assert taken.checkSerializing() == (SERIALIZER_STATE.SUCCESS, 8)

    for what, left, returned in every_power_cut(root, take, tmp_path / "left"):
        state, _ = decode_snapshot((left / "snapshot").read_bytes())
        assert state["state"] in (("new",) if returned else ("old", "new")), what


def test_g7_a_leaders_snapshot_is_durable_before_it_is_loaded(tmp_path):
    leader = snapshots(tmp_path, "whole")
    leader.serialize((None, entry(9), entry(8), ()), 8)
    leader.checkSerializing()
    with watching(tmp_path / "follower") as cut:
        follower = snapshots(cut.root, "unused")
        loadable = False
        while not loadable:
            loadable = follower.setTransmissionData(leader.getTransmissionData("n2"))
        left = cut.leave(tmp_path / "left")
    assert decode_snapshot((left / "snapshot").read_bytes())[0] == {"state": "whole"}


def test_the_members_of_a_log_are_durable_before_it_begins(tmp_path):
    """Else a shorter list could make one node a majority by itself."""
    three = Membership("c", ("n0@h:1", "n1@h:2", "n2@h:3"))
    with watching(tmp_path / "raft") as cut:
        check_members(cut.root, three)
        left = cut.leave(tmp_path / "left")
    check_members(left, three)
    with pytest.raises(MembersChangedError):
        check_members(left, Membership("c", ("n0@h:1",)))


def test_members_that_differ_in_one_address_may_form_no_quorum():
    three = Membership("c", ("n0@h:1", "n1@h:2", "n2@h:3"))

    def greeting(*members: str, cluster: str = "c") -> Greeting:
        return Greeting(address="h:1", cluster=cluster, members=members, nonce="0" * 64)

    assert three.difference(greeting("n2@h:3", "n0@h:1", "n1@h:2")) == "", "in any order"
    for other in (("n0@h:1", "n1@h:2", "n2@h:4"), ("n0@h:1", "n1@h:2"), (*three.members, "n3@h:4")):
        assert "its members are" in three.difference(greeting(*other))
    assert "cluster 'd'" in three.difference(greeting(*three.members, cluster="d"))
    three.log = "log-1"
    assert three.difference(greeting(*three.members)) == "", "a new node, or an earlier version"
