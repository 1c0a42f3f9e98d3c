"""Every kind of disk call of a store fails, at every kind of file: once, or from then on.

A life puts, rolls segments, confirms, flushes, expires, cuts, reads and stops. A first life without
faults notes its disk calls. Then for each (call, kind of file) a position and an error are drawn,
and a life is led in which that call fails. It may pause (R45), end with an error, or notice
nothing; what it acknowledged is served by the next start, and no offset is given twice. The same
for the calls of a start, after a stop and after a kill.
"""

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from failing_disk import failing, walk_errors

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.errors import BatonError
from batonmq.protocol.records.codec import decode_records
from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file
from batonmq.store.errors import IndexFailedError, PutRefused
from batonmq.store.file_handles import UNREADABLE
from lab.cluster.fault_points import _paths
from lab.cluster.up import rounds

pytestmark = pytest.mark.usefixtures("disk_without_waits")

FOREVER_MS = 2**62
SEED = int(os.environ.get("BATONMQ_DISK_SEED", "0"))
PER_GROUP = rounds(1, 12)
LOOKS = ("stat", "listdir", "scandir", "statvfs")
"""Calls of `os` that change nothing, so servers make them without `disk`."""
TOPICS = ("T", "U")
FULL = ("ENOSPC", "EDQUOT", "EMFILE")
BAD = ("EIO", "EROFS", "EUCLEAN", "EBADMSG")


class Life:
    """`acked`: (topic, queue offset) -> (place in the log, body). `error`: what ended it."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.acked: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.cut_at = FOREVER_MS
        self.error: BaseException | None = None
        self.number = 0
        self.store: Any = None

    def lead(self) -> None:
        try:
            self.store = self.rig.open_master()
            self._work()
        except (OSError, BatonError) as error:
            self.error = error
            if self.store is not None:
                self.store._fail(error)  # as the broker does with whatever its store raises
        if self.store is not None:
            self._stop()

    def _stop(self) -> None:
        try:
            self.store.close()
        except (OSError, BatonError) as error:
            self.error = self.error or error

    def _work(self) -> None:
        store = self.store
        store._on_fatal = lambda error: None
        store.checkpoints.before_checkpoint = self._tables
        store.epochs.append(EpochEntry(1, 0))
        self.put(14)
        store.flush()
        self._expire()
        self.put(6)
        self._cut()
        store.epochs.append(EpochEntry(2, store.max_phy_offset))
        self.put(6)
        store.checkpoints.flush_derived()
        for topic in TOPICS:
            self.rig.read_bodies(store, topic)
            with suppress(IndexFailedError, OSError):  # that request fails, nothing else
                store.queries.query_message(topic, "k", 99, 0, FOREVER_MS)

    def _tables(self) -> list[Callable[[], None]]:
        data = b"{%d}" % self.number
        return [lambda: replace_file(self.rig.root / "config" / "topics.json", data)]

    def put(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            body = b"%04d" % self.number + bytes(850)
            topic = TOPICS[self.number % 3 == 0]
            try:
                put = self.rig.put(self.store, body, topic=topic, keys=b"k")
            except PutRefused:
                continue
            end = self.store.end_turn()
            if put.end_offset <= end <= self.store.advance_confirm_offset(end):
                self.acked[topic, put.queue_offset] = (put.physical_offset, body)
            if self.number % 4 == 0:
                self.store.checkpoints.flush_derived()

    def _expire(self) -> None:
        """The first segment, if positions are stated above it."""
        store = self.store
        store.positions.put_if_due()
        store.advance_confirm_offset(store.end_turn())
        if len(store.log.segments) > 1:
            os.utime(store.log.segments[0].path, (0, 0))
        store.expirer.clean_expired(manual=True)

    def _cut(self) -> None:
        """As a slave that has more than its master; nothing of that was acknowledged."""
        store, before = self.store, len(self.acked)
        confirmed = store.confirm_offset
        for number in range(3):
            try:
                self.rig.put(store, b"cut %d" % number)
            except PutRefused:
                break
        store.stop_writes()
        if store.max_phy_offset > confirmed == store.confirm_offset:
            store.slave_log.truncate_to(confirmed)
        store.prepare_master()
        assert before == len(self.acked)


def served(store: Any, topic: str) -> dict[int, bytes]:
    """Queue offset -> body."""
    found: dict[int, bytes] = {}
    offset = store.queries.min_offset_in_queue(topic, 0)
    while (result := store.queries.get_message(topic, 0, offset, 32)).message_count:
        for record in decode_records(b"".join(result.parts)):
            assert record.queue_offset not in found
            found[record.queue_offset] = record.body
        offset = result.next_begin_offset
    return found


def check_next_life(rig: Any, life: Life) -> None:
    store = rig.open()
    store.prepare_master()
    store.advance_confirm_offset(store.max_phy_offset)
    for topic in TOPICS:
        left = {
            offset: body
            for (of, offset), (place, body) in life.acked.items()
            if of == topic and place >= store.min_phy_offset
        }
        found = served(store, topic)
        assert left.items() <= found.items()
        keys = store.queries.query_message(topic, "k", 99, 0, FOREVER_MS).parts
        assert {record.body for record in decode_records(b"".join(keys))} >= set(left.values())
        given = [offset for of, offset in life.acked if of == topic]
        new = rig.put(store, b"new", topic=topic)
        assert new.queue_offset > max((*given, *found), default=-1)
    store.advance_confirm_offset(store.end_turn())
    store.close()
    assert not (rig.root / "abort").exists()
    store = rig.open()
    assert [served(store, topic).popitem()[1] for topic in TOPICS] == [b"new", b"new"]
    store.close()


def kind_of(root: Path, path: str) -> str:
    """A piece of the path that a rule can name: the file or folder below the store's root."""
    if not path.startswith(f"{root}/"):
        return ""
    parts = Path(path).relative_to(root).parts
    if parts[:2] == ("commitlog", ".baton"):
        return ".baton"
    return f"/{parts[0].partition('.tmp')[0]}"


@contextmanager
def noting_calls(root: Path) -> Iterator[Counter[tuple[str, str]]]:
    """How often each call came to each kind of file."""
    counts: Counter[tuple[str, str]] = Counter()

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            for kind in {kind_of(root, path) for path in _paths(name, arguments)}:
                counts[name, kind] += 1
            return real(*arguments)

        return call

    before = disk.replace_calls(
        {name: noting(name, getattr(disk, name)) for name in disk.CALLS if name != "close"}
    )
    try:
        yield counts
    finally:
        disk.replace_calls(before)


def plain_life(rig: Any) -> Counter[tuple[str, str]]:
    """The calls of a life without faults, of which everything is served."""
    rig.root = rig.folder / "plain"
    with noting_calls(rig.root) as counts:
        life = Life(rig)
        life.lead()
    assert life.error is None and len(life.acked) == 26
    check_next_life(rig, life)
    del counts["", ""]
    # All calls at once: then not even the mark for the next start can be made.
    counts["*", "/index"] = sum(count for (_, kind), count in counts.items() if kind == "/index")
    return Counter({group: count for group, count in counts.items() if group[1]})


def places(
    rig: Any, counts: Counter[tuple[str, str]], rng: random.Random
) -> Iterator[tuple[str, str, int]]:
    """For each group (call, kind of file, how many such calls pass), each in a folder of its own,
    which does not exist yet."""
    for (call, kind), count in sorted(counts.items()):
        for after in {rng.randrange(count) for _ in range(PER_GROUP)}:
            rig.root = rig.folder / f"{call}{kind.replace('/', '-')}-{after}"
            yield call, kind, after


@contextmanager
def explained(what: str, life: Life) -> Iterator[None]:
    try:
        yield
    except BaseException as failure:
        failure.add_note(f"BATONMQ_DISK_SEED={SEED}: {what}; ended by {life.error!r}")
        raise


@pytest.mark.parametrize("times", ["once", "from then on"])
@pytest.mark.parametrize("errors", [BAD, FULL], ids=["bad", "full"])
def test_r40_r45_whatever_disk_call_fails_the_next_start_serves_what_was_acknowledged(
    rig, errors, times, caplog
):
    counts = plain_life(rig)
    assert len(counts) > 40, "kinds of calls"
    rng = random.Random(f"{SEED} {errors} {times}")
    struck_lives = 0
    for call, kind, after in places(rig, counts, rng):
        rule = f"{call} {kind} {rng.choice(errors)} after {after}" + " once" * (times == "once")
        life = Life(rig)
        caplog.clear()
        with explained(rule, life):
            with failing(rule):
                life.lead()
            struck_lives += "disk_fault" in caplog.text
            check_life(life)
            assert life.error is None or kind != "/index", "the log needs no index"
            check_next_life(rig, life)
    assert struck_lives > len(counts) // 2


@contextmanager
def looks(root: Path, seen: Callable[[str, str], None]) -> Iterator[None]:
    """Calls `seen(call, kind of file)`, which may raise, before each look at the store's files."""
    plain = {name: getattr(os, name) for name in LOOKS}

    def looking(name: str) -> Callable[..., Any]:
        def look(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            if isinstance(path, (str, Path)) and (kind := kind_of(root, str(path))):
                try:
                    seen(name, kind)
                except OSError as error:
                    disk.named(error, path)
                    raise
            return plain[name](path, *arguments, **named)

        return look

    vars(os).update({name: looking(name) for name in LOOKS})
    try:
        yield
    finally:
        vars(os).update(plain)


@pytest.mark.parametrize("times", ["once", "from then on"])
def test_r40_whatever_look_at_the_disk_fails_the_next_start_serves_what_was_acknowledged(
    rig, times
):
    """`stat`, reading a folder, and asking for free space fail, too, on a bad disk."""
    counts: Counter[tuple[str, str]] = Counter()
    rig.root = rig.folder / "plain"
    with looks(rig.root, lambda *look: counts.update([look])):
        life = Life(rig)
        life.lead()
    assert life.error is None and len(counts) > 15, "kinds of looks"
    rng = random.Random(f"{SEED} {times}")
    for call, kind, after in places(rig, counts, rng):
        left = [after]

        def seen(*look: str, these: Any = (call, kind), left: list[int] = left) -> None:
            if look == these:
                left[0] -= 1
                if left[0] == -1 or (left[0] < 0 and times != "once"):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

        life = Life(rig)
        with explained(f"{call} {kind} {after}", life):
            with looks(rig.root, seen):
                life.lead()
            check_life(life)
            check_next_life(rig, life)


def check_life(life: Life) -> None:
    """What ended it names the error, and is not taken for a clean stop."""
    if life.error is None:
        return
    named = [getattr(errno, name) for name in BAD + FULL]
    assert isinstance(life.error, BatonError) or life.error.errno in named
    assert str(life.rig.root) in str(life.error)
    if life.store is not None:
        assert (life.rig.root / "abort").exists()


@pytest.mark.parametrize("errors", [BAD, FULL], ids=["bad", "full"])
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_r40_a_start_that_cannot_read_its_store_names_the_file_or_serves_everything(
    rig, end, errors, caplog
):
    """It never begins as if there were nothing, and it breaks nothing for the next start."""
    rig.root = rig.folder / "plain"
    life = Life(rig)
    life.store = rig.open_master()
    life._work()
    if end == "stopped":
        life.store.close()
    else:
        rig.kill(life.store)
    left = rig.root
    rig.root = shutil.copytree(left, rig.folder / "noted")
    with noting_calls(rig.root) as counts:
        rig.open().close()
    rng = random.Random(f"{SEED} {end} {errors}")
    struck_starts = 0
    for call, kind, after in places(rig, counts, rng):
        rule = f"{call} {kind or '*'} {rng.choice(errors)} after {after}"
        shutil.copytree(left, rig.root)
        life.error = None
        caplog.clear()
        with explained(rule, life):
            with failing(rule):
                try:
                    store = rig.open()
                except (OSError, BatonError) as error:
                    life.error = error
                    assert str(rig.root) in str(error)
                else:
                    check_served(life, store)
                    with suppress(OSError, BatonError):
                        store.close()
            struck_starts += "disk_fault" in caplog.text
            check_next_life(rig, life)
    assert struck_starts > len(counts) // 2


def check_served(life: Life, store: Any) -> None:
    store.prepare_master()
    store.advance_confirm_offset(store.max_phy_offset)
    for topic in TOPICS:
        found = served(store, topic)
        for (of, offset), (place, body) in life.acked.items():
            if of == topic and place >= store.min_phy_offset:
                assert found[offset] == body


def test_a_start_that_fails_tells_the_next_one_that_the_index_is_gone(rig):
    """The mark goes once the checkpoint says that the log is read from where the index ends."""
    store = rig.open_master()
    rig.put_confirmed(store, b"a", keys=b"k")
    store.close()
    (rig.root / "index" / UNREADABLE).mkdir()
    with failing("pwrite checkpoint EIO"), pytest.raises(OSError, match="checkpoint"):
        rig.open()
    assert (rig.root / "index" / UNREADABLE).exists()
    store = rig.open()
    assert not (rig.root / "index" / UNREADABLE).exists()
    assert store.queries.query_message("T", "k", 9, 0, FOREVER_MS).parts


def test_an_index_is_built_from_the_whole_log_where_the_checkpoint_is_gone(rig):
    store = rig.open_master()
    for number in range(30):
        rig.put_confirmed(store, b"%d" % number + bytes(850), keys=b"k")
    assert len(store.log.segments) > 3
    store.close()
    (rig.root / "index" / UNREADABLE).mkdir()
    (rig.root / "checkpoint").unlink()
    store = rig.open()
    assert len(store.queries.query_message("T", "k", 99, 0, FOREVER_MS).parts) == 30


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_r22_a_cut_lives_without_an_index_whose_folder_fails_as_a_whole(rig, ends):
    """No mark can be made there. The next start must not take old entries for those of new bytes:
    records up to the last old one would count as indexed."""
    store = rig.open_master()
    end = rig.put_confirmed(store, b"kept", keys=b"k")
    for _ in range(5):
        rig.put(store, b"old", keys=b"o")
    store.end_turn()
    store.advance_confirm_offset(store.max_phy_offset)
    store._files.index.flush()
    with failing("* index EIO"):
        store.slave_log.truncate_to(end, unclean_epoch=True)
        assert store.health.index_failure and not store.health.has_failed
        store.prepare_master()
        rig.put_confirmed(store, b"new", keys=b"k")
        store.checkpoints.flush_derived()
        rig.kill(store) if ends == "killed" else store.close()
    store = rig.open_master()
    store.advance_confirm_offset(store.max_phy_offset)
    found = store.queries.query_message("T", "k", 9, 0, FOREVER_MS).parts
    assert [record.body for record in decode_records(b"".join(found))] == [b"kept", b"new"]


@pytest.mark.parametrize("kind", ["consumequeue", "index"])
def test_r45_wherever_a_derived_file_lacks_a_descriptor_it_waits_for_one(rig, kind):
    """Also the sync, which opens the file again: nothing was lost, so the broker need not end."""

    def attempt(rule, number):
        rig.root = rig.folder / f"life-{number}"
        store = rig.open_master()
        end = rig.put_confirmed(store, b"a", keys=b"k")
        with failing(rule) as struck:
            for _ in range(4):
                store.checkpoints.flush_derived()
        assert not (store.health.has_failed or store.health.index_failure)
        assert store._files.checkpoint.recovery_offset == end
        store.close()
        assert not (rig.root / "abort").exists()
        return bool(struck)

    assert walk_errors(f"open {kind} EMFILE", attempt) > 1
