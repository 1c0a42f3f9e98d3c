"""topic_stats over small stores whose every message is known."""

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from random import Random

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batonmq.spark.jobs.topic_stats import main
from batonmq.spark.read.options import span_ms
from batonmq.spark.read.store_facts import StoreError
from batonmq.spark.stats.stats_job import StatsRequest, one_per_group, run
from batonmq.spark.stats.stats_queries import TABLES
from batonmq.spark.stats.stats_report import stats_page
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import DuckEngine, SparkEngine
from tests.spark.browser import assert_stands_alone
from tests.spark.log_files import LogFiles, write_queue

NOON_MS = 1_795_262_400_000  # 2026-11-21 12:00:00 UTC
HOT = "Orders"
EVIL = "<img src=x onerror=alert(1)>"


def consume_queue(root, topic, queue_id, end):
    """A consume queue of `end` units: only where it ends matters to a lag."""
    units = [(0, 100, 0)] * end
    write_queue(root, *units, bytes(20 * (200 - end)), topic=topic, queue_id=queue_id)


def message(files, topic, queue_id, offset, at_ms, delay_ms, body=b"x" * 100):
    files.add(
        topic=topic.encode(), queue_id=queue_id, queue_offset=offset, store_timestamp=at_ms,
        born_timestamp=at_ms - delay_ms, body=body,
    )  # fmt: skip


def write_store(root, *, confirmed_of=100, offsets):
    """One minute with 80 messages, the next with 20; queue 0 of two gets 75 %."""
    files = LogFiles(root, file_size=1 << 16)
    place = {0: 0, 1: 0}
    for number in range(100):
        at_ms = NOON_MS + number * 600 if number < 80 else NOON_MS + 60_000 + number * 100
        queue_id = 1 if number % 4 == 3 else 0
        message(files, HOT, queue_id, place[queue_id], at_ms, number)
        place[queue_id] += 1
        if number == confirmed_of - 1:
            confirm = files.end
    message(files, "rmq_sys_BATON_METADATA", 0, 0, NOON_MS, 0)
    message(files, EVIL, 0, 0, NOON_MS, 5, b"y" * 1000)
    files.save(
        confirm=files.end if confirmed_of == 100 else confirm,
        identity=f"C#broker-a#{1 if confirmed_of == 100 else 2}",
    )
    consume_queue(files.root, HOT, 0, 75)
    consume_queue(files.root, HOT, 1, 25)
    (files.root / "config").mkdir()
    (files.root / "config" / "consumerOffset.json").write_text(
        json.dumps({"offsetTable": {f"{HOT}@{group}": table for group, table in offsets.items()}})
    )
    return files.root


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two replicas of one group; the second has confirmed less and knows other offsets."""
    root = tmp_path_factory.mktemp("stores")
    write_store(
        root / "b1", offsets={"slow": {"0": 70, "1": 10}, "done": {"0": 75, "1": 25, "9": 3}}
    )
    write_store(root / "b2", confirmed_of=50, offsets={"slow": {"0": 0, "1": 0}})
    # Two brokers of their own, whose queues have the same names.
    for name in ("b3", "b4"):
        files = LogFiles(root / name, file_size=1 << 16)
        message(files, "Lonely", 0, 7, NOON_MS, 1)
        files.save(identity="", epochs="")
    return str(root / "b*")


@pytest.fixture(scope="module")
def done(stores, tmp_path_factory):
    """Two runs an hour apart into one output; the result of the second."""
    out = tmp_path_factory.mktemp("out")
    plain = ["--stores", stores, "--output", str(out), "--json", "--quiet", "--max-lag", "19"]
    first = CliRunner().invoke(main, [*plain, "--no-report", "--at", "2026-11-21 12:02:00"])
    assert first.exit_code == 1, first.output
    return out, CliRunner().invoke(main, [*plain, "--overwrite", "--at", "2026-11-21 13:02:00"])


def random_store(root, seed):
    """Up to 150 messages of odd topics, sizes, delays and clocks, and offsets of two groups."""
    random = Random(seed)
    files, ends, at_ms = LogFiles(root, file_size=1 << 16), {}, NOON_MS
    for _ in range(random.randint(0, 150)):
        queue = random.choice(["A", "Quo'te", "%RETRY%g", "rmq_sys_x"]), random.randint(0, 2)
        at_ms += random.choice([0, 1, 700, 30_000, random.randint(0, 4_000_000)])
        delay_ms = random.choice([0, 63, 64, 65, 999, 12_345, -5, 10**7, random.randint(0, 5000)])
        size = random.choice([0, 10, 60, 1000, random.randint(0, 3000)])
        born_ms = random.choice([delay_ms, delay_ms, 10**15])  # outside of all calendars
        message(files, *queue, ends.get(queue, 0), at_ms, born_ms, b"x" * size)
        ends[queue] = ends.get(queue, 0) + 1
    files.save(confirm=files.end, identity=f"C#broker-{random.choice('ab')}#{seed}")
    for (topic, queue_id), end in ends.items():
        consume_queue(files.root, topic, queue_id, end)
    (files.root / "config").mkdir()
    table = {
        f"{topic}@{group}": {str(q): random.randint(0, ends.get((topic, q), 3)) for q in range(3)}
        for group in ("g1", "g2")
        for topic in ("A", "Quo'te")
    }
    (files.root / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning:pyspark")
def test_both_engines_give_one_answer(stores, tmp_path, session):
    """One text of queries: of known stores, and of as many odd ones as fit into one run."""
    for seed in range(12):
        random_store(tmp_path / f"odd{seed}", seed)
    at = datetime(2026, 11, 21, 13, 2, tzinfo=UTC)
    request = StatsRequest((stores, str(tmp_path / "odd*")), (), 60_000, "FAILFAST", at)
    sources = one_per_group(request.stores)
    answers = {}
    for engine in (DuckEngine(), SparkEngine(session)):
        results = Results(str(tmp_path / type(engine).__name__), TABLES)
        with engine:
            summary = run(engine, request, sources, results, nullcontext)
            del summary["generated_at"]
            page = stats_page(engine, summary)
        tables = {each: pq.read_table(results.table(each).place) for each in TABLES}
        answers[type(engine)] = summary, page, {
            name: (
                {column: table.schema.field(column).type for column in table.column_names},
                sorted(str(sorted(row.items())) for row in table.to_pylist()),
            )
            for name, table in tables.items()
        }  # fmt: skip
    (summary, page, mine), (others, their_page, theirs) = answers.values()
    assert summary == others and page == their_page
    for table in TABLES:
        assert mine[table] == theirs[table] and mine[table][1], table


def rows(out, name, **request):
    found = pq.read_table(out / name).to_pylist()
    return [row for row in found if all(row[key] == value for key, value in request.items())]


def test_each_message_counts_once_although_two_replicas_hold_it(done):
    out, result = done
    assert result.exit_code == 1, result.output + result.stderr  # a group is 20 behind
    summary = json.loads(result.stdout)
    assert summary["messages"] == 104
    store = next(each for each in summary["stores"] if each["broker"] == "broker-a")
    assert store["store"].endswith("b1") and store["replicas_left_aside"] == 1
    assert sum(row["messages"] for row in rows(out, "traffic")) == 104
    assert [row["topic"] for row in rows(out, "traffic", is_system=True)] == [
        "rmq_sys_BATON_METADATA"
    ]


def test_volume_rates_and_percentiles_per_bucket(done):
    out, _ = done
    first, second = sorted(rows(out, "traffic", topic=HOT), key=lambda row: row["at"])
    assert first["at"] == datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    assert (first["messages"], second["messages"]) == (80, 20)
    assert first["messages_per_s"] == pytest.approx(80 / 60)
    size = first["bytes"] // 80
    assert first["bytes"] == 80 * size and size - size // 32 <= first["size_p50"] <= size
    # Delays are 0..79 ms and 80..99 ms: exact below 64, else at most 1/32 too small.
    assert first["delay_p50_ms"] in (39, 40) and first["delay_p95_ms"] in (74, 75)
    # Of the greatest ones no digit is lost.
    assert (
        first["delay_max_ms"] == 79 and second["delay_max_ms"] == 99 and first["size_max"] == size
    )
    (evil,) = rows(out, "traffic", topic=EVIL)
    assert evil["delay_p99_ms"] == 5 and evil["size_max"] > 1000


def test_a_hot_queue_against_an_even_spread(done):
    out, _ = done
    by_queue = {row["queue_id"]: row for row in rows(out, "hot_queues", topic=HOT)}
    assert by_queue[0]["share"] == pytest.approx(0.75)
    assert by_queue[0]["times_even"] == pytest.approx(1.5)
    assert by_queue[1]["times_even"] == pytest.approx(0.5)
    assert {row["even_share"] for row in by_queue.values()} == {0.5}


def test_stores_without_an_identity_are_brokers_of_their_own(done, stores):
    out, result = done
    paths = [stores.replace("*", number) for number in "34"]
    lonely = rows(out, "queues", topic="Lonely")
    assert sorted((r["broker"], r["messages"], r["first_offset"]) for r in lonely) == [
        (path, 1, 7) for path in paths
    ]
    assert {row["share"] for row in rows(out, "hot_queues", topic="Lonely")} == {0.5}
    assert set(paths) < {each["broker"] for each in json.loads(result.stdout)["stores"]}


def test_every_size_and_delay_is_in_the_histograms(done):
    out, _ = done
    for name in ("sizes", "delays"):
        assert sum(row["messages"] for row in rows(out, name)) == 104
    assert {row["delay_ms"]: row["messages"] for row in rows(out, "delays", topic=EVIL)} == {5: 1}


def test_lag_and_the_age_of_what_waits_from_run_to_run(done):
    out, _ = done
    found = {
        (row["snapshot_at"].hour, row["queue_id"]): row
        for row in rows(out, "consumer_lag", group="slow")
    }
    assert {key: row["lag"] for key, row in found.items()} == {
        (12, 0): 5,
        (12, 1): 15,
        (13, 0): 5,
        (13, 1): 15,
    }
    # Offset 70 of queue 0 came in the second minute, offset 10 of queue 1 in the first.
    assert found[12, 0]["oldest_store_at"] == datetime(2026, 11, 21, 12, 1, 8, tzinfo=UTC)
    assert found[12, 0]["oldest_age_ms"] == 52_000
    assert found[12, 1]["oldest_age_ms"] == 120_000 - 3 * 600
    assert found[13, 1]["oldest_age_ms"] == 3_600_000 + 120_000 - 3 * 600
    # Queue 9 is not there (any more): it is unknown how far behind that is.
    done_rows = rows(out, "consumer_lag", group="done")
    assert {(r["queue_id"], r["lag"], r["oldest_age_ms"]) for r in done_rows} == {
        (0, 0, None),
        (1, 0, None),
        (9, None, None),
    }


def test_the_report_is_drawn_and_stands_alone(done, browser):
    out, _ = done
    browser.open(out / "report.html")
    assert browser.pictures() == [
        "messages",
        "bytes",
        "sizes",
        "sizes-over-time",
        "delays",
        "delays-over-time",
        "lag-over-time",
    ]
    for picture, number in (("messages", 4), ("bytes", 4)):
        boxes = browser.boxes(f"#{picture} .plot .bars .point path")
        assert len(boxes) == number, picture
        assert all(width > 0 and height > 0 for width, height in boxes)
    for picture, number in (("delays-over-time", 3), ("lag-over-time", 1)):
        assert len(browser.boxes(f"#{picture} .plot .scatterlayer .js-line")) == number
    text = browser.text()
    for said in (
        f"slow is 20 messages behind on {HOT}",
        EVIL,
        "1.5×",
        "rmq_sys_BATON_METADATA",
        "All times are UTC",
        "1 other replica left aside",
    ):
        assert said in text, said
    assert EVIL not in (out / "report.html").read_text()
    browser.open(out / "report.html", width=400, dark=True)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert_stands_alone(browser)


def test_an_output_that_holds_something_is_not_overwritten_unasked(done, stores):
    out, _ = done
    result = CliRunner().invoke(main, ["--stores", stores, "--output", str(out), "--quiet"])
    assert result.exit_code == 2 and "--overwrite replaces it" in result.stderr


def test_which_stores_stand_for_their_groups(tmp_path):
    def store(name, identity, confirm=None):
        files = LogFiles(tmp_path / name)
        files.add()
        return files.save(identity=identity, confirm=confirm)

    store("a1", "east#a#1", confirm=0)
    longest, west = store("a2", "east#a#2"), store("w1", "west#a#1")
    plain = store("plain", "", confirm=0)  # as a broker without a controller leaves it
    with pytest.raises(StoreError, match=r"plain has no confirmOffset.* --unconfirmed"):
        one_per_group([str(tmp_path / "*")])
    found = one_per_group([str(tmp_path / "*")], unconfirmed=True)
    assert {(each.broker, each.facts.path, each.others) for each in found} == {
        ("east#a", longest, 1),
        ("west#a", west, 0),
        (plain, plain, 0),
    }


@pytest.mark.parametrize(("mode", "code"), [("FAILFAST", 3), ("DROPMALFORMED", 0)])
def test_damaged_offsets_are_left_out_in_the_mode_that_says_so(tmp_path, mode, code):
    store = write_store(tmp_path / "store", offsets={})
    (store / "config" / "consumerOffset.json").write_text('{"offsetTable":{"T@G":{"0":"x"}}}')
    options = ["--stores", str(store), "--output", str(tmp_path / "out"), "--mode", mode]
    result = CliRunner().invoke(main, [*options, "--no-report", "--quiet", "--json"])
    assert result.exit_code == code, result.output
    assert ("read with mode DROPMALFORMED" in result.stderr) == (code == 3)


def test_bad_input_is_named(tmp_path):
    result = CliRunner().invoke(
        main, ["--stores", "x", "--output", str(tmp_path), "--bucket", "1w", "--quiet"]
    )
    assert result.exit_code == 2 and "a time such as" in result.stderr
    with pytest.raises(FileNotFoundError, match=r"nowhere.*: nothing matches"):
        one_per_group([str(tmp_path / "nowhere*")])
    with pytest.raises(StoreError, match="is no store: none of commitlog, "):
        one_per_group([str(tmp_path)])
    spans = ("500ms", "30s", "1m", "2h", "1d")
    assert [span_ms(each) for each in spans] == [500, 30_000, 60_000, 7_200_000, 86_400_000]
