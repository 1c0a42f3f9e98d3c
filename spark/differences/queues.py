"""The consume queues of all replicas as rows, which the audit joins with their messages. Free of
Spark.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.topic_name import LMQ_PREFIX
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.read.columns import batch_of, columns_of
from batonmq.spark.read.queues import list_queues, unit_chunks
from batonmq.spark.read.selection import Selection
from batonmq.spark.read.storage import Storage
from batonmq.spark.read.store_facts import StoreFile

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
    number: int
    storage: Storage
    file: StoreFile


def queue_files(groups: Iterable[ReplicaGroup]) -> tuple[list[QueueFile], pa.Table]:
    """(files, the same as rows). Queues of LMQ_PREFIX are left out: they show messages of other
    topics a second time. Raises OSError."""
    files: list[QueueFile] = []
    rows = []
    for group in groups:
        for replica in group.replicas:
            for queue in list_queues(replica.facts, Selection()):
                for file in () if queue.topic.startswith(LMQ_PREFIX) else queue.files:
                    begins, ends = file.start // UNIT_SIZE, -(-file.end // UNIT_SIZE)
                    rows.append({
                        "file": len(files), "grp": group.name, "replica": replica.name,
                        "topic": queue.topic, "queue_id": queue.queue_id, "begins": begins,
                        "ends": ends, "path": file.path,
                    })  # fmt: skip
                    files.append(QueueFile(len(files), replica.facts.storage, file))
    return files, pa.Table.from_pylist(rows, QUEUE_FILES)


def read_units(files: Sequence[QueueFile]) -> Iterator[pa.RecordBatch]:
    """Their written units, whatever they hold. Raises OSError."""
    for each in files:
        with each.storage.open(each.file.path) as opened:
            start = each.file.start // UNIT_SIZE
            for units in unit_chunks(opened, start, start, start + opened.size // UNIT_SIZE):
                units = units[(units["offset"] | units["size"] | units["tags_code"]) != 0]
                yield batch_of(UNITS, len(units), {
                    "file": each.number, "queue_offset": units["index"],
                    "points_to": units["offset"], "unit_size": units["size"],
                    "unit_tags": units["tags_code"],
                })  # fmt: skip
