"""A blocking connection to any server of a cluster, and the requests that the lab repeats.

Independent of batonmq.
"""

import itertools
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from lab.cluster import frames
from lab.cluster.frames import Reply

_NO_FIELDS: Final[Mapping[str, object]] = {}


class BlockingConnection:
    """One connection to one address, used by one thread. Raises OSError for everything that breaks,
    ConnectionError when the peer closes."""

    def __init__(self, address: str, *, timeout_s: float = 5.0) -> None:
        self.address = address
        host, port = frames.split_address(address)
        self._socket = socket.create_connection((host, port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if folder := frames.tls_folder():
            self._socket = frames.tls_of(folder).wrap_socket(self._socket, server_hostname=host)
        self._frames = frames.Frames()
        self._ready: list[Reply] = []
        self._opaque = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def request(
        self, code: int, ext: Mapping[str, object] = _NO_FIELDS, body: bytes = b""
    ) -> Reply:
        """Sends a request and waits for its reply. Replies to earlier posts are dropped."""
        opaque = self.post(code, ext, body)
        while (reply := self.take()).opaque != opaque:
            pass
        return reply

    def post(
        self, code: int, ext: Mapping[str, object] = _NO_FIELDS, body: bytes = b"", flag: int = 0
    ) -> int:
        """Sends a request without waiting; its opaque. `take` returns the replies as they come."""
        opaque = next(self._opaque)
        self.write(frames.encode(code, ext, opaque, body, flag))
        return opaque

    def take(self) -> Reply:
        """The next reply."""
        while not self._ready:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionError(f"{self.address} closed the connection")
            self._ready.extend(self._frames.feed(data))
        return self._ready.pop(0)

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def fileno(self) -> int:
        """For selectors: readable when there is something that was not taken yet."""
        return self._socket.fileno()

    def send(self, topic: str, body: bytes, *, queue_id: int = 0, properties: str = "") -> Reply:
        return self.request(frames.SEND_V2, frames.send_ext(topic, queue_id, properties), body)

    def pull(self, topic: str, offset: int, *, queue_id: int = 0, count: int = 32) -> Reply:
        """Replied to at once; the body holds the stored records."""
        return self.request(frames.PULL, frames.pull_ext(topic, queue_id, offset, count))


def ask(
    address: str,
    code: int,
    ext: Mapping[str, object] = _NO_FIELDS,
    body: bytes = b"",
    *,
    timeout_s: float = 5.0,
) -> Reply:
    """One request on a connection of its own."""
    with BlockingConnection(address, timeout_s=timeout_s) as connection:
        return connection.request(code, ext, body)


def takes_writes(address: str, topic: str) -> bool:
    """Whether that broker acknowledges a message to the topic, which this sends."""
    try:
        with BlockingConnection(address, timeout_s=1.0) as connection:
            return connection.send(topic, b"first").code == frames.OK
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class HaStatus:
    """A broker's HA status (907). `acked`: the slaves' acknowledged offsets, by connection."""

    master: bool
    max_offset: int
    in_sync_slaves: int
    acked: dict[str, int]

    def is_level(self, slaves: int) -> bool:
        """Whether that many slaves are in the set, connected, and hold the whole log."""
        return (
            self.master
            and self.in_sync_slaves >= slaves
            and sum(offset >= self.max_offset for offset in self.acked.values()) >= slaves
        )


def parse_ha_status(body: bytes) -> HaStatus:
    """Parses the JSON body of a broker's HA status."""
    info = json.loads(body)
    connections = info.get("haConnectionInfo") or []
    return HaStatus(
        bool(info.get("master")),
        int(info.get("masterCommitLogMaxOffset") or 0),
        sum(bool(one.get("inSync")) for one in connections),
        {one["addr"]: int(one.get("slaveAckOffset") or 0) for one in connections},
    )


def ha_status(address: str, *, timeout_s: float = 5.0) -> HaStatus | None:
    """The broker's HA status; None while it does not reply."""
    try:
        reply = ask(address, frames.HA_STATUS, timeout_s=timeout_s)
    except OSError:
        return None
    return parse_ha_status(reply.body) if reply.code == frames.OK and reply.body else None


def sync_state(
    controllers: list[str], group: str, *, timeout_s: float = 5.0
) -> dict[str, Any] | None:
    """What the leading controller records of a group; None while none of them replies."""
    for address in controllers:
        try:
            reply = ask(
                address, frames.SYNC_STATE, body=json.dumps([group]).encode(), timeout_s=timeout_s
            )
        except OSError:
            continue
        if reply.code == frames.OK:
            found: dict[str, Any] | None = reply.json["replicasInfoTable"].get(group)
            return found
    return None
