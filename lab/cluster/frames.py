"""Encodes and decodes what a probe needs: remoting frames, requests, stored records.

It imports nothing of what is measured, so that an error there cannot hide here.
Independent of batonmq.
"""

import base64
import functools
import hmac
import json
import os
import ssl
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

VERSION: Final = 479
PULL: Final = 11
QUERY_OFFSET: Final = 14
UPDATE_OFFSET: Final = 15
UPDATE_TOPIC: Final = 17
UPDATE_CONFIG: Final = 25
UPDATE_GROUP: Final = 200
RUNTIME_INFO: Final = 28
MAX_OFFSET: Final = 30
END_TRANSACTION: Final = 37
ROUTE: Final = 105
SEND_V2: Final = 310
SEND_BATCH: Final = 320
HA_STATUS: Final = 907
ELECT_MASTER: Final = 1002
METADATA: Final = 1005
SYNC_STATE: Final = 1006
EPOCHS: Final = 1007
OK: Final = 0
SYSTEM_BUSY: Final = 2
PULL_NOT_FOUND: Final = 19
PULL_RETRY: Final = 20
FLAG_ONEWAY: Final = 2
BROKER_NAME: Final = "broker-a"
TEMPLATE_TOPIC: Final = "TBW102"
_SUBSCRIPTION_IN_REQUEST: Final = "4"
_HEAD: Final = struct.Struct(">II")
_RECORD: Final = struct.Struct(">iiiiiqqi")
"""Size, magic, body CRC, queue id, flag, queue offset, physical offset, sysFlag."""
_MAGIC_V2: Final = -626843477
_BORN_V6: Final = 0x10
_STORED_V6: Final = 0x20
SECURE_VARIABLE: Final = "BATONMQ_LAB_SECURE"
"""Environment variable with the folder of certificates, set while the lab's cluster has TLS and
users. Probes are processes of their own and inherit it."""
USER: Final = "admin"
SECRET: Final = "secret-of-the-lab"


def tls_folder() -> Path | None:
    """The folder with `ca.pem` and `admin.pem`; None: connections are plain, requests unsigned."""
    folder = os.environ.get(SECURE_VARIABLE)
    return Path(folder) if folder else None


@functools.cache
def tls_of(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "admin.pem")
    return context


def _signed(fields: dict[str, str], body: bytes) -> dict[str, str]:
    """As AclClientRPCHook signs: the values in the order of their names, then the body."""
    fields = fields | {"AccessKey": USER}
    text = "".join(value for _, value in sorted(fields.items())).encode() + body
    signature = hmac.digest(SECRET.encode(), text, "sha1")
    return fields | {"Signature": base64.b64encode(signature).decode()}


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply. `code` 0 is success; for a send, that all replicas of the set hold it."""

    code: int
    opaque: int
    remark: str
    ext: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def encode(
    code: int,
    ext: Mapping[str, object],
    opaque: int,
    body: bytes = b"",
    flag: int = 0,
    *,
    language: str = "PYTHON",
) -> bytes:
    """A whole request frame with a JSON header.

    Its language is Python by default: a slave relays the sends of other clients to the master, and
    then the broker that answers is not the one that acknowledged.
    """
    fields = {key: str(value) for key, value in ext.items()}
    header = json.dumps(
        {
            "code": code,
            "extFields": _signed(fields, body) if tls_folder() else fields,
            "flag": flag,
            "language": language,
            "opaque": opaque,
            "serializeTypeCurrentRPC": "JSON",
            "version": VERSION,
        },
        separators=(",", ":"),
    ).encode()
    return _HEAD.pack(4 + len(header) + len(body), len(header)) + header + body


class Frames:
    """Cuts a stream of bytes into replies. Frames that are no replies are skipped."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Adds what was received, and yields every whole reply."""
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                return
            frame = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            reply = _decode(frame)
            if reply is not None:
                yield reply


def _decode(frame: bytes) -> Reply | None:
    header_size = int.from_bytes(frame[1:4], "big")
    header = json.loads(frame[4 : 4 + header_size])
    if not header.get("flag", 0) & 1:
        return None
    return Reply(
        header["code"],
        header["opaque"],
        header.get("remark") or "",
        header.get("extFields") or {},
        frame[4 + header_size :],
    )


def send_ext(
    topic: str, queue_id: int = 0, properties: str = "", *, queues: int = 4
) -> dict[str, object]:
    """The header fields of a send (310) as the stock Java producer fills them. The topic is created
    from TBW102 with `queues` queues if it is new."""
    return {
        "a": "probe",
        "b": topic,
        "c": TEMPLATE_TOPIC,
        "d": queues,
        "e": queue_id,
        "f": 0,
        "g": now_ms(),
        "h": 0,
        "i": properties,
        "j": 0,
        "k": "false",
        "m": "false",
        "n": BROKER_NAME,
    }


def key_properties(unique_key: str) -> str:
    """The properties of a message that waits for all replicas and has this unique key."""
    return f"UNIQ_KEY\x01{unique_key}\x02WAIT\x01true\x02"


def pull_ext(topic: str, queue_id: int, offset: int, count: int = 32) -> dict[str, object]:
    """The header fields of a pull (11) that is answered at once, without a tag filter."""
    return {
        "consumerGroup": "probe",
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": offset,
        "maxMsgNums": count,
        "sysFlag": _SUBSCRIPTION_IN_REQUEST,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subVersion": 0,
        "subscription": "*",
        "expressionType": "TAG",
    }


def stored_records(body: bytes) -> Iterator[tuple[int, dict[str, str]]]:
    """(physical offset, properties) of each record in the body of a pull's reply.

    Layout: `org.apache.rocketmq.common.message.MessageDecoder`. CRCs are not checked.
    """
    at = 0
    while at < len(body):
        size, magic, _, _, _, _, physical_offset, sys_flag = _RECORD.unpack_from(body, at)
        position = at + _RECORD.size + 8 + (20 if sys_flag & _BORN_V6 else 8)
        position += 8 + (20 if sys_flag & _STORED_V6 else 8) + 4 + 8
        position += 4 + int.from_bytes(body[position : position + 4], "big")
        topic_bytes = 2 if magic == _MAGIC_V2 else 1
        position += topic_bytes + int.from_bytes(body[position : position + topic_bytes], "big")
        end = position + 2 + int.from_bytes(body[position : position + 2], "big")
        pairs = body[position + 2 : end].decode().split("\x02")
        yield physical_offset, dict(pair.split("\x01", 1) for pair in pairs if pair)
        at += size


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def now_ms() -> int:
    """Wall clock in ms, as messages carry it."""
    return time.time_ns() // 1_000_000
