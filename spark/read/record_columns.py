"""The records of a piece of the commit log at once: where they begin, and their heads as columns.

`chain` follows the sizes from one record to the next; `candidates` finds places that look like a
record where no boundary is known: behind damage, and where a large file is split.

Nothing here makes a Python object of a message: the fields of all records of a window are fetched
with one numpy take each, wherever they lie. Rules of the record: `protocol.record`.

The checks are those by which the broker itself recognises damage
(`protocol.record.scan_record`, `store.log_scan`), done for all records together. Where one fails,
`scan_record` gives the reason, so that both agree. Free of Spark.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from batonmq.protocol.layout import (
    HOST_V4_SIZE,
    HOST_V6_SIZE,
    RECORD_HEAD,
    RECORD_STORE_TIME,
    RECORD_TAIL,
)
from batonmq.protocol.record import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    FIXED_SIZE_V1,
    MAGIC_V1,
    MAGIC_V2,
    CorruptRecord,
    scan_record,
)
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

Int64s = npt.NDArray[np.int64]

# Bytes from a record's start to the end of its physical offset.
OFFSET_END: Final = RECORD_HEAD.only("physical_offset").size
_MAGIC_AT: Final = RECORD_HEAD.at["magic"]
_MAGICS: Final = (MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big"))
_read_size = RECORD_HEAD.only("size").unpack_from
_read_offset = RECORD_HEAD.only("physical_offset").unpack_from


def chain(window: bytes, position: int, stop: int) -> tuple[Int64s, int]:
    """(starts, next): whole records one behind the other from `position` on.

    Only those that start below `stop` (a position in the window, exclusive) and lie wholly in it.
    Only sizes are read, so the bytes at a start may still turn out to be no record. `next` is
    where the chain ended: at or behind `stop`, at what the window cuts off, or at something that
    cannot be a size.
    """
    starts: list[int] = []
    add = starts.append
    length = len(window)
    stop = min(stop, length - FIXED_SIZE_V1 + 1)
    while position < stop:
        (size,) = _read_size(window, position)
        if size < FIXED_SIZE_V1 or size > length - position:
            break
        add(position)
        position += size
    return np.array(starts, np.int64), position


def candidates(window: bytes, base: int) -> Iterator[int]:
    """Places in the window, ascending, with a record's magic and its own log offset behind it.

    `base` is the log offset of the window's first byte. A record must name its own offset, so a
    copy of one within a body does not count. `is_record` checks whether a whole record lies
    there. Places nearer than OFFSET_END to the window's end are not searched.
    """
    last = len(window) - OFFSET_END
    for at in magics(window):
        if at > last:
            return
        if _read_offset(window, at)[0] == base + at:
            yield at


def magics(data: bytes) -> Iterator[int]:
    """Places where a record would begin whose magic lies in `data`, ascending."""
    next_of = [data.find(magic, _MAGIC_AT) for magic in _MAGICS]
    while found := [at for at in next_of if at >= 0]:
        at = min(found)
        yield at - _MAGIC_AT
        which = next_of.index(at)
        next_of[which] = data.find(_MAGICS[which], at + 1)


def is_record(window: bytes, position: int, offset: int) -> bool:
    """Whether a whole record of log offset `offset` with the right CRC lies at `position`."""
    try:
        head = scan_record(window, position, check_crc=True)
    except CorruptRecord:
        return False
    return head is not None and head.kind == "message" and head.physical_offset == offset


Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

# The parts between the hosts have fixed layouts; where they begin depends on the hosts' lengths.
_HEAD: Final = np.dtype(RECORD_HEAD.dtype)
_STORE_TIME: Final = np.dtype(RECORD_STORE_TIME.dtype)
_TAIL: Final = np.dtype(RECORD_TAIL.dtype)
_HEAD_COLUMNS: Final = (
    "body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "born_ms",
)  # fmt: skip
_U8: Final = np.dtype("u1")
_U16: Final = np.dtype(">u2")
_I16: Final = np.dtype(">i2")
# Parts of a record without hosts, body, topic and properties, and with a topic length of one byte.
_REST: Final = FIXED_SIZE_V1 - 2 * HOST_V4_SIZE
_DIGITS: Final = CRC_TAIL_SIZE - len(CRC_PROPERTY) - 1
_POWERS: Final = 10 ** np.arange(_DIGITS, dtype=np.int64)
_crc32 = zlib.crc32


@dataclass(frozen=True, slots=True)
class Records:
    """Columns over the records of one window; `..._at` are positions in it, times are ms.

    `start` ascends, and a record's parts do not overlap with those of the next.
    """

    start: Int64s
    size: Int64s
    body_crc: Int64s
    queue_id: Int64s
    flag: Int64s
    queue_offset: Int64s
    physical_offset: Int64s
    sys_flag: Int64s
    born_ms: Int64s
    born_host_at: Int64s
    born_host_length: Int64s
    store_ms: Int64s
    store_host_at: Int64s
    store_host_length: Int64s
    reconsume_times: Int64s
    prepared: Int64s
    body_at: Int64s
    body_length: Int64s
    topic_at: Int64s
    topic_length: Int64s
    properties_at: Int64s
    properties_length: Int64s

    def __len__(self) -> int:
        return len(self.start)

    def keep(self, wanted: "Bools | slice") -> "Records":
        """The same columns over the records that are wanted."""
        return Records(*(getattr(self, field.name)[wanted] for field in fields(self)))


def take_fields(data: Bytes, at: Int64s, layout: np.dtype[Any]) -> npt.NDArray[Any]:
    """One item of `layout` from each position; all of them must lie in `data` wholly."""
    if not len(at):
        return np.empty(0, layout)
    width = layout.itemsize
    everywhere = np.ndarray((len(data) - width + 1,), f"V{width}", data, 0, (1,))
    return everywhere[at].view(layout)


def _numbers(data: Bytes, at: Int64s, layout: np.dtype[Any]) -> Int64s:
    return take_fields(data, at, layout).astype(np.int64)


def _integers(items: npt.NDArray[Any], names: tuple[str, ...]) -> dict[str, Int64s]:
    return {name: items[name].astype(np.int64) for name in names}


def locate(window: bytes, starts: Int64s) -> tuple[Records, int]:
    """(records, good): the records at `starts`, up to the first whose parts do not fit together.

    Each start must have the whole bytes of what its size says in the window, and a size of at least
    FIXED_SIZE_V1, as `chain` finds them. `good` is how many there are; at `starts[good]`, if that
    exists, lies no record. CRCs and offsets are not checked: see `wrong_crc` and `misplaced`.
    """
    data = np.frombuffer(window, np.uint8)
    head = take_fields(data, starts, _HEAD)
    size = head["size"].astype(np.int64)
    is_v2 = head["magic"] == MAGIC_V2
    sys_flag = head["sys_flag"].astype(np.int64)
    born_length = np.where(sys_flag & BORN_HOST_V6, HOST_V6_SIZE, HOST_V4_SIZE)
    store_length = np.where(sys_flag & STORE_HOST_V6, HOST_V6_SIZE, HOST_V4_SIZE)
    rest = size - _REST - is_v2 - born_length - store_length
    fits = ((head["magic"] == MAGIC_V1) | is_v2) & (rest >= 0)
    store_time_at = starts + _HEAD.itemsize + born_length
    store_host_at = store_time_at + _STORE_TIME.itemsize
    tail_at = store_host_at + store_length
    # A record that does not fit is read at its start, so that nothing is read outside the window.
    tail = take_fields(data, np.where(fits, tail_at, starts), _TAIL)
    store_ms = _numbers(data, np.where(fits, store_time_at, starts), _STORE_TIME["store_ms"])
    body_length = tail["body_length"].astype(np.int64)
    fits, variable = _variable_parts(
        data, starts, fits, tail_at + _TAIL.itemsize, body_length, rest, is_v2
    )
    records = Records(
        start=starts,
        size=size,
        sys_flag=sys_flag,
        born_host_at=starts + _HEAD.itemsize,
        born_host_length=born_length,
        store_ms=store_ms,
        store_host_at=store_host_at,
        store_host_length=store_length,
        **_integers(head, _HEAD_COLUMNS),
        **_integers(tail, ("reconsume_times", "prepared")),
        **variable,
    )
    if fits.all():
        return records, len(starts)
    good = int(np.argmin(fits))
    return records.keep(slice(good)), good


def _variable_parts(
    data: Bytes,
    starts: Int64s,
    fits: Bools,
    body_at: Int64s,
    body_length: Int64s,
    rest: Int64s,
    is_v2: Bools,
) -> tuple[Bools, dict[str, Int64s]]:
    """(fits, columns): where body, topic and properties lie, by the names of `Records`.

    `rest`: how many bytes the three must have together, else the record does not fit.
    """
    fits = fits & (body_length >= 0) & (body_length <= rest)
    topic_length_at = body_at + body_length
    safe = np.where(fits, topic_length_at, starts)
    topic_length = np.where(is_v2, _numbers(data, safe, _U16), _numbers(data, safe, _U8))
    fits &= body_length + topic_length <= rest
    topic_at = topic_length_at + 1 + is_v2
    properties_length_at = topic_at + topic_length
    safe = np.where(fits, properties_length_at, starts)
    properties_length = _numbers(data, safe, _I16)
    fits &= (properties_length >= 0) & (body_length + topic_length + properties_length == rest)
    return fits, {
        "body_at": body_at,
        "body_length": body_length,
        "topic_at": topic_at,
        "topic_length": topic_length,
        "properties_at": properties_length_at + _I16.itemsize,
        "properties_length": properties_length,
    }


def misplaced(records: Records, base: int) -> Bools:
    """Which records do not name the offset at which they lie; `base` is that of the window."""
    return records.physical_offset != records.start + base


def wrong_crc(window: bytes, records: Records) -> Bools:
    """Which records are not as they were written, by the property CRC, else by the body CRC.

    A record without the first whose properties end in zeros was torn within them. A record whose
    properties end in digits behind something else than the CRC's name is left to `scan_record`:
    it is marked here, and may be whole.
    """
    data = np.frombuffer(window, np.uint8)
    end = records.start + records.size
    # Every record is longer than the CRC's tail.
    tail = take_fields(data, end - CRC_TAIL_SIZE, np.dtype(("u1", CRC_TAIL_SIZE)))
    named = (tail[:, : len(CRC_PROPERTY)] == np.frombuffer(CRC_PROPERTY, np.uint8)).all(axis=1)
    digits = tail[:, len(CRC_PROPERTY) : -1].astype(np.int64) - ord("0")
    is_number = ((digits >= 0) & (digits <= 9)).all(axis=1) & (tail[:, -1] == 2)
    written = np.where(named, digits @ _POWERS, records.body_crc)
    begin = np.where(named, records.start, records.body_at)
    stop = np.where(named, end - CRC_TAIL_SIZE, records.body_at + records.body_length)
    view = memoryview(window)
    actual = np.fromiter(
        map(_crc32, (view[a:b] for a, b in zip(begin.tolist(), stop.tolist(), strict=True))),
        np.int64,
        len(records),
    )
    wrong = (actual & 0x7FFFFFFF) != written
    wrong &= named | (records.body_length > 0)
    wrong |= named ^ is_number
    torn = ~named & (records.properties_length > 0) & (tail[:, -1] == 0)
    return np.asarray(wrong | torn)
