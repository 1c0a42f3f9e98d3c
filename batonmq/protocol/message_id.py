"""The two ids of a message, and the handle by which a producer recalls a timed one.

The broker's id is the place of the message, the producer's its sender and time. Both are upper-case
hex of big-endian bytes. Origin: Java `MessageDecoder`, `MessageClientIDSetter`.

    offset id   ip(4|16) port(i32) physicalOffset(i64): 32 or 56 characters
    unique key  ip(4|16) pid(u16) hash(i32) ms-since-month-start(i32) counter(u16)

The handle is URL-safe base64 of `v1 TOPIC BROKER_NAME TIME UNIQ_KEY`, with TIME one ms after the
due time. Origin: Java `RecallMessageHandle.HandleV1`.
"""

import base64
import binascii
import ipaddress
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from batonmq.protocol.numbers import natural_number
from batonmq.protocol.properties import TIMER_DEL_UNIQKEY, name_value_problem

_PORT: Final = struct.Struct(">i")
_OFFSET: Final = struct.Struct(">q")
# A month of 31 days has more ms than fit an i32: Java's cast wraps, as unsigned does.
_TIME_AND_COUNTER: Final = struct.Struct(">IH")


@lru_cache(maxsize=4096)
def host_bytes(ip: str, port: int) -> bytes:
    """ip (4 or 16 bytes) and port (i32), as in records. Raises ValueError for a host name."""
    return ipaddress.ip_address(ip).packed + _PORT.pack(port)


@lru_cache(maxsize=4096)
def host_text(host: bytes) -> str:
    """ "ip:port" of 8 or 20 bytes, an IPv6 address in brackets."""
    if len(host) not in (8, 20):
        raise ValueError(f"a host is 8 or 20 bytes long, not {len(host)}")
    ip = ipaddress.ip_address(host[:-4])
    port = _PORT.unpack(host[-4:])[0]
    return f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}"


def split_address(address: str) -> tuple[str, int]:
    """("ip", port) of "ip:port" or "[ip]:port". Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def encode_offset_msg_id(host: bytes, offset: int) -> str:
    """The id of the record at `offset` of the broker with this store host."""
    return (host + _OFFSET.pack(offset)).hex().upper()


def decode_offset_msg_id(msg_id: str) -> tuple[str, int]:
    """("ip:port", physical offset). Raises ValueError unless the id has 32 or 56 hex digits."""
    if len(msg_id) not in (32, 56):
        raise ValueError(f"an offset message id has 32 or 56 characters, not {len(msg_id)}")
    raw = bytes.fromhex(msg_id)
    if len(raw) * 2 != len(msg_id):  # `fromhex` skips blanks
        raise ValueError(f"{msg_id!r} is not hexadecimal throughout")
    return host_text(raw[:-8]), _OFFSET.unpack(raw[-8:])[0]


class UniqIdGenerator:
    """Makes unique ids. `instance_hash` (Java: hash of the class loader) distinguishes generators
    of one process. The time part counts from the start of the local month."""

    def __init__(
        self, ip: bytes, pid: int, clock_ms: Callable[[], int], *, instance_hash: int = 0
    ) -> None:
        if len(ip) not in (4, 16):
            raise ValueError(f"an ip address is 4 or 16 bytes long, not {len(ip)}")
        head = ip + struct.pack(">HI", pid & 0xFFFF, instance_hash & 0xFFFFFFFF)
        self._head = head.hex().upper()
        self._clock_ms = clock_ms
        self._month_start_ms = 0
        self._next_month_ms = 0
        self._counter = 0

    def next(self) -> str:
        """32 or 56 characters."""
        now_ms = self._clock_ms()
        # Computed once a month: `mktime` costs more than the rest.
        if not self._month_start_ms <= now_ms < self._next_month_ms:
            self._month_start_ms, self._next_month_ms = _month_around(now_ms)
        counter = self._counter
        self._counter = (counter + 1) & 0xFFFF
        tail = _TIME_AND_COUNTER.pack(now_ms - self._month_start_ms, counter)
        return self._head + tail.hex().upper()


def _month_around(now_ms: int) -> tuple[int, int]:
    """The start of the local month of `now_ms`, and of the next one."""
    now = time.localtime(now_ms / 1000)
    start = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    year, month = (now.tm_year, now.tm_mon + 1) if now.tm_mon < 12 else (now.tm_year + 1, 1)
    after = time.mktime((year, month, 1, 0, 0, 0, 0, 0, -1))
    return int(start) * 1000, int(after) * 1000


VERSION: Final = "v1"
_WORDS: Final = 5


@dataclass(frozen=True, slots=True)
class RecallHandle:
    """`time_ms`: one more than the due time."""

    topic: str
    broker_name: str
    time_ms: int
    unique_key: str

    def encode(self) -> str:
        words = (VERSION, self.topic, self.broker_name, str(self.time_ms), self.unique_key)
        return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises ValueError that says what is wrong."""
    try:
        words = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode().split(" ")
    except (binascii.Error, ValueError):
        raise ValueError("the recall handle is not the one that a send returned") from None
    if words[0] != VERSION or len(words) < _WORDS or natural_number(words[3]) is None:
        raise ValueError("the recall handle is not of version v1")
    problem = name_value_problem(TIMER_DEL_UNIQKEY, words[4])
    if problem is not None:
        raise ValueError(f"the recall handle names no message: {problem}")
    return RecallHandle(words[1], words[2], int(words[3]), words[4])


def recall_key(topic: bytes, unique_key: bytes) -> bytes:
    """The name of a timed message in the property TIMER_DEL_UNIQKEY."""
    return b"%b+%b" % (topic, unique_key)
