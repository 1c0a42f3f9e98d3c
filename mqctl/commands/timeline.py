"""The failover history: what was seen when, and how long each step took."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mqctl.output import DIM, when
from mqctl.params import command, option
from mqctl.session import Session

if TYPE_CHECKING:
    from batonmq.timeline import Failover


@command("timeline", controllers=True)
@option("-bn", "-b", "--brokerName", "broker_name", default="", metavar="NAME",
        help="One broker group.")  # fmt: skip
@option("--last", "last", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
async def timeline(session: Session, broker_name: str, last: int | None) -> None:
    """Failovers so far, step by step, with durations.

    JSON: a list, oldest first: brokerName, masterEpoch, masterBefore, masterBrokerId,
    masterAddress, reason, unclean, detected-, elected-, opened- and firstAckTimestamp (0: not
    heard of), durationsMs from detection (elect, role, firstAck), setBefore, syncStateSet,
    truncations, setChanges.
    """
    from batonmq.timeline import failovers

    async with session.controller() as (_, controller):
        events = await controller.history(broker_name)
    stories = failovers([event.fields for event in events])
    if last is not None:
        stories = stories[-last:]
    if session.out.as_json:
        session.out.document([story.document() for story in stories])
    elif not stories:
        session.out.line("no election is recorded")
    for story in stories if not session.out.as_json else ():
        _show(session, story)


def _show(session: Session, story: Failover) -> None:
    session.out.line(
        f"{story.broker_name} epoch {story.master_epoch}"
        f"  {when(story.detected_ms or story.elected_ms)}",
        style="bold",
    )
    for line in story.lines():
        unclean = line.endswith("UNCLEAN")
        session.out.line(f"  {line}", style="bold red" if unclean else "")
    missing = [
        name
        for name, heard in (("role", story.opened_ms), ("first ack", story.first_ack_ms))
        if not heard
    ]
    if missing:
        session.out.line(f"  not heard of: {', '.join(missing)}", style=DIM)
    session.out.line()
