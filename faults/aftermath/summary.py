"""The closing summary of a run: for people as lines, for scripts as one document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from faults.aftermath.compare import Comparison, Told
from faults.aftermath.record import Deed
from faults.aftermath.tables import Failover
from faults.aftermath.verdict import Verdict

HEAD: Final = ("", "what was done", "to whom", "gap", "epoch", "told as", "master", "no writes")
RIGHT: Final = frozenset({0, 3, 4, 7})
SHOWN: Final = 20


def lines(verdict: Verdict) -> list[str]:
    """The table of failovers, then one line for each verdict, bad ones with what is wrong."""
    comparison, audit = verdict.both()
    told = comparison.told
    elections = sum(len(one.failovers) for one in told)
    disagree = sum(len(one.wrong) for one in told) + len(comparison.wrong)
    shown = [
        "all good: nothing acknowledged is missing, and the history tells what was done"
        if verdict.is_good
        else "NOT GOOD: what is wrong stands below the table",
        "gap: the longest time between two acknowledgements that the load saw; no writes: what the"
        " history says of it",
        "",
        *table(comparison),
        "",
        f"{len(told)} faults, {elections} changes of master: the history tells every one as it was"
        if comparison.agrees
        else f"{len(told)} faults, {elections} changes of master: {disagree} DISAGREEMENTS",
    ]
    for one in told:
        shown += [f"  {one.deed.number}: {text}" for text in one.wrong]
    shown += [f"  {text}" for text in comparison.wrong]
    for row in comparison.unasked:
        shown.append(f"  by itself between two faults: epoch {row.epoch} ({row.kind}, {row.cause})")
    shown.append(
        f"{verdict.acked:,} acknowledged writes looked for in every store: none is missing"
        if audit.code == 0
        else f"{verdict.acked:,} acknowledged writes looked for: the audit FOUND something"
    )
    shown += _found(audit.document)
    if verdict.streamed:
        once = "each once" if not verdict.stream_wrong else "NOT as the controllers kept them"
        shown.append(f"{verdict.streamed} events streamed from the history topic, {once}")
    shown += [f"  {text}" for text in verdict.stream_wrong[:SHOWN]]
    shown += [f"  {one.rule}: {one.text}" for one in verdict.findings[:SHOWN]]
    return shown


def _found(document: Mapping[str, Any]) -> list[str]:
    """What the audit calls critical or a warning, by kind and replica."""
    rows = [row for row in document.get("kinds", ()) if row["severity"] != "info"]
    told = [
        f"  {row['severity']}: {row['count']:,} {row['kind'].replace('_', ' ')}"
        + (f" in {', '.join(row['replicas'])}" if row["replicas"] else "")
        for row in rows[:SHOWN]
    ]
    return [*told, f"  and {len(rows) - SHOWN} sorts more"] if len(rows) > SHOWN else told


def table(comparison: Comparison) -> list[str]:
    """What was done beside what the history says of it, as lines of one width each column."""
    rows = [HEAD, *(row for one in comparison.told for row in _rows(one))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return [
        "  ".join(
            text.rjust(width) if column in RIGHT else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rows(told: Told) -> Iterable[tuple[str, ...]]:
    deed = told.deed
    done = (str(deed.number), deed.title, deed.struck, f"{deed.gap_ms:.0f} ms")
    if not told.failovers:
        yield (*done, str(deed.epoch_after), "-", f"{deed.master_after} stays", "-")
    for number, row in enumerate(told.failovers):
        yield (*(done if number == 0 else ("",) * len(done)), *_told(row))


def _told(row: Failover) -> tuple[str, ...]:
    lost_ms = row.unavailable_ms if row.without_writes_ms is None else row.without_writes_ms
    cost = "-" if lost_ms is None else f"{lost_ms} ms"
    kind, cause = row.kind.replace("_", " "), row.cause.replace("_", " ")
    why = f"{kind}: {cause}" if cause not in ("", kind) else kind
    return (str(row.epoch), why, f"{row.master_before} -> {row.master}", cost)


def document(verdict: Verdict) -> dict[str, Any]:
    """The same for scripts."""
    comparison, audit = verdict.both()
    return {
        "good": verdict.is_good,
        "agrees": comparison.agrees,
        "faults": [_document(one) for one in comparison.told],
        "wrong": comparison.wrong,
        "unasked": [row.epoch for row in comparison.unasked],
        "acknowledged": verdict.acked,
        "auditExitCode": audit.code,
        "auditFound": audit.document.get("kinds", []),
        "streamed": verdict.streamed,
        "streamWrong": verdict.stream_wrong,
        "findings": [[one.rule, one.text] for one in verdict.findings],
    }


def _document(told: Told) -> dict[str, Any]:
    deed: Deed = told.deed
    return {
        "number": deed.number,
        "fault": deed.what,
        "whom": list(deed.whom),
        "gapMs": deed.gap_ms,
        "failovers": [
            {
                "masterEpoch": row.epoch,
                "kind": row.kind,
                "cause": row.cause,
                "masterBefore": row.master_before,
                "master": row.master,
                "unavailableMs": row.unavailable_ms,
                "withoutWritesMs": row.without_writes_ms,
            }
            for row in told.failovers
        ],
        "wrong": list(told.wrong),
    }
