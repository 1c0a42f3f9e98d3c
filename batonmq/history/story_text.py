"""A story as text for people, and as a document for scripts. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

from batonmq.history.story import CHAIN, Story, StoryStep

_NAME_WIDTH: Final = max(map(len, CHAIN)) + 1
_TIME_WIDTH: Final = 11


def cost(story: Story) -> str:
    """What the change of master cost, in a sentence; "" if there was no election."""
    if not story.is_election:
        return ""
    if story.overtaken:
        return "this master acknowledged nothing: the next election came first"
    if not story.first_ack_ms and not story.opened_ms:
        return "no write is acknowledged yet, or none was sent"
    # With clocks that contradict each other a number would be wrong, and look right.
    span_ms = story.unavailable_ms
    if span_ms is None:
        return "how long no master acknowledged does not follow from these clocks"
    until = "it was open for writes" if story.is_idle else "a write was acknowledged"
    was_silent = story.silent_ms > 0 and story.reason.partition(": ")[0].endswith("_silent")
    silence = f", and {story.silent_ms} ms of silence before that" if was_silent else ""
    hold = f"; writes were held for {story.held_ms} ms" if story.held_ms >= 0 else ""
    if story.refused_ms >= 0:
        hold = f", {story.refused_ms} ms of them before the switch: the disk of broker"
        hold += f" {story.master_before} was full and it refused writes"
    before = ", counted from the loss before" if story.lost_since_ms else ""
    return f"{span_ms} ms until {until}{before}{silence}{_blind(story)}{hold}{_idle(story)}"


def _blind(story: Story) -> str:
    if not story.blind_until_ms:
        return ""
    ago_ms = max(0, story.detected_ms - story.blind_until_ms)
    return (
        f"; the controllers themselves had started {ago_ms} ms before: how long no broker served"
        " is not recorded"
    )


def _idle(story: Story) -> str:
    if not story.is_idle:
        return ""
    if not story.first_ack_ms:
        return "; no write is acknowledged since"
    # Whether clients were in a pause of their own, or none was there, no broker knows.
    return f"; the first write came {story.first_write_after_ms} ms later"


def lines(story: Story, width: int = 0, only: Sequence[StoryStep] | None = None) -> list[str]:
    """One step a line, folded at `width` columns (0: not), and the cost. `only`: these steps; the
    cost only with the first acknowledgement."""
    wrong = story.out_of_order()
    made: list[str] = []
    for step in story.in_order():
        if only is not None and step not in only:
            continue
        after_ms = story.after_ms(step, wrong)
        when = "?" if id(step) in wrong else "before"
        if after_ms is not None:
            when = f"+{after_ms} ms"
        text = step.text + (f" ({wrong[id(step)]})" if id(step) in wrong else "")
        made += _folded(f"{step.name:<{_NAME_WIDTH}}{when:<{_TIME_WIDTH}}", text, width)
    with_cost = only is None or any(step.name == "first ack" for step in only)
    if with_cost and (text := cost(story)):
        made += _folded(f"{'cost':<{_NAME_WIDTH}}", text, width)
    return made


def document(story: Story) -> dict[str, Any]:
    """The story as JSON values: the same members for every kind."""
    wrong = story.out_of_order()
    return {
        "kind": story.kind,
        "brokerName": story.broker_name,
        "masterEpoch": story.master_epoch,
        "brokerIds": sorted(story.brokers),
        "masterBefore": story.master_before,
        "masterBrokerId": story.winner,
        "masterAddress": story.address,
        "reason": story.reason,
        "how": story.how,
        "detectedBy": story.detected_by,
        "silentMs": _known(story.silent_ms),
        "unclean": story.unclean,
        "complete": story.complete,
        "beganTimestamp": story.began_ms,
        **{f"{_camel(name)}Timestamp": story.time_of(name) for name in CHAIN},
        "durationsMs": {_camel(name): story.duration_ms(name, wrong) for name in CHAIN},
        "unavailableMs": story.unavailable_ms,
        "firstWriteAfterMs": story.first_write_after_ms,
        "heldMs": _known(story.held_ms),
        "drainedOffset": _known(story.drained_offset),
        "setBefore": list(story.set_before),
        "syncStateSet": list(story.sync_state_set),
        **_changes(story),
        "steps": [
            {
                "step": _camel(step.name),
                "timestamp": step.time_ms,
                "afterMs": story.after_ms(step, wrong),
                "clock": step.clock,
                "brokerId": step.broker_id,
                "text": step.text,
                "outOfOrder": id(step) in wrong,
            }
            for step in story.in_order()
        ],
        "clockProblems": list(dict.fromkeys(wrong.values())),
    }


def _changes(story: Story) -> dict[str, Any]:
    return {
        "truncations": [
            {
                "brokerId": broker_id,
                "timestamp": time_ms,
                "fromOffset": before,
                "toOffset": after,
                "bytes": before - after,
            }
            for broker_id, before, after, time_ms in story.truncations
        ],
        "setChanges": [
            {"timestamp": time_ms, "syncStateSet": list(members), "reason": reason}
            for time_ms, members, reason in story.set_changes
        ],
    }


def _known(value: int) -> int | None:
    return value if value >= 0 else None


def _camel(name: str) -> str:
    first, *rest = name.split()
    return first + "".join(word.capitalize() for word in rest)


def _folded(head: str, text: str, width: int) -> list[str]:
    if width <= len(head) + 20:
        return [head + text]
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [
        head.rstrip()
    ]
