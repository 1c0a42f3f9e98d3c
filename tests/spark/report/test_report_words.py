"""Numbers as people read them, and a page that escapes whatever it is given. No session needed."""

import html.parser
import itertools

import pytest

from batonmq.spark.report import page
from batonmq.spark.report.epoch_figures import parts_figure
from batonmq.spark.report.page import render
from batonmq.spark.report.plots import Figure, amount_ticks, folded, pointed_out, round_steps
from batonmq.spark.report.quantities import (
    bytes_text,
    count_text,
    counted,
    duration_text,
    moment_text,
    plot_text,
    plot_time,
)
from batonmq.spark.report.traffic_figures import (
    histogram_figure,
    percentiles_figure,
    rates_figure,
)

EVIL = "</script><script>alert('1')</script>&amp;\"x"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1 s"),
        (1_234, "1.23 s"),
        (59_940, "59.9 s"),
        (60_000, "1 min"),
        (200_000, "3 min 20 s"),
        (7_500_000, "2 h 5 min"),
        (86_400_000, "1 d"),
        (1_045_000_000_000, "12,094 d 21 h"),
        (-1_500, "-1.50 s"),
    ],
)
def test_durations(ms, text):
    assert duration_text(ms) == text


def test_sizes_counts_and_times():
    assert [bytes_text(size) for size in (0, 1023, 1536, 1 << 30, 150 << 40, None)] == [
        "0 B",
        "1,023 B",
        "1.5 KiB",
        "1 GiB",
        "150 TiB",
        "–",
    ]
    assert [count_text(number) for number in (1_234, 12_345_678, 2e10)] == [
        "1,234",
        "12.3 million",
        "20.0 billion",
    ]
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


def topics(**more):
    """The facts of a page on topics, with nothing in it but `more`."""
    nothing = (
        "bar_ms", "volumes", "bytes_figure", "sizes", "size_lines", "delays", "delay_lines",
        "lag_lines", "peak", "latest",
    )  # fmt: skip
    totals = dict.fromkeys(("first_ms", "topics", "messages", "of_system", "bytes", "late"))
    return {
        **dict.fromkeys(nothing), "totals": totals, "topics": [], "hottest": [], "lags": [],
        "stores": [], "bucket_ms": 60_000, "generated_at": "", "version": "", "snapshot_at": "",
        **more,
    }  # fmt: skip


def test_nothing_from_data_becomes_markup():
    evil = {
        "topic": EVIL, "broker": EVIL, "group": EVIL, "queue_id": 1, "messages": 500, "bytes": 5,
        "share": 0.5, "times_even": 3.0, "lag": 7, "oldest_age_ms": None, "queues_behind": 1,
        "queues": 1, "store": EVIL, "replicas_left_aside": 0,
    }  # fmt: skip
    facts = topics(
        hottest=[evil], lags=[evil], stores=[evil], version=EVIL, generated_at=EVIL,
        lag_lines=parts_figure([(EVIL, EVIL, {"elect_ms": 5}, 9, EVIL)]),
    )  # fmt: skip
    seen = Tags()
    seen.feed(render("stats.html", facts))
    scripts = [attrs for tag, attrs in seen.tags if tag == "script"]
    assert [attrs.get("type") for attrs in scripts] == ["application/json"] + [None] * 2
    assert seen.text.count(EVIL) >= 12
    outside = [attrs for tag, attrs in seen.tags if "src" in attrs or tag in ("iframe", "object")]
    assert outside == []
    links = [attrs["href"] for _, attrs in seen.tags if "href" in attrs]
    assert links == ["data:,", "#queues", "#consumers", "#reading"]


def test_tags_in_a_picture_are_shown_as_text():
    assert plot_text("<b>&") == "&lt;b&gt;&amp;"


def test_a_number_that_json_has_not_makes_no_page():
    with pytest.raises(ValueError, match="JSON"):
        lags = [
            {
                "group": "g",
                "topic": "t",
                "lag": 1,
                "oldest_age_ms": None,
                "queues_behind": 1,
                "queues": 1,
            }
        ]
        render(
            "stats.html",
            topics(lags=lags, lag_lines=Figure([{"y": [float("nan")]}], {"height": 1})),
        )


def test_long_names_that_differ_at_one_end_stay_apart():
    names = [f"broker-group-in-region-central-{at:02d}-production-orders" for at in range(12)]
    cut = [folded(name) for name in names]
    assert len(set(cut)) == 12 and cut[7].endswith("al-07-production-orders")
    assert all(len(line) <= 24 for label in cut for line in label.split("<br>"))
    assert folded("one long name of a broker group") == "one long name of a broke<br>r group"
    assert folded("<b>") == "&lt;b&gt;"


def test_percentiles_at_one_place_are_kept_apart():
    """Each line is drawn above a wider one: it hides none."""
    traces = percentiles_figure([(0, 5, 90, 90)], "delay", [1, 10], str).data
    assert [trace["name"] for trace in traces] == ["p99", "p95", "p50"]
    widths = [trace["line"]["width"] for trace in traces]
    assert all(above + 2 < below for below, above in itertools.pairwise(widths))
    assert len({trace["line"]["color"] for trace in traces}) == 3


def test_lines_at_one_place_have_one_name():
    notes = pointed_out({"median": 40, "p99": 40}, 1, 3)["annotations"]
    assert [note["text"] for note in notes] == ["median, p99 40 ms"]


def test_parts_of_a_change_add_up_to_the_whole():
    """What no part covers is grey; silence by which a hung master was missed is a part, too."""
    parts = {"detect_ms": 820, "elect_ms": 10, "role_ms": None, "open_ms": 50, "first_ack_ms": 20}
    drawn = parts_figure([("a #1", "", parts, 1_000, "")]).data
    assert sum(trace["x"][0] for trace in drawn) == 1_000
    assert drawn[-1]["x"] == [100]


def test_ticks_of_small_amounts_are_neither_thousandths_nor_parts_of_a_message():
    one_a_minute = rates_figure({"T": [(0, 1 / 60)]}, 60_000, "messages/s", str)
    assert one_a_minute.layout["yaxis"]["tickformat"] == "~g"
    assert amount_ticks([3, 12_000.0], whole=True)["tickformat"] == "~s"
    few = histogram_figure([(118, 1)], {}, "size", [64, 256], str).layout["yaxis"]
    assert (few["dtick"], few["tickformat"]) == (1, "d")


def test_names_of_groups_in_a_sentence_are_escaped_once():
    made = page._ENVIRONMENT.from_string('{{ "of %s" | format(them | group_names) }}')
    assert made.render(them=["a&b", "c"]) == "of a&amp;b, c"
    assert made.render(them=["a", "b", "c", "d"]) == "of 4 groups"
