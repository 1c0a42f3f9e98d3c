"""What a server prints if it cannot start: one line, and no traceback."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def namesrv(folder: Path, *arguments: str, port: int = 1) -> subprocess.CompletedProcess[str]:
    config = folder / "namesrv.yaml"
    config.write_text(f"namesrv:\n  listenPort: {port}\n  bindAddress: 127.0.0.1\n")
    argv = [sys.executable, "-m", "batonmq.namesrv.main", "-c", str(config), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30)


def test_a_pid_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = tmp_path / "file" / "pid"
    done = namesrv(tmp_path, "--pid-file", str(wanted))
    assert (done.returncode, done.stderr) == (
        1,
        f"namesrv: --pid-file {wanted}: File exists\n",
    )


def test_a_port_in_use_is_named_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = namesrv(tmp_path, port=port)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"namesrv: namesrv port {port}: it is taken by process {os.getpid()} (")
    assert "Errno" not in last
