"""Appending in place: what a crash, a cut-off write or a rotten slot leaves of the epoch list."""

import errno
import itertools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import SLOT_SIZE, SLOTS, EpochFileCache, decode_entries
from batonmq.runtime import disk, durable_file

FIRST = [(1, 100), (2, 300)]


def starts(cache: EpochFileCache) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.start_offset) for entry in cache.entries]


def in_file(cache: EpochFileCache) -> list[tuple[int, int]]:
    return [(e.epoch, e.start_offset) for e in decode_entries(cache.path.read_bytes())]


def redo_path(cache: EpochFileCache) -> Path:
    return cache.path.with_name(cache.path.name + ".redo")


@pytest.fixture
def cache(tmp_path: Path) -> EpochFileCache:
    """Both files hold epochs 1 and 2."""
    cache = EpochFileCache(tmp_path / "epochFileCheckpoint")
    for epoch, start in FIRST:
        assert cache.append(EpochEntry(epoch, start))
    cache.settle()
    assert in_file(cache) == FIRST
    return cache


class Crash(Exception):
    """The process ends here."""


@contextmanager
def crash_before(step: int) -> Iterator[list[str]]:
    """The process ends before its n-th write, sync or rename; yields the steps that were done."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patched:

        def guard(name: str) -> None:
            real = getattr(os, name)

            def guarded(*args: object, **more: object) -> object:
                if len(done) + 1 == step:
                    raise Crash
                done.append(name)
                return real(*args, **more)

            patched.setattr(disk, name, guarded)

        for name in ("pwrite", "fsync", "fdatasync", "replace"):
            guard(name)
        yield done


def survivor(path: Path, change: str, crash_at: int) -> tuple[EpochFileCache, bool]:
    """`change` on the list at `path` by a process that ends before step `crash_at`, if it comes to
    that; then the list as the next process finds it."""
    cache = EpochFileCache(path)
    crashed = False
    with crash_before(crash_at):
        try:
            perform(cache, change)
        except Crash:
            crashed = True
    return EpochFileCache(path), crashed


def perform(cache: EpochFileCache, change: str) -> None:
    verb, _, number = change.partition(" ")
    if verb == "append":
        cache.append(EpochEntry(int(number), 100 * int(number)))
    elif verb == "cut":
        drop_from(cache, int(number))
    elif verb == "expire":
        cache.truncate_prefix_by_offset(100 * int(number))
    else:
        cache.settle()


def drop_from(cache: EpochFileCache, epoch: int) -> None:
    cache.replace_all([entry for entry in cache.entries if entry.epoch < epoch])


def test_r2_an_epoch_is_durable_with_one_sync_in_place(cache: EpochFileCache) -> None:
    """What every failover waits for: no rename, no sync of a folder."""
    with crash_before(99) as steps:
        assert cache.append(EpochEntry(3, 500))
    assert steps == ["pwrite", "fdatasync"]
    assert in_file(cache) == FIRST
    again = EpochFileCache(cache.path)
    assert starts(again) == [*FIRST, (3, 500)]
    assert in_file(cache) == [*FIRST, (3, 500)], "the next start brings the file up to it"
    restarted, descriptors = EpochFileCache(cache.path), os.listdir("/proc/self/fd")
    with crash_before(99) as steps:
        assert restarted.append(EpochEntry(4, 600))
    assert steps == ["pwrite", "fdatasync"], "after a restart, too"
    assert os.listdir("/proc/self/fd") == descriptors


def test_settling_brings_both_files_up_to_the_list(cache: EpochFileCache) -> None:
    cache.append(EpochEntry(3, 500))
    cache.append(EpochEntry(4, 500))
    assert not cache.is_settled
    cache.settle()
    assert cache.is_settled
    assert in_file(cache) == [*FIRST, (3, 500), (4, 500)]
    backup = durable_file.backup_path(cache.path)
    assert backup.read_bytes() == cache.path.read_bytes()


CHANGES = (
    ("append 3",),
    ("append 3", "append 4"),
    ("append 3", "append 4", "cut 4"),
    ("append 3", "settle", "append 4"),
    ("append 3", "settle", "cut 3", "append 5"),
    ("append 3", "cut 3", "append 5"),
    ("append 3", "settle", "cut 3", "settle", "append 4", "cut 4", "append 5"),
    ("append 3", "append 4", "expire 3", "append 5", "settle"),
    ("append 3", "settle", "append 4", "settle", "cut 4", "cut 3"),
)


@pytest.mark.parametrize("changes", CHANGES, ids=" ".join)
def test_r25_a_crash_at_any_step_leaves_the_list_before_or_after_it(
    changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each change the process ends before each of its steps; the next one finds what was, or
    what was to be, and the rest of the changes leads where it leads without a crash."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(disk, name, lambda fd: None)  # steps, but nobody cuts the power here
    crashes = 0
    for number in range(len(changes)):
        for step in itertools.count(1):
            folder = tmp_path / f"{number}-{step}"
            path = folder / "epochFileCheckpoint"
            cache = EpochFileCache(path)
            for epoch, start in FIRST:
                cache.append(EpochEntry(epoch, start))
            for change in changes[:number]:
                perform(cache, change)
            before = starts(cache)
            again, crashed = survivor(path, changes[number], step)
            perform(cache, changes[number])
            after = starts(cache)
            assert starts(again) in (before, after), (changes[number], step)
            if not crashed:
                assert starts(again) == after
                break
            crashes += 1
            perform(again, changes[number])
            for change in changes[number + 1 :]:
                perform(again, change)
                assert starts(EpochFileCache(path)) == starts(again)
    assert crashes > len(changes)


def test_r25_what_was_cut_off_does_not_come_back(cache: EpochFileCache) -> None:
    """The file returns to a content that a record once continued: that record has ended."""
    for epoch in (3, 4, 5):
        cache.append(EpochEntry(epoch, 500))
        cache.settle()
        drop_from(cache, epoch)
        assert in_file(cache) == FIRST
        assert starts(EpochFileCache(cache.path)) == FIRST
    cache.append(EpochEntry(6, 500))
    drop_from(cache, 6)
    assert starts(EpochFileCache(cache.path)) == FIRST


def test_a_record_of_a_list_that_is_gone_continues_no_new_one(cache: EpochFileCache) -> None:
    """An operator removed both files; the new life of this store begins like the old one."""
    cache.append(EpochEntry(3, 500))
    cache.path.unlink()
    durable_file.backup_path(cache.path).unlink()
    fresh = EpochFileCache(cache.path)
    assert starts(fresh) == []
    fresh.replace_all([EpochEntry(*entry) for entry in FIRST])
    assert starts(EpochFileCache(cache.path)) == FIRST


def test_a_write_that_is_cut_off_leaves_the_record_before_it(cache: EpochFileCache) -> None:
    """Any prefix of the sectors of the second append, and any garbage in one, leaves the first."""
    cache.append(EpochEntry(3, 500))
    before = redo_path(cache).read_bytes()
    cache.append(EpochEntry(4, 600))
    after = redo_path(cache).read_bytes()
    changed = [at for at in range(SLOTS) if slot(before, at) != slot(after, at)]
    assert len(changed) == SLOTS // 2
    for at in changed:
        for torn in (b"", slot(after, at)[:7], os.urandom(SLOT_SIZE)):
            data = bytearray(before)
            data[at * SLOT_SIZE : (at + 1) * SLOT_SIZE] = torn.ljust(SLOT_SIZE, b"\0")
            folder = copy_of(cache, bytes(data))
            assert starts(EpochFileCache(folder)) == [*FIRST, (3, 500)]
    data = bytearray(before)
    for at in changed:
        data[at * SLOT_SIZE : (at + 1) * SLOT_SIZE] = bytes(SLOT_SIZE)
    folder = copy_of(cache, bytes(data))
    assert starts(EpochFileCache(folder)) == [*FIRST, (3, 500)], "both copies are torn"


def test_a_rotten_slot_has_a_copy(cache: EpochFileCache) -> None:
    cache.append(EpochEntry(3, 500))
    data = redo_path(cache).read_bytes()
    for at in range(SLOTS):
        rotten = bytearray(data)
        rotten[at * SLOT_SIZE + 3] ^= 0x20
        assert starts(EpochFileCache(copy_of(cache, bytes(rotten)))) == [*FIRST, (3, 500)]


def slot(data: bytes, at: int) -> bytes:
    return data[at * SLOT_SIZE : (at + 1) * SLOT_SIZE]


def copy_of(cache: EpochFileCache, redo: bytes) -> Path:
    """The store's files elsewhere, with `redo` as they would be found."""
    folder = cache.path.parent / f"copy-{random.randbytes(6).hex()}"
    folder.mkdir()
    path = folder / cache.path.name
    for source in (cache.path, durable_file.backup_path(cache.path)):
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / redo_path(cache).name).write_bytes(redo)
    return path


def test_a_list_too_long_for_a_slot_is_written_to_the_files(cache: EpochFileCache) -> None:
    known = list(FIRST)
    for epoch in range(3, 200):
        entry = (epoch, epoch * 10**15)
        assert cache.append(EpochEntry(*entry))
        known.append(entry)
        assert starts(EpochFileCache(copy_of(cache, redo_path(cache).read_bytes()))) == known


def test_either_copy_alone_is_continued(cache: EpochFileCache) -> None:
    cache.append(EpochEntry(3, 500))
    for gone in (cache.path, durable_file.backup_path(cache.path)):
        path = copy_of(cache, redo_path(cache).read_bytes())
        path.with_name(gone.name).unlink()
        assert starts(EpochFileCache(path)) == [*FIRST, (3, 500)]


def test_copies_that_differ_are_both_replaced(cache: EpochFileCache) -> None:
    """Java's `.bak` is one list behind: a record could continue only one of them."""
    backup = durable_file.backup_path(cache.path)
    backup.write_bytes(b"1\n0\n1-100\n")
    again = EpochFileCache(cache.path)
    assert again.append(EpochEntry(3, 500))
    assert backup.read_bytes() == cache.path.read_bytes()
    assert in_file(again) == [*FIRST, (3, 500)]


def test_a_full_disk_puts_settling_off(
    cache: EpochFileCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.append(EpochEntry(3, 500))

    def full(fd: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "pwrite", full)
        cache.settle()
        assert "epoch_file_not_settled" in caplog.text
        with pytest.raises(OSError, match="no space"):
            cache.append(EpochEntry(4, 600))
    assert starts(cache) == [*FIRST, (3, 500)]
    cache.settle()
    assert in_file(cache) == [*FIRST, (3, 500)]
    assert cache.append(EpochEntry(5, 700))
    assert starts(EpochFileCache(cache.path)) == [*FIRST, (3, 500), (5, 700)]


def test_r40_a_sync_that_fails_in_settling_is_no_lack_of_room(
    cache: EpochFileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised: the process ends, and the next one reads what the disk has."""
    cache.append(EpochEntry(3, 500))

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(disk, "fsync", broken)
    with pytest.raises(OSError, match="input/output"):
        cache.settle()
