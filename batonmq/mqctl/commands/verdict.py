"""The verdict at 3 a.m.: what broke, what is safe, what each repair would cost."""

import json
import math
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import click

from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.health import EXIT_CODES
from batonmq.mqctl.output import BAD, DIM, GOOD, Output, when
from batonmq.mqctl.params import FILE, NEW_FILE, SECONDS, command, folders_argument, option
from batonmq.mqctl.target import data_folder, data_of
from batonmq.mqctl.verdict.ask import ask
from batonmq.mqctl.verdict.evidence import Evidence
from batonmq.mqctl.verdict.gather import from_folders
from batonmq.mqctl.verdict.incidents import Finding
from batonmq.mqctl.verdict.judge import INCIDENTS, Judgement, judge
from batonmq.mqctl.verdict.receipt import check, receipt
from batonmq.runtime.clock import boot_s
from batonmq.runtime.durable_file import write_named
from batonmq.runtime.words import counted, named

ANSWER_S: Final = 0.45
"""Of one node. Short: at night a node that hangs is the usual case, and is waited for twice."""
READ_S: Final = 3.0
WIDTH: Final = 80
NAMES_SHOWN: Final = 4
SYMPTOMS_SHOWN: Final = 5
"""One cause has a symptom at each node: the cause must not leave the screen."""


@command("verdict", controllers=True, timeout_s=ANSWER_S)
@folders_argument
@option("--full", is_flag=True, help="Read every log whole, however long that takes.")
@option(
    "--seconds",
    "read_s",
    type=SECONDS,
    default=READ_S,
    help="How long the logs of stopped brokers are read, the newest parts first.",
)
@option(
    "--receipt",
    "receipt_file",
    type=NEW_FILE,
    help="Write what proves it: digests of logs, sets, epochs.",
)
@option(
    "--check",
    "checked_file",
    metavar="RECEIPT",
    type=FILE,
    help="Compare a receipt with the stores in DIR..., offline.",
)
@option("--classic", is_flag=True, help="The cluster has no controllers.")
async def verdict(
    context: CommandContext,
    folders: tuple[Path, ...],
    full: bool,
    read_s: float,
    receipt_file: Path | None,
    checked_file: Path | None,
    classic: bool,
) -> None:
    """Asks what runs, and reads what does not. DIR: a data folder of `batonmq up`, a broker's
    store, a controller's folder; then nothing is asked, so copies do. Exit code as of health: 0 ok,
    3 degraded, 1 down; with --check 0: every group of the receipt is proven.

    JSON: state, cluster, time, incidents (incident, meaning, subject, cause, sinceTimestamp,
    groups, topics, consumers, symptomOf, repairs: what, command, seconds, lost, copies), groups
    (group, state safe, lost or unknown, how, holders, endOffset, lost), restarts (node, allowed,
    why, first), absent (name, why); with --check: ok, problems."""
    if checked_file is not None:
        _check(context, checked_file, folders)
        return
    evidence = await gather(context, folders, math.inf if full else read_s, classic=classic)
    judgement = judge(evidence)
    context.exit_code = EXIT_CODES[judgement.state]
    if receipt_file is not None:
        with disk_failures(receipt_file):
            write_named(receipt_file, json.dumps(receipt(evidence, judgement), indent=2) + "\n")
    if not context.out.wrote_json(document(evidence, judgement)):
        _show(context.out, evidence, judgement)


async def gather(
    context: CommandContext, folders: tuple[Path, ...], read_s: float, *, classic: bool
) -> Evidence:
    """The evidence of the folders given, else of the target."""
    deadline_s = boot_s() + read_s

    def until() -> bool:
        return boot_s() < deadline_s

    if folders:
        return from_folders(folders, until)
    target = context.target
    local = target.local.path if target.local is not None else target.ended
    data = data_of(local) if local is not None else None
    if data is None and not target.name_servers and not target.controllers:
        data = data_folder()
    evidence = from_folders([data] if data is not None else [], until)
    if target.name_servers and classic:
        async with context.admin() as admin:
            return await ask(evidence, admin, None, (), context.timeout_ms)
    if target.controllers:
        async with context.controller() as (admin, controller):
            expected = target.local.brokers if target.local else ()
            evidence = await ask(evidence, admin, controller, expected, context.timeout_ms)
            return replace(evidence, cluster=str(target))
    if data is None:
        context.controllers  # noqa: B018  wrong usage: says what to give
    return evidence


def _check(context: CommandContext, file: Path, folders: tuple[Path, ...]) -> None:
    if not folders:
        raise click.UsageError("--check needs the folders of the stores: DIR...")
    try:
        with disk_failures(file):
            problems = check(json.loads(file.read_text()), folders)
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{file}: no receipt: {error!r}") from error
    context.exit_code = 1 if problems else 0
    if context.out.wrote_json({"ok": not problems, "problems": problems}):
        return
    for problem in problems:
        context.out.line(f"- {problem}", style=BAD)
    if not problems:
        context.out.line("proven: the stores have every byte that the receipt names", style=GOOD)


def document(evidence: Evidence, judgement: Judgement) -> dict[str, Any]:
    incidents = []
    for each in judgement.findings:
        topics, consumers = touched(evidence, each)
        incidents.append(
            {
                "incident": each.incident,
                "meaning": INCIDENTS[each.incident].meaning,
                "subject": each.subject,
                "cause": each.cause,
                "sinceTimestamp": each.since_ms,
                "groups": list(each.groups),
                "topics": topics,
                "consumers": consumers,
                "symptomOf": each.symptom_of,
                "repairs": [asdict(repair) for repair in each.repairs],
            }
        )
    return {
        "state": judgement.state,
        "cluster": evidence.cluster,
        "time": evidence.now_ms,
        "incidents": incidents,
        "groups": [
            {
                "group": each.group,
                "state": each.state,
                "how": each.how,
                "holders": list(each.holders),
                "endOffset": each.end,
                "lost": [list(part) for part in each.lost],
            }
            for each in judgement.safeties
        ],
        "restarts": [asdict(restart) for restart in judgement.restarts],
        "absent": [asdict(source) for source in evidence.absent],
    }


def touched(evidence: Evidence, finding: Finding) -> tuple[list[str], list[str]]:
    """(topics, consumer groups) with queues on the broker groups that it touches."""
    stores = [s for name in finding.groups for s in evidence.stores(name)]
    topics = sorted({topic for store in stores for topic in store.topics})
    # Without a store nothing tells which topics it has: every consumer group counts.
    groups = {c.group for c in evidence.consumers if c.topic in topics or not stores}
    return topics, sorted(groups)


def _show(out: Output, evidence: Evidence, judgement: Judgement) -> None:
    """The first three lines say it all: the state, the cause, the next command."""
    first = next(iter(judgement.findings), None)
    style = GOOD if judgement.state == "ok" else BAD
    where = f" in {evidence.cluster}" if evidence.cluster else ""
    if first is None:
        # Health knows problems for which there is no incident.
        what = "nothing is broken" if judgement.state == "ok" else "mqctl health names it"
        _line(out, f"{judgement.state}{where}: {what}", style=style)
    else:
        since = f" since {when(first.since_ms)}" if first.since_ms else ""
        _line(out, f"{judgement.state}: {first.incident}{since}", style=style)
        _line(out, f"cause: {first.cause}")
        best = first.repairs[0] if first.repairs else None
        _line(out, f"next:  {best.command or best.what if best else 'mqctl health'}")
    out.line()
    for state in judgement.safeties:
        good = state.state == "safe"
        title = {"safe": "acknowledged messages are safe", "lost": "messages are LOST"}
        text = title.get(state.state, "it is not proven that nothing was lost")
        _line(out, f"{state.group}: {text}: {state.how}", style=GOOD if good else BAD)
        for begin, end in state.lost:
            size = counted(end - begin, "byte")
            _line(out, f"  the log from {begin} to {end}, {size}", style=BAD)
    if first is not None:
        _show_finding(out, evidence, first)
    for each in judgement.causes[1:]:
        _line(out, f"also:  {each.incident}: {each.cause}")
        if each.repairs:
            out.line(f"  {each.repairs[0].command or each.repairs[0].what}")
    symptoms = [each for each in judgement.findings if each.symptom_of]
    for each in symptoms[:SYMPTOMS_SHOWN]:
        _line(out, f"follows from {each.symptom_of}: {each.cause}", style=DIM)
    if len(symptoms) > SYMPTOMS_SHOWN:
        out.line(f"and {len(symptoms) - SYMPTOMS_SHOWN} more that follow; --json has all")
    out.line()
    at = {node.name: f" ({node.address})" for node in evidence.nodes if node.address}
    for restart in judgement.restarts:
        may = "yes" if restart.allowed else "NO"
        first_do = f": first {restart.first}" if restart.first else ""
        who = f"{restart.node}{at.get(restart.node, '')}"
        _line(out, f"restart {who}: {may}, because {restart.why}{first_do}")
    for source in evidence.absent:
        _line(out, f"not known: {source.name}: {source.why}", style=DIM)


def _show_finding(out: Output, evidence: Evidence, finding: Finding) -> None:
    topics, groups = touched(evidence, finding)
    if finding.groups:
        # Retry topics, dead letters and the brokers' own topics are not what people ask for.
        own = [topic for topic in topics if not topic.startswith(("RMQ_SYS", "rmq_sys", "%"))]
        text = f"touched: {', '.join(finding.groups)}; {_some('topic', own)}"
        _line(out, f"{text}; {_some('consumer group', groups)}")
    for at, repair in enumerate(finding.repairs):
        cost = [f"{repair.seconds} s"] if repair.seconds else []
        cost += [f"loses {repair.lost}" if repair.lost else "loses nothing"]
        cost += [f"{repair.copies} complete copies meanwhile"] if repair.copies >= 0 else []
        name = "repair" if at == 0 else "or"
        _line(out, f"{name}: {repair.what} ({', '.join(cost)})")
        if repair.command:
            out.line(f"  {repair.command}")


def _some(what: str, names: list[str]) -> str:
    if not names:
        return f"no {what} known"
    shown, left = names[:NAMES_SHOWN], len(names) - NAMES_SHOWN
    return named(what, shown) + (f" and {left} more" if left > 0 else "")


def _line(out: Output, text: str, style: str = "") -> None:
    """Folded at 80 columns; a command is never folded."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    # To be copied as a whole.
    for line in lines if not text.startswith("next:") else [text]:
        out.line(line, style=style)
