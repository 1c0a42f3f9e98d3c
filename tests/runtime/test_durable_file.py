"""Writes that the system makes in pieces."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file, write_all, write_named


def test_a_write_goes_on_behind_what_a_short_one_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "pwrite", lambda fd, data, at: os.pwrite(fd, data[:3], at))
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    write_all(fd, b"0123456789", 2)
    os.close(fd)
    assert path.read_bytes() == b"\0\x000123456789"


def test_a_write_that_writes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="pwrite of 2 bytes wrote nothing"):
        write_all(-1, b"xy", 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda fd: disk.pread(fd, 1, 0),
        lambda fd: disk.ftruncate(fd, -1),
        lambda fd: disk.posix_fallocate(fd, -1, 0),
    ],
)
def test_an_error_of_a_descriptor_names_its_file(
    tmp_path: Path, call: Callable[[int], object]
) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match=str(path)):
            call(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("has_links", [True, False])
def test_the_backup_of_a_secret_file_is_as_private_as_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """`users.json` has the secrets of users, on file systems without hard links, too."""
    if not has_links:
        monkeypatch.setattr(disk, "link", Mock(side_effect=OSError("not supported")))
    path = tmp_path / "users.json"
    for content in (b"one", b"two"):
        replace_file(path, content, keep_previous=True, mode=0o600)
    backup = tmp_path / "users.json.bak"
    assert (path.read_bytes(), backup.read_bytes()) == (b"two", b"one")
    assert {each.stat().st_mode & 0o777 for each in (path, backup)} == {0o600}


def test_what_a_user_names_stays_what_it_is(tmp_path: Path) -> None:
    """As root a rename would make a regular file of `/dev/stdout`."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_named(pipe, "text")
    assert os.read(reader, 100) == b"text" and pipe.is_fifo()
    os.close(reader)
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_named(link, b"new")
    assert (link.is_symlink(), target.read_text(), target.stat().st_mode & 0o777) == (
        True,
        "new",
        0o600,
    )
    write_named(tmp_path / "fresh", "text")
    (tmp_path / "dangling").symlink_to(tmp_path / "none" / "file")
    for mistyped in ("dangling", "nowhere/file"):
        with pytest.raises(FileNotFoundError, match=mistyped):
            write_named(tmp_path / mistyped, "text")
    (tmp_path / "dangling").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "link", "pipe", "target"]
