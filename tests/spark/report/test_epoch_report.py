"""The page on epochs as a person opens it: drawn, complete, and without a single request."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from batonmq.spark.report.epoch_report import epoch_page
from batonmq.spark.report.epoch_tables import FAILOVERS_LISTED, EpochTables
from batonmq.spark.steps.sql import ResultTable
from tests.spark.browser import assert_stands_alone
from tests.spark.report.epoch_folders import EpochFolder, at, incident_hour

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SUMMARY = {
    "inputs": {
        "history": ["/data/n*/history"],
        "history_parquet": [],
        "stores": ["/data/b-*/store"],
        "since": "2026-11-01T00:00:00",
        "until": None,
    },
    "generated_at": "2026-11-21 12:00:00",
    "version": "9.9",
    "groups": [{"group": "broker-a", "last_event": "2026-11-21T11:30:00.000+00:00"}],
}
EVIL = "<script>alert(1)</script>"
BARS = "#masterships .plot .bars .point path"


def page_of(folder, summary):
    """Where the page of a folder's tables is."""
    path = f"{folder}/report.html"
    Path(path).write_text(epoch_page(tables_of(folder), summary))
    return path


def tables_of(folder):
    return EpochTables(lambda name: ResultTable(f"{folder}/{name}"), {})


@pytest.fixture(scope="module")
def incident(tmp_path_factory):
    folder = incident_hour(tmp_path_factory.mktemp("incident") / "out").save()
    return page_of(folder, SUMMARY)


@pytest.fixture(scope="module")
def nothing(tmp_path_factory):
    summary = SUMMARY | {"inputs": {"history": ["/data/n0"]}, "groups": []}
    return page_of(EpochFolder(tmp_path_factory.mktemp("nothing")).save(), summary)


@pytest.fixture(scope="module")
def bad_year(tmp_path_factory):
    """Three groups: one evil name, one with much, one that is still without a master."""
    made = EpochFolder(tmp_path_factory.mktemp("year") / "out")
    start = at("2026-01-05 00:00:00")
    for epoch in range(1, 1201):
        began = start + timedelta(hours=7 * (epoch - 1))
        made.mastership("busy", epoch, 1 + epoch % 3, began, began + timedelta(hours=7), "failover")
        made.failover("busy", epoch + 1, began + timedelta(hours=7), 100 + epoch)
        made.set_change("busy", began, [1, 2, 3], [1, 2], "election")
    # One file per group and day is slow to make; the day of a row is not what is drawn here.
    made.rows = {
        (table, group, "2026-01-05"): [
            row for (t, g, _), rows in made.rows.items() if (t, g) == (table, group) for row in rows
        ]
        for table, group, _ in made.rows
    }
    made.mastership(EVIL, 1, 1, start, start + timedelta(days=1), "unclean_election")
    made.mastership(EVIL, 2, 2, start + timedelta(days=1, minutes=1))
    made.failover(EVIL, 2, start + timedelta(days=1), 60_000, kind="unclean_election",
                  unclean=True, cause=EVIL)  # fmt: skip
    made.failover(EVIL, 3, start + timedelta(days=9), None, clock_problem="the clocks differ")
    made.set_change(EVIL, start, [1], [1, 2], f"{EVIL} caught up")
    made.mastership("lost", 1, 1, start, start + timedelta(days=300), "master_lost")
    made.day("lost", start + timedelta(days=300), 1, 80_000_000, is_open=True)
    made.day(EVIL, start + timedelta(days=1), 1, 60_000)
    for number in range(2, 40):
        made.day(EVIL, start + timedelta(days=number))
    made.add("findings", EVIL, start, severity="critical", kind="two_masters", text=EVIL,
             subject=EVIL, evidence=json.dumps({"from": EVIL}))  # fmt: skip
    return page_of(made.save(), SUMMARY)


def figures(path):
    """The pictures of a page as the data that they are drawn from."""
    html = Path(path).read_text()
    found = re.findall(
        r'<figure class="picture" id="([^"]+)">.*?<script type="application/json">(.*?)</script>',
        html,
        re.S,
    )
    return {key: json.loads(data) for key, data in found}


def test_every_picture_is_what_plotly_knows(incident, bad_year):
    from plotly import graph_objects

    for path in (incident, bad_year):
        for figure in figures(path).values():
            graph_objects.Figure(figure)  # raises for what it does not know


def test_an_incident_is_drawn_with_all_its_marks(browser, incident):
    browser.open(incident)
    assert browser.pictures() == [
        "masterships", "distribution", "typical", "worst", "calendar", "set-sizes",
    ]  # fmt: skip
    bars = browser.boxes(BARS)
    assert len(bars) == 4 + 3  # masterships, and the outages between them
    assert all(height > 0 for _, height in bars)
    assert all(width > 100 for width, _ in bars[:4])  # an outage may be narrower than a pixel,
    marks = browser.boxes("#masterships .plot .scatterlayer .point")
    assert len(marks) == 4 and all(width > 4 for width, _ in marks)  # its mark never is
    for picture, number in (("distribution", 3), ("typical", 9), ("worst", 14)):
        boxes = browser.boxes(f"#{picture} .plot .bars .point path")
        assert len(boxes) == number, picture
        assert all(width > 0 and height > 0 for width, height in boxes)
    assert browser.boxes("#calendar .plot .heatmaplayer image")
    lines = browser.boxes("#set-sizes .plot .scatterlayer .js-line")
    assert len(lines) == 1 and lines[0][0] > 500
    assert_stands_alone(browser)


def test_an_incident_says_its_numbers(browser, incident):
    browser.show(incident)
    text = browser.text()
    for said in (
        "1 broker group",
        "to 2026-11-21 11:30:00",
        "All times are UTC",
        "The master changed 3 times in broker-a",
        "Writes were impossible for 3.80 s altogether",
        "The worst took 3.30 s: broker-a, 2026-11-21 10:45:00.600, session silent",
        "No unclean election and no critical finding",
        "1 warning",
        "4 KiB",
        "epoch 3 in its file",
        '{"epochs": [3]}',
        "1,052,672",
        "n1",
        "BatonMQ 9.9",
        "/data/n*/history, /data/b-*/store; rows since 2026-11-01T00:00:00",
    ):
        assert said in text, said
    rows = browser.run(
        "return [...document.querySelectorAll('#failovers tbody tr')].map((r) => r.innerText)"
    )
    assert len(rows) == 3
    assert "3.30 s" in rows[0] and "900 ms" in rows[0] and "600 ms" in rows[0]


def test_a_story_has_each_step(browser, incident):
    browser.show(incident)
    browser.run("document.querySelectorAll('#failovers td.link a')[1].click()")
    opened = browser.run(
        "return [...document.querySelectorAll('#stories details[open]')].map((d) => d.innerText)"
    )
    (story,) = opened
    assert "broker-a: failover, broker 1 → 2, epoch 2, 480 ms without writes" in story
    assert "2026-11-21 10:10:00.480 first acknowledgement, 120 ms after the step before" in story
    assert (
        "rejoined cut 4 KiB" in story
        and "mqctl timeline -bn broker-a --since 1795255800000" in story
    )


def test_a_table_is_sorted_by_the_column_that_is_clicked(browser, incident):
    browser.show(incident)
    took = (
        "return [...document.querySelectorAll('#failovers tbody tr')]"
        ".map((r) => r.cells[7].innerText)"
    )
    longest = browser.run(took)
    click = "document.querySelectorAll('#failovers th button')[7].click()"
    browser.run(click)
    assert browser.run(took) == longest == ["3.30 s", "480 ms", "24 ms"]
    browser.run(click)
    assert browser.run(took) == longest[::-1]
    head = "return document.querySelectorAll('#failovers th')[7].getAttribute('aria-sort')"
    assert browser.run(head) == "ascending"


def test_the_changes_that_cost_most_are_listed_with_their_stories(tmp_path):
    made, start = EpochFolder(tmp_path), at("2026-01-05 00:00:00")
    last = 2 * FAILOVERS_LISTED
    for number in range(last):
        made.failover(f"broker-{number}", 2, start, 1000 + number, how=f"of broker-{number}")
    listed = tables_of(made.save()).dearest()
    assert [row["group"] for row in listed] == [f"broker-{last - n}" for n in range(1, 51)]
    assert all(row["how"] == f"of {row['group']}" for row in listed)


def test_the_bars_of_a_change_are_as_long_as_it_took(incident):
    """A silence by which a master was missed is a part, one before a closed session is none."""
    whole = [0, 0, 0]
    for trace in figures(incident)["worst"]["data"]:
        for row, part in zip(trace["y"], trace["x"], strict=True):
            whole[row] += part
    assert whole[:2] == [3_300, 480]


def test_no_event_at_all_is_a_page_too(browser, nothing):
    text = Path(nothing).read_text()
    assert "No event of any broker group" in text and "<figure" not in text
    assert "None. No epoch files were compared." in text
    assert "Nothing was cut." in text and "None in this time." in text


def test_names_from_data_are_only_ever_text(browser, bad_year):
    html = Path(bad_year).read_text()
    assert EVIL not in html
    browser.open(bad_year)
    assert browser.text().count(EVIL) >= 5  # verdict, tables
    ticks = browser.run(
        "return [...document.querySelectorAll('#masterships .ytick text')]"
        ".map((t) => t.textContent)"
    )
    assert ticks == [EVIL, "busy", "lost"]
    assert browser.run("return document.querySelectorAll('main script:not([type])').length") == 0
    assert_stands_alone(browser)


def test_what_is_grave_stands_first(browser, bad_year):
    browser.show(bad_year)
    verdicts = browser.run(
        "return [...document.querySelectorAll('.verdict li')]"
        ".map((v) => [v.className, v.innerText])"
    )
    assert verdicts[0][0] == "bad" and verdicts[0][1].startswith("lost has no master since")
    assert "1 unclean election" in verdicts[1][1] and "1 critical finding" in verdicts[2][1]
    assert not any(tone == "good" for tone, _ in verdicts)


def test_much_is_thinned_and_said_so(browser, bad_year):
    drawn = figures(bad_year)["masterships"]["data"]
    named = [trace for trace in drawn if trace["name"].startswith("broker ")]
    bars = sum(len(trace["x"]) for trace in named)
    assert bars == 400 + 3  # the bins of busy, and each of the others
    marks = sum(len(trace["x"]) for trace in drawn if trace["type"] == "scatter")
    assert marks == 400 + 2
    html = Path(bad_year).read_text()
    assert "Thinned: of busy (more than 400 masterships each)" in html
    assert f"The {FAILOVERS_LISTED} longest of 1,202 changes of master" in html
    browser.show(bad_year)
    assert len(browser.boxes(BARS)) >= bars


def test_each_change_leads_to_its_story(browser, bad_year):
    browser.show(bad_year)
    stories = browser.run(
        "return [...document.querySelectorAll('#failovers td.link a')]"
        ".map((a) => document.getElementById(decodeURIComponent(a.hash.slice(1))).innerText)"
    )
    assert len(stories) == FAILOVERS_LISTED
    assert EVIL in stories[0] and "unclean election" in stories[0]


def test_a_bin_leaves_no_hole_in_the_time_line(bad_year):
    drawn = figures(bad_year)["masterships"]["data"]
    busy = [
        (base, length)
        for trace in drawn
        if trace["name"].startswith("broker ")
        for base, length, row in zip(trace["base"], trace["x"], trace["y"], strict=True)
        if row == 1
    ]
    ends = [at(base) + timedelta(milliseconds=length) for base, length in sorted(busy)]
    starts = [at(base) for base, _ in sorted(busy)]
    assert all(
        abs(b - e) <= timedelta(milliseconds=1) for e, b in zip(ends, starts[1:], strict=False)
    )


def test_days_without_data_differ_from_days_without_outage(bad_year):
    layers = {trace["name"]: trace for trace in figures(bad_year)["calendar"]["data"]}
    rows = ("all groups", EVIL, "busy", "lost")
    count = {
        name: [sum(value is not None for value in line) for line in trace["z"]]
        for name, trace in layers.items()
    }
    days = len(layers["no outage"]["x"])
    assert len(rows) == len(layers["no outage"]["y"]) and days == 300
    assert count["no outage"] == [38, 38, 0, 0] and count["outage, by its length"] == [2, 1, 0, 1]
    assert count["nothing recorded"] == [days - 40, days - 39, days, days - 1]


def test_no_day_is_drawn_that_has_not_come_yet(incident):
    """The history ends on its only day: the other six are before it."""
    layers = {trace["name"]: trace for trace in figures(incident)["calendar"]["data"]}
    assert layers["outage, by its length"]["x"][-1] == "Sat<br>Nov 21"
    assert [line[-1] is not None for line in layers["outage, by its length"]["z"]] == [True]
    assert len(layers["nothing recorded"]["x"]) == 7


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_without_scrolling_sideways(browser, incident, dark):
    browser.open(incident, width=400, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    ink, paper = browser.run(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", each)[:3])) for each in (ink, paper)]
    assert (brightness[0] > brightness[1]) is dark
    tick = browser.run(
        "return getComputedStyle(document.querySelector('#masterships .xtick text')).fill"
    )
    assert tick == ink
    assert_stands_alone(browser)


def test_what_a_table_holds_is_read_whole_on_a_phone(browser, bad_year):
    browser.open(bad_year, width=390)
    boxes = browser.boxes("caption span")
    assert boxes and all(0 < width < 390 for width, _ in boxes)
    assert browser.run("return document.documentElement.scrollWidth") == 390
