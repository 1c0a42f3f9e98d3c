"""Faults on purpose: each rule strikes the calls it names, no others; a wrong one is refused."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonmq.runtime import clock, disk
from batonmq.runtime.durable_file import replace_file
from lab.cluster import fault_points
from lab.cluster.fault_points import (
    FaultRuleError,
    SpoiledDiskCalls,
    fault_environment,
    jump_wall_clock,
    parse_disk_faults,
    parse_jump,
)


@pytest.fixture
def faults() -> Iterator[list[SpoiledDiskCalls]]:
    before = {name: getattr(disk, name) for name in disk.CALLS}
    made: list[SpoiledDiskCalls] = []
    yield made
    disk.replace_calls(before)


def opened(folder: Path, name: str = "commitlog") -> int:
    return disk.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)


def errors_of(count: int, fd: int) -> list[int]:
    """The errno of each of so many fdatasyncs, 0 for one that worked."""
    found = []
    for _ in range(count):
        try:
            disk.fdatasync(fd)
        except OSError as error:
            found.append(error.errno)
        else:
            found.append(0)
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", [5, 5, 5, 5]),
        ("after 2", [0, 0, 5, 5]),
        ("once", [5, 0, 0, 0]),
        ("once after 1", [0, 5, 0, 0]),
    ],
)
def test_a_call_fails_as_often_as_the_rule_says(
    tmp_path: Path, faults: list[SpoiledDiskCalls], options: str, expected: list[int]
) -> None:
    fd, other = opened(tmp_path), opened(tmp_path, "checkpoint")
    SpoiledDiskCalls(parse_disk_faults(f"fdatasync commitlog EIO {options}"))
    assert errors_of(4, fd) == expected
    assert errors_of(1, other) == [0], "another file"
    disk.pwrite(fd, b"x", 0)  # another call
    os.close(fd)
    os.close(other)


def test_a_fault_with_a_time_ends_after_it(
    tmp_path: Path, faults: list[SpoiledDiskCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000]
    monkeypatch.setattr(fault_points, "boot_ms", lambda: now[0])
    fd = opened(tmp_path)
    SpoiledDiskCalls(parse_disk_faults("fdatasync * ENOSPC after 1 for 5s"))
    assert errors_of(2, fd) == [0, errno.ENOSPC]
    now[0] += 5_000
    assert errors_of(1, fd) == [errno.ENOSPC]
    now[0] += 1
    assert errors_of(2, fd) == [0, 0]
    os.close(fd)


def test_removed_rules_leave_the_plain_calls(
    tmp_path: Path, faults: list[SpoiledDiskCalls]
) -> None:
    before = {name: getattr(disk, name) for name in disk.CALLS}
    one = SpoiledDiskCalls(parse_disk_faults("* * EIO; kill before replace epochFileCheckpoint"))
    assert disk.pwrite is not os.pwrite
    one.remove()
    assert before == {name: getattr(disk, name) for name in disk.CALLS}


def test_rules_are_read_with_comments_and_in_order() -> None:
    rules = parse_disk_faults(
        "# nothing\n\nfdatasync commitlog EIO once after 3 # why\npwrite * ENOSPC for 0.5s;"
        "kill during pwrite journal after 7; write history SHORT"
    )
    assert [(r.action, r.call, r.path, r.error, r.after, r.once, r.for_ms) for r in rules] == [
        ("fail", "fdatasync", "commitlog", errno.EIO, 3, True, None),
        ("fail", "pwrite", "*", errno.ENOSPC, 0, False, 500),
        ("during", "pwrite", "journal", 0, 7, False, None),
        ("short", "write", "history", 0, 0, False, None),
    ]


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("pwrite", "needed are CALL PATH ERROR"),
        ("pwrite *", "needed are CALL PATH ERROR"),
        ("kill before pwrite", "needed are CALL PATH ERROR"),
        ("kill never pwrite *", "kill before, during or after"),
        ("kill during fsync *", "only pwrite and write have a middle"),
        ("fsync * SHORT", "only pwrite and write can be short"),
        ("kill before pwrite * once", "a process is killed once"),
        ("pwritten * EIO", "no call 'pwritten'; allowed are open, close"),
        ("pwrite * EVIL", "'EVIL' is no error"),
        ("pwrite * path", "'path' is no error"),
        ("pwrite * EIO twice", "'twice' is none of"),
        ("pwrite * EIO after x", "'after x' is none of"),
        ("pwrite * EIO once for 3s", "not both"),
    ],
)
def test_a_wrong_rule_is_refused_with_what_is_allowed(rule: str, why: str) -> None:
    with pytest.raises(FaultRuleError, match=why) as raised:
        parse_disk_faults(rule)
    assert rule in str(raised.value)


def test_a_full_disk_takes_what_has_its_place_already(
    tmp_path: Path, faults: list[SpoiledDiskCalls]
) -> None:
    given, sparse = opened(tmp_path, "given"), opened(tmp_path, "sparse")
    os.posix_fallocate(given, 0, 1 << 16)
    os.ftruncate(sparse, 1 << 16)
    SpoiledDiskCalls(parse_disk_faults("room * ENOSPC"))
    disk.pwrite(given, b"x" * 4096, 8192)
    disk.posix_fallocate(given, 0, 1 << 16)
    disk.fsync(given)
    disk.makedirs(tmp_path)
    disk.rename(tmp_path / "given", tmp_path / "renamed")
    disk.close(disk.open(tmp_path / "renamed", os.O_RDWR | os.O_CREAT, 0o644))
    for refused in (
        lambda: disk.pwrite(sparse, b"x", 0),
        lambda: disk.pwrite(given, b"x", 1 << 16),
        lambda: disk.posix_fallocate(given, 0, 1 << 20),
        lambda: disk.open(tmp_path / "new", os.O_RDWR | os.O_CREAT, 0o644),
        lambda: disk.makedirs(tmp_path / "new"),
        lambda: disk.link(tmp_path / "renamed", tmp_path / "new"),
        lambda: disk.write(given, b"x"),
    ):
        with pytest.raises(OSError, match="No space left"):
            refused()
    os.close(given)
    os.close(sparse)


def killed_at(rule: str, folder: Path) -> int:
    """How a child ends that replaces a file under that rule."""
    child = os.fork()
    if child == 0:
        SpoiledDiskCalls(parse_disk_faults(rule))
        replace_file(folder / "file", b"new content")
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ("kill before open tmp", {"file": b"old"}),
        ("kill before pwrite tmp", {"file": b"old", "file.tmp": b""}),
        ("kill during pwrite tmp", {"file": b"old", "file.tmp": b"new c"}),
        ("kill after pwrite tmp", {"file": b"old", "file.tmp": b"new content"}),
        ("kill before replace /file", {"file": b"old", "file.tmp": b"new content"}),
        ("kill after replace /file", {"file": b"new content"}),
        ("kill before changes * after 2", {"file": b"old", "file.tmp": b""}),
    ],
)
def test_a_kill_leaves_what_was_done_before_it(
    tmp_path: Path, rule: str, left: dict[str, bytes]
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    assert killed_at(rule, tmp_path) == signal.SIGKILL
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == left


def test_a_rule_that_fits_nothing_kills_nobody(tmp_path: Path) -> None:
    assert killed_at("kill before replace journal", tmp_path) == 0
    assert killed_at("kill before changes * after 7", tmp_path) == 0


def test_the_wall_clock_jumps_and_deadlines_do_not() -> None:
    wall, boot = clock.wall_ms(), clock.boot_ms()
    try:
        jump_wall_clock(parse_jump("+3600"))
        assert 3_600_000 <= clock.wall_ms() - wall < 3_700_000
        assert 3_600 <= time.time() - wall / 1000 < 3_700
        assert clock.boot_ms() - boot < 100_000
        jump_wall_clock(parse_jump("-0.5"))
        assert clock.wall_ms() - wall < 100_000, "from the true time, not from the last jump"
    finally:
        jump_wall_clock(parse_jump(""))
    assert clock.wall_ms() - wall < 100_000
    with pytest.raises(FaultRuleError, match=r"'soon': seconds with a sign"):
        parse_jump("soon")


def serve(folder: Path, disk_faults: str) -> subprocess.Popen[str]:
    """A name server on any port, whose disk has those faults."""
    config = folder / "namesrv.yaml"
    config.write_text("namesrv:\n  listenPort: 0\n  bindAddress: 127.0.0.1\n")
    return subprocess.Popen(
        [sys.executable, "-m", "batonmq.namesrv.main", "-c", str(config)],
        env=os.environ | fault_environment(disk=disk_faults),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_server_refuses_a_wrong_rule_with_exit_2(tmp_path: Path) -> None:
    process = serve(tmp_path, "pwrite * EVIL")
    assert process.stderr is not None
    written = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 2
    assert written.startswith("namesrv: BATONMQ_START_HOOK: 'pwrite * EVIL'")


def test_a_server_says_it_loudly_and_reads_the_file_again_when_told(tmp_path: Path) -> None:
    rules = tmp_path / "faults"
    process = serve(tmp_path, f"@{rules}")
    assert process.stderr is not None
    try:
        lines = iter(process.stderr)
        first = next(lines)
        assert "CRITICAL" in first and "FAULTS ON PURPOSE" in first and "disk=sound" in first
        rules.write_text("fsync journal EIO once")
        process.send_signal(signal.SIGUSR1)
        assert any("disk=['fsync journal EIO once']" in line for line in lines)
        rules.write_text("fsync journal EVIL")
        process.send_signal(signal.SIGUSR1)
        assert any("fault_points_refused" in line and "EVIL" in line for line in lines)
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(30)
