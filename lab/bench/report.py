"""Rows, medians, ratios, marks, and the table that people read. Pure.

A row holds the samples of both sides. Its mark is either a limit for our figure or a factor
against the Java peer's median, and is met or not; a row without samples of ours is not judged.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["less", "more"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What our figure must reach: `limit` in the row's unit, or `times` the Java median."""

    limit: float | None = None
    times: float | None = None
    limit_of_max: float | None = None

    def text(self, better: Better) -> str:
        sign = "<=" if better == "less" else ">="
        parts = []
        if self.limit is not None:
            parts.append(f"{sign} {number(self.limit)}")
        if self.limit_of_max is not None:
            parts.append(f"max <= {number(self.limit_of_max)}")
        if self.times is not None:
            parts.append(f"{sign} {self.times:g}x")
        return ", ".join(parts)


@dataclass(slots=True)
class ReportRow:
    """One line of the table. `java` and `ours` hold one sample for each trial or round."""

    key: str
    title: str
    unit: str
    better: Better
    mark: Mark | None = None
    java: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def samples(self, side: str) -> list[float]:
        return self.java if side == "java" else self.ours

    @property
    def ratio(self) -> float | None:
        """Our median over Java's; None while one of them has no sample."""
        if not self.java or not self.ours or not statistics.median(self.java):
            return None
        return statistics.median(self.ours) / statistics.median(self.java)

    @property
    def met(self) -> bool | None:
        """Whether the mark is reached; None if there is none, or nothing to judge."""
        if self.mark is None or not self.ours:
            return None
        median = statistics.median(self.ours)
        checks = []
        if self.mark.limit is not None:
            checks.append(_reaches(median, self.mark.limit, self.better))
        if self.mark.limit_of_max is not None:
            checks.append(max(self.ours) <= self.mark.limit_of_max)
        if self.mark.times is not None:
            if self.ratio is None:
                return None
            checks.append(_reaches(self.ratio, self.mark.times, self.better))
        return all(checks)

    def to_json(self) -> dict[str, object]:
        """Everything raw, with the medians beside it."""
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "better": self.better,
            "mark": self.mark.text(self.better) if self.mark else None,
            "met": self.met,
            "ratio": self.ratio,
            "java": _summary(self.java),
            "ours": _summary(self.ours),
        }


def _reaches(value: float, wanted: float, better: Better) -> bool:
    return value <= wanted if better == "less" else value >= wanted


def _summary(samples: Sequence[float]) -> dict[str, object] | None:
    if not samples:
        return None
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
    }


def number(value: float) -> str:
    """Three figures that count, thousands with a comma: `0.0123`, `4.56`, `12,300`."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(samples: Sequence[float]) -> str:
    """`median (least-most, count)`, or `-` without samples."""
    if not samples:
        return "-"
    median = number(statistics.median(samples))
    if len(samples) == 1:
        return median
    return f"{median} ({number(min(samples))}-{number(max(samples))}, n={len(samples)})"


def table(rows: Sequence[ReportRow]) -> str:
    """A Markdown table, its columns padded so that it reads in a terminal as well."""
    head = ["", "Java 5.3.3", "ours", "ratio", "mark", ""]
    body = [
        [
            f"{row.title}, {row.unit}",
            spread(row.java),
            spread(row.ours),
            "-" if row.ratio is None else f"{row.ratio:.2f}x",
            row.mark.text(row.better) if row.mark else "",
            {True: "met", False: "MISSED", None: ""}[row.met],
        ]
        for row in rows
        if row.java or row.ours
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    ruler = ["-" * width for width in widths]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in [head, ruler, *body]
    )
