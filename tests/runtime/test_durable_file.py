"""Writes that the system makes in pieces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batonmq.runtime import disk
from batonmq.runtime.durable_file import write_all


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
