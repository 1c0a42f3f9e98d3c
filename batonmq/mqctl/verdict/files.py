"""What the folders of brokers and controllers show, read only, also when nothing runs.

Small files come first, then the logs, the newest parts first, until the time is over.
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from batonmq.epoch.file_cache import REDO_SUFFIX, every_entry
from batonmq.mqctl.store_check import Verdict, segments_of, verify
from batonmq.mqctl.verdict.evidence import (
    ControllerFacts,
    FaultEvidence,
    LogTail,
    ProcessFacts,
    StoreEvidence,
    line_ms,
)
from batonmq.protocol import layout
from batonmq.protocol.numbers import INT_MAX, natural_number
from batonmq.protocol.records.codec import MAGIC_V1, MAGIC_V2
from batonmq.protocol.topic_name import SCHEDULE_TOPIC
from batonmq.runtime import disk
from batonmq.runtime.durable_file import BACKUP_SUFFIX

LOG_TAIL_BYTES: Final = 128 << 10
"""About a thousand lines: the last minutes, in which the cause stands."""
_LAST_WORDS: Final = re.compile(r"(broker|namesrv|controller): ")
_TABLES: Final = ("topics.json", "consumerOffset.json", "subscriptionGroup.json")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

Until = Callable[[], bool]
"""Whether there is time left."""


# Processes of this host.


def process_facts(pid: int) -> ProcessFacts:
    """What /proc says of a process of this host; what may not be read is left out."""
    folder = Path(f"/proc/{pid}")
    facts = ProcessFacts(pid)
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        facts = replace(facts, stopped=state in "Tt")
        limits = re.search(r"Max open files\s+(\d+)", (folder / "limits").read_text())
        count = len(os.listdir(folder / "fd"))
        return replace(facts, descriptors=count, descriptors_max=int(limits[1]) if limits else 0)
    except OSError:
        return facts


def log_tail(path: Path) -> LogTail:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return LogTail()
    starts = [at for at, line in enumerate(lines) if " server_started " in line]
    own = lines[starts[-1] :] if starts else lines
    times = [line_ms(line) for line in lines]
    # A process that refuses its settings ends before it says that it started.
    words = next((line for line in reversed(own) if line.strip()), "")
    return LogTail(
        tuple(own),
        tuple(times[at] for at in starts),
        any(" server_stopped " in line for line in own[-8:]),
        words if _LAST_WORDS.match(words) else "",
        max(times, default=0),
    )


# Controllers.


def controller_facts(folder: Path, node_id: str, configured: tuple[str, ...]) -> ControllerFacts:
    raft = folder / "raft"
    faults: list[FaultEvidence] = []
    if all(_is_absent(raft / name) for name in ("journal", "meta")):
        return ControllerFacts(str(folder), node_id, True, (), (), configured)
    for kind, name, check in (
        ("raft-journal", "journal", _journal_fault),
        ("raft-vote", "meta", _meta_fault),
        ("raft-snapshot", "snapshot", _snapshot_fault),
    ):
        path = raft / name
        try:
            what = check(disk.read_bytes(path))
        except FileNotFoundError:
            what = "" if name == "snapshot" else "it is missing"
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
        if what:
            faults.append(FaultEvidence(kind, str(path), what))
    members = json_of(raft / "members")
    ids = tuple(map(str, members.get("ids", ()))) if isinstance(members, dict) else ()
    return ControllerFacts(str(folder), node_id, False, tuple(faults), ids, configured)


def _journal_fault(data: bytes) -> str:
    """A torn last group is none: no message about it left the node."""
    if not data.startswith(layout.JOURNAL_MAGIC):
        return "no journal"
    at, bad = len(layout.JOURNAL_MAGIC), -1
    while at + layout.JOURNAL_GROUP.size <= len(data):
        size, crc = layout.JOURNAL_GROUP.unpack_from(data, at)
        payload = data[at + layout.JOURNAL_GROUP.size : at + layout.JOURNAL_GROUP.size + size]
        if not size or len(payload) < size or zlib.crc32(payload) != crc:
            bad = at
            break
        at += layout.JOURNAL_GROUP.size + size
    if bad < 0:
        return ""
    # A good group behind the bad one: what was written later is there, so this is no torn end. In a
    # part only: this is Python byte by byte.
    for at in range(bad + 1, min(len(data), bad + (1 << 20)) - layout.JOURNAL_GROUP.size):
        size, crc = layout.JOURNAL_GROUP.unpack_from(data, at)
        begin = at + layout.JOURNAL_GROUP.size
        if 0 < size <= len(data) - begin and zlib.crc32(data[begin : begin + size]) == crc:
            return f"a bad group at offset {bad}, with a good one behind it"
    size, _ = layout.JOURNAL_GROUP.unpack_from(data, bad)
    is_whole = 0 < size <= len(data) - bad - layout.JOURNAL_GROUP.size
    return f"a bad group at offset {bad}" if is_whole else ""


def _meta_fault(data: bytes) -> str:
    checksum, _, text = data.rstrip(b"\n").partition(b" ")
    return "" if checksum == b"%08x" % zlib.crc32(text) else "its checksum differs"


def _snapshot_fault(data: bytes) -> str:
    begin = len(layout.SNAPSHOT_MAGIC)
    head = data[: begin + layout.SNAPSHOT_CRC.size]
    if len(head) < begin + layout.SNAPSHOT_CRC.size or not head.startswith(layout.SNAPSHOT_MAGIC):
        return "no snapshot"
    is_good = layout.SNAPSHOT_CRC.unpack_from(data, begin)[0] == zlib.crc32(data[len(head) :])
    return "" if is_good else "its checksum differs"


# Brokers.


def store_facts(folder: Path) -> StoreEvidence:
    """The facts of a store except for its log and what points into the log."""
    reader = _StoreReader(folder)
    reader.read()
    return reader.facts


class _StoreReader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = StoreEvidence(str(folder))
        self._faults: list[FaultEvidence] = []
        self._unread = ""

    def fault(self, kind: str, file: Path, what: str) -> None:
        self._faults.append(FaultEvidence(kind, str(file), what))

    def read(self) -> None:
        self._identity()
        self._run_mark()
        self._epochs()
        self._role()
        self._checkpoint()
        self._tables()
        folder = self.folder
        private = folder / "commitlog" / ".baton"
        what = ""
        if (note := self._bytes(folder / "suspect")) is not None:
            noted = _json(note)
            is_whole = isinstance(noted, dict)
            what = str(noted.get("what", "")) if is_whole else "its note cannot be read"
        self.facts = replace(
            self.facts,
            log_id=self._text(private / "log_id"),
            lineage=self._text(private / "lineage"),
            lives=tuple(self._text(folder / "lives").split()),
            suspect=what,
            unread=self._unread,
            faults=tuple(self._faults),
        )

    def _bytes(self, path: Path, kind: str = "") -> bytes | None:
        """None if it is missing or cannot be read. The latter is a fault of `kind`; without one,
        what the file says could speak against the log."""
        try:
            return disk.read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            if kind:
                self.fault(kind, path, why)
            else:
                self._unread = self._unread or f"{path.name} {why}"
            return None

    def _text(self, path: Path) -> str:
        return (self._bytes(path) or b"").decode(errors="replace").strip()

    def _identity(self) -> None:
        path = self.folder / "brokerIdentity"
        if (data := self._bytes(path)) is None:
            return
        fields = data.decode(errors="replace").strip().split("#")
        if len(fields) != 3 or not fields[2].isdigit() or not "".join(fields).isprintable():
            self.fault("identity-file", path, f"no identity: {'#'.join(fields)[:60]!r}")
            return
        self.facts = replace(
            self.facts, cluster=fields[0], group=fields[1], broker_id=int(fields[2])
        )

    def _run_mark(self) -> None:
        if (data := self._bytes(self.folder / "abort")) is None:
            return
        lines = [*data.decode(errors="replace").split("\n"), "", ""]
        boot = self._text(_BOOT_ID)
        lost = bool(lines[1]) and lines[1] != boot and lines[2] != "flushed"
        self.facts = replace(self.facts, clean=False, lost_cache=lost)

    def _epochs(self) -> None:
        path = self.folder / "epochFileCheckpoint"
        whys: list[str] = []
        redo = path.with_name(path.name + REDO_SUFFIX)
        # As a start reads them: the first copy that is whole counts.
        for candidate in (path, path.with_name(path.name + BACKUP_SUFFIX)):
            try:
                content = disk.read_bytes(candidate)
                listed = every_entry(content, disk.read_bytes(redo) if redo.exists() else b"")
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                whys.append(f"{candidate.name}: {error}")
                continue
            epochs = tuple((each.epoch, each.start_offset) for each in listed)
            self.facts = replace(self.facts, epochs=epochs)
            if whys:
                self.fault("epoch-file-copy", path, f"{whys[0]}; its copy is used")
            return
        if whys:
            self.fault("epoch-file", path, "; ".join(whys))

    def _role(self) -> None:
        path = self.folder / "masterEpoch"
        if (data := self._bytes(path)) is None:
            return
        epochs = []
        for at in range(0, 128, 64):
            digits, _, crc = data[at : at + 64].rstrip().partition(b" ")
            if digits.isdigit() and crc == b"%08x" % zlib.crc32(digits):
                epochs.append(int(digits))
        if len(epochs) < 2 or len(data) != 128:
            self.fault("role-file", path, "it cannot be read: the highest masterEpoch is in it")
        self.facts = replace(self.facts, role_epoch=max(epochs, default=0))

    def _checkpoint(self) -> None:
        path = self.folder / "checkpoint"
        if (data := self._bytes(path)) is None:
            return
        if len(data) != layout.CHECKPOINT_SIZE:
            self.fault("checkpoint", path, f"{len(data)} bytes instead of {layout.CHECKPOINT_SIZE}")
            return
        ours = data[
            layout.CHECKPOINT_OURS_AT : layout.CHECKPOINT_OURS_AT + layout.CHECKPOINT_OURS.size
        ]
        magic, recovery, crc = layout.CHECKPOINT_OURS.struct.unpack(ours)
        head = data[: layout.CHECKPOINT.size]
        if magic != layout.CHECKPOINT_MAGIC or crc != zlib.crc32(
            ours[: layout.CHECKPOINT_OURS.at["crc"]], zlib.crc32(head)
        ):
            if any(data):  # all zeros: made at the start, and not written yet
                self.fault("checkpoint", path, "its checksum differs")
            return
        about = data[
            layout.CHECKPOINT_LOG_AT : layout.CHECKPOINT_LOG_AT + layout.CHECKPOINT_LOG.size
        ]
        *_, log_crc, crc = layout.CHECKPOINT_LOG.struct.unpack(about)
        log_id = self._text(self.folder / "commitlog" / ".baton" / "log_id")
        is_good = crc == zlib.crc32(about[: layout.CHECKPOINT_LOG.at["crc"]])
        if log_id and is_good and log_crc != zlib.crc32(log_id.encode()):
            self.fault("checkpoint", path, "it is about the log of another store")
            return
        newest_ms, *_, confirmed = layout.CHECKPOINT.struct.unpack(head)
        self.facts = replace(
            self.facts, newest_ms=newest_ms, confirmed=confirmed, known_end=max(recovery, confirmed)
        )

    def _tables(self) -> None:
        config = self.folder / "config"
        for name in _TABLES:
            path = config / name
            found = (
                self._bytes(each, "tables") for each in (path, path.with_name(name + BACKUP_SUFFIX))
            )
            copies = [data for data in found if data is not None]
            if copies and not any(isinstance(_json(data), dict) for data in copies):
                self.fault("tables", path, "no JSON object, and no copy of it is")
        for table in map(json_of, (config / "topics.json", config / f"topics.json{BACKUP_SUFFIX}")):
            if isinstance(table, dict) and isinstance(table.get("topicConfigTable"), dict):
                self.facts = replace(self.facts, listed=frozenset(table["topicConfigTable"]))
                break
        path = self.folder / "queuePositions"
        data = self._bytes(path, "queue-positions")
        crc, _, body = (data or b"").partition(b"\n")
        if data and crc != b"%08x" % zlib.crc32(body.rstrip(b"\n")):
            self.fault("queue-positions", path, "its checksum differs")


def read_log(facts: StoreEvidence, until: Until) -> Iterator[StoreEvidence]:
    """The facts with the log read, again and again, its newest file first; the last ones count.
    The first ones say that nothing was read yet."""
    segments = segments_of(Path(facts.folder) / "commitlog")
    if not segments:
        return
    facts = replace(
        facts,
        begin=int(segments[0].name),
        read_from=int(segments[-1].name) + segments[-1].stat().st_size,
    )
    yield facts
    following = -1
    for path in reversed(segments):
        check = Verdict()
        for _ in verify([path], check, is_open=False):
            if not until():
                return
        if following < 0 and check.end == int(path.name) and not check.damages:
            if path is segments[0]:
                yield replace(facts, end=check.end, read_from=check.end)
            continue  # made ahead, nothing was written to it
        found = _log_faults(path, check, facts, is_last=following < 0)
        if following >= 0 and check.end != following and not check.damages:
            what = "the log has a hole here: the file that follows begins later"
            found = (FaultEvidence("log-part", str(path), what, check.end, following - check.end),)
        end = check.end if following < 0 else facts.end
        facts = replace(facts, end=end, read_from=int(path.name), faults=(*found, *facts.faults))
        following = int(path.name)
        yield facts


def _log_faults(
    path: Path, check: Verdict, facts: StoreEvidence, *, is_last: bool
) -> tuple[FaultEvidence, ...]:
    base = int(path.name)
    found = []
    for damage in check.damages:
        is_tail = is_last and damage.offset == check.end
        if is_tail and not facts.clean and _is_torn(path, damage.offset - base, damage.size):
            continue  # a write that the end of its process cut off was not acknowledged
        kind = "log-tail" if is_tail else "log-middle"
        found.append(FaultEvidence(kind, damage.file, damage.what, damage.offset, damage.size))
    return tuple(found)


def _is_torn(path: Path, position: int, used: int) -> bool:
    """Whether the bytes at the log's end are the beginning of a record, and no whole bad one."""
    if used < layout.RECORD_HEAD.only("size", "magic").size:
        return True
    with path.open("rb") as file:
        file.seek(position)
        size, magic = layout.RECORD_HEAD.only("size", "magic").unpack(file.read(8))
    return magic in (MAGIC_V1, MAGIC_V2) and size > used


def read_derived(facts: StoreEvidence, until: Until) -> StoreEvidence:
    """The facts with consume queues, index and offsets of groups."""
    folder = Path(facts.folder)
    faults: list[FaultEvidence] = []
    counts: dict[str, dict[int, int | None]] = {}  # None: it cannot be read
    beyond: dict[int, tuple[int, Path]] = {}
    for queue in _below(folder / "consumequeue", "*/*", "consume-queue", faults):
        if not until():
            break
        queue_id = natural_number(queue.name, INT_MAX)
        if queue_id is not None:
            count: int | None = None
            try:
                count, ahead, what = _read_queue(queue, facts.end)
            except OSError as error:
                ahead, what = {}, f"cannot be read: {error.strerror}"
            counts.setdefault(queue.parent.name, {})[queue_id] = count
            if what:
                faults.append(FaultEvidence("consume-queue", str(queue), what))
            else:
                beyond |= {offset: (end, queue) for offset, end in ahead.items()}
    if len(beyond) == 1 and facts.end not in beyond:
        # Records that are gone would leave more units, the first of them for the log's end.
        ((offset, (_, queue)),) = beyond.items()
        faults.append(
            FaultEvidence("consume-queue", str(queue), f"its last unit points to {offset}")
        )
        beyond = {}
    for path in _below(folder / "index", "*", "index", faults):
        if os.path.isfile(path) and (what := _index_fault(path)):
            faults.append(FaultEvidence("index", str(path), what))
    return replace(
        facts,
        faults=(*facts.faults, *faults),
        known_end=max([facts.known_end, *(end for end, _ in beyond.values())]),
        topics={topic: sum(filter(None, of.values())) for topic, of in counts.items()},
        queues={topic: max(of) + 1 for topic, of in counts.items()},
        lags=_lags(folder, counts),
    )


def _below(folder: Path, pattern: str, kind: str, faults: list[FaultEvidence]) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        faults.append(FaultEvidence(kind, str(folder), f"cannot be read: {error.strerror}"))
        return []


def _read_queue(folder: Path, log_end: int) -> tuple[int, dict[int, int], str]:
    """(end of the queue, records behind the log's end that it names: offset -> end, what is
    wrong). `log_end` 0: not known."""
    count, before, last_size = 0, -1, 0
    ahead: dict[int, int] = {}
    for path in segments_of(folder):
        base = int(path.name)
        if base % layout.UNIT_SIZE:
            return count, ahead, f"{path.name} begins within a unit"
        data = disk.read_bytes(path).rstrip(b"\0")
        data += bytes(-len(data) % layout.UNIT_SIZE)
        for at, (offset, size, _) in enumerate(layout.UNIT.struct.iter_unpack(data)):
            if size == layout.FILLER_SIZE:
                continue
            where = f"{path.name}, unit {at}: "
            if offset < 0 or size <= 0:
                return count, ahead, f"{where}no place of a record"
            if offset <= before or offset < before + last_size:
                return count, ahead, f"{where}its offset {offset} is not above the one before"
            before, last_size = offset, size
            count = base // layout.UNIT_SIZE + at + 1
            if log_end and offset >= log_end:
                ahead[offset] = offset + size
    return count, ahead, ""


def due_ms(folder: Path, levels: Mapping[int, int]) -> int:
    """When the oldest of these delayed messages is due; 0: none is in the files. `levels`: delay
    level -> offset in its queue, whose units have due times instead of tags."""
    found = []
    for level, index in levels.items():
        queue = folder / "consumequeue" / SCHEDULE_TOPIC / str(level - 1)
        position = index * layout.UNIT_SIZE
        try:
            path = max(f for f in segments_of(queue) if int(f.name) <= position)
            with path.open("rb") as file:
                file.seek(position - int(path.name))
                offset, size, due = layout.UNIT.struct.unpack(file.read(layout.UNIT_SIZE))
        except (OSError, ValueError, struct.error):
            continue
        if size > 0 and size != layout.FILLER_SIZE and offset >= 0 and due > 0:
            found.append(due)
    return min(found, default=0)


def _index_fault(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(layout.INDEX_HEADER.size)
        if len(head) < layout.INDEX_HEADER.size:
            return "it is shorter than its header"
        begin_ms, end_ms, begin, end, used, count = layout.INDEX_HEADER.struct.unpack(head)
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    needs = (
        layout.INDEX_HEADER.size
        + used * layout.INDEX_SLOT.size
        + (count - 1) * layout.INDEX_ENTRY.size
    )
    sane = begin_ms >= 0 and begin >= 0 and 0 <= used <= max(count, 1) and needs <= size
    return "" if sane and (count <= 1 or (begin_ms <= end_ms and begin <= end)) else "a bad header"


def _lags(folder: Path, counts: dict[str, dict[int, int | None]]) -> dict[tuple[str, str], int]:
    table = json_of(folder / "config" / "consumerOffset.json")
    lags: dict[tuple[str, str], int] = {}
    offsets = table.get("offsetTable", {}) if isinstance(table, dict) else {}
    for key, queues in offsets.items():
        topic, _, group = str(key).partition("@")
        ends = counts.get(topic, {})
        if group and isinstance(queues, dict):
            known = [(ends.get(int(q), 0), int(at)) for q, at in queues.items()]
            behind = [max(0, end - at) for end, at in known if end is not None]
            if len(behind) == len(known):
                lags[group, topic] = sum(behind)
    return lags


def json_of(path: Path) -> Any:
    """None if it is missing, cannot be read, or is no JSON."""
    try:
        return _json(disk.read_bytes(path))
    except OSError:
        return None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_absent(path: Path) -> bool:
    """False also if the disk does not say: `os.path.exists` would take an error for absence."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False
