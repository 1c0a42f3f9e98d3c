"""The failover history: what was seen when, and how long each step took."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqctl.output import DIM, when
from mqctl.params import Timestamp, command, option
from mqctl.session import Session

if TYPE_CHECKING:
    from batonmq.timeline import Story

FOLLOW_S: Final = 0.5
FOLLOWED_EVENTS: Final = 500
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Since(Timestamp):
    """A time as elsewhere, or how long ago: 90s, 10m, 2h, 1d. Converts to ms since 1970."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        ago = re.fullmatch(r"(\d+)([smhd])", value) if isinstance(value, str) else None
        if ago is not None:
            return time.time_ns() // 1_000_000 - int(ago[1]) * _UNITS_MS[ago[2]]
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message}, nor a span such as 90s, 10m, 2h, 1d", param, ctx)


@command("timeline", controllers=True)
@option("-bn", "-b", "--brokerName", "broker_name", default="", metavar="NAME",
        help="One broker group. Without it the controllers' own changes are told too.")  # fmt: skip
@option("--last", "last", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
@option("--since", "since_ms", type=Since(), metavar="TIME",
        help="Only from then: 90s, 10m, 2h, 1d ago, or a time.")  # fmt: skip
@option("--follow", "follow", is_flag=True, help="Tell on, as it happens, until ctrl-C.")
@option("--events", "as_events", is_flag=True, help="The events themselves, one a line.")
@option("--file", "files", multiple=True, metavar="PATH",
        type=click.Path(exists=True, path_type=Path),
        help="Read history files, or folders of them, instead. May be repeated.")  # fmt: skip
async def timeline(
    session: Session,
    broker_name: str,
    last: int | None,
    since_ms: int | None,
    follow: bool,
    as_events: bool,
    files: tuple[Path, ...],
) -> None:
    """Failovers and what else befell a cluster, step by step, each as a story.

    Any controller may answer; where several do, what one lacks is taken from the others, and
    disagreement is pointed out on standard error.

    JSON: a list of stories, oldest first (with --follow one a line, again whenever it grew). Every
    story has the same members; times are ms since 1970 (0: not heard of), durations ms from the
    first step (null: not heard of, or the clocks do not allow to say): kind, brokerName,
    masterEpoch, brokerIds, masterBefore, masterBrokerId, masterAddress, reason, how, detectedBy,
    silentMs, unclean, complete; beganTimestamp and requested-, drained-, detected-, proposed-,
    committed-, pushed-, roleChanged-, opened- and firstAckTimestamp; durationsMs of the same steps;
    unavailableMs (without an acknowledging master; without an open one if nobody wrote),
    firstWriteAfterMs (from the opening to the first write acknowledged), heldMs, drainedOffset,
    setBefore, syncStateSet, truncations, setChanges, steps, clockProblems. Kinds: first_election,
    failover, planned_switch, operator_election, unclean_election, switch_failed, master_lost,
    election_blocked, slave_lost, replica_joined, broker_restarted, lease_lost, controller_change,
    diverged, cleaned.
    """
    if follow:
        if files or as_events:
            raise click.UsageError("--follow goes with neither --file nor --events")
        await _follow(session, broker_name, last, since_ms)
        return
    events = _from_files(files) if files else await _from_controllers(session, broker_name)
    if as_events:
        _show_events(session, events, broker_name, last, since_ms)
        return
    chosen = _chosen(events, broker_name, last, since_ms)
    if session.out.as_json:
        session.out.document([story.document() for story in chosen])
    elif not chosen:
        session.out.line("nothing is recorded")
    for story in chosen if not session.out.as_json else ():
        _show(session, story)


Events = Sequence[Mapping[str, Any]]


def _from_files(files: Iterable[Path]) -> Events:
    from batonmq.history_files import read_history_files

    try:
        sources, problems = read_history_files(files)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    return _merged(sources, problems)


async def _from_controllers(session: Session, broker_name: str) -> Events:
    """What the controllers tell. Raises BatonError if none of them answers."""
    import asyncio

    from protocol.errors import BatonError

    async with session.controller() as (_, controller):
        addresses = controller.addresses
        answers = await asyncio.gather(
            *(controller.history(broker_name, address=address) for address in addresses),
            return_exceptions=True,
        )
    told: dict[str, Events] = {}
    silent: list[BatonError] = []
    for address, answer in zip(addresses, answers, strict=True):
        if isinstance(answer, BatonError):
            silent.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            told[address] = [event.fields for event in answer]
    if not told:
        raise silent[0]
    return _merged(told, [f"no answer: {error}" for error in silent])


def _merged(sources: Mapping[str, Events], problems: Iterable[str]) -> Events:
    from batonmq.history_events import merged

    told = merged(sources)
    for problem in (*problems, *told.problems):
        click.echo(f"mqctl: note: {' '.join(problem.split())}", err=True)
    return told.events


def _chosen(
    events: Events, broker_name: str, last: int | None, since_ms: int | None
) -> list[Story]:
    from batonmq.timeline import stories

    chosen = [
        story
        for story in stories(events)
        if broker_name in ("", story.broker_name)
        and (since_ms is None or story.ended_ms >= since_ms)
    ]
    return chosen if last is None else chosen[-last:]


def _show_events(
    session: Session, events: Events, broker_name: str, last: int | None, since_ms: int | None
) -> None:
    from batonmq.history_events import in_order

    chosen = [
        event
        for event in in_order(events)
        if broker_name in ("", event.get("broker_name", ""))
        and (since_ms is None or event.get("time_ms", 0) >= since_ms)
    ]
    session.out.compact = True
    for event in chosen if last is None else chosen[-last:]:
        session.out.document(dict(event))


async def _follow(
    session: Session, broker_name: str, last: int | None, since_ms: int | None
) -> None:
    """Prints each step once; of what is over already only what was asked for."""
    import asyncio

    from protocol.errors import BatonError

    session.interval_s = FOLLOW_S  # ctrl-C is the usual end
    session.out.compact = True
    shown: dict[object, int] = {}
    newest: object = None
    first, lost = True, False
    async with session.controller() as (_, controller):
        while True:
            try:
                told = await controller.history(broker_name, limit=FOLLOWED_EVENTS)
            except BatonError as error:
                if not lost:
                    click.echo(f"mqctl: note: no controller answers: {error}", err=True)
                lost = True
                await asyncio.sleep(FOLLOW_S)
                continue
            lost = False
            found = _chosen([event.fields for event in told], broker_name, None, None)
            wanted = _wanted_first(found, last, since_ms) if first else found
            for story in found:
                key = (story.broker_name, story.steps[0])
                if not first or story in wanted:
                    newest = _show_growth(session, story, shown.get(key, 0), key, newest)
                shown[key] = len(story.steps)
            first = False
            await asyncio.sleep(FOLLOW_S)


def _wanted_first(found: list[Story], last: int | None, since_ms: int | None) -> list[Story]:
    if since_ms is not None:
        found = [story for story in found if story.ended_ms >= since_ms]
    elif last is None:
        return []
    return found if last is None else found[-last:]


def _show_growth(session: Session, story: Story, known: int, key: object, newest: object) -> object:
    """The steps beyond the first `known` ones; gives the story shown last."""
    if len(story.steps) <= known:
        return newest
    if session.out.as_json:
        session.out.document(story.document())
        return key
    if key != newest:
        session.out.line(_heading(story), style="bold")
    for line in story.lines(_width(), only=story.steps[known:]):
        session.out.line(f"  {line}")
    sys.stdout.flush()
    return key


def _show(session: Session, story: Story) -> None:
    session.out.line(_heading(story), style="bold red" if story.unclean else "bold")
    for line in story.lines(_width()):
        session.out.line(f"  {line}")
    if not story.complete:
        missing = ", ".join(f"broker {each}" for each in sorted(story.missing))
        text = f"not back yet: {missing}" if missing else "not over yet"
        session.out.line(f"  {text}", style=DIM)
    session.out.line()


def _heading(story: Story) -> str:
    what = story.kind.replace("_", " ")
    if story.unclean:
        what = what.upper()
    group = f"{story.broker_name} epoch {story.master_epoch}  " if story.broker_name else ""
    utc = time.strftime("%H:%M:%S", time.gmtime(story.began_ms // 1000))
    return f"{group}{what}  {when(story.began_ms)}  ({utc}.{story.began_ms % 1000:03d} UTC)"


def _width() -> int:
    """Columns to fold at; a pipe gets whole lines."""
    return shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else 0
