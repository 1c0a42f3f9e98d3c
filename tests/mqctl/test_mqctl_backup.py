"""`mqctl backup` and `restore`: what a backup holds, what is refused, what is left halfway."""

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
from batonmq.mqctl import backup
from batonmq.runtime import disk
from batonmq.runtime.lock_file import FolderLock
from tests.mqctl.conftest import MASTER, SLAVE, FakeCluster, Run
from tests.mqctl.test_mqctl_verify import SEGMENT, change, make_log
from tests.shared.failing_disk import failing, walk_errors

GROUPS_OFFSETS = b'{"offsetTable":{"T@g":{"0":3}}}'
TOPICS = b'{"topicConfigTable":{"T":{}}}'


def nothing(count: int) -> None:
    """No progress is shown."""


class Store:
    """A stopped store of 50 records with a lineage, two epochs and tables."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.offsets = make_log(root, 50)
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
        cache.append(EpochEntry(2, self.offsets[25]))

    def back_up(self, folder: Path, records: int) -> tuple[backup.Manifest, int]:
        """The first `records` of them."""
        return backup.back_up(
            backup.StoreSource(self.root), folder, self.offsets[records], 7, nothing
        )

    def log(self, records: int) -> bytes:
        return log_bytes(self.root, self.offsets[records])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def log_bytes(root: Path, end: int) -> bytes:
    files = sorted(path for path in (root / "commitlog").iterdir() if path.is_file())
    begin = int(files[0].name)
    return b"".join(path.read_bytes() for path in files)[: end - begin]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_r17_r47_a_backup_ends_at_its_cut_and_a_new_log_is_made_of_it(
    store: Store, tmp_path: Path
) -> None:
    """Epochs that begin at the cut or later are left out, and so is who the broker was."""
    manifest, added = store.back_up(tmp_path / "b", 30)
    cut = store.offsets[30]
    assert (manifest.begin, manifest.end, added) == (0, cut, cut)
    new = tmp_path / "new"
    backup.restore(tmp_path / "b", new, nothing)
    whole = log_bytes(new, 1 << 30)
    assert whole[:cut] == store.log(30) and len(whole) % SEGMENT == 0
    assert whole[cut:] == bytes(len(whole) - cut), "nothing above the cut is copied"
    assert (new / "config" / "consumerOffset.json").read_bytes() == GROUPS_OFFSETS
    assert (new / "config" / "topics.json").read_bytes() == TOPICS
    entries = EpochFileCache(new / "epochFileCheckpoint").entries
    assert [(e.epoch, e.start_offset) for e in entries] == [(1, 0), (2, store.offsets[25])]
    assert store.back_up(tmp_path / "earlier", 25)[0].epochs == [(1, 0)]
    names = {path.split("/")[-1] for path in files_of(new)}
    assert not names & {"brokerIdentity", "brokerIdentity-secret", "lives", "log_id", "lineage"}


def test_a_second_backup_adds_new_bytes_only(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "b"
    store.back_up(folder, 30)
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
    _, added = store.back_up(folder, 45)
    assert added == sum(written) == store.offsets[45] - store.offsets[30]
    monkeypatch.undo()
    backup.restore(folder, tmp_path / "new", nothing)
    assert log_bytes(tmp_path / "new", store.offsets[45]) == store.log(45)


def test_what_expired_leaves_the_backup(store: Store, tmp_path: Path) -> None:
    store.back_up(tmp_path / "b", 30)
    (store.root / "commitlog" / f"{0:020}").unlink()
    manifest, _ = store.back_up(tmp_path / "b", 45)
    assert manifest.begin == SEGMENT
    assert not (tmp_path / "b" / "commitlog" / f"{0:020}").exists()
    backup.restore(tmp_path / "b", tmp_path / "new", nothing)


def refused(rule: str, work: Callable[[], object], silent: list[str]) -> bool:
    """Does `work` under that rule; whether a call failed. The failure names its file, or the rule
    is added to `silent`."""
    with failing(rule) as struck:
        try:
            work()
        except OSError as error:
            assert error.filename
        else:
            silent += [rule] * bool(struck)
    return bool(struck)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_failing_disk_leaves_the_backup_before_and_no_half_one(
    store: Store, tmp_path: Path, before: int, error: str
) -> None:
    """Whichever call fails; then the same folder takes a backup."""
    silent: list[str] = []
    end = store.offsets[45]

    def attempt(rule: str, number: int) -> bool:
        folder = tmp_path / str(number)
        if before:
            store.back_up(folder, before)
        struck = refused(rule, lambda: store.back_up(folder, 45), silent)
        manifest = backup.read_manifest(folder)
        assert manifest is not None or (struck and not before)
        if manifest is not None:
            assert manifest.end in {store.offsets[before] or end, end}
            assert backup.check_backup(folder, nothing) == manifest
            assert log_bytes(folder, manifest.end) == log_bytes(store.root, manifest.end)
        store.back_up(folder, 45)
        assert backup.check_backup(folder, nothing).end == end
        return struck

    assert walk_errors(f"* * {error}", attempt) > 40
    assert len(silent) == 1, "the close of the lock file"


def test_a_failing_disk_leaves_no_half_store_and_is_named(store: Store, tmp_path: Path) -> None:
    """Whichever call fails; then a restore takes the same folder."""
    store.back_up(tmp_path / "b", 45)
    silent: list[str] = []

    def attempt(rule: str, number: int) -> bool:
        new = tmp_path / str(number)
        struck = refused(rule, lambda: backup.restore(tmp_path / "b", new, nothing), silent)
        if not new.exists():
            backup.restore(tmp_path / "b", new, nothing)
        assert log_bytes(new, store.offsets[45]) == store.log(45)
        assert not new.with_name(f"{number}.restoring").exists()
        return struck

    assert walk_errors("* * EIO", attempt) > 40
    assert silent == []


@pytest.mark.parametrize("what", ["flip", "short", "missing", "manifest", "no manifest"])
def test_a_damaged_backup_is_refused(store: Store, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "b"
    store.back_up(folder, 45)
    segment, manifest = folder / "commitlog" / f"{SEGMENT:020}", folder / backup.MANIFEST
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
    with pytest.raises((backup.BackupError, FileNotFoundError)):
        backup.restore(folder, tmp_path / "new", nothing)
    assert not (tmp_path / "new").exists()


def test_damage_in_the_store_and_a_cut_within_a_record_are_found_and_no_backup_counts(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(backup.BackupError):
        backup.back_up(
            backup.StoreSource(store.root), tmp_path / "b", store.offsets[30] + 1, 7, nothing
        )
    assert backup.read_manifest(tmp_path / "b") is None
    change(store.root, store.offsets[20] + 90, b"\xff\xff")
    with pytest.raises(backup.BackupError, match="back up another replica"):
        store.back_up(tmp_path / "b", 45)
    assert backup.read_manifest(tmp_path / "b") is None


def test_r47_another_history_does_not_continue_a_backup(store: Store, tmp_path: Path) -> None:
    folder, offsets = tmp_path / "b", store.offsets
    store.back_up(folder, 30)
    before = files_of(folder)
    shutil.copytree(store.root, tmp_path / "other")
    (tmp_path / "other" / "commitlog" / ".baton" / "lineage").write_text("another-history")
    shutil.copytree(store.root, tmp_path / "cut")
    change(tmp_path / "cut", offsets[29] + 90, b"\xff\xff")  # rewritten below the backup's end
    for root, end, why in (
        (tmp_path / "other", offsets[45], "another history"),
        (tmp_path / "cut", offsets[45], "other bytes"),
        (store.root, offsets[10], "confirmed up to"),
    ):
        with pytest.raises(backup.BackupError, match=why):
            backup.back_up(backup.StoreSource(root), folder, end, 8, nothing)
    assert files_of(folder) == before


def stream_of(store: Store) -> bytes:
    out = BytesIO()
    backup.back_up_to_stream(backup.StoreSource(store.root), out, store.offsets[30], 7, nothing)
    return out.getvalue()


def test_a_stream_holds_the_same(store: Store, tmp_path: Path) -> None:
    backup.restore_from_stream(BytesIO(stream_of(store)), tmp_path / "new", nothing)
    store.back_up(tmp_path / "b", 30)
    backup.restore(tmp_path / "b", tmp_path / "by-folder", nothing)
    assert files_of(tmp_path / "new") == files_of(tmp_path / "by-folder")


def test_a_stream_that_ends_early_is_no_backup(store: Store, tmp_path: Path) -> None:
    stream = stream_of(store)
    for end in range(0, len(stream) - 10_240, 512):
        with pytest.raises(backup.BackupError):
            backup.restore_from_stream(BytesIO(stream[:end]), tmp_path / "new", nothing)
        assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("name", ["../escaped", "commitlog/../../escaped", "/escaped", "lineage"])
def test_a_stream_of_a_stranger_writes_nowhere_else(tmp_path: Path, name: str) -> None:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w|") as archive:
        member = tarfile.TarInfo(name)
        member.size = 3
        archive.addfile(member, BytesIO(b"abc"))
    (tmp_path / "at").mkdir()
    with pytest.raises(backup.BackupError, match="is no backup"):
        backup.restore_from_stream(BytesIO(out.getvalue()), tmp_path / "at" / "new", nothing)
    assert not list((tmp_path / "at").iterdir()) and not (tmp_path / "escaped").exists()


@pytest.mark.usefixtures("store")
def test_the_commands_on_a_stopped_store(mqctl: Run, tmp_path: Path) -> None:
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
    mqctl: Run, store: Store, tmp_path: Path
) -> None:
    users = b'{"dataVersion":{},"users":{"shop":{"username":"shop","password":"hidden-secret"}}}'
    (store.root / "config" / "users.json").write_bytes(users)
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
    mqctl: Run,
    fake: FakeCluster,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behind: bool,
) -> None:
    """The cut is what the slave itself confirmed, though its file holds more."""
    monkeypatch.setattr("batonmq.mqctl.commands.backup.LEVEL_MS", 0)
    records, end = 30 if behind else 45, store.offsets[45]
    own = store.offsets[records]
    fake.log_ends = {MASTER: (end, end), SLAVE: (end, own)}
    lock = FolderLock(store.root / "lock")
    lock.acquire()
    try:
        ran = mqctl("backup", str(store.root), str(tmp_path / "b"), "-b", SLAVE, "--json")
    finally:
        lock.release()
    assert (ran.json["endOffset"], ran.json["behindBytes"]) == (own, end - own)
    assert (ran.code, f"{end - own} bytes behind" in ran.err) == (int(behind), behind)
    assert mqctl("restore", str(tmp_path / "b"), str(tmp_path / "new")).code == 0
    assert log_bytes(tmp_path / "new", own) == store.log(records)
