"""`mqctl backup` and `restore`: what a backup holds, what is refused, what is left halfway."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import EpochFileCache
from batonmq.mqctl.backup import (
    MANIFEST,
    BackupError,
    StoreSource,
    back_up,
    back_up_to_stream,
    check_backup,
    read_manifest,
    restore,
    restore_from_stream,
)
from batonmq.runtime import disk
from batonmq.runtime.lock_file import FolderLock
from tests.mqctl.conftest import MASTER, SLAVE, FakeCluster, Run
from tests.mqctl.test_mqctl_verify import SEGMENT, change, make_log
from tests.shared.failing_disk import failing, walk_errors

GROUPS_OFFSETS = b'{"offsetTable":{"T@g":{"0":3}}}'
TOPICS = b'{"topicConfigTable":{"T":{}}}'


def nothing(count: int) -> None:
    """No progress is shown."""


def make_store(root: Path, count: int = 50) -> list[int]:
    """A stopped store with a lineage, epochs and tables; the offset of each record."""
    offsets = make_log(root, count)
    (root / "commitlog" / ".baton").mkdir()
    (root / "commitlog" / ".baton" / "lineage").write_text("one-history")
    (root / "commitlog" / ".baton" / "log_id").write_text("one-log")
    (root / "config").mkdir()
    (root / "config" / "consumerOffset.json").write_bytes(GROUPS_OFFSETS)
    (root / "config" / "topics.json").write_bytes(TOPICS)
    (root / "brokerIdentity").write_text("c#broker-a#1")
    (root / "brokerIdentity-secret").write_text("secret")
    (root / "lives").write_text("me")
    cache = EpochFileCache(root / "epochFileCheckpoint")
    cache.append(EpochEntry(1, 0))
    cache.append(EpochEntry(2, offsets[count // 2]))
    return offsets


def log_bytes(root: Path, end: int) -> bytes:
    files = sorted(path for path in (root / "commitlog").iterdir() if path.is_file())
    begin = int(files[0].name)
    return b"".join(path.read_bytes() for path in files)[: end - begin]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_backup_ends_at_its_cut_and_a_store_is_made_of_it(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    cut = offsets[30]
    manifest, added = back_up(StoreSource(tmp_path / "store"), tmp_path / "b", cut, 7, nothing)
    assert (manifest.begin, manifest.end, added) == (0, cut, cut)
    restore(tmp_path / "b", tmp_path / "new", nothing)
    assert log_bytes(tmp_path / "new", cut) == log_bytes(tmp_path / "store", cut)
    behind = log_bytes(tmp_path / "new", 1 << 30)[cut:]
    assert len(log_bytes(tmp_path / "new", 1 << 30)) % SEGMENT == 0
    assert behind == bytes(len(behind)), "nothing above the cut is copied"
    assert (tmp_path / "new" / "config" / "consumerOffset.json").read_bytes() == GROUPS_OFFSETS
    assert (tmp_path / "new" / "config" / "topics.json").read_bytes() == TOPICS
    entries = EpochFileCache(tmp_path / "new" / "epochFileCheckpoint").entries
    assert [(e.epoch, e.start_offset) for e in entries] == [(1, 0), (2, offsets[25])]


def test_epochs_that_begin_at_the_cut_or_later_are_left_out(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    manifest, _ = back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[25], 7, nothing)
    assert manifest.epochs == [(1, 0)]


def test_r17_r47_a_restored_store_is_a_new_log(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[30], 7, nothing)
    restore(tmp_path / "b", tmp_path / "new", nothing)
    names = {path.split("/")[-1] for path in files_of(tmp_path / "new")}
    assert not names & {"brokerIdentity", "brokerIdentity-secret", "lives", "log_id", "lineage"}


def test_a_second_backup_adds_new_bytes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = make_store(tmp_path / "store")
    folder = tmp_path / "b"
    back_up(StoreSource(tmp_path / "store"), folder, offsets[30], 7, nothing)
    written: list[int] = []
    pwrite = disk.pwrite

    def counted(fd: int, data: Any, at: int) -> int:
        if data != b"lock":  # of the folder
            written.append(len(data))
        return pwrite(fd, data, at)

    monkeypatch.setattr(disk, "pwrite", counted)
    monkeypatch.setattr(
        "batonmq.mqctl.backup.replace_file", lambda path, data: path.write_bytes(data)
    )
    _, added = back_up(StoreSource(tmp_path / "store"), folder, offsets[45], 8, nothing)
    assert added == sum(written) == offsets[45] - offsets[30]
    monkeypatch.undo()
    restore(folder, tmp_path / "new", nothing)
    assert log_bytes(tmp_path / "new", offsets[45]) == log_bytes(tmp_path / "store", offsets[45])


def test_what_expired_leaves_the_backup(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[30], 7, nothing)
    (tmp_path / "store" / "commitlog" / f"{0:020}").unlink()
    manifest, _ = back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[45], 8, nothing)
    assert manifest.begin == SEGMENT
    assert not (tmp_path / "b" / "commitlog" / f"{0:020}").exists()
    restore(tmp_path / "b", tmp_path / "new", nothing)


def refused(rule: str, work: Callable[[], object]) -> bool:
    """Does `work` under that rule; whether a call failed, which must be named. Only the close of
    the lock file may fail without an error."""
    failure = None
    with failing(rule) as struck:
        try:
            work()
        except OSError as error:
            failure = error
    if failure is not None:
        assert failure.filename
    else:
        assert not struck or rule.startswith("*")
    return bool(struck)


WRITES = pytest.mark.parametrize(
    ("call", "least"), [("*", 40), ("pwrite", 3), ("fsync", 3), ("replace", 0)]
)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@WRITES
def test_a_failing_disk_leaves_the_backup_before_and_no_half_one(
    tmp_path: Path, before: int, error: str, call: str, least: int
) -> None:
    """Whichever call fails; then the same folder takes a backup."""
    store = tmp_path / "store"
    offsets = make_store(store)

    def attempt(rule: str, number: int) -> bool:
        folder = tmp_path / str(number)
        if before:
            back_up(StoreSource(store), folder, offsets[before], 7, nothing)
        struck = refused(rule, lambda: back_up(StoreSource(store), folder, offsets[45], 8, nothing))
        manifest = read_manifest(folder)
        assert manifest is not None or (struck and not before)
        if manifest is not None:
            assert manifest.end in {offsets[before] or offsets[45], offsets[45]}
            assert check_backup(folder, nothing) == manifest
            assert log_bytes(folder, manifest.end) == log_bytes(store, manifest.end)
        back_up(StoreSource(store), folder, offsets[45], 9, nothing)
        assert check_backup(folder, nothing).end == offsets[45]
        return struck

    assert walk_errors(f"{call} * {error}", attempt) > least


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@WRITES
def test_a_failing_disk_leaves_no_half_store_and_is_named(
    tmp_path: Path, error: str, call: str, least: int
) -> None:
    """Whichever call fails; then a restore takes the same folder."""
    offsets = make_store(tmp_path / "store")
    back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[45], 7, nothing)

    def attempt(rule: str, number: int) -> bool:
        new = tmp_path / str(number)
        struck = refused(rule, lambda: restore(tmp_path / "b", new, nothing))
        if not new.exists():
            restore(tmp_path / "b", new, nothing)
        assert log_bytes(new, offsets[45]) == log_bytes(tmp_path / "store", offsets[45])
        assert not new.with_name(f"{number}.restoring").exists()
        return struck

    assert walk_errors(f"{call} * {error}", attempt) > least


@pytest.mark.parametrize("what", ["flip", "short", "missing", "manifest", "no manifest"])
def test_a_damaged_backup_is_refused(tmp_path: Path, what: str) -> None:
    offsets = make_store(tmp_path / "store")
    folder = tmp_path / "b"
    back_up(StoreSource(tmp_path / "store"), folder, offsets[45], 7, nothing)
    segment, manifest = folder / "commitlog" / f"{SEGMENT:020}", folder / MANIFEST
    data = segment.read_bytes()
    if what == "flip":
        segment.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    elif what == "short":
        segment.write_bytes(data[:-1])
    elif what == "missing":
        segment.unlink()
    elif what == "manifest":
        manifest.write_bytes(manifest.read_bytes().replace(b'"end": ', b'"end": 1'))
    else:
        manifest.unlink()
    with pytest.raises((BackupError, FileNotFoundError)):
        restore(folder, tmp_path / "new", nothing)
    assert not (tmp_path / "new").exists()


def test_damage_in_the_store_is_found_and_no_backup_of_it_counts(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    change(tmp_path / "store", offsets[20] + 90, b"\xff\xff")
    with pytest.raises(BackupError, match="back up another replica"):
        back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[45], 7, nothing)
    assert read_manifest(tmp_path / "b") is None


def test_r47_another_history_does_not_continue_a_backup(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    folder = tmp_path / "b"
    back_up(StoreSource(tmp_path / "store"), folder, offsets[30], 7, nothing)
    before = files_of(folder)
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    (tmp_path / "other" / "commitlog" / ".baton" / "lineage").write_text("another-history")
    with pytest.raises(BackupError, match="another history"):
        back_up(StoreSource(tmp_path / "other"), folder, offsets[45], 8, nothing)
    shutil.copytree(tmp_path / "store", tmp_path / "cut")
    change(tmp_path / "cut", offsets[29] + 90, b"\xff\xff")  # rewritten below the backup's end
    with pytest.raises(BackupError, match="other bytes"):
        back_up(StoreSource(tmp_path / "cut"), folder, offsets[45], 8, nothing)
    with pytest.raises(BackupError, match="confirmed up to"):
        back_up(StoreSource(tmp_path / "store"), folder, offsets[10], 8, nothing)
    assert files_of(folder) == before


def test_a_cut_within_a_record_is_no_backup(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    with pytest.raises(BackupError):
        back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[30] + 1, 7, nothing)
    assert read_manifest(tmp_path / "b") is None


def test_a_store_is_not_overwritten(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[30], 7, nothing)
    with pytest.raises(BackupError, match="is not empty"):
        restore(tmp_path / "b", tmp_path / "store", nothing)


def stream_of(store: Path, end: int) -> bytes:
    out = BytesIO()
    back_up_to_stream(StoreSource(store), out, end, 7, nothing)
    return out.getvalue()


def test_a_stream_holds_the_same(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    stream = stream_of(tmp_path / "store", offsets[30])
    restore_from_stream(BytesIO(stream), tmp_path / "new", nothing)
    back_up(StoreSource(tmp_path / "store"), tmp_path / "b", offsets[30], 7, nothing)
    restore(tmp_path / "b", tmp_path / "by-folder", nothing)
    assert files_of(tmp_path / "new") == files_of(tmp_path / "by-folder")


def test_a_stream_that_ends_early_is_no_backup(tmp_path: Path) -> None:
    offsets = make_store(tmp_path / "store")
    stream = stream_of(tmp_path / "store", offsets[30])
    for end in range(0, len(stream) - 10_240, 512):
        with pytest.raises(BackupError):
            restore_from_stream(BytesIO(stream[:end]), tmp_path / "new", nothing)
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["../escaped", "commitlog/../../escaped", "/escaped", "lineage"])
def test_a_stream_of_a_stranger_writes_nowhere_else(tmp_path: Path, name: str) -> None:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w|") as archive:
        member = tarfile.TarInfo(name)
        member.size = 3
        archive.addfile(member, BytesIO(b"abc"))
    (tmp_path / "at").mkdir()
    with pytest.raises(BackupError, match="is no backup"):
        restore_from_stream(BytesIO(out.getvalue()), tmp_path / "at" / "new", nothing)
    assert not list((tmp_path / "at").iterdir()) and not (tmp_path / "escaped").exists()


def test_the_commands_on_a_stopped_store(mqctl: Run, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    ran = mqctl("backup", str(tmp_path / "store"), str(tmp_path / "b"), "--json")
    assert (ran.code, ran.json["newBytes"]) == (0, ran.json["endOffset"])
    again = mqctl("backup", str(tmp_path / "store"), str(tmp_path / "b"), "--json")
    assert (again.code, again.json["newBytes"]) == (0, 0)
    ran = mqctl("restore", str(tmp_path / "b"), str(tmp_path / "new"), "--json")
    assert (ran.code, ran.json["endOffset"]) == (0, again.json["endOffset"])
    assert mqctl("verifyStore", str(tmp_path / "new")).code == 0
    ran = mqctl("restore", str(tmp_path / "b"), str(tmp_path / "new"), "--json")
    assert ran.code == 1 and "is not empty" in json.loads(ran.out)["error"]
    ran = mqctl("restore", str(tmp_path / "store"), str(tmp_path / "newer"))
    assert ran.code == 1 and "no backup" in ran.err


def test_rights_of_a_backup_do_not_come_back_unsaid_and_its_secrets_stay_private(
    mqctl: Run, tmp_path: Path
) -> None:
    make_store(tmp_path / "store")
    users = b'{"dataVersion":{},"users":{"shop":{"username":"shop","password":"hidden-secret"}}}'
    (tmp_path / "store" / "config" / "users.json").write_bytes(users)
    for command in (("backup", "store", "b"), ("restore", "b", "new"), ("restore", "b", "newer")):
        name, source, target = (command[0], *(str(tmp_path / each) for each in command[1:]))
        json_too = ["--json"] * (command[2] == "newer")
        ran = mqctl(name, source, target, *json_too)
        assert ran.code == 0 and "hidden" not in ran.out + ran.err
        written = [path for path in (tmp_path / command[2]).rglob("*") if path.is_file()]
        assert {path.stat().st_mode & 0o077 for path in written} == {0}, written
        if name == "restore":
            assert "what was revoked since counts again: shop" in ran.err
    assert ran.json["users"] == ["shop"]


@pytest.mark.parametrize("behind", [False, True])
def test_r16_a_slave_that_is_behind_gives_a_whole_backup_and_says_what_it_lacks(
    mqctl: Run, fake: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """The cut is what the slave itself confirmed, though its file holds more."""
    monkeypatch.setattr("batonmq.mqctl.commands.backup.LEVEL_MS", 0)
    offsets = make_store(tmp_path / "store")
    own = offsets[30] if behind else offsets[45]
    fake.log_ends = {MASTER: (offsets[45], offsets[45]), SLAVE: (offsets[45], own)}
    lock = FolderLock(tmp_path / "store" / "lock")
    lock.acquire()
    try:
        ran = mqctl("backup", str(tmp_path / "store"), str(tmp_path / "b"), "-b", SLAVE, "--json")
    finally:
        lock.release()
    lacks = offsets[45] - own
    assert (ran.json["endOffset"], ran.json["behindBytes"]) == (own, lacks)
    assert (ran.code, f"{lacks} bytes behind" in ran.err) == (int(behind), behind)
    assert mqctl("restore", str(tmp_path / "b"), str(tmp_path / "new")).code == 0
    assert log_bytes(tmp_path / "new", own) == log_bytes(tmp_path / "store", own)
