"""Files that are followed while the process runs."""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from batonmq.runtime import followed_files
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.secret_file import Secrets, read_passwords
from tests.shared.waiting import until

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(followed_files, "POLL_S", 0.001)
    path = tmp_path / "raft.password"
    put(path, OLD, 0o600)
    return path


def put(path: Path, text: str, mode: int) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


async def followed(path: Path, read: Callable[[], Secrets]) -> FollowedFiles[Secrets]:
    files = FollowedFiles("raftPasswordFile", [str(path)], read)
    files.watch()
    return files


async def test_a_refused_file_counts_once_its_mode_is_right(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new mode shows neither in the inode nor in the time of the last change."""
    files = await followed(file, partial(read_passwords, file))
    put(file, NEW, 0o644)
    await until(lambda: files.refusal)
    assert "chmod 0600" in files.refusal and files.value.used == OLD
    await asyncio.sleep(0.02)  # many polls
    os.chmod(file, 0o600)
    await until(lambda: not files.refusal)
    assert files.value.used == NEW and files.version == 2
    assert caplog.text.count("files_not_reloaded") == 1
    files.close()


async def test_r54_files_are_followed_after_an_error_that_nobody_expected(file: Path) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    failures = [RuntimeError("a bug")]

    def read() -> Secrets:
        if unread and failures:
            raise failures.pop()
        return read_passwords(file)

    unread = False
    files = await followed(file, read)
    unread = True
    put(file, NEW + "\n", 0o600)
    await until(lambda: unhandled)
    put(file, NEW + "\n\n", 0o600)
    await until(lambda: files.version == 2)
    assert files.value.used == NEW
    files.close()


async def test_only_changed_files_are_read_again(file: Path) -> None:
    reads: list[float] = []

    def read() -> Secrets:
        reads.append(asyncio.get_running_loop().time())
        return read_passwords(file)

    files = await followed(file, read)
    os.utime(file, (1, 1))
    await until(lambda: files.version == 2)
    await asyncio.sleep(0.02)  # many polls
    assert len(reads) == 2 and files.taken_ms == 1000
    files.close()
    os.utime(file, (2, 2))
    await asyncio.sleep(0.02)
    assert len(reads) == 2
