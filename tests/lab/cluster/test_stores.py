"""Copies of a replica's folder: whole, and no larger on the disk than what they hold."""

from pathlib import Path

import pytest

from lab.cluster.stores import copy_sparsely, put_back


def test_a_folder_put_back_holds_the_copy_and_zeros_take_no_room(tmp_path: Path) -> None:
    folder, backup = tmp_path / "broker-0", tmp_path / "backup-0"
    queue = folder / "consumequeue" / "T" / "0" / "00000000000000000000"
    queue.parent.mkdir(parents=True)
    unit = bytes(range(20))
    queue.write_bytes(unit + bytes(6_000_000 - len(unit)))
    (folder / "checkpoint").write_bytes(b"old")
    copy_sparsely(folder, backup)

    (folder / "checkpoint").write_bytes(b"new")
    (folder / "abort").touch()
    (folder / "brokerIdentity").write_bytes(b"7")
    put_back(folder, backup)

    assert (folder / "checkpoint").read_bytes() == b"old"
    assert not (folder / "abort").exists()
    assert (folder / "brokerIdentity").read_bytes() == b"7"
    for copy in (queue, backup / queue.relative_to(folder)):
        assert copy.read_bytes() == unit + bytes(6_000_000 - len(unit))
        assert copy.stat().st_blocks * 512 < 100_000


def test_a_copy_that_fails_says_what_and_where(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="was not copied to"):
        copy_sparsely(tmp_path / "not-there", tmp_path / "copy")
