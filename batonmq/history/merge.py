"""Events of several controllers, or in any order, as one history: in order, each once. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from batonmq.history.event import EventKey, HistoryEvent
from batonmq.runtime.words import counted


def in_order(events: Iterable[HistoryEvent]) -> list[HistoryEvent]:
    """The events, each once, in the order in which they were applied: logs by the earliest time in
    them, then by index. Events without an index come first, in the order given."""
    # Logs have random names: only their times show which came first. Within a log its index counts,
    # since the clocks of controllers differ.
    known: dict[object, HistoryEvent] = {}
    begins: dict[str, int] = {}
    for event in events:
        if known.setdefault(event.key if event.raft_index >= 0 else event, event) is event:
            begins[event.log] = min(begins.get(event.log, event.time_ms), event.time_ms)

    def order(event: HistoryEvent) -> tuple[bool, int, str, int, int]:
        return (event.raft_index >= 0, begins[event.log], *event.key)

    return sorted(known.values(), key=order)


@dataclass(frozen=True, slots=True)
class Merged:
    """The events of several controllers. `problems` are sentences."""

    events: tuple[HistoryEvent, ...]
    problems: tuple[str, ...]


def merged(sources: Mapping[str, Iterable[HistoryEvent]]) -> Merged:
    """All events of `sources` (by name), each once; where two differ the first one counts.
    Controllers apply the same log, so a difference means damage or two clusters."""
    events: list[HistoryEvent] = []
    first: dict[EventKey, tuple[str, HistoryEvent]] = {}
    differ: dict[tuple[str, str], list[EventKey]] = {}
    for source, of_source in sources.items():
        for event in of_source:
            # Without an index there is nothing by which two could be the same event.
            if event.raft_index < 0:
                events.append(event)
                continue
            other, known = first.setdefault(event.key, (source, event))
            if known is event:
                events.append(event)
            elif without_gap(known) != without_gap(event):
                differ.setdefault((other, source), []).append(event.key)
    problems = [
        f"{one} and {other} disagree about {counted(len(keys), 'event')}, the first at index "
        f"{keys[0][1]} part {keys[0][2]} of log {keys[0][0] or '?'}; shown as in {one}"
        for (one, other), keys in differ.items()
    ]
    return Merged(tuple(events), tuple(problems))


def without_gap(event: HistoryEvent) -> HistoryEvent:
    """`gap` is of one controller's file, not of the event."""
    return msgspec.structs.replace(event, gap=False) if event.gap else event
