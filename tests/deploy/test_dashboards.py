"""The dashboards for Grafana: each figure in them is one that docs/metrics.md lists."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.conftest import ROOT, says

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


def test_no_count_is_0_where_nothing_is_scraped() -> None:
    """A green 0 for a cluster of which Prometheus knows nothing."""
    assert not [file.name for file in FILES if "vector(" in file.read_text()]


def test_prometheus_takes_each_query(tmp_path: Path) -> None:
    targets = [t for f in FILES for panel in dashboard(f)["panels"] for t in panel["targets"]]
    rules = [
        {"record": f"query_{n}", "expr": re.sub(r"\$\w+", "chosen", target["expr"])}
        for n, target in enumerate(targets)
    ]
    file = tmp_path / "rules.json"  # YAML, too
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    says("promtool", "check", "rules", file)


@pytest.mark.parametrize(("values", "counted"), [((), None), ((1, 1), 0), ((1, 0), 1)])
def test_without_a_controller_no_count_of_groups_is_shown(
    tmp_path: Path, values: tuple[int, ...], counted: int | None
) -> None:
    """A green 0 would say that each group has a master."""
    (panel,) = (
        panel
        for panel in dashboard(ROOT / "deploy/observe/dashboards/cluster.json")["panels"]
        if panel["title"] == "Groups without a master"
    )
    case = {
        "interval": "1m",
        "input_series": [
            {"series": f'batonmq_group_has_master{{node_id="g{n}"}}', "values": str(value)}
            for n, value in enumerate(values)
        ],
        "promql_expr_test": [
            {
                "expr": panel["targets"][0]["expr"].replace("$group", ".*"),
                "eval_time": "0m",
                "exp_samples": [] if counted is None else [{"labels": "{}", "value": counted}],
            }
        ],
    }
    file = tmp_path / "tests.json"
    file.write_text(json.dumps({"tests": [case]}))
    says("promtool", "test", "rules", file)


def test_what_is_bad_is_red() -> None:
    """Without steps of its own a figure is green up to 80: no leader would be as well."""
    coloured = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for file in FILES
        for panel in dashboard(file)["panels"]
        if panel["type"] == "stat" and panel["options"]["colorMode"] != "none"
    }

    def colour(title: str, value: float) -> str:
        steps = coloured[title]
        return str([s["color"] for s in steps if s["value"] is None or s["value"] <= value][-1])

    good = {
        "Groups without a master": (0, 1),
        "Smallest set": (3, 1),
        "Controller leaders": (1, 0),
        "Problems": (0, 2),
        "Log suspect": (0, 1),
    }
    assert {
        t: (colour(t, well), colour(t, bad)) for t, (well, bad) in good.items()
    } == dict.fromkeys(coloured, ("green", "red"))


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
