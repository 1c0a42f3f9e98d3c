"""R37 as an operator sees it: a broker whose log is cut half way ends and says what it needs."""

import os
import subprocess
from pathlib import Path

import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.records.codec import NewMessage
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet
from lab.cluster.fault_points import fault_environment
from lab.cluster.processes import ROOT, spawn, stop_all, tail, wait_for
from tests.process.lone import SEGMENT, lone_broker

pytestmark = pytest.mark.process

HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])


class Killed(Exception):
    """The process ended here."""


def half_cut(root: Path, *, settled: bool) -> int:
    """A store of 20 messages, its cut behind the 10th begun and left; where that is. Its epoch file
    holds the whole list, or the last of it is in the redo file."""
    config = StoreConfig(store_path_root_dir=str(root), mapped_file_size_commit_log=SEGMENT)
    store = MessageStore(config, store_host=HOST, confirm_rule=ConfirmedBySet())
    store.open()
    store.epochs.append(EpochEntry(1, 0))
    store.prepare_master()
    message = NewMessage("T", 0, b"m", b"", 0, None, None, born_timestamp=1, born_host=HOST)
    ends = [store.appender.put_message(message).end_offset for _ in range(20)]
    store.end_turn()
    store.epochs.append(EpochEntry(2, ends[14]))

    if settled:
        store.epochs.settle()

    def die(step: str) -> None:
        if step == "index":
            raise Killed

    store.truncation.after_step = die
    with pytest.raises(Killed):
        store.slave_log.truncate_to(ends[9])
    store.abandon()
    return ends[9]


FULL = "pwrite *epochFileCheckpoint* ENOSPC"


def test_r37_a_broker_that_cannot_finish_a_cut_ends_and_names_what_it_needs(tmp_path: Path) -> None:
    """1. A cut was begun, the disk is full. 2. Each start ends with 1, names the file and the room
    that is needed, and never listens. 3. There is room: the start finishes the cut and serves."""
    root = tmp_path / "store"
    cut_at = half_cut(root, settled=True)
    command = lone_broker(tmp_path)
    needed = (
        f"the log could not be cut at {cut_at}: {root / 'epochFileCheckpoint'}: No space left on "
        f"device; free 1 MiB on the disk of {root}, then start this broker again: it finishes the "
        "cut first (truncation.intent), and does nothing until then"
    )
    full = os.environ | fault_environment(disk=FULL)
    for _ in range(2):
        done = subprocess.run(
            command, env=full, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
        assert done.returncode == 1, done.stderr
        line = done.stderr.splitlines()[-1]
        assert line == f"broker: {needed}"
        assert "broker_started" not in done.stderr and (root / "truncation.intent").exists()
    finishes(command, root, tmp_path / "broker.log", cut_at)


def test_r37_r45_a_broker_that_cannot_read_its_files_before_a_cut_waits_for_room(
    tmp_path: Path,
) -> None:
    """The newest epoch is in the redo file alone, and there is no room to make one file of both:
    the start waits and says so, and the cut stays for the next one."""
    root, log = tmp_path / "store", tmp_path / "full.log"
    cut_at = half_cut(root, settled=False)
    command = lone_broker(tmp_path)
    broker = spawn(command, log, env=os.environ | fault_environment(disk=FULL))
    try:
        wait_for("the reason", lambda: "start_waits_for_disk_space" in log.read_text())
        assert f"{root / 'epochFileCheckpoint.tmp'}: No space left on device" in log.read_text()
        assert "broker_started" not in log.read_text() and (root / "truncation.intent").exists()
    finally:
        stop_all([broker])
    finishes(command, root, tmp_path / "broker.log", cut_at)


def finishes(command: list[str], root: Path, log: Path, cut_at: int) -> None:
    """There is room: a start finishes the cut and serves."""
    broker = spawn(command, log)
    try:
        wait_for("the broker", lambda: "broker_started" in log.read_text())
        assert not (root / "truncation.intent").exists(), tail(log)
        assert f"end_offset={cut_at} " in log.read_text()
    finally:
        stop_all([broker])
