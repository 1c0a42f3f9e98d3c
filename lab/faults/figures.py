"""The figures of the table, and the table itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(slots=True)
class FaultFigures:
    """All trials of one fault. `limit_s` is the longest allowed, `median_limit_s` of the median."""

    title: str
    peer: str = ""
    limit_s: float | None = None
    median_limit_s: float | None = None
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    other: int = 0
    elections: list[int] = field(default_factory=list)
    left_out: str = ""

    def add(self, seconds: float | None, elections: int) -> None:
        """One trial; `seconds` None: nothing was acknowledged."""
        if seconds is not None:
            self.seconds.append(seconds)
        self.elections.append(elections)

    def found(self, rules: Iterable[str]) -> None:
        """Counts findings by their rule."""
        for rule in rules:
            self.lost += rule == "lost"
            self.other += rule != "lost"

    @property
    def meets_limits(self) -> bool:
        """Whether all trials are within the limits; True where there is no limit."""
        if not self.seconds:
            return False
        if self.limit_s is not None and max(self.seconds) > self.limit_s:
            return False
        return self.median_limit_s is None or median(self.seconds) <= self.median_limit_s


def markdown(rows: Iterable[FaultFigures]) -> str:
    """The table, to be pasted."""
    lines = [
        "| fault | Java peer | limit | median | max | trials | elections | lost | other findings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.left_out:
            figures = f"left out: {row.left_out} | | 0 | | | "
        elif not row.seconds:
            figures = f"- | - | 0 | - | {row.lost} | {row.other}"
        else:
            worst = f"{max(row.seconds):.3f} s"
            figures = (
                f"{median(row.seconds):.3f} s | {worst if row.meets_limits else f'**{worst}**'}"
                f" | {len(row.seconds)} | {_range(row.elections)} | {row.lost} | {row.other}"
            )
        lines.append(f"| {row.title} | {row.peer or '-'} | {_limit(row)} | {figures} |")
    return "\n".join(lines)


def _limit(row: FaultFigures) -> str:
    parts = []
    if row.median_limit_s is not None:
        parts.append(f"median {row.median_limit_s:g} s")
    if row.limit_s is not None:
        parts.append(f"max {row.limit_s:g} s" if parts else f"{row.limit_s:g} s")
    return ", ".join(parts) or "-"


def _range(counts: Sequence[int]) -> str:
    """`1`, or `0-2` where trials differ."""
    if not counts:
        return "-"
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"
