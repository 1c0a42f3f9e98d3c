"""One story of the time line: its steps with their times and clocks, for people and for scripts.

Times are wall clocks of several hosts. A step whose clock shows less than that of a step before it
is called out of order, and its distance is not told: a negative time would only tell of clocks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from batonmq.retry import LAST_PAUSE_MS

__all__ = ["CHAIN", "Step", "Story", "ids"]

CHAIN: Final = (
    "requested", "drained", "detected", "proposed", "committed", "pushed", "role changed",
    "opened", "first ack",
)  # fmt: skip
"""The steps that every document has a time for; each can be once in a story."""
_LEADERS: Final = ("committed", "pushed")
_CAUSAL: Final = tuple(name for name in CHAIN if name not in _LEADERS)
"""Those that follow from one another. What the leader commits and pushes, a broker may have heard
of from another controller a little earlier."""
_AFTER_PUSH: Final = ("role changed", "opened", "first ack")
_MAY_COME_BEFORE: Final = ("restarted", "leader known", "started")
_SERVED_MS: Final = 1_000
"""Open for so long, a master that acknowledged nothing was asked for nothing."""
_NAME_WIDTH: Final = max(map(len, CHAIN)) + 1
_TIME_WIDTH: Final = 11


@dataclass(frozen=True, slots=True)
class Step:
    """`time_ms` is on the clock of `clock` ("controller n0", "broker 2")."""

    name: str
    time_ms: int
    clock: str
    text: str
    broker_id: int = 0


@dataclass(slots=True)
class Story:
    """What happened once, from the first sign of it to its end as far as that is heard of.

    `kind` is one of those in `batonmq.timeline`. `sync_state_set` is the set right after the
    election. Ids are 0 for nobody, offsets bytes.
    """

    kind: str
    broker_name: str = ""
    master_epoch: int = 0
    steps: list[Step] = field(default_factory=list)
    master_before: int = 0
    winner: int = 0
    address: str = ""
    reason: str = ""
    how: str = ""
    detected_by: str = ""
    silent_ms: int = -1
    unclean: bool = False
    set_before: tuple[int, ...] = ()
    sync_state_set: tuple[int, ...] = ()
    truncations: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(broker id, log end before, log end after the cut, time ms)"""
    set_changes: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    """(time ms, new set, reason)"""
    brokers: set[int] = field(default_factory=set)
    """Whom it is about: who left, who came back, who won."""
    missing: set[int] = field(default_factory=set)
    """Members that left in this story and are not back yet."""
    lost_since_ms: int = 0
    """When the master was first missed, where that was in a story before this one."""
    held_ms: int = -1
    drained_offset: int = -1
    overtaken: bool = False
    """Another election came before this one's master acknowledged anything."""
    waited_ms: int = -1
    """How long the first acknowledged write waited for that, -1 if it was not told."""
    blind_until_ms: int = 0
    """When the controllers were started that saw it first: before that nobody looked."""
    waiting: bool = False
    """Its end is yet to come."""

    def add(self, name: str, time_ms: int, clock: str, text: str, broker_id: int = 0) -> None:
        """A step that has a time; of a step of the chain the first one counts."""
        if time_ms <= 0 or (name in CHAIN and self.time_of(name)):
            return
        self.steps.append(Step(name, time_ms, clock, text, broker_id))

    def time_of(self, name: str) -> int:
        """When that step was, 0 if it was not heard of."""
        return next((step.time_ms for step in self.steps if step.name == name), 0)

    @property
    def detected_ms(self) -> int:
        return self.time_of("detected")

    @property
    def elected_ms(self) -> int:
        return self.time_of("proposed")

    @property
    def opened_ms(self) -> int:
        return self.time_of("opened")

    @property
    def first_ack_ms(self) -> int:
        return self.time_of("first ack")

    @property
    def truncated_bytes(self) -> int:
        return sum(before - after for _, before, after, _ in self.truncations)

    @property
    def began_ms(self) -> int:
        """The time from which the others are counted; 0 if there is none."""
        began = _beginning(self.in_order())
        return began.time_ms if began is not None else 0

    @property
    def is_election(self) -> bool:
        return self.winner > 0

    @property
    def complete(self) -> bool:
        """Whether its end is heard of."""
        served = self.overtaken or self.first_ack_ms or self.opened_ms
        if self.waiting or (self.is_election and not served):
            return False
        return not self.missing and self.kind not in ("master_lost", "election_blocked")

    def in_order(self) -> list[Step]:
        """What followed from one another, and the other steps where their times put them."""
        causal = [step for step in self.steps if step.name in _CAUSAL]
        beside = [step for step in self.steps if step.name not in _CAUSAL]
        causal.sort(key=lambda step: _CAUSAL.index(step.name))
        beside.sort(key=lambda step: step.time_ms)
        ordered: list[Step] = []
        next_beside = 0
        for step in causal:
            while next_beside < len(beside) and _comes_before(beside[next_beside], step):
                ordered.append(beside[next_beside])
                next_beside += 1
            ordered.append(step)
        return ordered + beside[next_beside:]

    def out_of_order(self) -> dict[int, str]:
        """id of each step whose clock cannot be right -> what is wrong with it."""
        wrong: dict[int, str] = {}
        began = _beginning(self.in_order())
        latest: Step | None = None
        for step in self.in_order():
            before = latest if step.name in _CAUSAL else began
            if before is None or step.time_ms >= before.time_ms:
                latest = step if step.name in _CAUSAL else latest
            elif step.name not in _MAY_COME_BEFORE:
                behind_ms = before.time_ms - step.time_ms
                wrong[id(step)] = (
                    f"the clock of {step.clock} went back by {behind_ms} ms"
                    if step.clock == before.clock
                    else f"the clock of {step.clock} is at least {behind_ms} ms behind that of "
                    f"{before.clock}"
                )
        return wrong

    def after_ms(self, step: Step, wrong: Mapping[int, str] | None = None) -> int | None:
        """Since the story began; None where the clocks do not allow to say.

        `wrong`: what `out_of_order` gave, where it is known.
        """
        if id(step) in (self.out_of_order() if wrong is None else wrong):
            return None
        distance = step.time_ms - self.began_ms
        return distance if distance >= 0 else None

    def duration_ms(self, name: str, wrong: Mapping[int, str] | None = None) -> int | None:
        """From the beginning to that step; None as in `after_ms`, or if it was not heard of."""
        step = next((each for each in self.steps if each.name == name), None)
        return None if step is None else self.after_ms(step, wrong)

    @property
    def unavailable_ms(self) -> int | None:
        """From the first sign (or the hold of a planned switch) to the first acknowledgement.

        Where nobody waited for the new master, to its opening instead: idleness is no outage. None
        while there is neither, or where the clocks do not allow to say. What passed before the
        first sign, as while a hung master was silent, is `silent_ms`.
        """
        end_ms = self.opened_ms if self._is_idle else self.first_ack_ms
        if not self.is_election or self.overtaken or not end_ms or self.out_of_order():
            return None
        if self.held_ms >= 0 and (drained_ms := self.time_of("drained")):
            span_ms = end_ms - drained_ms + self.held_ms
        else:
            span_ms = end_ms - (self.lost_since_ms or self.detected_ms or self.began_ms)
        return span_ms if span_ms >= 0 else None

    @property
    def first_write_after_ms(self) -> int | None:
        """How long after the opening the first acknowledged write came; None if that is not told.

        Both are of the new master's clock.
        """
        if not self.opened_ms or not self.first_ack_ms or self.waited_ms < 0:
            return None
        return max(0, self.first_ack_ms - self.waited_ms - self.opened_ms)

    @property
    def _is_idle(self) -> bool:
        """Nobody waited for the new master: a client that does tries again sooner than that."""
        if not self.first_ack_ms:
            return bool(self.opened_ms)
        return (self.first_write_after_ms or 0) > LAST_PAUSE_MS

    def served_until(self, lost_ms: int) -> bool:
        """Whether this master acknowledged, or was open for long without a write, until then."""
        opened_ms = self.opened_ms
        return bool(self.first_ack_ms or (opened_ms and lost_ms - opened_ms > _SERVED_MS))

    def cost(self) -> str:
        """What it cost, as one sentence; empty if nothing can be said."""
        if not self.is_election:
            return ""
        if self.overtaken:
            return "this master acknowledged nothing: the next election came first"
        if not self.first_ack_ms and not self.opened_ms:
            return "no write is acknowledged yet, or none was sent"
        span_ms = self.unavailable_ms
        if span_ms is None:
            return "how long no master acknowledged cannot be told from these clocks"
        until = "until a write was acknowledged"
        if self._is_idle:
            until = "until it was open for writes"
        told = self.silent_ms > 0 and self.reason.partition(": ")[0].endswith("_silent")
        silence = f", and {self.silent_ms} ms of silence before that" if told else ""
        hold = f"; writes were held for {self.held_ms} ms" if self.held_ms >= 0 else ""
        before = ", counted from the loss before" if self.lost_since_ms else ""
        return f"{span_ms} ms {until}{before}{silence}{self._blind()}{hold}{self._idle()}"

    def _blind(self) -> str:
        if not self.blind_until_ms:
            return ""
        ago_ms = max(0, self.detected_ms - self.blind_until_ms)
        return (
            f"; the controllers themselves had started {ago_ms} ms before: how long nobody served"
            " is not recorded"
        )

    def _idle(self) -> str:
        if not self._is_idle:
            return ""
        if not self.first_ack_ms:
            return "; no write is acknowledged since"
        return f"; nobody waited: the first write came {self.first_write_after_ms} ms later"

    @property
    def ended_ms(self) -> int:
        """The time of its last step, on whichever clock."""
        return max((step.time_ms for step in self.steps), default=0)

    def lines(self, width: int = 0, only: Sequence[Step] | None = None) -> list[str]:
        """The story for people, one step a line, folded at `width` columns (0: not folded).

        `only`: these steps, and what it cost only once that is known with them.
        """
        wrong = self.out_of_order()
        lines: list[str] = []
        for step in self.in_order():
            if only is not None and step not in only:
                continue
            after_ms = self.after_ms(step, wrong)
            when = (
                f"+{after_ms} ms"
                if after_ms is not None
                else "?"
                if id(step) in wrong
                else "before"
            )
            text = step.text + (f" ({wrong[id(step)]})" if id(step) in wrong else "")
            lines += _folded(f"{step.name:<{_NAME_WIDTH}}{when:<{_TIME_WIDTH}}", text, width)
        told = only is None or any(step.name == "first ack" for step in only)
        if told and (cost := self.cost()):
            lines += _folded(f"{'cost':<{_NAME_WIDTH}}", cost, width)
        return lines

    def document(self) -> dict[str, Any]:
        """The story for scripts: the same members for every kind."""
        wrong = self.out_of_order()
        return {
            "kind": self.kind,
            "brokerName": self.broker_name,
            "masterEpoch": self.master_epoch,
            "brokerIds": sorted(self.brokers),
            "masterBefore": self.master_before,
            "masterBrokerId": self.winner,
            "masterAddress": self.address,
            "reason": self.reason,
            "how": self.how,
            "detectedBy": self.detected_by,
            "silentMs": self.silent_ms if self.silent_ms >= 0 else None,
            "unclean": self.unclean,
            "complete": self.complete,
            "beganTimestamp": self.began_ms,
            **{f"{_camel(name)}Timestamp": self.time_of(name) for name in CHAIN},
            "durationsMs": {_camel(name): self.duration_ms(name, wrong) for name in CHAIN},
            "unavailableMs": self.unavailable_ms,
            "firstWriteAfterMs": self.first_write_after_ms,
            "heldMs": self.held_ms if self.held_ms >= 0 else None,
            "drainedOffset": self.drained_offset if self.drained_offset >= 0 else None,
            "setBefore": list(self.set_before),
            "syncStateSet": list(self.sync_state_set),
            "truncations": [
                {
                    "brokerId": broker,
                    "timestamp": when,
                    "fromOffset": before,
                    "toOffset": after,
                    "bytes": before - after,
                }
                for broker, before, after, when in self.truncations
            ],
            "setChanges": [
                {"timestamp": when, "syncStateSet": list(members), "reason": reason}
                for when, members, reason in self.set_changes
            ],
            "steps": [
                {
                    "step": _camel(step.name),
                    "timestamp": step.time_ms,
                    "afterMs": self.after_ms(step, wrong),
                    "clock": step.clock,
                    "brokerId": step.broker_id,
                    "text": step.text,
                    "outOfOrder": id(step) in wrong,
                }
                for step in self.in_order()
            ],
            "clockProblems": list(dict.fromkeys(wrong.values())),
        }


def _beginning(ordered: Sequence[Step]) -> Step | None:
    first = next((step for step in ordered if step.name in _CAUSAL), None)
    return first if first is not None else next(iter(ordered), None)


def _comes_before(beside: Step, causal: Step) -> bool:
    if beside.time_ms == causal.time_ms:
        return beside.name in _LEADERS and causal.name in _AFTER_PUSH
    return beside.time_ms < causal.time_ms


def ids(members: tuple[int, ...] | list[int]) -> str:
    return "{" + ", ".join(map(str, members)) + "}"


def _camel(name: str) -> str:
    first, *rest = name.split()
    return first + "".join(word.capitalize() for word in rest)


def _folded(head: str, text: str, width: int) -> list[str]:
    if width <= len(head) + 20:
        return [head + text]
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [
        head.rstrip()
    ]
