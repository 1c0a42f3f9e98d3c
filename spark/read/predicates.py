"""Filters of Spark as a selection. Each is checked by Spark again; see `spark.selection`."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import datasource as ds

from batonmq.spark.read.selection import HIGH, LOW, Selection

_SETS: Final = {
    "store": "stores",
    "cluster": "clusters",
    "broker": "brokers",
    "broker_id": "broker_ids",
    "topic": "topics",
    "queue_id": "queue_ids",
    "tags": "tags",
    "unique_key": "unique_keys",
}
_SPANS: Final = frozenset({"queue_offset", "physical_offset", "epoch"})
_TIME: Final = "store_at"
_EPOCH_START: Final = datetime(1970, 1, 1, tzinfo=UTC)


def selection_of(filters: Iterable[ds.Filter]) -> Selection:
    """What these filters, all of which must hold, select of messages or units; ignores others."""
    selection = Selection()
    for each in filters:
        path: tuple[str, ...] = getattr(each, "attribute", ())
        if len(path) != 1 or getattr(each, "value", None) is None:
            continue
        name = path[0]
        if isinstance(each, ds.EqualTo | ds.EqualNullSafe):
            selection = _equal(selection, name, [each.value])
        elif isinstance(each, ds.In):
            selection = _equal(selection, name, [v for v in each.value if v is not None])
        elif isinstance(each, ds.GreaterThan | ds.GreaterThanOrEqual):
            low = _floor(name, each.value)
            selection = _span(selection, name, low=low + isinstance(each, ds.GreaterThan))
        elif isinstance(each, ds.LessThan | ds.LessThanOrEqual):
            high = _floor(name, each.value)
            selection = _span(selection, name, high=high - _is_below(each, name))
    return selection


def _equal(selection: Selection, name: str, values: list[Any]) -> Selection:
    if name in _SETS:
        return selection.only(_SETS[name], frozenset(values))
    if values and (name in _SPANS or name == _TIME):
        numbers = [_floor(name, value) for value in values]
        return _span(selection, name, low=min(numbers), high=max(numbers))
    return selection


def _span(selection: Selection, name: str, *, low: int = LOW, high: int = HIGH) -> Selection:
    if name == _TIME:
        return selection.within("store_ms", low=low, high=high)
    if name in _SPANS:
        return selection.within(name, low=low, high=high)
    return selection


def _is_below(each: ds.Filter, name: str) -> int:
    # A time may lie within a millisecond: what was stored in that one is let through.
    return int(isinstance(each, ds.LessThan) and name != _TIME)


def _floor(name: str, value: Any) -> int:
    """A number, or a time in ms, rounded down: low ends may let one more through."""
    if isinstance(value, datetime):
        moment = value if value.tzinfo is not None else value.astimezone()
        delta = moment - _EPOCH_START
        return (
            delta.days * 86_400_000_000 + delta.seconds * 1_000_000 + delta.microseconds
        ) // 1000
    return int(value) if name in _SPANS else 0
