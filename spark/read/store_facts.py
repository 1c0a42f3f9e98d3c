"""What a store folder says of itself: its broker, its epochs, and what is confirmed.

Read once while a query is planned; the facts travel with each partition. All access goes through
`pyarrow.fs`, so a store may lie in object storage as well. Free of Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import fs

from batonmq.epoch.entry import EpochEntry, order_fault, with_ends
from batonmq.epoch.file_cache import REDO_SUFFIX, every_entry
from batonmq.protocol.codes import LONG_MAX
from batonmq.protocol.errors import BatonError
from batonmq.protocol.layout import CHECKPOINT, CHECKPOINT_SIZE
from batonmq.protocol.records.columns import Bools, Int64s
from batonmq.spark.read.columns import integers_or_null
from batonmq.spark.read.storage import COMMA_HINT, LOCAL, Storage, found

NAME_DIGITS: Final = 20
EPOCH_FILE: Final = "epochFileCheckpoint"
_SIGNS: Final = (
    "commitlog", "consumequeue", "checkpoint", EPOCH_FILE, "brokerIdentity", "config"
)  # fmt: skip
_read_confirm_offset = CHECKPOINT.only("confirm_phy_offset").unpack_from


class StoreError(BatonError):
    """A store, or a file in it, cannot be read; the text names it and the remedy."""


@dataclass(frozen=True)
class StoreFacts:
    """One broker's store. Names are None where the store has no brokerIdentity.

    `confirm_offset` is the exclusive end of what is confirmed, None if the store has none.
    `epochs` ascend; they are empty where there is no epoch file, and where none of its copies can
    be read: `epochs_fault` has the reason then.
    """

    path: str
    cluster: str | None
    broker: str | None
    broker_id: int | None
    epochs: tuple[EpochEntry, ...]
    epochs_from_backup: bool
    confirm_offset: int | None
    epochs_fault: str = ""
    storage: Storage = LOCAL

    @property
    def names(self) -> dict[str, str | int | None]:
        """The columns that name the store, as all of its rows have them."""
        return {
            "store": self.path, "cluster": self.cluster, "broker": self.broker,
            "broker_id": self.broker_id,
        }  # fmt: skip

    @property
    def uri(self) -> str:
        """Its folder as a path of the data source."""
        return self.storage.uri(self.path)

    def log_files(self, *, with_empty: bool = False) -> list[StoreFile]:
        """The files of its commit log. Raises OSError."""
        return segments(self.storage, f"{self.path}/commitlog", with_empty=with_empty)

    @property
    def keeps_confirm(self) -> bool:
        """Whether its checkpoint says what is confirmed: without a controller that stays 0."""
        at = self.confirm_offset
        return at is not None and at >= (self.broker is None)

    def confirmed_end(self) -> int:
        """The exclusive end of what is confirmed. Raises StoreError if the store has none."""
        if not self.keeps_confirm or self.confirm_offset is None:
            raise StoreError(
                f"{self.path} has no confirmOffset: its checkpoint is missing, or it was written "
                "without a controller; unconfirmed=true (of a job: --unconfirmed) reads its log to "
                "the end"
            )
        return self.confirm_offset

    def epoch_of(self, offsets: Int64s) -> tuple[Int64s, Bools]:
        """(epochs, missing): in which epoch the bytes at these log offsets were written."""
        starts, epochs = self._epoch_starts
        # Of epochs with one start only the last wrote bytes.
        which = np.searchsorted(starts, offsets, side="right")
        return epochs[which], np.asarray(which == 0)

    @cached_property
    def _epoch_starts(self) -> tuple[Int64s, Int64s]:
        """(starts, 0 and the epochs): made once, since places are looked up one by one, too."""
        starts = np.array([entry.start_offset for entry in self.epochs], np.int64)
        return starts, np.array([0, *(entry.epoch for entry in self.epochs)], np.int64)

    def epoch_column(self, offsets: Int64s) -> pa.Array:
        """The same as a column, null where missing."""
        return integers_or_null(*self.epoch_of(offsets), pa.int64())


def read_stores(patterns: Sequence[str]) -> list[StoreFacts]:
    """Of the stores that paths and patterns mean. Raises StoreError for what is none, OSError,
    ValueError."""
    hint = COMMA_HINT * (len(patterns) > 1)
    return [_read_facts(*place, hint) for place in list(found(patterns))]


def _read_facts(storage: Storage, path: str, hint: str) -> StoreFacts:
    """Of the store in folder `path`; what is said of none ends with the hint."""
    if not any(storage.exists(f"{path}/{sign}") for sign in _SIGNS):
        raise StoreError(
            f"{path} is no store: none of {', '.join(_SIGNS)} is there; give the folder that "
            f"storePathRootDir names, or a pattern of such folders{hint}"
        )
    cluster, broker, broker_id = _identity(storage, f"{path}/brokerIdentity")
    epochs, from_backup, fault = _epochs(storage, f"{path}/{EPOCH_FILE}")
    checkpoint = storage.read_small(f"{path}/checkpoint")
    confirm_offset = None
    if checkpoint is not None and len(checkpoint) == CHECKPOINT_SIZE:
        (confirm_offset,) = _read_confirm_offset(checkpoint)
    return StoreFacts(
        path, cluster, broker, broker_id, epochs, from_backup, confirm_offset, fault, storage
    )


def _identity(storage: Storage, path: str) -> tuple[str | None, str | None, int | None]:
    raw = storage.read_small(path)
    if raw is None:
        return None, None, None
    parts = raw.decode("utf-8", "replace").strip().split("#")
    number = parts[-1]
    if len(parts) != 3 or not (number.isascii() and number.isdecimal()) or int(number) > LONG_MAX:
        raise StoreError(f"{path} holds {raw[:80]!r}; it must be cluster#name#id")
    return parts[0], parts[1], int(number)


def _epochs(storage: Storage, path: str) -> tuple[tuple[EpochEntry, ...], bool, str]:
    """(entries, from backup, fault), as the broker would load them: the list of the file, or of its
    backup, and what the redo file continues that very list with. Right after a crash the newest
    epoch stands only there. A redo record of another list, or a torn one, is ignored.
    """
    reasons: list[str] = []
    for name in (path, f"{path}.bak"):
        raw = storage.read_small(name)
        if raw is None:
            continue
        redo = storage.read_small(f"{path}{REDO_SUFFIX}") or b""
        try:
            entries = every_entry(raw, redo)
        except ValueError as error:
            reasons.append(f"{name}: {error}")
            continue
        if fault := order_fault(entries):
            return (), name != path, f"{path}{REDO_SUFFIX}: {fault}"
        return with_ends(entries), name != path, ""
    return (), False, "; ".join(reasons)


def group_names(groups: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What each (cluster, broker group) is called: `cluster#name` where clusters share a name."""
    known = [*groups]
    brokers = Counter(broker for _, broker in known)
    return {
        (cluster, broker): broker if brokers[broker] == 1 else f"{cluster}#{broker}"
        for cluster, broker in known
    }


@dataclass(frozen=True, slots=True)
class StoreFile:
    """One file of the commit log or of a consume queue: bytes [start, start + size) of it."""

    path: str
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def gaps(folder: str, files: Sequence[StoreFile], end: int) -> Iterator[tuple[str, int, int]]:
    """(path, begin, end) of what is missing between files, and from the last one up to `end`. The
    path is where it should be: the file that is too short, or the one that follows."""
    if not files and end:
        yield folder, 0, end
    usual = max((file.size for file in files), default=0)
    for file, next_start in zip(files, [*(file.start for file in files[1:]), end], strict=False):
        if file.end < next_start:
            path = file.path if file.size < usual else f"{folder}/{file.end:0{NAME_DIGITS}d}"
            yield path, file.end, next_start


def segments(storage: Storage, folder: str, *, with_empty: bool = False) -> list[StoreFile]:
    """The files of a log or queue folder that are named by their start, ascending; none if the
    folder is missing.
    """
    found = [
        StoreFile(info.path, int(info.base_name), info.size)
        for info in storage.children(folder)
        if info.type == fs.FileType.File
        and len(info.base_name) == NAME_DIGITS
        and info.base_name.isascii()
        and info.base_name.isdecimal()
        and int(info.base_name) <= LONG_MAX - info.size
        and (info.size or with_empty)
    ]
    return sorted(found, key=lambda segment: segment.start)
