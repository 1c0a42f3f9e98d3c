"""Files that are small and durable: after a power cut at any moment each is the old or the new one,
and the new one once its write returned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from power_cut import every_power_cut, watching

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import EpochFileCache
from batonmq.replicas_manager.identity import IdentityFile, IncarnationLog, RoleFile
from batonmq.runtime.durable_file import (
    load_with_backup,
    remove_file,
    replace_file,
    replace_with_twin,
    show_file,
    sync_file,
    write_all,
)
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.suspicion import RunMark, SuspectMark, Suspicion


class Case(NamedTuple):
    """`change` takes the file from `before` to `after`, as `read` shows it."""

    prepare: Callable[[Path], object]
    change: Callable[[Path], object]
    read: Callable[[Path], object]
    before: object
    after: object


def text_of(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def both(path: Path) -> tuple[str | None, str | None]:
    return text_of(path), text_of(path.with_name("f.bak"))


def epochs(path: Path) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.start_offset) for entry in EpochFileCache(path).entries]


def epoch_list(path: Path, *settled: EpochEntry, pending: EpochEntry | None = None) -> None:
    cache = EpochFileCache(path)
    for entry in settled:
        cache.append(entry)
    cache.settle()
    if pending:
        cache.append(pending)


def stored_role(path: Path, *master_epochs: int) -> None:
    role = RoleFile(path)
    role.load()
    for master_epoch in master_epochs:
        role.store(master_epoch)


def stored_confirm(path: Path, *offsets: int) -> None:
    checkpoint = StoreCheckpoint(path)
    for offset in offsets:
        checkpoint.confirm_phy_offset = checkpoint.recovery_offset = offset
        checkpoint.flush()


def confirm_of(path: Path) -> tuple[int, int | None]:
    checkpoint = StoreCheckpoint(path)
    return checkpoint.confirm_phy_offset, checkpoint.recovery_offset


def suspicion(path: Path) -> str:
    return SuspectMark(path).reason


ONE, TWO, THREE = EpochEntry(1, 0), EpochEntry(2, 100), EpochEntry(3, 300)
BAD = Suspicion("f", 5, "it is bad", 9)

CASES = {
    "replaced": Case(
        lambda f: f.write_text("old"), lambda f: replace_file(f, b"new"), text_of, "old", "new"
    ),
    "made": Case(lambda f: None, lambda f: replace_file(f, b"new"), text_of, None, "new"),
    "shared": Case(
        lambda f: f.write_text("old"),
        lambda f: replace_file(f, b"new", shared=True),
        text_of,
        "old",
        "new",
    ),
    "removed": Case(lambda f: f.write_text("old"), remove_file, text_of, "old", None),
    "epoch appended": Case(
        lambda f: epoch_list(f, ONE, TWO),
        lambda f: EpochFileCache(f).append(THREE),
        epochs,
        [(1, 0), (2, 100)],
        [(1, 0), (2, 100), (3, 300)],
    ),
    "first epoch": Case(
        lambda f: None, lambda f: EpochFileCache(f).append(ONE), epochs, [], [(1, 0)]
    ),
    "epoch settled": Case(
        lambda f: epoch_list(f, ONE, pending=TWO),
        lambda f: EpochFileCache(f).settle(),
        epochs,
        [(1, 0), (2, 100)],
        [(1, 0), (2, 100)],
    ),
    "epochs cut": Case(
        lambda f: epoch_list(f, ONE, TWO, pending=THREE),
        lambda f: EpochFileCache(f).truncate_suffix_by_offset(100),
        epochs,
        [(1, 0), (2, 100), (3, 300)],
        [(1, 0)],
    ),
    "epochs replaced": Case(
        lambda f: epoch_list(f, ONE, TWO),
        lambda f: EpochFileCache(f).replace_all([ONE, EpochEntry(4, 50)]),
        epochs,
        [(1, 0), (2, 100)],
        [(1, 0), (4, 50)],
    ),
    "role": Case(
        lambda f: stored_role(f, 3),
        lambda f: stored_role(f, 7),
        lambda f: RoleFile(f).load(),
        3,
        7,
    ),
    "first role": Case(
        lambda f: None,
        lambda f: stored_role(f, 7),
        lambda f: RoleFile(f).load(),
        0,
        7,
    ),
    "checkpoint": Case(
        lambda f: stored_confirm(f, 500),
        lambda f: stored_confirm(f, 900),
        confirm_of,
        (500, 500),
        (900, 900),
    ),
    "first checkpoint": Case(
        lambda f: None,
        lambda f: stored_confirm(f, 900),
        confirm_of,
        (0, None),
        (900, 900),
    ),
    "identity": Case(
        lambda f: IdentityFile(f, "c", "b").load(),
        lambda f: (IdentityFile(f, "c", "b").load(), IdentityFile(f, "c", "b").save(2)),
        lambda f: IdentityFile(f, "c", "b").load().broker_id,
        0,
        2,
    ),
    "incarnation": Case(
        lambda f: (IncarnationLog(f).begin("a"), IncarnationLog(f).registered("a")),
        lambda f: IncarnationLog(f).begin("b"),
        text_of,
        "a\n",
        "a\nb\n",
    ),
    "registered": Case(
        lambda f: f.write_text("a\nb\n"),
        lambda f: IncarnationLog(f).registered("b"),
        text_of,
        "a\nb\n",
        "b\n",
    ),
    "run mark": Case(
        lambda f: None,
        lambda f: RunMark("boot", True).write(f),
        RunMark.read,
        None,
        RunMark("boot", True),
    ),
    "suspicion": Case(lambda f: None, lambda f: SuspectMark(f).set(BAD), suspicion, "", str(BAD)),
    "suspicion ended": Case(
        lambda f: SuspectMark(f).set(BAD),
        lambda f: SuspectMark(f).clear(),
        suspicion,
        str(BAD),
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_power_cut_leaves_the_old_content_or_the_new(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    root = tmp_path / "root"
    root.mkdir()
    case.prepare(root / "f")
    cuts = 0
    for what, left, returned in every_power_cut(
        root, lambda folder: case.change(folder / "f"), tmp_path / "left"
    ):
        expected = (case.after,) if returned else (case.before, case.after)
        assert case.read(left / "f") in expected, what
        cuts += 1
    assert cuts >= 4


def test_a_check_code_is_kept_before_it_is_sent(tmp_path: Path) -> None:
    """An id that the controllers gave for a forgotten code is lost."""
    with watching(tmp_path / "root") as cut:
        code = IdentityFile(cut.root / "f", "c", "b").load().check_code
        left = cut.leave(tmp_path / "left")
    assert IdentityFile(left / "f", "c", "b").load().check_code == code


def test_the_previous_content_stays_beside_the_new_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "f").write_text("old")
    (root / "f.bak").write_text("older")

    def change(folder: Path) -> None:
        replace_file(folder / "f", b"new", keep_previous=True)

    for what, left, returned in every_power_cut(root, change, tmp_path / "left"):
        found = both(left / "f")
        assert found == ("new", "old") if returned else found[0] in ("old", "new"), what
        loaded = load_with_backup(left / "f", bytes.decode)
        assert loaded is not None and loaded[0] in ("old", "new"), what


def test_twins_are_both_durable_on_return(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("f", "f.bak"):
        (root / name).write_text("old")
    for what, left, returned in every_power_cut(
        root, lambda folder: replace_with_twin(folder / "f", b"new"), tmp_path / "left"
    ):
        found = both(left / "f")
        assert found == ("new", "new") if returned else set(found) <= {"old", "new"}, what


def test_a_file_is_synced_by_its_name(tmp_path: Path) -> None:
    with watching(tmp_path / "root") as cut:
        path = cut.root / "f"
        replace_file(path, b"12345")
        with path.open("r+b") as file:
            write_all(file.fileno(), b"ab", 1)
        before = cut.leave(tmp_path / "before")
        sync_file(path)
        sync_file(cut.root / "nobody")
        after = cut.leave(tmp_path / "after")
    assert (text_of(before / "f"), text_of(after / "f")) == ("12345", "1ab45")


def test_what_is_only_shown_is_not_promised(tmp_path: Path) -> None:
    with watching(tmp_path / "root") as cut:
        show_file(cut.root / "f", "shown")
        assert text_of(cut.root / "f") == "shown"
        assert text_of(cut.leave(tmp_path / "left") / "f") is None


def test_the_model_loses_what_is_not_synced(tmp_path: Path) -> None:
    """Else nothing here could fail: content without a sync, names without that of their folder."""
    calls: dict[str, Any] = {}
    with watching(tmp_path / "root") as cut:
        from batonmq.runtime import disk

        fd = disk.open(cut.root / "f", 0o102)
        disk.write(fd, b"abc")
        calls["nothing"] = text_of(cut.leave(tmp_path / "1") / "f")
        disk.fsync(fd)
        calls["content"] = text_of(cut.leave(tmp_path / "2") / "f")
        calls["names"] = text_of(cut.leave(tmp_path / "3", names=True) / "f")
        disk.close(fd)
    assert calls == {"nothing": None, "content": None, "names": "abc"}
