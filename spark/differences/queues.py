"""The consume queues of all replicas as rows, which the audit joins with their messages. Free of
Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from batonmq.protocol.layout import UNIT, UNIT_SIZE
from batonmq.protocol.topic_name import LMQ_PREFIX
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.read.columns import batch_of, columns_of
from batonmq.spark.read.queues import list_queues
from batonmq.spark.read.selection import Selection
from batonmq.spark.read.storage import Storage

_UNITS_AT_ONCE: Final = 1 << 16
_UNIT: Final = np.dtype(UNIT.dtype)
#: `file`: its number in the table of queue files; of unwritten units there is no row.
UNITS: Final = columns_of("int: file; long: queue_offset points_to unit_size unit_tags")
#: The queue offsets [begins, ends) of a replica's queue are in this file.
QUEUE_FILES: Final = columns_of("""
    int: file
    string: grp replica topic
    int: queue_id
    long: begins ends
    string: path
""")


@dataclass(frozen=True, slots=True)
class QueueFile:
    storage: Storage
    path: str
    number: int
    begins: int
    size: int


def queue_files(groups: Iterable[ReplicaGroup]) -> tuple[list[QueueFile], pa.Table]:
    """(files, the same as rows). Queues of LMQ_PREFIX are left out: they show messages of other
    topics a second time. Raises OSError."""
    files: list[QueueFile] = []
    rows = []
    for group in groups:
        for replica in group.replicas:
            for queue in list_queues(replica.storage, replica.facts.path, Selection()):
                for file in () if queue.topic.startswith(LMQ_PREFIX) else queue.files:
                    begins, ends = file.start // UNIT_SIZE, -(-file.end // UNIT_SIZE)
                    rows.append({
                        "file": len(files), "grp": group.name, "replica": replica.name,
                        "topic": queue.topic, "queue_id": queue.queue_id, "begins": begins,
                        "ends": ends, "path": file.path,
                    })  # fmt: skip
                    each = QueueFile(replica.storage, file.path, len(files), begins, file.size)
                    files.append(each)
    return files, pa.Table.from_pylist(rows, QUEUE_FILES)


def read_units(files: Sequence[QueueFile]) -> Iterator[pa.RecordBatch]:
    """Their written units, whatever they hold. Raises OSError."""
    for file in files:
        with file.storage.open(file.path) as opened:
            for begin in range(0, opened.size // UNIT_SIZE, _UNITS_AT_ONCE):
                data = opened.read_at(begin * UNIT_SIZE, _UNITS_AT_ONCE * UNIT_SIZE)
                units = np.frombuffer(data, _UNIT, len(data) // UNIT_SIZE)
                at = np.flatnonzero(units != np.zeros((), _UNIT))
                units = units[at]
                yield batch_of(UNITS, len(at), {
                    "file": file.number, "queue_offset": file.begins + begin + at,
                    "points_to": units["offset"].astype(np.int64),
                    "unit_size": units["size"].astype(np.int64),
                    "unit_tags": units["tags_code"].astype(np.int64),
                })  # fmt: skip
