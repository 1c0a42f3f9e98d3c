"""The failover history: what was seen when, and how long each step took."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import click

from batonmq.history.event import HistoryEvent
from batonmq.history.fold import stories
from batonmq.history.merge import in_order, merged
from batonmq.history.reader import read_histories
from batonmq.history.story import Story
from batonmq.history.story_text import document, lines
from batonmq.mqctl.context import CommandContext, CommandFailed, answered, disk_failures
from batonmq.mqctl.output import DIM, note, when
from batonmq.mqctl.params import COUNT, TIME, command, option
from batonmq.mqctl.target import data_of
from batonmq.protocol.errors import BatonError
from batonmq.runtime.words import counted

T = TypeVar("T")
Events = Sequence[HistoryEvent]
FOLLOW_S: Final = 0.5
FOLLOWED_EVENTS: Final = 500


@command("timeline", controllers=True)
@option(
    "-bn",
    "-b",
    "--brokerName",
    default="",
    help="One broker group. Without it the controllers' own changes are shown too.",
)
@option("--last", type=COUNT, metavar="N", help="Only the last N.")
@option(
    "--since",
    "since_ms",
    type=TIME,
    help="Only from then: 10m (ago), '2026-11-24 15:40:00', @ms, or RFC 3339.",
)
@option("--follow", is_flag=True, help="Continue as it happens, until ctrl-C.")
@option("--events", "as_events", is_flag=True, help="The events themselves, one a line.")
@option(
    "--file",
    "files",
    multiple=True,
    metavar="PATH",
    type=click.Path(exists=True, path_type=Path),
    help="Read history files, or folders of them, instead. May be repeated.",
)
async def timeline(
    context: CommandContext,
    broker_name: str,
    last: int | None,
    since_ms: int | None,
    follow: bool,
    as_events: bool,
    files: tuple[Path, ...],
) -> None:
    """Any controller may answer; where several do, what one lacks is taken from the others, and
    disagreement is pointed out on standard error.

    JSON: a list of stories, oldest first (with --follow one a line, again whenever it grew). Every
    story has the same members; times are ms since 1970 (0: unknown), durations ms from the
    first step (null: unknown, or the clocks do not allow to say): kind, brokerName,
    masterEpoch, brokerIds, masterBefore, masterBrokerId, masterAddress, reason, how, detectedBy,
    silentMs, unclean, complete; beganTimestamp and requested-, drained-, detected-, proposed-,
    committed-, pushed-, roleChanged-, opened- and firstAckTimestamp; durationsMs of the same steps;
    unavailableMs (without an acknowledging master; without an open one if there were no writes),
    firstWriteAfterMs (from the opening to the first write acknowledged), heldMs, drainedOffset,
    setBefore, syncStateSet, truncations, setChanges, steps, clockProblems. Kinds: first_election,
    failover, planned_switch, operator_election, unclean_election, switch_failed, master_lost,
    election_blocked, slave_lost, replica_joined, broker_restarted, lease_lost, controller_change,
    diverged, cleaned."""
    wanted = _Wanted(broker_name, last, since_ms)
    if follow:
        if files or as_events:
            raise click.UsageError("--follow goes with neither --file nor --events")
        await _follow(context, wanted)
        return
    events = _from_files(files) if files else await _from_controllers(context, broker_name)
    if as_events:
        context.out.compact = True
        for event in wanted.events(in_order(events)):
            context.out.document(json.loads(event.to_json()))
        return
    chosen = wanted.stories(stories(events))
    if context.out.wrote_json([document(story) for story in chosen]):
        return
    if not chosen:
        context.out.line(_why_nothing(events, wanted))
    for story in chosen:
        _show(context, story)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Of one broker group, or all (""); the last ones, from a time on."""

    broker_name: str = ""
    last: int | None = None
    since_ms: int | None = None

    def events(self, known: Iterable[HistoryEvent]) -> list[HistoryEvent]:
        return self._newest([e for e in known if self._is_meant(e.broker_name, e.time_ms)])

    def stories(self, known: Iterable[Story]) -> list[Story]:
        return self._newest([s for s in known if self._is_meant(s.broker_name, s.ended_ms)])

    def _is_meant(self, broker_name: str, time_ms: int) -> bool:
        is_late_enough = self.since_ms is None or time_ms >= self.since_ms
        return is_late_enough and self.broker_name in ("", broker_name)

    def _newest(self, found: list[T]) -> list[T]:
        return found if self.last is None else found[-self.last :]


def _why_nothing(events: Events, wanted: _Wanted) -> str:
    """What is shown without stories: an empty output would look as if nothing could be wrong."""
    known = _Wanted(wanted.broker_name).events(events)
    if not known:
        return "nothing is recorded"
    last = max(known, key=lambda event: event.time_ms)
    what = f"{last.kind.replace('_', ' ')} of {last.broker_name or 'the controllers'}"
    since = f" since {when(wanted.since_ms)}" if wanted.since_ms is not None else ""
    return f"nothing is recorded{since}; the last event is {what} at {when(last.time_ms)}"


def _from_files(files: Iterable[Path]) -> Events:
    with disk_failures("a history"):
        sources, problems = read_histories(files)
    return _merged(sources, problems)


def _folders_of_ended(context: CommandContext) -> list[Path]:
    """The controllers' folders of the local cluster, if that is meant and has ended."""
    target = context.target
    if target.controllers or target.ended is None:
        return []
    data = data_of(target.ended)
    note(f"the cluster of {data} has ended: read from its files")
    return sorted(data.glob("namesrv-*/controller"))


async def _from_controllers(context: CommandContext, broker_name: str) -> Events:
    """The events of the controllers. Raises CommandFailed if none of them replies."""
    if folders := _folders_of_ended(context):
        return _from_files(folders)
    async with context.controller() as (_, controller):
        answers = await controller.histories(broker_name)
    found = answered(answers)
    silent = [answer for answer in answers.values() if isinstance(answer, BatonError)]
    if not found:
        raise CommandFailed(
            f"no controller answers ({silent[0]}): start a majority of them, or read their files"
            " with --file DIR"
        )
    # Else an empty answer of the minority would look as if nothing had happened.
    if len(found) * 2 <= len(answers):
        heard = f"{len(found)} of {counted(len(answers), 'controller')} answer"
        note(
            f"note: no quorum, {heard}: nothing is recorded, and no master is replaced, until a"
            " majority runs"
        )
    return _merged(found, [f"no answer: {error}" for error in silent])


def _merged(sources: Mapping[str, Events], problems: Iterable[str]) -> Events:
    found = merged(sources)
    for problem in (*problems, *found.problems):
        note(f"note: {problem}")
    return found.events


async def _follow(context: CommandContext, asked: _Wanted) -> None:
    """Prints each step once; of what is over already only what was asked for."""
    every = _Wanted(asked.broker_name)
    context.interval_s = FOLLOW_S  # ctrl-C is the usual end
    context.out.compact = True
    shown: dict[object, int] = {}
    newest: object = None
    first, lost = True, False
    async with context.controller() as (_, controller):
        while True:
            try:
                events = await controller.history(asked.broker_name, limit=FOLLOWED_EVENTS)
            except BatonError as error:
                if not lost:
                    note(f"note: no controller answers: {error}")
                lost = True
                await asyncio.sleep(FOLLOW_S)
                continue
            lost = False
            found = every.stories(stories(events))
            asked_for = asked.stories(found) if first and asked != every else []
            for story in found:
                # By its first step: a story grows, and what it is called may change meanwhile.
                key = (story.broker_name, story.steps[0])
                if not first or story in asked_for:
                    newest = _show_growth(context, story, shown.get(key, 0), key, newest)
                shown[key] = len(story.steps)
            first = False
            await asyncio.sleep(FOLLOW_S)


def _show_growth(
    context: CommandContext, story: Story, known: int, key: object, newest: object
) -> object:
    """The steps beyond the first `known` ones; gives the story shown last."""
    if len(story.steps) <= known:
        return newest
    if context.out.as_json:
        context.out.document(document(story))
        return key
    if key != newest:
        context.out.line(_heading(story), style="bold")
    for line in lines(story, _width(), only=story.steps[known:]):
        context.out.line(f"  {line}")
    sys.stdout.flush()
    return key


def _show(context: CommandContext, story: Story) -> None:
    context.out.line(_heading(story), style="bold red" if story.unclean else "bold")
    for line in lines(story, _width()):
        context.out.line(f"  {line}")
    if not story.complete:
        missing = ", ".join(f"broker {each}" for each in sorted(story.missing))
        text = f"not back yet: {missing}" if missing else "not over yet"
        context.out.line(f"  {text}", style=DIM)
    context.out.line()


def _heading(story: Story) -> str:
    # The event has this name, also if the cause is a full disk and no other history.
    what = "cannot follow" if story.kind == "diverged" else story.kind.replace("_", " ")
    if story.unclean:
        what = what.upper()
    group = f"{story.broker_name} epoch {story.master_epoch}  " if story.broker_name else ""
    utc = time.strftime("%H:%M:%S", time.gmtime(story.began_ms // 1000))
    return f"{group}{what}  {when(story.began_ms)}  ({utc}.{story.began_ms % 1000:03d} UTC)"


def _width() -> int:
    """Columns to fold at; a pipe gets whole lines."""
    return shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else 0
