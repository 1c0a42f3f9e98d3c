"""The stand-alone process: SIGTERM ends it cleanly, what hinders its start is one line."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.shared.ports import free_ports

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, base_port: int, more: str = "") -> Path:
    path = folder / "controller.yaml"
    path.write_text(
        "controller:\n"
        f"  controllerDLegerPeers: n0-127.0.0.1:{base_port}\n"
        "  bindAddress: 127.0.0.1\n"
        f"  controllerStorePath: {folder / 'store'}\n" + more
    )
    return path


def start(config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batonmq.controller.main", "-c", str(config)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it wrote; killed if it does not end."""
    try:
        _, written = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, written


def leading(config: Path) -> subprocess.Popen[str]:
    """A process that leads, since it is alone."""
    process = start(config)
    assert process.stderr is not None
    for line in process.stderr:
        if "gate_opened" in line:
            return process
    raise AssertionError("it ended")


@pytest.mark.process
def test_sigterm_ends_a_leading_node_with_0(tmp_path):
    process = leading(write_config(tmp_path, free_ports(10)))
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, written = finish(process)
    assert code == 0, written
    assert time.monotonic() - asked < 10, "it hung"
    assert (tmp_path / "store" / "history-n0.jsonl").exists()


@pytest.mark.process
def test_a_second_process_on_the_folder_is_refused_and_told_whose_it_is(tmp_path):
    base = free_ports(20)
    first = leading(write_config(tmp_path, base))
    code, written = finish(start(write_config(tmp_path, base + 10)))
    assert first.poll() is None, f"the first ended: {first.communicate()[1]}"
    assert code == 1, written
    (said,) = (line for line in written.splitlines() if line.startswith("controller:"))
    assert f"process {first.pid}" in said and str(tmp_path / "store") in said, written
    first.terminate()
    assert finish(first)[0] == 0


@pytest.mark.process
def test_a_bad_setting_is_one_line_and_exit_2(tmp_path):
    config = write_config(tmp_path, free_ports(10), "  masterLeaseMs: 10\n")
    code, written = finish(start(config))
    assert code == 2
    (line,) = written.splitlines()
    assert "masterLeaseMs" in line and f"{config}:5" in line
