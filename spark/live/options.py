"""The options of `table=topic`, checked; `docs/spark.md` lists them for users. Free of Spark."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from batonmq.protocol.topic_name import group_problem
from batonmq.spark.live.offsets import Bound, parse_bound
from batonmq.spark.read.option_values import GivenOptions

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
CONSUMER_GROUP: Final = "BATON_SPARK"

NAMES: Final = (
    "table", "nameServers", "topic", "columns", "tags", "startingOffsets", "endingOffsets",
    "startingTimestamp", "endingTimestamp", "maxOffsetsPerTrigger", "minOffsetsPerTrigger",
    "maxTriggerDelay", "maxOffsetsPerPartition", "failOnDataLoss", "operationTimeout",
    "passOverSilentGroups", "batchBytes", "timeSlackMs", "consumerGroup", "pushdown",
)  # fmt: skip
_BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp")
_STREAM_ONLY: Final = (
    "maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "passOverSilentGroups",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """The options of a read. Sizes are bytes, times ms, counts messages.

    `starting` and `ending`: None: not given. 0 offsets per trigger or partition: no
    such limit.
    """

    name_servers: tuple[str, ...]
    topics: tuple[str, ...]
    columns: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    starting: Bound | None = None
    ending: Bound | None = None
    offsets_per_trigger_max: int = 0
    offsets_per_trigger_min: int = 0
    trigger_delay_max_ms: int = 900_000
    offsets_per_partition_max: int = 0
    fail_on_data_loss: bool = True
    operation_timeout_ms: int = 60_000
    pass_over_silent: bool = False
    batch_bytes: int = 4 * _MIB
    time_slack_ms: int = 3_600_000
    group: str = CONSUMER_GROUP
    pushdown: bool = False

    @classmethod
    def from_mapping(cls, options: Mapping[str, str], *, streaming: bool | None = None) -> Self:
        """The options by their names in Spark. `streaming` None: not known yet which it will be.

        Raises ValueError, with what is allowed, for a bad value, an unknown name, or options that
        exclude each other.
        """
        given = GivenOptions(options, NAMES, "table=topic")
        wrong = () if streaming is None else (_BATCH_ONLY if streaming else _STREAM_ONLY)
        for name in wrong:
            if given.has(name):
                kind = "batch reads only, not of streams" if streaming else "streams only"
                raise ValueError(f"{name} is an option of {kind}: leave it out")
        given.together("startingOffsets", "startingTimestamp")
        given.together("endingOffsets", "endingTimestamp")
        group = given.text("consumerGroup", CONSUMER_GROUP)
        problem = group_problem(group)
        if problem is not None:
            raise ValueError(f"consumerGroup={group!r}: {problem}")
        made = cls(
            given.name_servers(),
            given.topics(),
            given.words("columns"),
            _tags(given),
            _bound(given, "starting"),
            _bound(given, "ending"),
            given.number("maxOffsetsPerTrigger", 0),
            given.number("minOffsetsPerTrigger", 0),
            given.duration_ms("maxTriggerDelay", 900_000),
            given.number("maxOffsetsPerPartition", 0),
            given.truth("failOnDataLoss", True),
            given.duration_ms("operationTimeout", 60_000),
            given.truth("passOverSilentGroups", False),
            given.number("batchBytes", 4 * _MIB, 64 * _KIB),
            given.number("timeSlackMs", 3_600_000, 0),
            group,
            given.truth("pushdown", False),
        )
        low, high = made.offsets_per_trigger_min, made.offsets_per_trigger_max
        if high and low > high:
            raise ValueError(
                f"minOffsetsPerTrigger={low} is above maxOffsetsPerTrigger={high}: lower it"
            )
        return made


def _bound(given: GivenOptions, end: str) -> Bound | None:
    time_ms = given.time_ms(f"{end}Timestamp")
    if time_ms is not None:
        return Bound(time_ms=time_ms)
    text = given.text(f"{end}Offsets")
    return parse_bound(text, f"{end}Offsets", given.topics()) if text else None


def _tags(given: GivenOptions) -> tuple[str, ...]:
    """Tags by commas or, as in subscriptions, by `||`."""
    text = given.text("tags")
    if text == "*":
        return ()
    found = tuple(dict.fromkeys(t.strip() for t in text.replace("||", ",").split(",") if t.strip()))
    if "*" in found or any(" " in tag or "|" in tag for tag in found):
        raise ValueError(f"tags={text!r}: name tags as a || b, or leave the option out for all")
    return found
