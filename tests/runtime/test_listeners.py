"""Who listens on a port: the process is named, and no other is taken for it."""

import os
import socket
import subprocess
import sys

import pytest

from batonmq.runtime.sockets import (
    CannotListenError,
    check_port_free,
    holder_of,
    listening_as,
    listens,
)

SERVER = "import socket,sys; s=socket.create_server((sys.argv[1],0)); print(s.getsockname()[1],flush=True); sys.stdin.read()"  # noqa: E501


@pytest.mark.parametrize("host", ["127.0.0.1", "", "127.77.0.3"])
def test_another_process_is_named(host: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert holder_of(port).startswith(f"process {other.pid} ({sys.executable} -c import socket")
        assert listens(other.pid, port)
        assert not listens(os.getpid(), port)
        with (
            pytest.raises(CannotListenError, match=f"HA port {port}: it is taken by process"),
            listening_as("HA", port),
        ):
            check_port_free(host or "127.0.0.1", port)
        assert other.stdin is not None
        other.stdin.close()


def test_a_port_that_is_bound_or_connected_has_no_listener() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert (holder_of(port), listens(os.getpid(), port)) == ("", False)
        bound.listen()
        assert f"process {os.getpid()} (" in holder_of(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert holder_of(client.getsockname()[1]) == ""


def test_a_process_that_is_gone_listens_on_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not listens(gone.pid, 22)
