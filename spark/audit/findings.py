"""What an audit finds: the columns of a finding, and rows of them from ranges of the log."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

CRITICAL: Final = "critical"
WARNING: Final = "warning"
INFO: Final = "info"
SEVERITIES: Final = (CRITICAL, WARNING, INFO)

_STRING: Final = pa.string()
_LONG: Final = pa.int64()
#: The table of findings. `replicas`: those that deviate; `field`: header, body, properties.
FINDING_FIELDS: Final = (
    ("group", _STRING),
    ("severity", _STRING),
    ("kind", _STRING),
    ("topic", _STRING),
    ("queue_id", pa.int32()),
    ("queue_offset", _LONG),
    ("physical_offset", _LONG),
    ("size", _LONG),
    ("epoch", _LONG),
    ("replicas", pa.list_(_STRING)),
    ("unique_key", _STRING),
    ("field", _STRING),
    ("file", _STRING),
    ("detail", _STRING),
)
FINDING_NAMES: Final = tuple(name for name, _ in FINDING_FIELDS)

#: Rows of a scan: findings, messages, the ends of queues, and counts; `part` says which.
#: `identity` pairs what is missing at one place with what is extra at another. `have`, `lack`: bit
#: i is replica i of the group. `amount`: messages that a row stands for (0: the other replicas
#: hold something else, or those that have it are behind a later epoch); `agreed`: of these, those
#: that at least two replicas hold alike; `last_offset`: queue offset of the last one; `batch_key`:
#: the unique key of the batch in which a message was sent.
SCAN_SCHEMA: Final = pa.schema(
    [
        ("part", _STRING),
        *FINDING_FIELDS,
        ("batch_key", _STRING),
        ("identity", _LONG),
        ("have", _LONG),
        ("lack", _LONG),
        ("body_crc", _LONG),
        ("amount", _LONG),
        ("agreed", _LONG),
        ("last_offset", _LONG),
    ]
)
FINDING: Final = "finding"
MESSAGE: Final = "message"
QUEUE: Final = "queue"
BEHIND: Final = "behind"
COUNT: Final = "count"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; offsets are log and queue offsets, sizes bytes. None: it does not apply."""

    group: str | None
    severity: str
    kind: str
    detail: str
    replicas: tuple[str, ...] = ()
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    physical_offset: int | None = None
    size: int | None = None
    epoch: int | None = None
    unique_key: str | None = None
    field: str | None = None
    file: str | None = None
    identity: int | None = None

    def row(self) -> dict[str, Any]:
        """The finding as a row of the table of findings."""
        made = {name: getattr(self, name) for name in FINDING_NAMES}
        made["replicas"] = list(self.replicas)
        return made


def scan_batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Rows of a scan; what a row does not name is null."""
    return pa.RecordBatch.from_pylist(list(rows), schema=SCAN_SCHEMA)


def scan_columns(part: str, columns: dict[str, pa.Array], rows: int) -> pa.RecordBatch:
    """The same from whole columns."""
    arrays = []
    for name, kind in zip(SCAN_SCHEMA.names, SCAN_SCHEMA.types, strict=True):
        if name == "part":
            arrays.append(pa.repeat(pa.scalar(part, kind), rows))
        else:
            column = columns.get(name)
            arrays.append(pa.nulls(rows, kind) if column is None else column.cast(kind))
    return pa.RecordBatch.from_arrays(arrays, schema=SCAN_SCHEMA)


def finding_rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Findings as rows of a scan."""
    return [
        {"part": FINDING, **finding.row(), "identity": finding.identity} for finding in findings
    ]
