"""R45: a broker that is started on a full disk waits for room, and can be stopped meanwhile."""

import asyncio
import errno
import os
import signal

import pytest

from batonmq.broker import main as broker_main
from batonmq.process import disk
from batonmq.process.server_main import ServerMain


class FullDisk:
    """The next `left` writes fail, for want of room unless `number` says otherwise."""

    def __init__(self, left, number=errno.ENOSPC):
        self.left, self.number = left, number

    def __call__(self, fd, data, offset):
        if not self.left:
            return os.pwrite(fd, data, offset)
        self.left -= 1
        raise OSError(self.number, os.strerror(self.number))


def wait_for_room(root, monkeypatch, full):
    async def run():
        monkeypatch.setattr(disk, "pwrite", full)
        return await broker_main._has_room(ServerMain({}), root)

    monkeypatch.setattr(broker_main, "ROOM_POLL_S", 0.01)
    return asyncio.run(run())


def test_r45_it_starts_as_soon_as_there_is_room(tmp_path, monkeypatch, caplog):
    full = FullDisk(3)
    assert wait_for_room(tmp_path / "store", monkeypatch, full)
    assert full.left == 0
    (told,) = [r.getMessage() for r in caplog.records if "start_waits_for_room" in r.message]
    assert f"{tmp_path / 'store'}: No space left on device" in told, "once, with the folder"
    assert not list((tmp_path / "store").iterdir()), "nothing is left of the trial"


def test_r45_it_can_be_stopped_while_it_waits(tmp_path, monkeypatch):
    def full(fd, data, offset):
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert not wait_for_room(tmp_path / "store", monkeypatch, full)


def test_another_error_of_the_disk_ends_the_start(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="Input/output error"):
        wait_for_room(tmp_path / "store", monkeypatch, FullDisk(1, number=errno.EIO))
