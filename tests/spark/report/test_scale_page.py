"""The page of `lab.bench.scale`: every figure is in it, and it asks nothing of anybody."""

import pytest

from lab.bench.scale_page import MEASURES, growth_figure, write_scale_page

POINTS = [
    (10, {"per_second": 4000.0, "master_us": 20.0, "failover_ms": 21.0, "others_percent": 3.0}),
    (1_000, {"per_second": 2000.0, "master_us": 40.0, "failover_ms": 84.0}),
]


def test_a_measure_is_drawn_against_its_smallest_size() -> None:
    figure = growth_figure("queues", POINTS)
    assert figure is not None
    drawn = {trace["meta"]["legend"]: trace for trace in figure.data}
    assert set(drawn) == {"sends/s", "master, µs", "failover, ms"}
    assert drawn["failover, ms"]["x"] == [1, 3]
    assert drawn["failover, ms"]["y"] == pytest.approx([0, 0.602], abs=0.001)
    assert growth_figure("queues", POINTS[:1]) is None, "one size shows no growth"


def test_the_page_has_every_figure_and_what_it_means(tmp_path) -> None:
    sweep = {"name": "queues", "title": "queues & topics", "points": POINTS}
    path = tmp_path / "scale.html"
    write_scale_page(str(path), {"machine": "<two> cores", "sweeps": [sweep]})
    text = path.read_text()
    for wanted in ("4,000", "2,000", "84", "&lt;two&gt; cores", "Queues &amp; topics", "3 %"):
        assert wanted in text, wanted
    for key in ("per_second", "master_us", "failover_ms"):
        assert MEASURES[key][1] in text
    assert MEASURES["notice_ms"][1] not in text, "what was not measured is not explained"
    assert "src=" not in text.split("<script>")[0]
