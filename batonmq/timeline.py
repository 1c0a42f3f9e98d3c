"""The failover history as stories: who was master, what was seen when, how long each step took.

Pure: a list of the controllers' history events (their JSON form, oldest first) becomes one
`Failover` per election. `mqctl timeline` and `batonmq demo` print it. Times are wall clocks of
different processes, good to a millisecond or two on one machine and as good as NTP across several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Failover:
    """One election and what followed from it. Times in ms since 1970, 0 where nothing was heard."""

    broker_name: str
    master_epoch: int
    master_before: int
    winner: int
    address: str
    reason: str
    detected_ms: int
    elected_ms: int
    set_before: tuple[int, ...]
    sync_state_set: tuple[int, ...]
    unclean: bool = False
    opened_ms: int = 0
    first_ack_ms: int = 0
    truncations: list[tuple[int, int, int]] = field(default_factory=list)
    """(broker id, log end before, log end after the cut)"""
    set_changes: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    """(time ms, new set, reason)"""

    @property
    def steps_ms(self) -> dict[str, int | None]:
        """Durations from the moment of detection; None for what has not happened."""
        start = self.detected_ms or self.elected_ms
        return {
            "elect": max(0, self.elected_ms - start),
            "role": max(0, self.opened_ms - start) if self.opened_ms else None,
            "firstAck": max(0, self.first_ack_ms - start) if self.first_ack_ms else None,
        }

    @property
    def truncated_bytes(self) -> int:
        return sum(before - after for _, before, after in self.truncations)

    def lines(self) -> list[str]:
        """The story for people, one step a line."""
        steps = self.steps_ms
        start = self.detected_ms or self.elected_ms
        who = f"broker {self.master_before}" if self.master_before else "nobody"
        lines = [
            f"detected  +0 ms     {self.reason or 'an election was asked for'} ({who} was master)",
            f"elected   +{steps['elect']} ms".ljust(19)
            + f" broker {self.winner} at {self.address}, epoch {self.master_epoch},"
            f" set {_ids(self.set_before)} -> {_ids(self.sync_state_set)}"
            + (" UNCLEAN" if self.unclean else ""),
        ]
        if steps["role"] is not None:
            lines.append(
                f"opened    +{steps['role']} ms".ljust(19) + " the new master takes writes"
            )
        if steps["firstAck"] is not None:
            lines.append(
                f"first ack +{steps['firstAck']} ms".ljust(19)
                + " a write is on every member of the set"
            )
        for broker_id, before, after in self.truncations:
            lines.append(
                "truncated".ljust(19) + f" broker {broker_id}: {before - after} bytes"
                f" cut, from {before} to {after}"
            )
        for when, members, reason in self.set_changes:
            lines.append(
                f"set       +{max(0, when - start)} ms".ljust(19)
                + f" {_ids(members)}"
                + (f" ({reason})" if reason else "")
            )
        return lines

    def document(self) -> dict[str, Any]:
        """The story for scripts."""
        return {
            "brokerName": self.broker_name,
            "masterEpoch": self.master_epoch,
            "masterBefore": self.master_before,
            "masterBrokerId": self.winner,
            "masterAddress": self.address,
            "reason": self.reason,
            "unclean": self.unclean,
            "detectedTimestamp": self.detected_ms,
            "electedTimestamp": self.elected_ms,
            "openedTimestamp": self.opened_ms,
            "firstAckTimestamp": self.first_ack_ms,
            "durationsMs": self.steps_ms,
            "setBefore": list(self.set_before),
            "syncStateSet": list(self.sync_state_set),
            "truncations": [
                {"brokerId": broker, "fromOffset": before, "toOffset": after}
                for broker, before, after in self.truncations
            ],
            "setChanges": [
                {"timestamp": when, "syncStateSet": list(members), "reason": reason}
                for when, members, reason in self.set_changes
            ],
        }


def failovers(events: Iterable[Mapping[str, Any]]) -> list[Failover]:
    """Folds history events, oldest first, into stories, oldest first."""
    stories: dict[tuple[str, int], Failover] = {}
    for event in events:
        name = str(event.get("broker_name", ""))
        kind = event["kind"]
        if kind == "elected":
            stories[name, int(event["master_epoch"])] = Failover(
                broker_name=name,
                master_epoch=int(event["master_epoch"]),
                master_before=int(event.get("master_before", 0)),
                winner=int(event.get("broker_id", 0)),
                address=str(event.get("address", "")),
                reason=str(event.get("reason", "")),
                detected_ms=int(event.get("detected_ms", 0)),
                elected_ms=int(event["time_ms"]),
                set_before=tuple(event.get("set_before", ())),
                sync_state_set=tuple(event.get("sync_state_set", ())),
                unclean=bool(event.get("unclean", False)),
            )
            continue
        story = stories.get((name, int(event.get("master_epoch", 0))))
        if story is not None:
            _add(story, str(kind), event)
    return list(stories.values())


def _add(story: Failover, kind: str, event: Mapping[str, Any]) -> None:
    when = int(event["time_ms"])
    if kind == "opened":
        story.opened_ms = story.opened_ms or when
    elif kind == "first_ack":
        story.first_ack_ms = story.first_ack_ms or when
    elif kind == "set_altered":
        story.set_changes.append(
            (when, tuple(event.get("sync_state_set", ())), str(event.get("reason", "")))
        )
    elif kind == "truncated":
        detail = json.loads(event.get("json") or "{}")
        story.truncations.append(
            (
                int(event.get("broker_id", 0)),
                int(detail.get("fromOffset", 0)),
                int(detail.get("toOffset", 0)),
            )
        )


def _ids(members: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, members)) + "}"
