"""What is fuzzed: name -> Target. A target's `read` takes any bytes."""

import base64
import hmac
import itertools
import json
import logging
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batonmq.auth.policy import (
    ACTIONS,
    RESOURCES,
    AclInfo,
    KnownUser,
    Need,
    PolicyEntry,
    User,
    merged,
    pattern_of,
)
from batonmq.auth.signature import SigningKey, call_signature
from batonmq.broker.main import SECTIONS
from batonmq.broker.tables.topics import MetadataChange
from batonmq.controller.raft.journal import DurableJournal, JournalDamage
from batonmq.controller.raft.membership import decode_greeting
from batonmq.controller.raft.snapshot import BadSnapshot, decode_snapshot, encode_snapshot
from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import RedoFile, continuation, decode_entries, digest, encode_entries
from batonmq.ha.wire import MasterFrameReader, SlaveFrameReader
from batonmq.history.event import lenient_event
from batonmq.protocol import fastjson
from batonmq.protocol.batch import split_batch
from batonmq.protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    EpochEntryCache,
    HeartbeatData,
    SubscriptionGroupWrapper,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.errors import (
    BrokerRefusal,
    ConfigError,
    CorruptLogError,
    RemoteProtocolError,
)
from batonmq.protocol.properties import decode_properties, find_property
from batonmq.protocol.records.codec import decode_record, scan_record
from batonmq.protocol.records.common import quick_size
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.remoting.command import (
    FRAME_SIZE_MAX,
    FrameReader,
    decode_frame,
    peek_code,
    peek_is_response,
    receive_buffer,
)
from batonmq.remoting.headers import decode_pull, decode_send
from batonmq.runtime.settings import load_settings
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.commit_log import CommitLog
from batonmq.store.consume_queue import Boundary, ConsumeQueue
from batonmq.store.file_handles import FileHandles
from batonmq.store.index_file import IndexFile, file_size
from batonmq.store.log_scan import find_valid_record, whole_records_end
from batonmq.store.queue_positions import decode_positions

GOLDEN = Path(__file__).parents[1] / "golden"
STORE = GOLDEN / "java-5.3.3" / "store" / "b0"
SEGMENT = 8192
SEED_BYTES_MAX = 8192


class Target(NamedTuple):
    """`seeds`: whole, good inputs that the search begins with."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


@cache
def folder() -> Path:
    """For readers of files: in memory where there is such a place."""
    shm = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="fuzz-")
    _kept.append(made)
    return Path(made.name)


_kept: list[Any] = []  # removed when the process ends


def quiet() -> None:
    """Refusals are logged, a million times."""
    logging.disable(logging.CRITICAL)


# Remoting.


def remoting_frames(data: bytes) -> None:
    """The first byte says in pieces of which size the rest arrives."""
    reader, rest = FrameReader(receive_buffer()), data[1:]
    size = (data[0] if data else 0) + 1
    with suppress(RemoteProtocolError):
        while rest:
            buffer = reader.get_buffer()
            assert 0 < len(buffer) <= FRAME_SIZE_MAX
            count = min(size, len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            for kind, header, body in reader.received(count):
                assert len(header) + len(body) <= len(data)
                remoting_header(bytes([kind]) + header)


def remoting_header(data: bytes) -> None:
    """The first byte is the header's type; no other than 0 and 1 comes out of a FrameReader."""
    kind, header = (data[0] if data else 0), data[1:]
    with suppress(RemoteProtocolError):
        decode_frame(header, b"", kind)
    kind &= 1
    with suppress(RemoteProtocolError):
        peek_code(kind, header)
        peek_is_response(kind, header)
    for decode in (decode_send, decode_pull):
        with suppress(RemoteProtocolError, BrokerRefusal):
            decode(kind, header)


@cache
def examples() -> tuple[tuple[bytes, bytes], ...]:
    """(header, body) of the messages of a Java cluster."""
    found = []
    for file in sorted(GOLDEN.glob("*/remoting/*.json")):
        for example in json.loads(file.read_text())["examples"][:2]:
            for message in (example["request"], example.get("response")):
                if message is None or len(message["body_hex"]) > 2 * SEED_BYTES_MAX:
                    continue
                text = message["header"]
                header = bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()
                found.append((header, bytes.fromhex(message["body_hex"])))
    return tuple(found)


def _kind(header: bytes) -> int:
    return 0 if header[:1] == b"{" else 1


def _frames() -> list[bytes]:
    made = []
    for header, body in examples():
        mark = _kind(header) << 24 | len(header)
        length = 4 + len(header) + len(body)
        made.append(b"\x40" + length.to_bytes(4) + mark.to_bytes(4) + header + body)
    return made


def _headers() -> list[bytes]:
    return [bytes([_kind(header)]) + header for header, _ in examples()]


def _json_bodies() -> list[bytes]:
    return [body for _, body in examples() if body[:1] in (b"{", b"[")]


def body_of(data: bytes) -> None:
    """Bodies of requests and replies, and the tables' files."""
    for kind in (
        TopicConfigAndMappingSerializeWrapper,
        SubscriptionGroupWrapper,
        ConsumerOffsetSerializeWrapper,
        EpochEntryCache,
        HeartbeatData,
    ):
        with suppress(RemoteProtocolError):
            kind.decode(data)


def register_body(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        list(RegisterBrokerBody.decode_steps(data))


def register_body_inflated(data: bytes) -> None:
    register_body(zlib.compress(data))


def read_fastjson(data: bytes) -> None:
    with suppress(fastjson.FastjsonError):
        fastjson.loads(data)


def batch(data: bytes) -> None:
    with suppress(BrokerRefusal):
        list(split_batch(data))


def message_properties(data: bytes) -> None:
    decode_properties(data)
    find_property(data, b"KEYS")


def system_records(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        MetadataChange.decode(data)
    decode_positions(data)


# Users.


def signature(data: bytes) -> None:
    """Two lines of a gRPC call's metadata, then fields as JSON: what a plain HMAC says."""
    secret, (scheme, time, fields) = "secret", (data.split(b"\n", 2) + [b""] * 2)[:3]
    metadata = [
        ("authorization", scheme.decode("latin-1")),
        ("x-mq-date-time", time.decode("latin-1")),
    ]
    call = call_signature(metadata)
    if call is not None:
        wanted = hmac.digest(secret.encode(), call.signed.encode(), "sha1")
        with suppress(ValueError):
            assert SigningKey(secret).proves_call(call) is (bytes.fromhex(call.digest) == wanted)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        ext = msgspec.json.decode(fields, type=dict[str, str])
        text = "".join(value for name, value in sorted(ext.items()) if name != "Signature")
        plain = base64.b64encode(
            hmac.digest(secret.encode(), text.encode() + time, "sha1")
        ).decode()
        assert SigningKey(secret).proves(ext, time) is (ext.get("Signature") == plain)
        assert SigningKey(secret).proves(ext | {"Signature": plain}, time)


def policies(data: bytes) -> None:
    """Whatever a user's policies are, each decision is the one of `by_the_page`."""
    try:
        user = merged(User(username="u", password="p"), AclInfo.decode(data))
    except (BrokerRefusal, RemoteProtocolError):
        return
    known = KnownUser(user)
    patterns = {pattern_of(name) for entries in user.policies.values() for name in entries}
    names = {pattern.name + more for pattern in patterns for more in ("", "x", "*")} | {"other"}
    for kind, name, action in itertools.product(RESOURCES, sorted(names)[:8], ACTIONS[:3]):
        if name:
            for source in ("10.0.0.1", "fd00::1", "?"):
                decided = known.evaluate(Need(((kind, name),), (action,)), source, "C").allowed
                assert decided is by_the_page(user, kind, name, action, source)


def by_the_page(user: User, kind: str, name: str, action: str, source: str) -> bool:
    """As docs/security.md has it: resources are tried from the closest on, Deny before Allow."""
    prefixes = [f"{kind}:{name[:end]}*" for end in range(len(name), -1, -1)]
    for policy in ("Custom", "Default"):
        entries = user.policies.get(policy, {})
        for resource in (f"{kind}:{name}", *prefixes, "*"):
            entry = entries.get(resource)
            if entry and {action, "All"} & set(entry.actions) and _comes_from(entry, source):
                return entry.decision == "Allow"
    return False


def _comes_from(entry: PolicyEntry, source: str) -> bool:
    with suppress(ValueError):
        address = ip_address(source)
        if any(address in ip_network(text, strict=False) for text in entry.source_ips):
            return True
    return not entry.source_ips


# HA.


def ha_from_slave(data: bytes) -> None:
    """The first byte says in pieces of which size the rest arrives."""
    reader = SlaveFrameReader()
    with suppress(RemoteProtocolError):
        for piece in _pieces(data):
            reader.feed(piece)


def ha_from_master(data: bytes) -> None:
    reader, taken = MasterFrameReader(), 0
    with suppress(RemoteProtocolError):
        for piece in _pieces(data):
            for got in reader.feed(memoryview(piece)):
                if isinstance(got, memoryview):
                    assert len(got)
                    taken += len(got)
            assert taken <= len(data)
            assert len(reader._pending) <= len(data)


def _pieces(data: bytes) -> Iterator[bytes]:
    size, rest = (data[0] if data else 0) + 1, data[1:]
    for at in range(0, len(rest), size):
        yield rest[at : at + size]


def _streams(direction: str) -> list[bytes]:
    streams = json.loads((GOLDEN / "java-5.3.3" / "ha-streams.json").read_text())
    chosen = [bytes.fromhex(each["hex"]) for each in streams if each["direction"] == direction]
    return [b"\x30" + stream[:SEED_BYTES_MAX] for stream in chosen]


# The store's files.


def record(data: bytes) -> None:
    """The quick way takes nothing that the careful way refuses."""
    view = memoryview(data)
    quick = quick_size(view, 0, len(data) + 8, 0)
    try:
        head = scan_record(view, 0, check_crc=True)
    except CorruptRecord:
        assert not quick
        return
    assert head is not None or not quick
    if head is not None and head.kind != "blank":
        assert not quick or quick == head.size
        with suppress(CorruptRecord):
            decode_record(view, 0)


def commit_log(data: bytes) -> None:
    """Two segments; `data` is at their beginning."""
    root = folder() / "commitlog"
    root.mkdir(exist_ok=True)
    whole = data[: 2 * SEGMENT].ljust(2 * SEGMENT, b"\0")
    for start in (0, SEGMENT):
        (root / f"{start:020d}").write_bytes(whole[start : start + SEGMENT])
    log = CommitLog(root, SEGMENT)
    try:
        log.load()
        end, problem = whole_records_end(log, 0, log.end_of_segments)
        assert 0 <= end <= log.end_of_segments
        if problem is not None:
            find_valid_record(log, end)
        for segment in log.segments:
            assert 0 <= segment.data_end() <= SEGMENT
    finally:
        log.close()


def _log_bytes() -> list[bytes]:
    raw = (STORE / "commitlog" / ("0" * 20)).read_bytes() if STORE.exists() else b""
    return [raw[:SEED_BYTES_MAX], raw[: 2 * SEGMENT]]


def _records() -> list[bytes]:
    raw, at, found = _log_bytes()[1], 0, []
    while len(found) < 20 and (size := int.from_bytes(raw[at : at + 4])) and at + size < len(raw):
        found.append(raw[at : at + size])
        at += size
    return found


def consume_queue(data: bytes) -> None:
    path = folder() / "queue" / ("0" * 20)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:4000].ljust(4000, b"\0"))
    handles = FileHandles(4)
    queue = ConsumeQueue(path.parent, "T", 0, file_size=4000, handles=handles)
    try:
        queue.load(0)
        for _ in queue.iter_units():
            pass
        queue.offset_by_time(5, Boundary.LOWER, lambda offset, size: offset)
        queue.read_units(0, 32)
    except CorruptLogError:
        pass
    finally:
        handles.close()


def index(data: bytes) -> None:
    path, slots, entries = folder() / "20240101000000000", 16, 64
    size = file_size(slots, entries)
    path.write_bytes(data[:size].ljust(size, b"\0"))
    handles = FileHandles(4)
    try:
        file = IndexFile(path, slots, entries, handles)
        file.verify()
        file.select_phy_offsets(7, 10, 0, 1 << 62, [])
        file.first_entry_at_or_above(100)
        file.truncate_to(100)
    except ValueError:
        pass
    finally:
        handles.close()


def _queue_units() -> list[bytes]:
    files = [p for p in (STORE / "consumequeue").rglob("0" * 20) if p.is_file()]
    return [path.read_bytes()[:4000].rstrip(b"\0") for path in files[:4]]


def _index_files() -> list[bytes]:
    made = folder() / "made" / "20240101000000000"
    made.parent.mkdir(exist_ok=True)
    made.unlink(missing_ok=True)
    handles = FileHandles(4)
    file = IndexFile.create(made, 16, 64, handles)
    for number in range(12):
        file.put([number * 7], [1000 * number + 1], [1_700_000_000_000 + number])
    file.write_slots()
    handles.close()
    return [made.read_bytes()]


def checkpoint(data: bytes) -> None:
    path = folder() / "checkpoint"
    path.write_bytes(data.ljust(4096, b"\0")[:4096])
    read = StoreCheckpoint(path)
    assert read.recovery_offset is None or read.recovery_offset >= 0
    read.encode()


def epoch_file(data: bytes) -> None:
    with suppress(ValueError):
        decode_entries(data)


def epoch_redo(data: bytes) -> None:
    base, _, rest = data.partition(b"\n")
    for entry in continuation(rest, base):
        assert entry.epoch >= 0


def _redo_files() -> list[bytes]:
    path = folder() / "redo"
    path.unlink(missing_ok=True)
    redo = RedoFile(path)
    base = digest(b"x")
    redo.load(base)
    redo.make()
    redo.write(base, [EpochEntry(3, 100)])
    redo.write(base, [EpochEntry(3, 100), EpochEntry(4, 200)])
    return [base + b"\n" + path.read_bytes()]


# Controllers.


def raft_journal(data: bytes) -> None:
    _open_journal(data, b"")


def raft_meta(data: bytes) -> None:
    """As it is, and with a checksum that fits."""
    _open_journal(b"BATONJ01", data)
    _open_journal(b"BATONJ01", b"%08x %s\n" % (zlib.crc32(data), data))


def raft_groups(data: bytes) -> None:
    """Operations in a group whose checksum fits."""
    if data:
        group = len(data).to_bytes(4) + zlib.crc32(data).to_bytes(4) + data
        _open_journal(b"BATONJ01" + group, b"")


def _open_journal(journal: bytes, meta: bytes) -> None:
    root = folder() / "raft"
    root.mkdir(exist_ok=True)
    text = b'{"term": 3, "votedFor": null}'
    (root / "journal").write_bytes(journal)
    (root / "meta").write_bytes(meta or b"%08x %s\n" % (zlib.crc32(text), text))
    try:
        opened = DurableJournal(root, None, _fatal)
    except JournalDamage:
        return
    opened.setCurrentTerm(9, None)
    opened.close()


def _fatal(what: str) -> Any:
    raise AssertionError(what)


def _journals() -> list[bytes]:
    root = folder() / "made-raft"
    journal = DurableJournal(root, None, _fatal)
    journal.setCurrentTerm(1, "n1")
    for first in (len(journal) + 1, len(journal) + 4):
        for number in range(first, first + 3):
            journal.add(b"command %d" % number, number, 1)
        journal.sync()
    journal.deleteEntriesFrom(3)
    journal.join()
    journal.sync()
    journal.close()
    return [(root / "journal").read_bytes()]


def _groups() -> list[bytes]:
    (whole,) = _journals()
    at, found = 8, []
    while at < len(whole):
        size = int.from_bytes(whole[at : at + 4])
        found.append(whole[at + 8 : at + 8 + size])
        at += 8 + size
    return found


def raft_snapshot(data: bytes) -> None:
    """As it is, and with a checksum that fits."""
    magic = len(_snapshots()[0]) - len(_snapshot_body()) - 4
    head = _snapshots()[0][:magic]
    for whole in (data, head + zlib.crc32(data).to_bytes(4) + data):
        with suppress(BadSnapshot):
            decode_snapshot(whole)


@cache
def _snapshots() -> tuple[bytes, ...]:
    state = {"groups": {"broker-a": [1, 2]}, "clock": 5}
    return (encode_snapshot(state, ((b"last", 9, 2), (b"", 8, 1))),)


def _snapshot_body() -> bytes:
    whole = _snapshots()[0]
    return whole[whole.index(b"{") :]


def greeting(data: bytes) -> None:
    with suppress(ValueError, msgspec.MsgspecError):
        decode_greeting(data)


def history_line(data: bytes) -> None:
    event = lenient_event(data)
    if event is not None:
        event.to_json()


# Settings.


def config_yaml(data: bytes) -> None:
    _load_config(data, "broker.yaml")


def config_flat(data: bytes) -> None:
    _load_config(data, "broker.conf")


def _load_config(data: bytes, name: str) -> None:
    path = folder() / name
    path.write_bytes(data)
    try:
        load_settings(path, SECTIONS, environ={})
    except ConfigError as error:
        assert str(path) in str(error) or "nowhere" in str(error) or "together" in str(error)


def _yaml_files() -> list[bytes]:
    deploy = Path(__file__).parents[2] / "deploy" / "config"
    return [path.read_bytes() for path in sorted(deploy.glob("*.yaml"))] + [
        b"broker:\n  brokerName: b\n  listenPort: 10911\nstore:\n  flushDiskType: SYNC_FLUSH\n"
    ]


def _table_files() -> list[bytes]:
    return [p.read_bytes() for p in sorted((STORE / "config").glob("*.json"))][:6]


TARGETS: dict[str, Target] = {
    "remoting-frames": Target(remoting_frames, _frames),
    "remoting-header": Target(remoting_header, _headers),
    "bodies": Target(body_of, lambda: _json_bodies() + _table_files()),
    "register-body": Target(register_body, _json_bodies),
    "register-body-inflated": Target(register_body_inflated, lambda: [b"\0\0\0\2{}\0\0\0\0"]),
    "fastjson": Target(
        read_fastjson, lambda: [*_json_bodies(), b'{0:"a",{"t":1}:[{"$ref":"$.a[0]"}]}']
    ),
    "batch": Target(batch, lambda: [b"\0\0\0\x19" + bytes(12) + b"\0\0\0\3abc\0\0"]),
    "properties": Target(message_properties, lambda: [b"TAGS\x01a\x02KEYS\x01b c\x02"]),
    "system-records": Target(
        system_records,
        lambda: [
            b'{"v":1,"topics":{"T":{"topicName":"T"}},"deletedTopics":["U"]}',
            b'{"v":1,"since":1,"positions":{"T":{"0":5}}}',
        ],
    ),
    "signature": Target(
        signature,
        lambda: [
            b"MQv2-HMAC-SHA1 Credential=u/r, SignedHeaders=x-mq-date-time, Signature=0A\n"
            b'20260101T000000Z\n{"topic":"T","AccessKey":"u","B":"up"}',
            b"MQv2-HMAC-SHA1 Credential=u, Signature=6E5BB4D1E2B1A7C3\n20260101T000000Z\n{}",
        ],
    ),
    "policies": Target(
        policies,
        lambda: [
            b'{"policies":[{"entries":[{"resource":"Topic:ab*","actions":["Pub","Sub"]},'
            b'{"resource":"*","actions":["All"],"decision":"Deny","sourceIps":["10.0.0.0/8"]}]}]}',
            b'{"policies":[{"entries":[{"resource":"Topic:a*","actions":["Pub"],"decision":"Deny"},'
            b'{"resource":"Topic:ab*","actions":["All"]}]}]}',
            b'{"policies":[{"policyType":"Default","entries":[{"resource":"Group:a","actions":'
            b'["all"]},{"resource":"Topic:*","actions":["Sub"],"decision":"deny"}]}]}',
        ],
    ),
    "ha-from-slave": Target(ha_from_slave, lambda: _streams("slave->master")),
    "ha-from-master": Target(ha_from_master, lambda: _streams("master->slave")),
    "record": Target(record, _records),
    "commit-log": Target(commit_log, _log_bytes),
    "consume-queue": Target(consume_queue, _queue_units),
    "index": Target(index, _index_files),
    "checkpoint": Target(checkpoint, lambda: [(STORE / "checkpoint").read_bytes()[:64]]),
    "epoch-file": Target(
        epoch_file, lambda: [encode_entries([EpochEntry(1, 0), EpochEntry(2, 500)])]
    ),
    "epoch-redo": Target(epoch_redo, _redo_files),
    "raft-journal": Target(raft_journal, _journals),
    "raft-groups": Target(raft_groups, _groups),
    "raft-meta": Target(raft_meta, lambda: [b'{"term": 3, "votedFor": "n1"}']),
    "raft-snapshot": Target(raft_snapshot, lambda: [*_snapshots(), _snapshot_body()]),
    "raft-greeting": Target(
        greeting,
        lambda: [
            b'{"version":1,"address":"h:1","cluster":"c","members":["n0@h:1"],"nonce":"%b"}'
            % (b"0f" * 32)
        ],
    ),
    "history-line": Target(
        history_line,
        lambda: [b'{"v":1,"log":"a","raftIndex":3,"part":0,"kind":"elected","detail":{}}'],
    ),
    "config-yaml": Target(config_yaml, _yaml_files),
    "config-flat": Target(config_flat, lambda: [b"brokerName=b\nlistenPort = 10911\n# x\n"]),
}
