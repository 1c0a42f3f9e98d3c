"""One story of the history, for example a failover: its steps with times and clocks. Pure. Times
are wall clocks of several hosts: a step with a lower time than an earlier one is out of order and
gets no duration, which would only show how far the clocks differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from batonmq.history.event import EventKey

CHAIN: Final = (
    "requested", "drained", "detected", "proposed", "committed", "pushed", "role changed",
    "opened", "first ack",
)  # fmt: skip
"""Steps of a change of master; each can occur once in a story."""
_RANKS: Final = {name: rank for rank, name in enumerate(CHAIN)}
_LEADERS: Final = ("committed", "pushed")
CAUSAL: Final = tuple(name for name in CHAIN if name not in _LEADERS)
"""Those that follow from one another. A broker may hear earlier from another controller what the
leader commits and pushes."""
_IS_CAUSAL: Final = frozenset(CAUSAL).__contains__
_AFTER_PUSH: Final = ("role changed", "opened", "first ack")
_MAY_COME_BEFORE: Final = ("restarted", "leader known", "started")
_SERVED_MS: Final = 1_000
"""A master that was open for so long and acknowledged nothing received no write."""
IDLE_AFTER_MS: Final = 100
"""A client that waits for a master retries sooner: LAST_PAUSE_MS of `client.instance.failover`."""


class StoryStep(msgspec.Struct, frozen=True):
    """`time_ms` is on the clock of `clock` ("controller n0", "broker 2")."""

    name: str
    time_ms: int
    clock: str
    text: str
    broker_id: int = 0


@dataclass(slots=True, eq=False)
class Story:
    """From the first sign to the end, as far as known. `kind`: see `history.fold`.
    `sync_state_set`: right after the election. Ids: 0 none; offsets in bytes, -1 unknown; times in
    ms, 0 unknown."""

    kind: str
    broker_name: str = ""
    master_epoch: int = 0
    first_event: EventKey = ("", -1, 0)
    number: int = 0  # Ascends with the stories of a group: two may begin with the same event.
    steps: list[StoryStep] = field(default_factory=list)
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
    brokers: set[int] = field(default_factory=set)  # Brokers that left, came back or won.
    missing: set[int] = field(default_factory=set)
    """Members that left in this story and are not back."""
    lost_since_ms: int = 0  # When the master was lost, if in an earlier story.
    refused_ms: int = -1
    """How long the old master, whose disk was full, had refused writes before the switch."""
    held_ms: int = -1
    drained_offset: int = -1
    overtaken: bool = False  # Another election came before this one's master acknowledged anything.
    waited_ms: int = -1  # How long the first acknowledged write had waited; -1 unknown.
    blind_until_ms: int = 0
    """Start of the controllers that detected it, if none watched before; else 0."""
    waiting: bool = False  # A lease was lost and is not back.
    elected_by: EventKey | None = None  # The event of the election.
    opened_offset: int = -1  # The log's end when the new master opened.
    offsets_clamped: int = 0
    """Group offsets that the new master set to the end of their queue (R44)."""
    confirmed_offset: int = -1
    """What the new master reported as confirmed when it opened and at its first ack."""
    at_work: bool = False
    """The new master changed its set or drained, so it served, even if reports are missing."""
    next: Story | None = field(default=None, repr=False)
    """The next election of the group, or its loss of the master."""
    _times: dict[str, int] = field(default_factory=dict, repr=False)

    def add(self, name: str, time_ms: int, clock: str, text: str, broker_id: int = 0) -> None:
        """A step with a time; of a step of the chain the first one counts."""
        # A report that was repeated, or a second push, must not move the step.
        if time_ms <= 0 or (name in _RANKS and name in self._times):
            return
        self._take(StoryStep(name, time_ms, clock, text, broker_id))

    def absorb(self, other: Story) -> None:
        """The steps of a story that turned out to be a part of this one."""
        for step in other.steps:
            self._take(step)

    def _take(self, step: StoryStep) -> None:
        self.steps.append(step)
        self._times.setdefault(step.name, step.time_ms)

    def time_of(self, name: str) -> int:
        """0 if there is no such step."""
        return self._times.get(name, 0)

    @property
    def detected_ms(self) -> int:
        return self._times.get("detected", 0)

    @property
    def elected_ms(self) -> int:
        return self._times.get("proposed", 0)

    @property
    def opened_ms(self) -> int:
        return self._times.get("opened", 0)

    @property
    def first_ack_ms(self) -> int:
        return self._times.get("first ack", 0)

    @property
    def truncated_bytes(self) -> int:
        return sum(before - after for _, before, after, _ in self.truncations)

    @property
    def began_ms(self) -> int:
        """The time from which the others are counted; 0 if there is none."""
        for name in CAUSAL:
            if name in self._times:
                return self._times[name]
        return min((step.time_ms for step in self.steps), default=0)

    @property
    def is_election(self) -> bool:
        return self.winner > 0

    @property
    def complete(self) -> bool:
        """Whether its end is known."""
        served = self.overtaken or self.first_ack_ms or self.opened_ms
        if self.waiting or (self.is_election and not served):
            return False
        return not self.missing and self.kind not in ("master_lost", "election_blocked")

    def in_order(self) -> list[StoryStep]:
        """The causal steps in their order, the others by their times."""
        causal = [step for step in self.steps if _IS_CAUSAL(step.name)]
        beside = [step for step in self.steps if not _IS_CAUSAL(step.name)]
        causal.sort(key=lambda step: _RANKS[step.name])
        beside.sort(key=lambda step: step.time_ms)
        ordered: list[StoryStep] = []
        next_beside = 0
        for step in causal:
            while next_beside < len(beside) and _comes_before(beside[next_beside], step):
                ordered.append(beside[next_beside])
                next_beside += 1
            ordered.append(step)
        return ordered + beside[next_beside:]

    def out_of_order(self) -> dict[int, str]:
        """id() of each step with an impossible clock -> what is wrong, as a sentence."""
        wrong: dict[int, str] = {}
        ordered = self.in_order()
        causal = (step for step in ordered if _IS_CAUSAL(step.name))
        began = next(causal, ordered[0] if ordered else None)
        latest: StoryStep | None = None
        for step in ordered:
            is_causal = _IS_CAUSAL(step.name)
            before = latest if is_causal else began
            if before is None or step.time_ms >= before.time_ms:
                latest = step if is_causal else latest
            elif step.name not in _MAY_COME_BEFORE:
                behind_ms = before.time_ms - step.time_ms
                wrong[id(step)] = (
                    f"the clock of {step.clock} went back by {behind_ms} ms"
                    if step.clock == before.clock
                    else f"the clock of {step.clock} is at least {behind_ms} ms behind that of "
                    f"{before.clock}"
                )
        return wrong

    def after_ms(self, step: StoryStep, wrong: Mapping[int, str]) -> int | None:
        """Since the story began; None for a step out of order or before the beginning. `wrong`: the
        result of `out_of_order`."""
        if id(step) in wrong:
            return None
        distance = step.time_ms - self.began_ms
        return distance if distance >= 0 else None

    def duration_ms(self, name: str, wrong: Mapping[int, str]) -> int | None:
        """From the beginning to that step; None as in `after_ms`, or if it is missing."""
        step = next((each for each in self.steps if each.name == name), None)
        return None if step is None else self.after_ms(step, wrong)

    @property
    def unavailable_ms(self) -> int | None:
        """From `start_ms` to `served_ms`; None without an end, or if steps are out of order. The
        silence of a hung master before the first sign is `silent_ms`."""
        return self.outage_ms(self.out_of_order())

    def outage_ms(self, wrong: Mapping[int, str]) -> int | None:
        """`unavailable_ms`, with the result of `out_of_order`."""
        end_ms = self.served_ms
        if not self.is_election or self.overtaken or not end_ms or wrong:
            return None
        span_ms = end_ms - self.start_ms
        return span_ms if span_ms >= 0 else None

    @property
    def start_ms(self) -> int:
        """From when `unavailable_ms` counts: the first sign, the hold of a planned switch, or the
        first refusal of a master whose disk was full."""
        requested_ms, drained_ms = self.time_of("requested"), self.time_of("drained")
        if self.refused_ms >= 0 and requested_ms:
            return requested_ms - self.refused_ms
        if self.held_ms >= 0 and drained_ms:
            return drained_ms - self.held_ms
        return self.lost_since_ms or self.detected_ms or self.began_ms

    @property
    def handover_ms(self) -> int | None:
        """From the hold of sends to `served_ms`, by the clocks of both brokers; None if nothing was
        acknowledged or held."""
        drained_ms = self.time_of("drained")
        if self.held_ms < 0 or not drained_ms or not self.first_ack_ms:
            return None
        return max(0, self.served_ms - drained_ms + self.held_ms)

    @property
    def served_ms(self) -> int:
        """When the new master acknowledged a write, or opened if no write waited."""
        return self.opened_ms if self.is_idle else self.first_ack_ms

    @property
    def first_write_after_ms(self) -> int | None:
        """From the opening to the first acknowledged write, on the new master's clock; None if
        unknown."""
        if not self.opened_ms or not self.first_ack_ms or self.waited_ms < 0:
            return None
        return max(0, self.first_ack_ms - self.waited_ms - self.opened_ms)

    @property
    def is_idle(self) -> bool:
        """Whether no client waited for the new master."""
        if not self.first_ack_ms:
            return bool(self.opened_ms)
        return (self.first_write_after_ms or 0) > IDLE_AFTER_MS

    def served_until(self, lost_ms: int) -> bool:
        """Whether this master had acknowledged, or had been open for long, by then."""
        opened_ms = self.opened_ms
        return bool(self.first_ack_ms or (opened_ms and lost_ms - opened_ms > _SERVED_MS))

    @property
    def ended_ms(self) -> int:
        """The time of its last step, on whichever clock."""
        return max((step.time_ms for step in self.steps), default=0)


def _comes_before(beside: StoryStep, causal: StoryStep) -> bool:
    if beside.time_ms == causal.time_ms:
        return beside.name in _LEADERS and causal.name in _AFTER_PUSH
    return beside.time_ms < causal.time_ms
