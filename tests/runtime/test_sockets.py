"""What the kernel is asked for, read back from it."""

import socket
from pathlib import Path

import pytest

from batonmq.broker.config import BrokerConfig
from batonmq.protocol.message_id import host_bytes
from batonmq.runtime.sockets import (
    check_port_free,
    descriptors_in_use,
    hang_up,
    is_port_free,
    keep_alive,
    limit_unacknowledged,
    look_up,
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


def test_only_the_connection_of_that_peer_is_hung_up(tmp_path: Path) -> None:
    """A library closes its connection at any time, and its descriptor is reused."""
    unix, other_end = socket.socketpair()
    with (
        unix,
        other_end,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
        open(tmp_path / "file", "wb") as file,
    ):
        peer = f"127.0.0.1:{client.getsockname()[1]}"
        free = descriptors_in_use()
        for reused in (file, unix, client, listener):
            hang_up(peer, reused.fileno())
            assert descriptors_in_use() == free
        client.sendall(b"on")
        assert accepted.recv(2) == b"on"
        hang_up(peer, accepted.fileno())
        assert client.recv(1) == b""


def test_a_name_is_looked_up_and_an_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_up("127.0.0.2") == "127.0.0.2"
    assert look_up("::1") == "::1"
    assert look_up("localhost") == "127.0.0.1"
    store_host = BrokerConfig(broker_ip1="localhost", listen_port=10911).store_host
    assert store_host == host_bytes("127.0.0.1", 10911)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="host name 'broker-0': Name or service not known"):
        look_up("broker-0")
