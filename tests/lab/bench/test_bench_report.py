"""Medians, marks and the table of the bench."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lab.bench import compare, history_events, scale
from lab.bench.report import Mark, ReportRow, number, spread, table
from lab.bench.scale import sweep_table


def row(mark: Mark | None, better: str, java: list[float], ours: list[float]) -> ReportRow:
    return ReportRow("key", "title", "unit", better, mark, java, ours)  # type: ignore[arg-type]


def test_ratio_is_median_over_median() -> None:
    """One wild sample moves neither side."""
    assert row(None, "more", [10, 10, 1000], [15, 15, 0]).ratio == 1.5


def test_ratio_needs_both_sides() -> None:
    assert row(None, "more", [], [1.0]).ratio is None
    assert row(None, "more", [1.0], []).ratio is None
    assert row(None, "less", [0.0], [0.0]).ratio is None


@pytest.mark.parametrize(
    ("mark", "better", "java", "ours", "met"),
    [
        (None, "less", [1.0], [1.0], None),
        (Mark(limit=2), "less", [], [2.0], True),
        (Mark(limit=2), "less", [], [2.1], False),
        (Mark(limit=2), "less", [9.0], [], None),
        (Mark(limit=0.06, limit_of_max=0.15), "less", [], [0.05, 0.05, 0.2], False),
        (Mark(limit=0.06, limit_of_max=0.15), "less", [], [0.05, 0.05, 0.15], True),
        (Mark(times=1.2), "more", [100.0], [120.0], True),
        (Mark(times=1.2), "more", [100.0], [119.0], False),
        (Mark(times=1.2), "more", [], [119.0], None),
    ],
)
def test_met_judges_our_median_against_the_mark(
    mark: Mark | None, better: str, java: list[float], ours: list[float], met: bool | None
) -> None:
    assert row(mark, better, java, ours).met is met


def test_numbers_show_three_figures() -> None:
    shown = ["0", "0.0123", "4.57", "123", "12,346"]
    assert [number(v) for v in (0, 0.012345, 4.5678, 123.4, 12345.6)] == shown


def test_spread_shows_median_range_and_count() -> None:
    assert spread([]) == "-"
    assert spread([3.0]) == "3"
    assert spread([3.0, 1.0, 2.0]) == "2 (1-3, n=3)"


def test_table_columns_line_up_and_empty_rows_stay_out() -> None:
    rows = [
        row(Mark(times=1.2), "more", [100.0], [150.0]),
        ReportRow("none", "never measured", "s", "less"),
        ReportRow("long", "a row with a long title", "s", "less", Mark(limit=1.0), [], [2.0]),
    ]
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert "1.50x" in lines[2] and "met" in lines[2]
    assert "MISSED" in lines[3]


def test_json_holds_every_sample() -> None:
    document = row(Mark(limit=2.0), "less", [1.0, 3.0], [2.0]).to_json()
    assert document["java"] == {"median": 2.0, "min": 1.0, "max": 3.0, "samples": [1.0, 3.0]}
    assert document["mark"] == "<= 2" and document["met"] is True


def test_a_sweep_shows_each_measure_that_it_has_by_size() -> None:
    points = {10: {"per_second": 4000.0, "wait_ms": 2.0}, 1_000: {"per_second": 2000.0}}
    assert sweep_table("queues", points).splitlines() == [
        "| queues | 10 | 1,000 |",
        "| --- | --- | --- |",
        "| sends/s, acknowledged by both replicas | 4,000 | 2,000 |",
        "| longest wait of a light request meanwhile, ms | 2 |  |",
    ]


@pytest.mark.parametrize("bench", [compare, history_events, scale])
def test_a_folder_that_is_missing_is_named_before_anything_runs(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = str(tmp_path / "missing")
    monkeypatch.setattr(sys, "argv", ["bench", "--folder", place])
    with pytest.raises(SystemExit):
        bench.main()
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"argument --folder: {place!r} must be a folder that is there")
