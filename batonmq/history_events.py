"""History events as the controllers tell them, made safe to reason about: typed, in order, once.

Events come as JSON objects from one controller, from several, or from their files. They may be
incomplete, repeated, out of order or of a newer version: what is missing or of the wrong type gets
the default of its field here, so that nothing behind this module has to ask again. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Happening", "Merged", "happenings", "in_order", "merged"]

Raw = Mapping[str, Any]

REPORTED: Final = frozenset(
    {
        "role_changed",
        "opened",
        "first_ack",
        "truncated",
        "lease_lost",
        "lease_back",
        "diverged",
        "drained",
    }
)
"""Kinds whose time is on the clock of the broker that tells them."""


@dataclass(frozen=True, slots=True)
class Happening:
    """One event. Times are wall clock in ms, 0 unknown; offsets bytes, -1 unknown; ids 0 none.

    The fields are those of `controller.history.HistoryEvent`; `detail` is its `json`, read.
    """

    kind: str
    time_ms: int = 0
    log: str = ""
    raft_index: int = -1
    part: int = 0
    broker_name: str = ""
    broker_id: int = 0
    incarnation: str = ""
    address: str = ""
    master_epoch: int = 0
    controller_epoch: int = 0
    node: str = ""
    node_before: str = ""
    master_before: int = 0
    set_before: tuple[int, ...] = ()
    sync_state_set: tuple[int, ...] = ()
    max_offset: int = -1
    confirm_offset: int = -1
    unclean: bool = False
    reason: str = ""
    detected_ms: int = 0
    silent_ms: int = -1
    proposed_ms: int = 0
    started_ms: int = 0
    leader_seen_ms: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int] | None:
        """(log, index, part): no two events share it. None if the event does not tell."""
        return (self.log, self.raft_index, self.part) if self.raft_index >= 0 else None

    @property
    def clock(self) -> str:
        """Whose clock `time_ms` is of."""
        if self.kind in REPORTED:
            return f"broker {self.broker_id}"
        return f"controller {self.node}".rstrip()

    def number(self, name: str, default: int = 0) -> int:
        """A number of `detail`."""
        value = self.detail.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def text(self, name: str) -> str:
        value = self.detail.get(name)
        return value if isinstance(value, str) else ""


_INTS: Final = (
    "time_ms", "part", "broker_id", "master_epoch", "controller_epoch", "master_before",
    "detected_ms", "proposed_ms", "started_ms", "leader_seen_ms",
)  # fmt: skip
_INTS_OR_MINUS_1: Final = ("raft_index", "max_offset", "confirm_offset", "silent_ms")
_TEXTS: Final = (
    "kind", "log", "broker_name", "incarnation", "address", "node", "node_before", "reason",
)  # fmt: skip
_IDS: Final = ("set_before", "sync_state_set")


def happenings(events: Iterable[Raw]) -> list[Happening]:
    """The events, each once, in the order in which they were applied.

    Logs follow one another in the order of the earliest time in them; within a log the index
    counts. Events without an index come first, in the order given.
    """
    return [one for one, _ in _ordered(events)]


def in_order(events: Iterable[Raw]) -> list[Raw]:
    """The events themselves, each once, in the order of `happenings`."""
    return [event for _, event in _ordered(events)]


def _ordered(events: Iterable[Raw]) -> list[tuple[Happening, Raw]]:
    known: dict[object, tuple[Happening, Raw]] = {}
    for event in events:
        one = _happening(event)
        key = one.key or json.dumps(event, sort_keys=True, default=str)
        known.setdefault(key, (one, event))
    begins: dict[str, int] = {}
    for one, _ in known.values():
        begins[one.log] = min(begins.get(one.log, one.time_ms), one.time_ms)

    def order(pair: tuple[Happening, Raw]) -> tuple[bool, int, str, int, int]:
        one = pair[0]
        return (one.key is not None, begins[one.log], one.log, one.raft_index, one.part)

    return sorted(known.values(), key=order)


@dataclass(frozen=True, slots=True)
class Merged:
    """What several controllers told. `problems` are sentences for people."""

    events: tuple[Raw, ...]
    problems: tuple[str, ...]


def merged(sources: Mapping[str, Iterable[Raw]]) -> Merged:
    """All that `sources` (by name) tell, each event once; where two disagree the first one counts.

    All controllers apply the same log, so a disagreement means damage, or two clusters.
    """
    events: list[Raw] = []
    first: dict[tuple[str, int, int], tuple[str, Raw]] = {}
    disagreed: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for source, told in sources.items():
        for event in told:
            key = _happening(event).key
            if key is None:
                events.append(event)
                continue
            other, known = first.setdefault(key, (source, event))
            if known is event:
                events.append(event)
            elif _of_event(known) != _of_event(event):
                disagreed.setdefault((other, source), []).append(key)
    problems = [
        f"{one} and {other} disagree about {len(keys)} events, the first of them at index "
        f"{keys[0][1]} part {keys[0][2]} of log {keys[0][0] or '?'}; shown as {one} tells it"
        for (one, other), keys in disagreed.items()
    ]
    return Merged(tuple(events), tuple(problems))


def _of_event(raw: Raw) -> dict[str, Any]:
    """Without `gap`, which tells of one controller's file and not of the event."""
    return {name: value for name, value in raw.items() if name != "gap"}


def _happening(event: Raw) -> Happening:
    fields: dict[str, Any] = {name: _int(event.get(name), 0) for name in _INTS}
    fields |= {name: _int(event.get(name), -1) for name in _INTS_OR_MINUS_1}
    fields |= {name: value if isinstance(value := event.get(name), str) else "" for name in _TEXTS}
    fields |= {name: _ids(event.get(name)) for name in _IDS}
    return Happening(
        **fields, unclean=event.get("unclean") is True, detail=_detail(event.get("json"))
    )


def _int(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(each for each in value if isinstance(each, int) and not isinstance(each, bool))


def _detail(text: object) -> Mapping[str, Any]:
    if not isinstance(text, str) or not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
