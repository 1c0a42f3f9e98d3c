"""What the kernel is asked for, read back from it."""

import socket

import pytest

from batonmq.runtime.sockets import (
    check_port_free,
    is_port_free,
    keep_alive,
    limit_unacknowledged,
)


def test_options_reach_the_kernel() -> None:
    with socket.socket() as sock:
        keep_alive(sock, every_s=1, failures=3)
        limit_unacknowledged(sock, 2_000)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in tcp] == [1, 1, 3]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2_000


def test_a_listener_takes_its_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
        with pytest.raises(OSError):
            check_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", port)
