"""The options and columns of the sink, checked; `docs/spark.md` lists them for users.

Free of Spark.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from batonmq.client.producer.outgoing import MESSAGE_SIZE_MAX
from batonmq.protocol.topic_name import group_problem
from batonmq.spark.live.ack_report import report_folder
from batonmq.spark.read.option_values import GivenOptions

PRODUCER_GROUP: Final = "BATON_SPARK_SINK"
NAMES: Final = (
    "table", "nameServers", "topic", "producerGroup", "sendTimeout", "batchMessages", "batchBytes",
    "inFlight", "ackReport", "checkpointLocation",
)  # fmt: skip
#: Column -> types it may have, as Spark writes them.
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "keys": ("string",),
    "tags": ("string",),
    "properties": ("map<string,string>",),
    "broker": ("string",),
    "queue_id": ("int", "bigint", "smallint", "tinyint"),
    "sharding_key": ("string",),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """`topic` "": each row names its own. `ack_folder` "": nothing is written down."""

    name_servers: tuple[str, ...]
    topic: str = ""
    group: str = PRODUCER_GROUP
    send_timeout_ms: int = 60_000
    batch_messages: int = 64
    batch_bytes: int = 256 << 10
    in_flight: int = 8
    ack_folder: str = ""

    @classmethod
    def from_mapping(cls, options: Mapping[str, str]) -> Self:
        """The options by their names in Spark. Raises ValueError, with what is allowed."""
        given = GivenOptions(options, NAMES, "writing")
        table = given.text("table", "topic").lower()
        if table != "topic":
            raise ValueError(f"table={table!r}: only topics are written; leave it out")
        topics = given.topics() if given.has("topic") else ("",)
        if len(topics) > 1:
            raise ValueError(
                f"topic={given.text('topic')!r}: name one, or give each row a column topic"
            )
        group = given.text("producerGroup", PRODUCER_GROUP)
        problem = group_problem(group)
        if problem is not None:
            raise ValueError(f"producerGroup={group!r}: {problem}")
        batch_bytes = given.number("batchBytes", 256 << 10)
        if batch_bytes > MESSAGE_SIZE_MAX:
            raise ValueError(
                f"batchBytes={batch_bytes}: a broker takes no more than {MESSAGE_SIZE_MAX} in one "
                "request"
            )
        return cls(
            given.name_servers(),
            topics[0],
            group,
            given.duration_ms("sendTimeout", 60_000),
            given.number("batchMessages", 64),
            batch_bytes,
            given.number("inFlight", 8),
            report_folder(given.text("ackReport")),
        )


def check_columns(columns: Mapping[str, str], options: SinkOptions) -> None:
    """`columns`: name -> type of what is written. Raises ValueError for what cannot be sent."""
    if "body" not in columns:
        raise ValueError(
            f"no column body among {', '.join(columns) or 'none'}: it is what is sent (binary or "
            "string)"
        )
    if not options.topic and "topic" not in columns:
        raise ValueError("no topic: give the option topic, or a column of that name")
    for name, kind in columns.items():
        allowed = COLUMNS.get(name)
        if allowed is None:
            raise ValueError(
                f"column {name} cannot be sent: drop it, or put it into properties or body; there "
                f"are {', '.join(COLUMNS)}"
            )
        if kind not in allowed:
            raise ValueError(f"column {name} is {kind}; it must be {' or '.join(allowed)}")
    if "queue_id" in columns and "sharding_key" in columns:
        raise ValueError("queue_id and sharding_key both choose the queue: drop one of the columns")
    if "broker" in columns and "queue_id" not in columns:
        raise ValueError("column broker belongs to column queue_id, which is missing")
