"""The dashboards for Grafana: each figure in them is one that docs/metrics.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
FILES: Final = sorted((ROOT / "deploy" / "observe" / "dashboards").glob("*.json"))
LISTED: Final = set(
    re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
)


def dashboard(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_there_is_one_for_each_question() -> None:
    assert [file.stem for file in FILES] == ["broker", "cluster", "consumer", "failover"]
    assert len({dashboard(file)["uid"] for file in FILES}) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_figure_of_a_dashboard_exists(file: Path) -> None:
    document = dashboard(file)
    queries = [t["expr"] for panel in document["panels"] for t in panel["targets"]]
    queries += [
        variable["query"]["query"]
        for variable in document["templating"]["list"]
        if variable["type"] == "query"
    ]
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for query in queries
        for name in re.findall(r"\b(?:batonmq|rocketmq|process|python)_\w+", query)
    }
    assert len(queries) >= 8 and named
    assert named <= LISTED, sorted(named - LISTED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_have_a_place_of_their_own(file: Path) -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard(file)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
