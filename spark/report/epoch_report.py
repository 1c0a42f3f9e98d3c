"""The page on the epochs of broker groups: who was master when, what it cost, what is wrong.

Reads the Parquet tables of `epoch_history` and writes `report.html` beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from batonmq.spark.report import epoch_lines
from batonmq.spark.report.axes import short_labels
from batonmq.spark.report.calendar_figure import calendar_figure, group_calendar_figure
from batonmq.spark.report.duration_figures import distribution_figure, parts_figure
from batonmq.spark.report.epoch_rows import (
    failover_table,
    finding_table,
    group_table,
    leader_table,
    truncation_table,
)
from batonmq.spark.report.epoch_tables import (
    BINS_PER_DECADE,
    GROUPS_SHOWN,
    PARTS,
    EpochTables,
    Group,
    Kind,
    Totals,
)
from batonmq.spark.report.mastership_figure import mastership_figure
from batonmq.spark.report.page import (
    Card,
    Facts,
    Page,
    Picture,
    ReportSummary,
    Section,
    Table,
    Words,
    write_page,
)
from batonmq.spark.report.palette import kind_label
from batonmq.spark.report.quantities import (
    UNKNOWN,
    bytes_text,
    count_text,
    counted,
    duration_text,
    moment_text,
)
from batonmq.spark.report.set_size_figure import set_size_figure

_WORST_DRAWN: Final = 12
_ZOOM: Final = "Drag to zoom in, double-click to see all again."


@dataclass(frozen=True, slots=True)
class _Facts:
    """All that the page is made of."""

    totals: Totals
    groups: list[Group]
    kinds: list[Kind]
    dearest: list[Any]
    truncations: tuple[int, int, list[Any]]
    findings: tuple[dict[str, int], list[Any]]
    leaders: tuple[int, list[Any]]

    @property
    def changes(self) -> list[Kind]:
        """All kinds but first elections: before those there was nothing to lose."""
        return [kind for kind in self.kinds if kind.kind != "first_election"]

    @property
    def unclean(self) -> int:
        return sum(kind.unclean for kind in self.kinds)


def write_epoch_report(out_dir: str, summary: Mapping[str, Any]) -> str:
    """Write OUT/report.html from the tables below OUT, whole or not at all; its path.

    `summary`: what `epoch_history` writes as summary.json; of it `inputs`, `generated_at` and
    `version` are shown, the numbers come from the tables.
    """
    return write_page(f"{out_dir}/report.html", _page(EpochTables(out_dir), summary))


def _page(tables: EpochTables, summary: Mapping[str, Any]) -> Page:
    totals, groups = tables.groups()
    totals = replace(totals, last_ms=_last_ms(totals, summary))
    facts = _Facts(
        totals, groups, tables.kinds(), tables.dearest(), tables.truncations(),
        tables.findings(), tables.leaders(),
    )  # fmt: skip
    compared = bool(summary.get("inputs", {}).get("stores"))
    sections = [*_pictures(tables, facts), *_lists(facts, compared), _reading(facts, summary)]
    return Page(
        "Epoch history",
        _subtitle(totals, summary),
        _summaries(facts),
        _cards(facts),
        [section for section in sections if section.parts],
    )


def _last_ms(totals: Totals, summary: Mapping[str, Any]) -> int | None:
    """The time of the last event: the newest mastership goes on beyond the last row of a table."""
    if totals.last_ms is None or summary.get("inputs", {}).get("until"):
        return totals.last_ms
    ends = [group["last_event"] for group in summary.get("groups", ()) if group.get("last_event")]
    return max(
        [totals.last_ms, *(int(datetime.fromisoformat(at).timestamp() * 1000) for at in ends)]
    )


def _subtitle(totals: Totals, summary: Mapping[str, Any]) -> str:
    made = summary.get("generated_at")
    made_text = f" Made {made}." if made else ""
    if totals.first_ms is None or totals.last_ms is None:
        return f"No event of any broker group.{made_text}"
    return (
        f"{counted(totals.groups, 'broker group')}, {moment_text(totals.first_ms)} to "
        f"{moment_text(totals.last_ms)} ({duration_text(totals.last_ms - totals.first_ms)}). "
        f"All times are UTC.{made_text}"
    )


def _summaries(facts: _Facts) -> list[ReportSummary]:
    """The most important facts, the gravest first."""
    summaries: list[ReportSummary] = []
    totals = facts.totals
    for group in facts.groups:
        if group.is_open:
            since = f" since {moment_text(group.open_since_ms)}" if group.open_since_ms else ""
            summaries.append(
                ReportSummary(f"{group.name} has no master{since}: writes are impossible.", "bad")
            )
    if facts.unclean:
        summaries.append(
            ReportSummary(
                f"{counted(facts.unclean, 'unclean election')}: a master may lack messages that "
                "had been acknowledged. Compare the stores with message_audit.",
                "bad",
            )
        )
    numbers = facts.findings[0]
    if numbers.get("critical"):
        summaries.append(
            ReportSummary(
                f"{counted(numbers['critical'], 'critical finding')}: records of controllers or "
                "replicas contradict each other. See Findings.",
                "bad",
            )
        )
    elif numbers.get("warning"):
        summaries.append(
            ReportSummary(f"{counted(numbers['warning'], 'warning')}: see Findings.", "warn")
        )
    if totals.failovers:
        summaries.append(
            ReportSummary(
                f"The master changed {_times(totals.failovers)} in {_of_groups(facts)}. Writes "
                f"were impossible for {duration_text(totals.unavailable_ms)} altogether."
                + _longest(facts)
            )
        )
    elif totals.groups:
        summaries.append(ReportSummary("No master was lost or changed in this time."))
    if totals.groups and not facts.unclean and not numbers.get("critical"):
        summaries.append(
            ReportSummary(
                "No unclean election and no critical finding: nothing points to a loss.", "good"
            )
        )
    return summaries


def _longest(facts: _Facts) -> str:
    known = [row for row in facts.dearest if row.unavailable_ms is not None]
    worst = max(known, key=lambda row: row.unavailable_ms, default=None)
    if worst is None:
        return ""
    cause = f", {worst.cause.replace('_', ' ')}." if worst.cause else "."
    when = moment_text(worst.elected_at)
    return f" The worst took {duration_text(worst.unavailable_ms)}: {worst.group}, {when}{cause}"


def _of_groups(facts: _Facts) -> str:
    if facts.totals.groups == 1:
        return facts.groups[0].name
    number = sum(1 for group in facts.groups if group.failovers)
    if facts.totals.groups > len(facts.groups):
        return f"{count_text(facts.totals.groups)} groups"
    return f"{number} of {counted(facts.totals.groups, 'group')}"


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{count_text(number)} times"


def _cards(facts: _Facts) -> list[Card]:
    totals, numbers = facts.totals, facts.findings[0]
    told = [kind for kind in facts.changes if kind.longest_ms is not None]
    worst_ms = max((kind.longest_ms or 0 for kind in told), default=None)
    by_kind = ", ".join(
        f"{count_text(kind.number)} {kind_label(kind.kind)}"
        for kind in sorted(facts.changes, key=lambda kind: -kind.number)
    )
    span_ms = (totals.last_ms or 0) - (totals.first_ms or 0)
    share = ""
    if span_ms > 0 and totals.groups:
        served = 100 * (1 - totals.unavailable_ms / (span_ms * totals.groups))
        share = f"writable {max(0.0, served):.5g} % of the time"
    open_text = (
        f"; {counted(totals.open_groups, 'group')} still without" if totals.open_groups else ""
    )
    cuts, cut_bytes, _ = facts.truncations
    critical, warnings = numbers.get("critical", 0), numbers.get("warning", 0)
    return [
        Card("Changes of master", count_text(totals.failovers), by_kind or "none in this time"),
        Card(
            "Without writes, all groups",
            duration_text(totals.unavailable_ms),
            share + open_text,
            "bad" if totals.open_groups else "",
        ),
        Card("Longest change", duration_text(worst_ms), _median_text(told)),
        Card(
            "Unclean elections",
            count_text(facts.unclean),
            "acknowledged messages may be lost" if facts.unclean else "no sign of a loss",
            "bad" if facts.unclean else "good",
        ),
        Card(
            "Findings",
            f"{count_text(critical)} / {count_text(warnings)}",
            "critical / warnings",
            "bad" if critical else "warn" if warnings else "good",
        ),
        Card(
            "Cut at rejoins",
            bytes_text(cut_bytes),
            f"{counted(cuts, 'truncation')} of what was never confirmed" if cuts else "none",
        ),
    ]  # fmt: skip


def _median_text(told: Sequence[Kind]) -> str:
    failovers = next((kind for kind in told if kind.kind == "failover"), None)
    if failovers is None:
        return "first sign to first acknowledgement"
    return f"a failover: median {duration_text(failovers.median_ms)}"


def _pictures(tables: EpochTables, facts: _Facts) -> list[Section]:
    totals, groups = facts.totals, facts.groups
    if totals.first_ms is None or totals.last_ms is None:
        return []
    first_ms, last_ms = totals.first_ms, max(totals.last_ms, totals.first_ms + 60_000)
    left_out = (
        f"Of {count_text(totals.groups)} groups the {GROUPS_SHOWN} with most time without writes "
        "are drawn. "
        if totals.groups > len(groups)
        else ""
    )
    masters = _masters(tables, facts, first_ms, last_ms, left_out)
    days = _calendar(tables, groups, first_ms, last_ms, left_out)
    sets = _sets(tables, groups, first_ms, last_ms, left_out)
    return [
        Section("masters", "Who was master when", masters),
        Section("durations", "How long the changes of master took", _durations(tables, facts)),
        Section("days", "Time without writes, by day", days),
        Section("sets", "How many brokers were in sync", sets),
    ]


def _masters(
    tables: EpochTables, facts: _Facts, first_ms: int, last_ms: int, left_out: str
) -> list[Picture]:
    groups = facts.groups
    intervals = epoch_lines.masterships(tables, groups, first_ms, last_ms)
    changes = epoch_lines.changes(tables, groups)
    if not intervals and not changes:
        return []
    open_since = {g.name: g.open_since_ms for g in groups if g.open_since_ms is not None}
    bound = epoch_lines.rows_each(len(groups))
    binned = sorted({m.group for m in intervals if m.is_bin})
    thinned = (
        f"Thinned: of {_names(binned)} (more than {bound} masterships each) every bar is "
        f"{duration_text((last_ms - first_ms) // bound)} long and has the colour of the broker "
        f"that was master most of it; only the {bound} longest changes of each are marked."
        if binned
        else ""
    )
    text = (
        "One row per group, one colour per broker, red while writes were impossible. Short outages "
        f"are narrower than a pixel, so each change has a mark above its row. {_ZOOM}"
    )
    figure = mastership_figure(
        [g.name for g in groups], intervals, changes, open_since, first_ms, last_ms
    )
    return [Picture("masterships", figure, text, left_out + thinned)]


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} groups"


def _durations(tables: EpochTables, facts: _Facts) -> list[Picture]:
    return [*_distribution(tables, facts), *_typical(facts), *_worst(facts)]


def _distribution(tables: EpochTables, facts: _Facts) -> Iterator[Picture]:
    bins = [each for each in tables.duration_bins() if each[0] != "first_election"]
    if not bins:
        return
    median_ms, p99_ms = tables.overall_percentiles()
    unknown = sum(kind.number - kind.told for kind in facts.changes)
    yield Picture(
        "distribution",
        distribution_figure(bins, BINS_PER_DECADE, {"median": median_ms, "p99": p99_ms}),
        "From the first sign, or the last sign of life of a master that hung, to the first "
        "acknowledged write (to the opening where no client waited). The axis is logarithmic: "
        "each step is ten times the one before.",
        f"Without {counted(unknown, 'change', 'changes')} whose duration is not known."
        if unknown
        else "",
    )


def _typical(facts: _Facts) -> Iterator[Picture]:
    typical = [
        (
            kind_label(kind.kind),
            f"medians over {counted(kind.number, 'change')}",
            kind.parts_ms,
            None,
        )
        for kind in sorted(facts.changes, key=lambda kind: -kind.number)
        if any(kind.parts_ms.values())
    ]
    if typical:
        yield Picture(
            "typical",
            parts_figure(typical),
            "Where the time of a typical change goes: the median of each part.",
            "Medians of parts need not add up to the median of the whole.",
        )


def _worst(facts: _Facts) -> Iterator[Picture]:
    worst = sorted(
        (row for row in facts.dearest if row.unavailable_ms), key=lambda row: -row.unavailable_ms
    )[:_WORST_DRAWN]
    if worst:
        yield Picture(
            "worst",
            parts_figure(_worst_bars(worst)),
            f"Where the time of the {len(worst)} longest went."
            if len(worst) > 1
            else "Where its time went.",
            "Grey: that part is unknown to the clocks or the histories.",
        )


_Bar = tuple[str, str, dict[str, int | None], int]


def _worst_bars(rows: Sequence[Any]) -> list[_Bar]:
    names = short_labels([str(row.group) for row in rows], 16)
    return [_worst_bar(row, name) for row, name in zip(rows, names, strict=True)]


def _worst_bar(row: Any, name: str) -> _Bar:
    parts = {name: row[name] for name in PARTS} | {"detect_ms": row.detect_part_ms}
    if row.idle:
        parts["first_ack_ms"] = None
    took = duration_text(row.unavailable_ms)
    text = f"{moment_text(row.elected_at)}, {kind_label(row.kind)}, {took}"
    return f"{name} #{row.master_epoch}", f"{row.group}, {text}", parts, row.unavailable_ms


def _calendar(
    tables: EpochTables, groups: list[Group], first_ms: int, last_ms: int, left_out: str
) -> list[Picture]:
    days = epoch_lines.days(tables)
    if not days:
        return []
    pictures = [
        Picture(
            "calendar",
            calendar_figure(days),
            "All groups together, by the day in UTC. The colour scale is logarithmic.",
        )
    ]
    if len(groups) > 1:
        step, cells = epoch_lines.group_days(tables, groups, first_ms, last_ms)
        if cells:
            note = f"One cell is {step} days. " if step > 1 else ""
            names = [group.name for group in groups]
            pictures.append(
                Picture(
                    "group-calendar",
                    group_calendar_figure(names, step, cells),
                    "The same for each group.",
                    note + left_out,
                )
            )
    return pictures


def _sets(
    tables: EpochTables, groups: list[Group], first_ms: int, last_ms: int, left_out: str
) -> list[Picture]:
    sizes = epoch_lines.set_sizes(tables, groups, first_ms, last_ms)
    if not sizes:
        return []
    bound = epoch_lines.rows_each(len(groups))
    many = [group.name for group in groups if group.set_changes > bound]
    note = f"Thinned: of {_names(many)} the least of each {bound}th of the time." if many else ""
    return [
        Picture(
            "set-sizes",
            set_size_figure([group.name for group in groups], sizes, first_ms, last_ms),
            "The size of the SyncStateSet: only its members may follow a lost master. Red "
            f"diamonds: one broker alone, the next loss stops writes. {_ZOOM}",
            left_out + note,
        )
    ]


def _lists(facts: _Facts, compared: bool) -> list[Section]:
    """`compared`: epoch files were given, too."""
    numbers, findings = facts.findings
    cuts, cut_bytes, largest = facts.truncations
    leader_changes, leaders = facts.leaders
    cut_table = truncation_table(cuts, cut_bytes, largest)
    sections = [
        Section("findings", "Findings", [finding_table(numbers, findings)]),
        Section("failovers", "Changes of master", [failover_table(facts.dearest, facts.totals)]),
        Section("groups", "Groups", [group_table(facts.groups, facts.totals)]),
        Section("truncations", "Cut when brokers rejoined", [cut_table]),
        Section("leaders", "Leading controllers", [leader_table(leader_changes, leaders)]),
    ]
    nothing = _NONE if compared else _NONE | {"findings": "None. No epoch files were compared."}
    return [_or_words(section, nothing) for section in sections]


_NONE: Final = {
    "findings": "None: the histories and the epoch files agree.",
    "failovers": "None in this time.",
    "groups": "None.",
    "truncations": "Nothing was cut.",
    "leaders": "No change of the leading controller is recorded.",
}


def _or_words(section: Section, nothing: Mapping[str, str]) -> Section:
    table = section.parts[0]
    if isinstance(table, Table) and not table.rows:
        return Section(section.key, section.title, [Words(nothing[section.key])])
    return section


_INPUTS: Final = ("history", "history_parquet", "stores")


def _reading(facts: _Facts, summary: Mapping[str, Any]) -> Section:
    inputs = summary.get("inputs", {})
    paths = [str(path) for name in _INPUTS for path in inputs.get(name) or ()]
    shown = ", ".join(paths[:50]) + (f" and {len(paths) - 50} more" if len(paths) > 50 else "")
    span = [f"{name} {inputs[name]}" for name in ("since", "until") if inputs.get(name)]
    shown += f"; rows {' '.join(span)}" if span else ""
    return Section(
        "reading",
        "How to read this, and what it was made from",
        [
            Facts(
                {
                    "without writes": "from the first sign of a loss (the last sign of life of a "
                    "master that hung, the hold of a planned switch) to the first acknowledged "
                    "write; to the opening of the new master where no client waited for it",
                    "detect": "how long a lost master had been silent at the first sign; "
                    "part of the time without writes where its silence was that sign",
                    "other parts": "each from the step before: elect, change role, open, first "
                    f"acknowledgement; {UNKNOWN} where clocks of two hosts contradict each other",
                    "unclean": "a master from outside the set, or one that may lack messages",
                    "cut": "bytes behind the confirmed end that a rejoining broker truncated",
                    "first elections": "listed in no number of changes: before them writes were "
                    "impossible anyway",
                    "tables": "Parquet folders beside this file, partitioned by group and day",
                    "inputs": shown or UNKNOWN,
                    "made by": f"BatonMQ {summary.get('version', '')} epoch_history".strip(),
                }
            )
        ],
    )
