"""Options as users write them in Spark, as typed structs: `docs/spark.md` lists them.

A field is an option: its name, type, bounds and default are declared there and nowhere else.
Free of Spark.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta, inspect

from batonmq.protocol.records.codec import FIXED_SIZE_V1
from batonmq.runtime.clock import UNITS_MS
from batonmq.spark.read.columns import LIVE_TABLE, TABLES
from batonmq.spark.read.damage import Mode
from batonmq.spark.read.selection import HIGH, LOW, Bound, Selection, Span, parse_bound
from batonmq.spark.read.storage import split_paths

MIB: Final = 1 << 20
# Arrow counts the bytes of a column of one window with 31 bits.
_WINDOW_MAX: Final = 1 << 30
_MS_PER: Final = {"ms": 1, **UNITS_MS}
_SPAN: Final = re.compile(r"(0*[1-9]\d{0,11})\s*(ms|s|m|h|d)")
_TRUTHS: Final = {"true": True, "false": False}


class Options(msgspec.Struct, frozen=True, rename="camel"):
    """The options of one read or write. A subclass says in WHAT which ones they are."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, str]) -> Self:
        """The options by their names in Spark, which are not case-sensitive; empty is not given.

        Raises ValueError, with what is allowed, for a bad value or an unknown name.
        """
        given = {name.lower(): value.strip() for name, value in options.items()}
        names = sorted(cls._names(), key=str.lower)
        unknown = sorted(set(given) - {name.lower() for name in names})
        if unknown:
            from batonmq.runtime.settings import nearest  # every task imports this module

            near = nearest(unknown[0], names)
            raise ValueError(
                f"unknown option {', '.join(unknown)} for {cls.what()}"
                f"{f', did you mean {near}? There' if near else '; there'} are {', '.join(names)}"
            )
        return cls._made(given)

    @classmethod
    def _fields(cls) -> Iterator[tuple[inspect.Field, "type[Options] | None"]]:
        """Each field; with its struct, if that is one of options beside the others."""
        for field in inspect.type_info(cls).fields:  # type: ignore[attr-defined]
            part: Any = field.type.cls if isinstance(field.type, inspect.StructType) else None
            yield field, part

    @classmethod
    def _names(cls) -> Iterator[str]:
        for field, part in cls._fields():
            yield from part._names() if part else [field.encode_name]

    @classmethod
    def _made(cls, given: Mapping[str, str]) -> Self:
        values: dict[str, Any] = {}
        for field, part in cls._fields():
            text = given.get(field.encode_name.lower(), "")
            if part:
                values[field.name] = part._made(given)
            elif field.required or text:
                values[field.name] = _value(field.encode_name, field, text)
        return cls(**values)

    @classmethod
    def what(cls) -> str:
        """What these options are for."""
        raise NotImplementedError


def _value(name: str, field: inspect.Field, text: str) -> Any:
    kind, read, lacking = field.type, None, ""
    if isinstance(kind, inspect.Metadata):
        extra = kind.extra or {}
        kind, read, lacking = kind.type, extra.get("read"), extra.get("lacking", "")
    if not text:
        raise ValueError(lacking)
    try:
        if read is not None:
            return read(text)
        if isinstance(kind, inspect.StrType):
            return text
        if isinstance(kind, inspect.IntType):
            return _number(kind, text, field.default)
        if isinstance(kind, inspect.BoolType):
            return read_truth(text)
        every = kind.cls if isinstance(kind, inspect.EnumType) else kind.values  # type: ignore[attr-defined]
        return _one_of({str(each).lower(): each for each in every}, text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def _number(kind: inspect.IntType, text: str, default: object) -> int:
    """The default may lie outside of what can be given else."""
    least, most = kind.ge or 0, kind.le
    good = text.isdecimal() and int(text) >= least and (most is None or int(text) <= most)
    if not good and text != str(default):
        allowed = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ValueError(f"it must be a number {allowed}")
    return int(text)


def _one_of(allowed: Mapping[str, Any], text: str, words: str = "") -> Any:
    if text.lower() not in allowed:
        raise ValueError(f"it must be {words or 'one of ' + ', '.join(map(str, allowed.values()))}")
    return allowed[text.lower()]


def read_truth(text: str) -> bool:
    truth: bool = _one_of(_TRUTHS, text, "true or false")
    return truth


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def read_words(text: str) -> tuple[str, ...]:
    """A list by commas, or a JSON list; each word once."""
    parts: Sequence[str] = _parts(text)
    if text.startswith("["):
        try:
            parts = msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            raise ValueError("it must be a list by commas or of JSON texts") from None
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def span_ms(text: str) -> int:
    """How long `500ms`, `30s`, `2m`, `1h` or `7d` is. Raises ValueError."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError("it must be a time such as 500ms, 30s or 2m")
    return int(found[1]) * _MS_PER[found[2]]


def _time_ms(text: str) -> int:
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        words = "it must be ms since 1970 or a time such as 2026-11-21T10:00:00Z"
        raise ValueError(words) from None
    zoned = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return -(-round(zoned.timestamp() * 1_000_000) // 1000)


def _tags(text: str) -> tuple[str, ...]:
    """Tags by commas or, as in subscriptions, by `||`."""
    if text == "*":
        return ()
    found = read_words(text.replace("||", ","))
    if "*" in found or any(" " in tag or "|" in tag for tag in found):
        raise ValueError("name tags as a || b, or leave the option out for all")
    return found


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"it must be a regular expression: {error}") from None
    return text


def _queue_ids(text: str) -> tuple[int, ...]:
    parts = _parts(text)
    if not all(part.isdecimal() and int(part) < 1 << 31 for part in parts):
        raise ValueError("it must be numbers of queues, by commas")
    return tuple(map(int, parts))


def _table(text: str) -> str:
    if text.lower() not in TABLES:
        raise ValueError(f"it must be one of {', '.join((*TABLES, LIVE_TABLE))}")
    return text.lower()


def by(read: Callable[[str], Any], lacking: str = "") -> Meta:
    """How the text of an option becomes its value, and what is said where it must be given."""
    return Meta(extra={"read": read, "lacking": lacking})


Words = Annotated[tuple[str, ...], by(read_words)]
"""A list by commas, or a JSON list; each word once."""
DurationMs = Annotated[int, by(lambda text: span_ms(f"{text}ms" if text.isdecimal() else text))]
TimeMs = Annotated[int | None, by(_time_ms)]
"""Ms since 1970, or ISO 8601 (UTC unless it has a zone)."""
Positive = Annotated[int, Meta(ge=1)]

_OF_QUEUES: Final = ("topic", "topicPattern", "queueId")
_OF_OFFSETS: Final = (*_OF_QUEUES, "startingOffsets", "endingOffsets")
NARROWING: Final = {
    "messages": (*_OF_OFFSETS, "tags", "startingTimestamp", "endingTimestamp"),
    "consumequeue": _OF_OFFSETS,
    "offsets": _OF_QUEUES,
}
"""The options that narrow each table."""


class Narrowed(Options, frozen=True, kw_only=True):
    """Which messages are read: of which topics, and from where (included) to where (not)."""

    topics: Words = msgspec.field(name="topic", default=())
    tags: Annotated[tuple[str, ...], by(_tags)] = ()
    starting_offsets: str = ""
    ending_offsets: str = ""
    starting_timestamp: TimeMs = None
    ending_timestamp: TimeMs = None

    def __post_init__(self) -> None:
        for end in ("starting", "ending"):
            self._bound(end)

    @property
    def starting(self) -> Bound | None:
        """None: not given."""
        return self._bound("starting")

    @property
    def ending(self) -> Bound | None:
        return self._bound("ending")

    def _bound(self, end: str) -> Bound | None:
        time_ms, text = getattr(self, f"{end}_timestamp"), getattr(self, f"{end}_offsets")
        if text and time_ms is not None:
            raise ValueError(
                f"{end}Offsets and {end}Timestamp exclude each other: give one of them"
            )
        if time_ms is not None:
            return Bound(time_ms=time_ms)
        return parse_bound(text, f"{end}Offsets", self.topics) if text else None


class ReadOptions(Narrowed, frozen=True, kw_only=True):
    """The options of a read of stores and histories. Sizes are bytes."""

    table: Annotated[str, by(_table)] = "messages"
    path: Annotated[tuple[str, ...], by(split_paths)] = ()
    more_paths: Annotated[tuple[str, ...], by(split_paths)] = msgspec.field(
        name="paths", default=()
    )
    columns: Annotated[tuple[str, ...], by(_parts)] = ()
    mode: Mode = Mode.FAILFAST
    unconfirmed: bool = False
    split_bytes: Annotated[int, Meta(ge=MIB // 16)] = 64 * MIB
    batch_bytes: Annotated[int, Meta(ge=MIB // 16, le=_WINDOW_MAX)] = 8 * MIB
    record_bytes_max: Annotated[int, Meta(ge=FIXED_SIZE_V1, le=_WINDOW_MAX)] = msgspec.field(
        name="maxRecordBytes", default=32 * MIB
    )
    time_slack_ms: Annotated[int, Meta(ge=0)] = 3_600_000
    slot_num: Annotated[int, Meta(ge=0)] = msgspec.field(name="maxHashSlotNum", default=0)
    topic_pattern: Annotated[str, by(_pattern)] = ""
    queue_ids: Annotated[tuple[int, ...], by(_queue_ids)] = msgspec.field(
        name="queueId", default=()
    )

    @classmethod
    def what(cls) -> str:
        return "reading stores"

    @classmethod
    def from_mapping(cls, options: Mapping[str, str]) -> Self:
        if {"owner", "provider"} <= {name.lower() for name in options}:  # of Spark's catalog
            raise ValueError(
                "a table of a catalog cannot lie in stores: use CREATE TEMPORARY VIEW ... USING "
                "batonmq OPTIONS (...)"
            )
        made = super().from_mapping(options)
        if not made.paths:
            raise ValueError("no path: name one or several stores, as load(path) or option paths")
        if made.topics and made.topic_pattern:
            raise ValueError("topic and topicPattern exclude each other: give one of them")
        allowed = NARROWING.get(made.table, ())
        given = {name.lower() for name, value in options.items() if value.strip()}
        for name in NARROWING["messages"]:
            if name.lower() in given and name not in allowed:
                raise ValueError(
                    f"option {name} does not narrow table={made.table}: leave it out"
                    + (f" (there are {', '.join(allowed)})" if allowed else "")
                )
        return made

    @property
    def selection(self) -> Selection:
        """Which rows of the table are wanted."""
        low, high = self.starting_timestamp, self.ending_timestamp
        return Selection(
            frozenset(self.topics) if self.topics else None,
            self.topic_pattern,
            frozenset(self.queue_ids) if self.queue_ids else None,
            frozenset(self.tags) if self.tags else None,
            Span(LOW if low is None else low, HIGH if high is None else high - 1),
            self.starting if self.starting and low is None else Bound(),
            self.ending if self.ending and high is None else Bound(),
        )

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.path, *self.more_paths)

    def ranges_of(self, size_bytes: int) -> int:
        """Into how many ranges so many bytes of one file are split: equal ones, at least one.

        The last range of a file must hold the blank that ends it: what lies behind that may be left
        from before a truncation, and no range may begin there. So none is below maxRecordBytes.
        """
        return max(1, min(-(-size_bytes // self.split_bytes), size_bytes // self.record_bytes_max))
