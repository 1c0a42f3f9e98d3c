"""R2, R25: whichever disk call of a change of the epoch list fails, what is appended next stays."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from failing_disk import failing, walk_errors

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import EpochFileCache
from batonmq.runtime import disk

CHANGES = {
    "append": lambda cache: cache.append(EpochEntry(6, 600)),
    "cut": lambda cache: cache.truncate_suffix_by_offset(400),
    "adopt": lambda cache: cache.replace_all([EpochEntry(1, 0), EpochEntry(4, 200)]),
    "drop": lambda cache: cache.drop_above(350),
    "settle": lambda cache: cache.settle(),
}


@pytest.mark.parametrize("pending", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_r25_an_epoch_appended_after_a_change_that_failed_is_there_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, error: str, pending: int
) -> None:
    """1. Some epochs stand in the redo file only. 2. A change fails at its n-th disk call. 3. A new
    epoch is accepted. 4. kill -9: the list is what it was in memory."""

    monkeypatch.setattr(disk, "fsync", lambda fd: None)  # no power is lost here
    monkeypatch.setattr(disk, "fdatasync", lambda fd: None)

    def attempt(text: str, number: int) -> bool:
        path = tmp_path / str(number) / "epochFileCheckpoint"
        path.parent.mkdir()
        cache = EpochFileCache(path)
        for epoch in range(1, 4):
            cache.append(EpochEntry(epoch, epoch * 100 - 100))
        cache.settle()
        for epoch in range(4, 4 + pending):
            cache.append(EpochEntry(epoch, epoch * 100 - 100))
        with failing(text) as struck, suppress(OSError):
            CHANGES[change](cache)
        after_failure = cache.entries
        killed = tmp_path / f"{number}-killed"
        shutil.copytree(path.parent, killed)
        assert cache.append(EpochEntry(9, 900))
        assert EpochFileCache(killed / path.name).entries, "some list, before or after the change"
        again = EpochFileCache(path)
        assert again.entries == cache.entries
        assert again.entries[: len(after_failure) - 1] == after_failure[:-1]
        path.unlink()
        assert EpochFileCache(path).entries == cache.entries, "the second copy has it, too"
        return bool(struck)

    walk_errors(f"* * {error}", attempt)
