"""Reads many records at once with numpy: where they begin, their fields, and whether they are
valid. The checks agree with `codec`; `codec.scan_in_file` gives the reason for a bad record. No
Python object is made per message: each field of a window's records is one numpy take."""

import sys
import zlib
from collections.abc import Sequence
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
    RECORD_V4,
)
from batonmq.protocol.records.codec import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    END_FILE_MIN_BLANK,
    FIXED_SIZE_V1,
    MAGIC_V1,
    MAGIC_V2,
    SIZE_MIN_WITH_CRC,
    Buffer,
)
from batonmq.protocol.records.common import UNCOMMON_FLAGS
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

BYTES_MAX: Final = 1 << 20  # Of a window whose tables should fit into the processor's cache.
_CHECKED_FIRST: Final = 32 << 10
"""What `checked_end` reads first; doubled each time while all of it is good."""

# The parts between the hosts have fixed layouts; where they begin depends on the hosts' lengths.
_HEAD: Final = np.dtype(RECORD_HEAD.dtype)
_V4: Final = np.dtype(RECORD_V4.dtype)
_STORE_TIME: Final = np.dtype(RECORD_STORE_TIME.dtype)
_TAIL: Final = np.dtype(RECORD_TAIL.dtype)
_HEAD_COLUMNS: Final = (
    "body_crc", "queue_id", "flag", "queue_offset", "physical_offset", "born_ms",
)  # fmt: skip
_U8: Final = np.dtype("u1")
_U16: Final = np.dtype(">u2")
_I16: Final = np.dtype(">i2")
# Of a record without hosts, body, topic, properties; one byte for the topic's length.
_REST: Final = FIXED_SIZE_V1 - 2 * HOST_V4_SIZE
_DIGITS: Final = CRC_TAIL_SIZE - len(CRC_PROPERTY) - 1
_POWERS: Final = 10 ** np.arange(_DIGITS, dtype=np.int64)
# The end of the properties: the CRC of all before it, least significant digit first.
_CRC_TAIL: Final = np.dtype(
    [("name", f"S{len(CRC_PROPERTY)}"), ("digits", "u1", _DIGITS), ("separator", "u1")]
)
_read_size = RECORD_HEAD.only("size").unpack_from
_crc32 = zlib.crc32


def chain(window: Buffer, position: int, stop: int, most: int = sys.maxsize) -> tuple[Int64s, int]:
    """(starts, next): at most `most` contiguous whole records from `position` on that start below
    `stop` (a window position, exclusive). Only sizes are read, so a start may still be no record.
    `next`: where the chain ended: at or behind `stop`, at what the window cuts off, or at an
    impossible size."""
    starts: list[int] = []
    add = starts.append
    length = len(window)
    stop = min(stop, length - FIXED_SIZE_V1 + 1)
    for _ in range(most):
        if position >= stop:
            break
        (size,) = _read_size(window, position)
        if size < FIXED_SIZE_V1 or size > length - position:
            break
        add(position)
        position += size
    return np.array(starts, np.int64), position


@dataclass(frozen=True, slots=True)
class Records:
    """Columns over the records of one window; `..._at` are positions in it, times are ms. `start`
    ascends, and records do not overlap."""

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
        """The same columns over the wanted records."""
        return Records(*(getattr(self, field.name)[wanted] for field in fields(self)))


def take_fields(data: Bytes | Buffer, at: Int64s, layout: np.dtype[Any]) -> npt.NDArray[Any]:
    """One item of `layout` from each position; all must lie in `data`."""
    if not len(at):
        return np.empty(0, layout)
    width = layout.itemsize
    everywhere = np.ndarray((len(data) - width + 1,), f"V{width}", data, 0, (1,))
    return everywhere[at].view(layout)


def put_fields(data: bytearray, at: Int64s, values: npt.NDArray[Any]) -> None:
    """Writes one row of `values`, as its bytes, to each position; all must lie in `data`."""
    width = values.dtype.itemsize * (values.shape[1] if values.ndim > 1 else 1)
    everywhere = np.ndarray((len(data) - width + 1,), f"V{width}", data, 0, (1,))
    everywhere[at] = np.ascontiguousarray(values).view(f"V{width}").reshape(-1)


def put_places(
    data: bytearray,
    bounds: Sequence[int],
    *,
    queue_offset: int,
    physical_offset: int,
    store_ms: int,
    born_host_size: int,
    has_crc: bool,
) -> None:
    """Sets place and time of records that were encoded with 0: consecutive queue offsets, and
    physical offsets from `physical_offset` (of the first byte of `data`) on. `bounds`: the begin of
    each record, and the end of the last. `has_crc`: each ends in a property CRC, which is computed
    here."""
    positions = np.array(bounds, np.int64)
    starts, ends = positions[:-1], positions[1:]
    heads = np.zeros(len(starts), _HEAD)
    heads["queue_offset"] = queue_offset + np.arange(len(starts))
    heads["physical_offset"] = physical_offset + starts
    times = np.full(len(starts), store_ms, _STORE_TIME["store_ms"])
    for name in ("queue_offset", "physical_offset"):
        place = _HEAD.fields[name][1]  # type: ignore[index]
        put_fields(data, starts + place, heads[name])
    put_fields(data, starts + (_HEAD.itemsize + born_host_size), times)
    if has_crc:
        crcs = _crcs(data, starts, ends - CRC_TAIL_SIZE)
        digits = crcs.astype(np.uint32)[:, None] // _POWERS.astype(np.uint32) % 10 + ord("0")
        put_fields(data, ends - _DIGITS - 1, digits.astype(np.uint8))


def _numbers(data: Bytes, at: Int64s, layout: np.dtype[Any]) -> Int64s:
    return take_fields(data, at, layout).astype(np.int64)


def _integers(items: npt.NDArray[Any], names: tuple[str, ...]) -> dict[str, Int64s]:
    return {name: items[name].astype(np.int64) for name in names}


def locate(window: Buffer, starts: Int64s) -> tuple[Records, int]:
    """(records, good): the records at `starts` up to the first whose parts do not fit. Starts are
    as `chain` finds them: whole, of at least FIXED_SIZE_V1. `good`: how many; at `starts[good]`
    lies no record. CRCs and offsets are not checked (`suspects`)."""
    data = np.frombuffer(window, np.uint8)
    head = take_fields(data, starts, _V4)
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
    times, tail = head, head
    if (sys_flag & (BORN_HOST_V6 | STORE_HOST_V6)).any():
        # Read records that do not fit at their start, to stay inside the window.
        times = take_fields(data, np.where(fits, store_time_at, starts), _STORE_TIME)
        tail = take_fields(data, np.where(fits, tail_at, starts), _TAIL)
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
        store_ms=times["store_ms"].astype(np.int64),
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
    """(fits, columns): where body, topic and properties lie, by the names of `Records`. `rest`: how
    many bytes the three must have together."""
    fits = fits & (body_length >= 0) & (body_length <= rest)
    topic_length_at = body_at + body_length
    safe = np.where(fits, topic_length_at, starts)
    topic_length = _numbers(data, safe, _U8)
    if is_v2.any():
        topic_length = np.where(is_v2, _numbers(data, safe, _U16), topic_length)
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


def suspects(window: Buffer, records: Records, base: int, file_end: int) -> Bools:
    """Which records `codec.scan_in_file` refuses, CRCs checked, and perhaps more (`wrong_crc`).
    `base`, `file_end`: log offsets of the window's first byte and of the file's end."""
    ends = records.start + records.size
    is_misplaced = records.physical_offset != records.start + base
    has_no_space = ends + (base + END_FILE_MIN_BLANK) > file_end
    return np.asarray(is_misplaced | has_no_space | wrong_crc(window, records))


def are_common(window: Buffer, records: Records, base: int, file_end: int) -> Bools:
    """Which records `common.quick_record` takes, apart from its CRC check. `base`, `file_end`: log
    offsets of the window's first byte and of the file's end."""
    ends = records.start + records.size
    tails = take_fields(window, ends - CRC_TAIL_SIZE, _CRC_TAIL)
    common: Bools = (
        (records.topic_at == records.body_at + records.body_length + 1)  # V1
        & (records.sys_flag & UNCOMMON_FLAGS == 0)
        & (records.physical_offset == records.start + base)
        & (ends + (base + END_FILE_MIN_BLANK) <= file_end)
        & (records.properties_length >= CRC_TAIL_SIZE)
        & (tails["name"] == CRC_PROPERTY)
    )
    return common


def wrong_crc(window: Buffer, records: Records) -> Bools:
    """Which records fail the property CRC, or the body CRC without one. A record without the former
    whose properties end in zeros was torn. One whose properties end in digits after another name
    than the CRC's is marked too, but may be good: ask `codec`."""
    ends = records.start + records.size
    # Every record is longer than the CRC's tail.
    named, is_number, in_properties = _property_crcs(window, ends)
    has_body = records.body_length > 0
    begins = np.where(named, records.start, records.body_at)
    stops = np.where(named, ends - CRC_TAIL_SIZE, records.body_at + records.body_length)
    written = np.where(named, in_properties, records.body_crc)
    wrong = (_crcs(window, begins, stops) != written) & (named | has_body)
    wrong |= named ^ is_number
    last = np.frombuffer(window, np.uint8)[ends - 1]
    return np.asarray(wrong | (~named & (records.properties_length > 0) & (last == 0)))


def checked_end(view: memoryview, start: int, offset: int, file_end: int) -> int:
    """The end of the records that `common.quick_size` accepts from `offset` on, CRCs checked; it
    may stop earlier. `view` is the log from `start` on."""
    window = _CHECKED_FIRST
    while True:
        starts, stopped = chain(view, offset - start, offset - start + window)
        if not len(starts):
            return offset
        window = min(2 * window, BYTES_MAX)
        count = _count_checked(view, start, starts, np.append(starts[1:], stopped), file_end)
        if count < len(starts):
            return start + int(starts[count])
        offset = start + stopped


def _count_checked(view: memoryview, base: int, starts: Int64s, ends: Int64s, file_end: int) -> int:
    """How many records, from the first on, `common.quick_size` accepts."""
    heads = take_fields(view, starts, _HEAD)
    named, is_number, written = _property_crcs(view, ends)
    good = (
        (heads["magic"] == MAGIC_V1)
        & (heads["physical_offset"] == starts + base)
        & (ends - starts >= SIZE_MIN_WITH_CRC)
        & (ends + (base + END_FILE_MIN_BLANK) <= file_end)
        & (named & is_number)
    )
    count = _leading(good)  # stop at the first other one: some logs have no such records
    return _leading(_crcs(view, starts[:count], ends[:count] - CRC_TAIL_SIZE) == written[:count])


def _leading(good: Bools) -> int:
    return len(good) if good.all() else int(np.argmin(good))


def _property_crcs(window: Buffer, ends: Int64s) -> tuple[Bools, Bools, Int64s]:
    """(named, is_number, crc) of the last bytes of records: `named`: they begin as a property CRC;
    `is_number`: they end in ten digits, which are `crc`."""
    tails = take_fields(window, ends - CRC_TAIL_SIZE, _CRC_TAIL)
    digits = tails["digits"].astype(np.int64) - ord("0")
    is_number = ((digits >= 0) & (digits <= 9)).all(axis=1) & (tails["separator"] == 2)
    return tails["name"] == CRC_PROPERTY, is_number, digits @ _POWERS


def _crcs(window: Buffer, begins: Int64s, ends: Int64s) -> Int64s:
    # No Python code per record.
    pieces = map(memoryview(window).__getitem__, map(slice, begins.tolist(), ends.tolist()))
    return np.fromiter(map(_crc32, pieces), np.int64, len(begins)) & 0x7FFFFFFF
