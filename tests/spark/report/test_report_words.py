"""Numbers as people read them, and a page that escapes whatever it is given. No session needed."""

import html.parser

import pytest

from spark.report.axes import round_steps
from spark.report.duration_figures import distribution_figure, parts_figure
from spark.report.page import (
    Badge,
    Card,
    Code,
    Column,
    Facts,
    Figure,
    Page,
    Picture,
    Section,
    Table,
    Verdict,
    Words,
    render,
    write_page,
)
from spark.report.quantities import (
    bytes_text,
    count_text,
    counted,
    duration_text,
    moment_text,
    plot_text,
    plot_time,
)

EVIL = "</script><script>alert('1')</script>&amp;\"x"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"), (0, "0 ms"), (999, "999 ms"), (1_000, "1 s"), (1_234, "1.23 s"),
        (59_940, "59.9 s"), (60_000, "1 min"), (200_000, "3 min 20 s"), (7_500_000, "2 h 5 min"),
        (86_400_000, "1 d"), (1_045_000_000_000, "12,094 d 21 h"), (-1_500, "-1.50 s"),
    ],
)  # fmt: skip
def test_durations(ms, text):
    assert duration_text(ms) == text


def test_sizes_counts_and_times():
    assert [bytes_text(size) for size in (0, 1023, 1536, 1 << 30, 150 << 40, None)] == [
        "0 B", "1,023 B", "1.5 KiB", "1 GiB", "150 TiB", "–",
    ]  # fmt: skip
    assert [count_text(number) for number in (1_234, 12_345_678, 2e10)] == [
        "1,234", "12.3 million", "20.0 billion",
    ]  # fmt: skip
    assert [counted(number, "group") for number in (0, 1, 3)] == [
        "no groups",
        "1 group",
        "3 groups",
    ]
    assert moment_text(1_795_262_400_250) == "2026-11-21 12:00:00.250"
    assert plot_time(1_795_262_400_000) == "2026-11-21 12:00:00.000"


def test_steps_of_a_duration_axis_are_round_and_reach_the_end():
    for longest in (1, 7, 999, 61_000, 5_000_000, 10**12):
        steps = round_steps(longest)
        assert steps[0] == 0 and steps[-1] >= longest and 2 <= len(steps) <= 9


class Tags(html.parser.HTMLParser):
    """Which tags a page has, and its text."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_nothing_from_data_becomes_markup():
    bars = [(EVIL, 3, 5)]
    page = Page(
        EVIL, EVIL, [Verdict(EVIL, "bad")], [Card(EVIL, EVIL, EVIL)],
        [
            Section(EVIL, EVIL, [
                Words(EVIL), Facts({EVIL: EVIL}),
                Table(EVIL, [Column(EVIL)] * 3, [[EVIL, Badge(EVIL, "bad"), Code(EVIL)]]),
                Picture("p", distribution_figure(bars, 6, {EVIL: 10.0}), EVIL, EVIL),
                Picture("q", parts_figure([(EVIL, EVIL, {"elect_ms": 5}, 9)]), EVIL),
            ])
        ],
    )  # fmt: skip
    text = render(page)
    seen = Tags()
    seen.feed(text)
    scripts = [attrs for tag, attrs in seen.tags if tag == "script"]
    assert [attrs.get("type") for attrs in scripts] == ["application/json"] * 2 + [None] * 2
    assert seen.text.count(EVIL) >= 14
    outside = [attrs for tag, attrs in seen.tags if "src" in attrs or tag in ("iframe", "object")]
    assert outside == []
    assert [attrs["href"] for _, attrs in seen.tags if "href" in attrs] == ["data:,", f"#{EVIL}"]


def test_tags_in_a_picture_are_shown_as_text():
    assert plot_text("<b>&") == "&lt;b&gt;&amp;"


def test_what_no_part_tells_of_is_grey_and_silence_is_no_part_of_the_whole():
    figure = parts_figure([("g", "", {"detect_ms": 900, "elect_ms": 100}, 400)])
    assert {trace["name"]: trace["x"] for trace in figure.data} == {
        "detect": [900], "elect": [100], "not told apart": [300],
    }  # fmt: skip


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    write_page(str(path), Page("before", ""))
    broken = Figure([{"y": [float("nan")]}], {})
    with pytest.raises(ValueError, match="JSON"):
        write_page(
            str(path), Page("after", "", sections=[Section("s", "s", [Picture("p", broken, "")])])
        )
    assert "before" in path.read_text() and list(tmp_path.iterdir()) == [path]
