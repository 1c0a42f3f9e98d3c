"""R37: a cut that fails anywhere is finished by the next start, and nothing happens before that.

Each kind of cut is tried on a copy of one folder, with the disk failing at its first, second, …
call. Then the store is asked for everything that a broker may still ask of it, closed as a broker
closes it, and opened again. A cut has happened whole by then, or not at all.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from failing_disk import failing, walk_errors
from kill_walk import walk_kills

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.errors import BatonError, CorruptLogError
from batonmq.store.errors import CutUnfinishedError, StoreFailedError
from batonmq.store.message_store import MessageStore
from lab.cluster.up import rounds
from tests.shared.cut_steps import STEPS

pytestmark = pytest.mark.usefixtures("disk_without_waits")

RULES = ["changes * ENOSPC", "* * EIO"]
KINDS = ["unclean", "unverified", "master", "damaged", "again"]
"""A clean cut takes the same steps as an unclean one, which also cuts queues and index."""
SEGMENT = 8192
RECORDS = 24
STRIDE = rounds(5, 1)


@dataclass
class Case:
    """A folder to cut in, the cut, and what must be left of it.

    `log` is what lies in its files, [0, end), when the cut begins; `prepare` brings the last of it
    there. The first `confirmed` bytes were confirmed. `more` is what a master sends for [cut_at, …)
    up to the last of RECORDS messages.
    """

    folder: Path
    log: bytes
    cut_at: int
    confirmed: int
    more: bytes
    cut: Callable[[MessageStore], object]
    epochs_after: list[int]
    prepare: Callable[[MessageStore], object] = lambda store: None
    keeps_aside: bool = True


def file_bytes(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((root / "commitlog").glob("0*")))


def spoiled(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def written_by(rig, name: str) -> tuple[bytes, list[int]]:
    """What a master of that name wrote, and where its records end; the first ten are everyone's."""
    master = rig.beside(name).open_master()
    puts = []
    for n in range(RECORDS):
        body = b"%s %d " % (b"both" if n < 10 else name.encode(), n)
        puts.append(rig.put(master, body.ljust(900, b"."), uniq_key=b"K%d" % n))
    master.end_turn()
    data = rig.log_of(master)
    master.close()
    return data, [put.end_offset for put in puts]


@pytest.fixture(scope="module")
def cases(rigs_in) -> Iterator[dict[str, Case]]:
    with rigs_in() as make_rig:
        yield cases_in(make_rig())


def cases_in(rig) -> dict[str, Case]:
    """By the kind of the cut. The replica holds 20 records of the old master in three files. Epoch
    2 began with the 15th. 7 of them were confirmed, for an unclean cut 12."""
    old, ends = written_by(rig, "old")
    new, _ = written_by(rig, "new")
    point, end = ends[9], ends[19]
    assert old[:point] == new[:point] != old
    whole, next_record = old[:end], old[end : ends[20]]

    def replica(name: str, confirmed: int) -> Path:
        rig.root = rig.folder / name
        slave = rig.open()
        slave.epochs.append(EpochEntry(1, 0))
        slave.slave_log.append_replicated(0, whole)
        slave.epochs.append(EpochEntry(2, ends[14]))
        slave.advance_confirm_offset(confirmed)
        slave.checkpoints.flush_derived()
        slave.close()
        return rig.root

    def append_bad(store: MessageStore) -> None:
        with pytest.raises(CorruptLogError):
            store.slave_log.append_replicated(end, spoiled(next_record, 400))

    few = replica("few", ends[6])
    damaged = rig.folder / "damaged"
    shutil.copytree(few, damaged)
    rig.root = damaged
    at = point + 300
    rig.flip(rig.segment(at // SEGMENT), at % SEGMENT)
    return {
        "clean": Case(
            few, whole, point, ends[6], new[point:],
            lambda store: store.slave_log.truncate_to(point), [1],
        ),
        "unclean": Case(
            replica("many", ends[11]), whole, point, ends[11], new[point:],
            lambda store: store.slave_log.truncate_to(point, unclean_epoch=True), [1],
        ),
        "unverified": Case(
            few, whole + spoiled(next_record, 400), end, ends[6], old[end:],
            lambda store: store.slave_log.drop_unverified(), [1, 2], append_bad, keeps_aside=False,
        ),
        "master": Case(
            few, whole + next_record[:100], end, ends[6], old[end:],
            lambda store: store.prepare_master(), [1, 2],
            lambda store: store.slave_log.append_replicated(end, next_record[:100]),
        ),
        "damaged": Case(
            damaged, spoiled(whole, at), point, ends[6], new[point:],
            lambda store: store.trust.discard_damaged_tail(), [1],
        ),
        "again": Case(
            few, whole, 0, ends[6], new,
            lambda store: store.slave_log.reset_for_empty_start(0), [],
        ),
    }  # fmt: skip


class Attempt:
    """A copy of a case's folder, and the store on it, ready for the cut."""

    def __init__(self, rig, case: Case, root: Path) -> None:
        self.rig, self.case = rig, case
        rig.root = root
        if not root.exists():
            shutil.copytree(case.folder, root)
        self.begun = False

    def open(self) -> MessageStore:
        store = self.store = self.rig.open()
        self.fatal: list[BaseException] = []
        store._on_fatal = self.fatal.append
        return store

    def files(self) -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in sorted(self.rig.root.rglob("*")) if p.is_file()}

    @property
    def intent(self) -> Path:
        return self.rig.root / "truncation.intent"

    def check_does_nothing(self) -> None:
        """Whatever is asked of a store that failed: nothing is taken, synced, confirmed or led."""
        store, case = self.store, self.case
        before, end = self.files(), store.max_phy_offset
        offsets = store.confirm_offset, store.log.flushed_offset
        asked: list[Callable[[], object]] = [
            lambda: case.cut(store),
            lambda: store.slave_log.append_replicated(end, case.more),
            lambda: store.slave_log.truncate_to(case.cut_at, unclean_epoch=True),
            lambda: store.slave_log.truncate_to(end),
            lambda: store.slave_log.drop_unverified(),
            lambda: store.slave_log.reset_for_empty_start(0),
            lambda: store.trust.discard_damaged_tail(),
            lambda: store.prepare_master(),
            lambda: store.prepare_master(discard_damage=True),
            lambda: store.flush(),
            lambda: store.log.append(b"not taken"),
            lambda: self.rig.put(store, b"not taken"),
        ]
        for ask in asked:
            with pytest.raises((BatonError, OSError)):
                ask()
        store.advance_confirm_offset(len(case.log))
        store.checkpoints.flush_derived()
        store.end_turn()
        assert (store.confirm_offset, store.log.flushed_offset) == offsets
        assert self.files() == before
        assert self.fatal, "the process ends"

    def contents(self) -> tuple[object, ...]:
        """The log, and its epochs."""
        return self.rig.log_of(self.store), self.store.epochs.entries

    def check_not_begun(self, before: tuple[object, ...]) -> None:
        """The cut was refused: this is the store that it was."""
        store = self.store
        assert not self.intent.exists() and not store.health.has_failed and not self.fatal
        assert self.contents() == before
        assert not list((self.rig.root / "truncated").glob("*/*"))

    def check_cut_or_not(self) -> None:
        """After a restart: the cut has happened whole, or not at all. Nothing confirmed is gone."""
        store, case = self.store, self.case
        assert not self.intent.exists()
        cut_at, data = case.cut_at, self.rig.log_of(store)
        assert data == case.log[: len(data)] and len(data) >= cut_at
        assert store.confirm_offset >= min(case.confirmed, cut_at)
        assert self.rig.read_bodies(store)[:7] or not cut_at
        is_cut = not any(file_bytes(self.rig.root)[cut_at:])
        assert is_cut or not self.begun, "what was begun is finished"
        if is_cut:
            assert [entry.epoch for entry in store.epochs.entries] == case.epochs_after
        if self.begun and case.keeps_aside:
            folder = max((self.rig.root / "truncated").iterdir())
            kept = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
            assert kept[: len(case.log) - cut_at] == case.log[cut_at:]

    def follow(self) -> None:
        """As a slave does: cut what is not to be trusted (after EIO more than the cut took) and
        what is not cut yet, and take the master's bytes."""
        store, case = self.store, self.case
        end = store.trust.discard_damaged_tail()
        assert end >= case.cut_at or "the disk failed" in store.trust.reason
        store.slave_log.truncate_to(case.cut_at, unclean_epoch=True)
        end = store.max_phy_offset
        store.slave_log.append_replicated(end, (case.log[: case.cut_at] + case.more)[end:])
        store.epochs.append(EpochEntry(3, case.cut_at))

    def lead(self) -> None:
        """As an elected replica does: its log counts as it is, and new messages come behind it."""
        store = self.store
        end = store.prepare_master(discard_damage=True)
        store.epochs.append(EpochEntry(3, end))
        while self.rig.put(store, b"led").queue_offset < RECORDS - 1:
            pass
        store.end_turn()

    def go_on(self, how: str, *, kill: bool) -> None:
        """Confirms all RECORDS messages, and starts again: they are all there."""
        getattr(self, how)()
        store, whole = self.store, self.rig.log_of(self.store)
        store.advance_confirm_offset(len(whole))
        self.check_whole(whole)
        self.restart(kill=kill)
        self.store.advance_confirm_offset(len(whole))
        self.check_whole(whole)
        assert self.store.epochs.last_epoch == 3
        assert not self.intent.exists()

    def check_whole(self, log: bytes) -> None:
        store = self.store
        assert self.rig.log_of(store) == log
        assert store.confirm_offset == store.max_phy_offset == len(log)
        assert len(self.rig.read_bodies(store)) == RECORDS

    def restart(self, *, kill: bool) -> None:
        if kill:
            self.rig.kill(self.store)
        else:
            self.store.close()
        self.open()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_r37_a_cut_that_meets_an_error_is_finished_by_the_next_start(rig, cases, rule, kind):
    case, seen = cases[kind], {"refused": 0, "unfinished": 0}

    def attempt(text: str, number: int) -> bool:
        at = Attempt(rig, case, rig.folder / f"attempt-{number}")
        store = at.open()
        case.prepare(store)
        before, outcome = at.contents(), "done"
        with failing(text) as struck:
            try:
                case.cut(store)
            except StoreFailedError:
                outcome = "unfinished"
            except OSError:
                outcome = "refused"
        if outcome == "unfinished":
            seen[outcome] += 1
            at.begun = at.intent.exists()
            at.check_does_nothing()
            at.restart(kill=number % 3 == 0)
            at.check_cut_or_not()
        elif outcome == "refused":
            seen[outcome] += 1
            at.check_not_begun(before)
        else:
            assert not store.health.has_failed
        at.go_on(("follow", "lead")[number % 2], kill=number % 4 < 2)
        return bool(struck)

    walk_errors(rule, attempt)
    assert seen["unfinished"] > 10
    assert bool(seen["refused"]) == case.keeps_aside


@pytest.mark.parametrize("kind", KINDS)
def test_r37_a_cut_that_is_killed_at_any_disk_call_is_finished_by_the_next_start(rig, cases, kind):
    case = cases[kind]

    def cut(folder: Path) -> None:
        at = Attempt(rig, case, folder)
        store = at.open()
        case.prepare(store)
        case.cut(store)

    def prepare(number: int) -> Path:
        folder = rig.folder / f"killed-{number}"
        shutil.copytree(case.folder, folder)
        return folder

    def check(folder: Path) -> None:
        at = Attempt(rig, case, folder)
        at.begun = at.intent.exists()
        at.open()
        at.check_cut_or_not()
        number = int(folder.name.partition("-")[2])
        at.go_on(("follow", "lead")[number % 2], kill=number % 4 < 2)

    assert walk_kills(prepare, cut, check) > 20


@pytest.mark.parametrize("step", STEPS[:-1])
@pytest.mark.parametrize("rule", RULES)
def test_r37_a_start_that_cannot_finish_the_cut_serves_nothing_and_says_why(rig, cases, rule, step):
    """1. A cut fails behind `step`. 2. So does the start, at each of its disk calls. 3. There is
    space again: the next start finishes the cut."""
    case = cases["clean"]
    at = Attempt(rig, case, rig.folder / "pending")
    store = at.open()

    def fail(done: str) -> None:
        if done == step:
            raise OSError(28, "No space left on device")

    store.truncation.after_step = fail
    with pytest.raises((CutUnfinishedError, OSError)):
        case.cut(store)
    store.abandon()
    pending = rig.root
    messages: list[str] = []

    def attempt(text: str, number: int) -> bool:
        rig.root = rig.folder / f"start-{number}"
        shutil.copytree(pending, rig.root)
        again = Attempt(rig, case, rig.root)
        again.begun = True
        with failing(text) as struck:
            try:
                again.open()
            except (OSError, BatonError) as error:
                if isinstance(error, CutUnfinishedError):
                    messages.append(str(error))
        rig.root = shutil.copytree(rig.root, rig.folder / f"again-{number}")
        again.open()
        again.check_cut_or_not()
        again.go_on("follow", kill=number % 2 == 0)
        return bool(struck)

    assert walk_errors(rule, attempt, STRIDE) > 20
    assert messages
    assert all("No space left" in m or "Input/output" in m for m in messages)
    assert all(f"on the disk of {rig.folder}" in m or "see to the disk" in m for m in messages)


@pytest.mark.parametrize("kind", ["master", "unverified", "damaged"])
@pytest.mark.parametrize("rule", RULES)
def test_r24_a_start_after_a_kill_may_fail_at_any_disk_call(rig, cases, rule, kind):
    """1. The process is killed with a torn tail, a bad record at the end, or damage in the middle.
    2. The start fails at its n-th disk call. 3. The next one works: nothing confirmed is gone."""
    case = cases[kind]
    at = Attempt(rig, case, rig.folder / "live")
    case.prepare(at.open())
    rig.kill(at.store)
    killed = rig.root

    def attempt(text: str, number: int) -> bool:
        rig.root = shutil.copytree(killed, rig.folder / f"start-{number}")
        with failing(text) as struck, suppress(OSError, BatonError):
            rig.open()
        again = Attempt(rig, case, shutil.copytree(rig.root, rig.folder / f"again-{number}"))
        again.open()
        again.check_cut_or_not()
        again.go_on(("follow", "lead")[number % 2], kill=number % 4 < 2)
        return bool(struck)

    walk_errors(rule, attempt, STRIDE)
