"""The job on histories with known answers, and against `batonmq.history.fold` on all of them.

One run over three controllers' files and some stores, in this process; each broker group is a case
of its own. Spark is held against that run once, and Parquet against files.
"""

import json
import os
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyarrow import dataset

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import encode_entries
from batonmq.history.event import lenient_event
from batonmq.history.fold import failovers
from batonmq.spark.arrow import open_arrow
from batonmq.spark.history import history_job
from batonmq.spark.history.history_findings import of_all
from batonmq.spark.history.lines import STREAM
from batonmq.spark.history.output_tables import TABLES
from batonmq.spark.history.overview import Facts
from batonmq.spark.jobs.epoch_history import main
from tests.spark.history.history_writer import (
    LOG,
    MIDNIGHT,
    NOON,
    OTHER_LOG,
    HistoryWriter,
    by_chance,
    write,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]
ROOT = Path(__file__).parents[3]
REAL = [
    json.loads(line)
    for line in (ROOT / "tests/history/testdata/history_real.jsonl").read_text().splitlines()
]
GOLDEN = ROOT / "tests/golden/java-5.3.3/store/*"
CHANCES = 40
HOUR = 3_600_000
DAY = 24 * HOUR
ODD = "a/b=c %41\u00fc '{x}' 001"
ELSEWHERE = "America/New_York"
YEAR_2100 = int(datetime(2100, 1, 1, tzinfo=UTC).timestamp() * 1000)


def by_hand():
    """Groups whose tables are known."""
    log = HistoryWriter()
    log.add("controller_leader_changed", NOON, node="n0", controller_epoch=1, proposed_ms=NOON)
    # The master is lost half a minute before midnight and the next one serves 45 s after it.
    log.first("midnight", NOON)
    at = MIDNIGHT - 30_000
    log.elected("midnight", 2, 2, at + 2, master_before=1, silent_ms=812, sync_state_set=[2, 3],
                reason="session_silent")  # fmt: skip
    log.served("midnight", 2, 2, at, role=50, opened=60_000, ack=75_000, waited=74_000)
    log.report("truncated", "midnight", 2, 1, MIDNIGHT + 50_000, fromOffset=900, toOffset=700)
    log.altered("midnight", 2, MIDNIGHT + 51_000, [2, 3], [1, 2, 3])
    log.report("truncated", "midnight", 2, 3, MIDNIGHT + 52_000, fromOffset=50, toOffset=40)
    # Nobody may follow, and an hour later the history ends.
    log.first("open", NOON)
    log.add("election_failed", NOON + HOUR, "open", broker_id=1, master_before=1, node="n0",
            master_epoch=2, set_before=[1, 2, 3], sync_state_set=[1, 2, 3], silent_ms=5,
            detected_ms=NOON + HOUR - 9, proposed_ms=NOON + HOUR,
            reason="session_closed: nobody lives")  # fmt: skip
    log.add("election_blocked", NOON + 2 * HOUR, "open", node="n0", master_epoch=2,
            reason="waits for members")  # fmt: skip
    # A planned switch holds writes for 7 ms.
    log.first("planned", NOON)
    log.add("switch_requested", NOON + 1_000, "planned", broker_id=3, master_epoch=1, node="n0",
            json={"master": 1}, reason="asked by remoting")  # fmt: skip
    log.report("drained", "planned", 1, 1, NOON + 1_010, heldMs=7, drainedOffset=64)
    log.elected("planned", 2, 3, NOON + 1_015, master_before=1, reason="planned switch",
                detected_ms=NOON + 1_012, proposed_ms=NOON + 1_013)  # fmt: skip
    log.served("planned", 2, 3, NOON + 1_015)
    # Idle: no message for 5 s.
    log.first("idle", NOON)
    log.elected("idle", 2, 2, NOON + 1_000, master_before=1)
    log.served("idle", 2, 2, NOON + 1_000, ack=5_010)
    # Two kills: the second master acknowledged nothing.
    log.first("two", NOON)
    log.elected("two", 2, 2, NOON + 1_000, master_before=1, sync_state_set=[2, 3])
    log.elected("two", 3, 3, NOON + 1_060, master_before=2, set_before=[2, 3], sync_state_set=[3])
    log.served("two", 3, 3, NOON + 1_060)
    log.altered("two", 3, NOON + 1_200, [3], [1, 2, 3])
    # What must not be.
    log.first("unclean", NOON)
    log.elected("unclean", 2, 2, NOON + 1_000, master_before=1, set_before=[1], unclean=True,
                sync_state_set=[2, 3])  # fmt: skip
    log.served("unclean", 2, 2, NOON + 1_000)
    log.first("twice", NOON)
    log.elected("twice", 2, 2, NOON + 1_000, master_before=1)
    log.served("twice", 2, 2, NOON + 1_000)
    log.elected("twice", 2, 3, NOON + 2_000, master_before=2)
    log.served("twice", 2, 3, NOON + 2_000)
    log.first("reports", NOON)
    log.elected("reports", 2, 2, NOON + 1_000, master_before=1)
    log.served("reports", 2, 2, NOON + 1_000)
    log.report("opened", "reports", 2, 3, NOON + 1_500)
    log.first("back", NOON)
    log.elected("back", 7, 2, NOON + 1_000, master_before=1)
    log.served("back", 7, 2, NOON + 1_000)
    log.elected("back", 6, 3, NOON + 2_000, master_before=2)
    log.served("back", 6, 3, NOON + 2_000)
    log.first("below", NOON, log_end=0)
    log.elected("below", 2, 2, NOON + 1_000, master_before=1, confirm_offset=500)
    log.served("below", 2, 2, NOON + 1_000, log_end=400)
    # Broker 1 is alone for two minutes.
    log.first("alone", NOON)
    log.altered("alone", 1, NOON + 1_000, [1, 2, 3], [1])
    log.altered("alone", 1, NOON + 121_000, [1], [1, 2, 3])
    # The new master's clock is 3 s behind.
    log.first("skew", NOON)
    log.elected("skew", 2, 2, NOON + 10_000, master_before=1)
    log.served("skew", 2, 2, NOON + 7_000)
    log.first("diverged", NOON)
    log.report("diverged", "diverged", 1, 3, NOON + 90, reason="no common epoch")
    # What their files say; see `stores`.
    log.first("files", NOON, log_end=0)
    for epoch, winner, start in ((2, 2, 100), (3, 1, 200), (4, 2, 300), (5, 1, 400)):
        at = NOON + 1_000 * epoch
        log.elected("files", epoch, winner, at, master_before=3 - winner, confirm_offset=start)
        log.served("files", epoch, winner, at, log_end=start)
    log.add("controller_leader_changed", NOON + 9 * HOUR, node="n1", node_before="n0",
            controller_epoch=2, proposed_ms=NOON + 9 * HOUR)  # fmt: skip
    # The clock of broker 2 stood at 1970, and that of broker 3 at 2100.
    log.first("seventies", NOON)
    log.elected("seventies", 2, 2, NOON + 1_000, master_before=1)
    log.served("seventies", 2, 2, DAY)
    log.altered("seventies", 2, NOON + 9_000, [1, 2, 3], [2, 3])
    log.first("future", NOON)
    log.elected("future", 2, 3, NOON + 1_000, master_before=1)
    log.served("future", 2, 3, YEAR_2100)
    log.altered("future", 2, NOON + 9_000, [1, 2, 3], [2, 3])
    # A controller's clock stood at 2100 for one event.
    log.first("century", NOON)
    log.altered("century", 1, YEAR_2100, [1, 2, 3], [1, 2])
    log.altered("century", 1, NOON + 9_000, [1, 2], [1, 2, 3])
    # The master of epoch 2 never opened and is lost again: one outage.
    log.first("again", NOON)
    log.elected("again", 2, 2, NOON + HOUR, master_before=1)
    log.add("election_failed", NOON + 2 * HOUR, "again", broker_id=2, master_before=2, node="n0",
            master_epoch=3, set_before=[1, 2, 3], sync_state_set=[1, 2, 3], silent_ms=5,
            detected_ms=NOON + 2 * HOUR - 9, proposed_ms=NOON + 2 * HOUR,
            reason="session_closed: nobody lives")  # fmt: skip
    log.add("broker_registered", NOON + 3 * HOUR, "again", broker_id=2, master_epoch=3)
    # An operator has to decide; nothing else is recorded.
    log.first("waits", NOON)
    log.add("election_blocked", NOON + HOUR, "waits", node="n0", master_epoch=2,
            reason="no member of the set is left", json={"operator": True})  # fmt: skip
    log.add("broker_registered", NOON + 3 * HOUR, "waits", broker_id=2, master_epoch=1)
    # It never had a master.
    log.add("election_blocked", NOON, "unborn", node="n0", master_epoch=1, reason="waits")
    # The report of its opening by the master of epoch 2 got lost; it changes its set an hour later.
    log.first("unheard", NOON)
    log.elected("unheard", 2, 2, NOON + 1_000, master_before=1)
    log.altered("unheard", 2, NOON + HOUR, [1, 2, 3], [2, 3])
    # The clock of broker 2 is 10 hours ahead, which is a time zone taken for UTC.
    log.first("ahead", NOON)
    for epoch in range(2, 8):
        at = NOON + HOUR * epoch
        log.elected("ahead", epoch, 1 + (epoch + 1) % 2, at, master_before=1 + epoch % 2)
        log.served("ahead", epoch, 1 + (epoch + 1) % 2, at + 10 * HOUR * ((epoch + 1) % 2))
    # The clock of controller n1 is an hour behind that of n0.
    log.first("backwards", NOON)
    log.elected("backwards", 2, 2, NOON + 2 * HOUR, master_before=1)
    log.served("backwards", 2, 2, NOON + 2 * HOUR)
    log.elected("backwards", 3, 1, NOON + HOUR, master_before=2, node="n1")
    log.served("backwards", 3, 1, NOON + HOUR)
    # It hangs right after it was elected: its silence began before that.
    log.first("hangs", NOON)
    log.elected("hangs", 2, 2, NOON + 10_000, master_before=1, silent_ms=800,
                reason="session_silent")  # fmt: skip
    log.served("hangs", 2, 2, NOON + 10_000)
    log.elected("hangs", 3, 3, NOON + 10_400, master_before=2, silent_ms=800,
                reason="session_silent")  # fmt: skip
    log.served("hangs", 3, 3, NOON + 10_400)
    # Three days, and one that ends as the next day begins.
    log.first("days", NOON)
    log.elected("days", 2, 2, NOON + 2, master_before=1)
    log.served("days", 2, 2, NOON, role=DAY, opened=DAY, ack=2 * DAY, waited=2 * DAY)
    log.elected("days", 3, 1, MIDNIGHT + 2 * DAY - 998, master_before=2)
    log.served("days", 3, 1, MIDNIGHT + 2 * DAY - 1_000, ack=1_000, waited=1_000)
    log.altered("days", 3, MIDNIGHT + 3 * DAY - 1, [1, 2, 3], [1, 2])
    # All brokers were stopped, and stay so.
    log.first("stopped", NOON)
    log.add("election_failed", NOON + HOUR, "stopped", broker_id=1, master_before=1, node="n0",
            master_epoch=2, set_before=[1, 2, 3], sync_state_set=[1, 2, 3],
            detected_ms=NOON + HOUR, proposed_ms=NOON + HOUR,
            reason="goodbye: nobody lives")  # fmt: skip
    # The histories begin in epoch 5; see LISTS for the files of these.
    log.elected("rotated", 5, 2, NOON, master_before=1)
    log.served("rotated", 5, 2, NOON, log_end=500)
    for group in ("lacking", "elsewhere", "copied"):
        log.first(group, NOON, log_end=0)
        for epoch, winner, start in ((2, 2, 100), (3, 1, 200), (4, 2, 300)):
            at = NOON + 1_000 * epoch
            log.elected(group, epoch, winner, at, master_before=3 - winner, confirm_offset=start)
            log.served(group, epoch, winner, at, log_end=start)
    # The members in another order are the same set; n1 moves a broker from one set to the other.
    log.first("moved", NOON)
    log.altered("moved", 1, NOON + 1_000, [1, 2, 3], [3, 1, 2])
    log.altered("moved", 1, NOON + 2_000, [1, 2, 3], [1, 2])
    # Of a later version, of a strange name, and nothing else.
    log.add("moon_phase", NOON, ODD, json={"phase": "full"}, new_field=7)
    log.elected(ODD, 1, 1, NOON, set_before=[], sync_state_set=[1], reason="no master is known")
    # Another cluster has a group of this name.
    log.first("shared", NOON)
    log.elected("shared", 2, 2, NOON + 1_000, master_before=1)
    log.served("shared", 2, 2, NOON + 1_000)
    log.elected("shared", 3, 1, NOON + 2_000, master_before=2)
    log.served("shared", 3, 1, NOON + 2_000)
    return log.events + of_another_cluster()


def of_another_cluster():
    log = HistoryWriter(OTHER_LOG)
    log.first("shared", NOON + 500)
    log.elected("shared", 2, 3, NOON + 1_500, master_before=1)
    log.served("shared", 2, 3, NOON + 1_500)
    return log.events


LISTS = {
    # As recorded; n lacks the newest, which is no news but for info.
    ("files", 1): [(1, 0), (2, 100), (3, 200), (4, 300), (5, 400)],
    ("files", 2): [(1, 0), (2, 100), (3, 200), (4, 300)],
    # Epoch 2 starts elsewhere, below what was confirmed; 3 is missing though it has bytes.
    ("files", 3): [(1, 0), (2, 90), (4, 300), (5, 400), (6, 400)],
    # As they were recorded.
    ("planned", 1): [(1, 0), (2, 64)],
    ("planned", 2): [(1, 0), (2, 64)],
    ("planned", 3): [(1, 0), (2, 64)],
    # No history has them.
    ("untold", 1): [(4, 10), (5, 20)],
    ("midnight", 1): [(1, 0), (2, 0)],
    ("midnight", 2): [(1, 0), (2, 0)],
    # A cluster of its own each, so nothing of them can be compared.
    ("waits", 1): [(1, 0), (2, 100)],
    ("waits", 2): [(1, 0), (2, 50), (3, 60)],
    ("rotated", 1): [(3, 300), (4, 400), (5, 500)],
    ("lacking", 1): [(1, 0), (2, 100), (4, 300)],
    ("elsewhere", 1): [(1, 0), (2, 100), (3, 210), (4, 300)],
    ("copied", 1): [(1, 0), (2, 100)],
}
CLUSTERS = {("waits", 2): "d"}


def stores(folder):
    for (group, number), entries in LISTS.items():
        store = folder / f"{group}-{number}"
        (store / "config").mkdir(parents=True)
        (store / "brokerIdentity").write_text(
            f"{CLUSTERS.get((group, number), 'c')}#{group}#{number}"
        )
        made = [EpochEntry(epoch, start) for epoch, start in entries]
        (store / "epochFileCheckpoint").write_bytes(encode_entries(made))
    (folder / "midnight-2" / "epochFileCheckpoint").write_bytes(b"torn")
    list_of_copied = folder / "copied-1" / "epochFileCheckpoint"
    list_of_copied.rename(f"{list_of_copied}.bak")
    list_of_copied.write_bytes(b"torn")
    for name in ("copied-2", "nobody-1"):
        (folder / name / "config").mkdir(parents=True)
        (folder / name / "brokerIdentity").write_text(f"c#{name[:-2]}#{name[-1]}")
    (folder / "nameless").mkdir()
    (folder / "nameless" / "epochFileCheckpoint").write_bytes(encode_entries([EpochEntry(1, 0)]))


def by_timeline():
    """Groups made by chance, and by a real cluster."""
    log = HistoryWriter("log-c")
    for number in range(CHANCES):
        by_chance(log, f"chance-{number:02d}", number)
    return log.events, [event | {"broker_name": "real"} for event in REAL]


@contextmanager
def somewhere(zone):
    """This process in another time zone, where clocks go back for the winter in these days."""
    before = os.environ.get("TZ")
    try:
        os.environ["TZ"] = zone
        time.tzset()
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(result of the command, its summary, its folder, all events)."""
    folder = tmp_path_factory.mktemp("epoch-history")
    hand = by_hand()
    chances, real = by_timeline()
    every = hand + chances + real
    stores(folder / "stores")
    write(folder / "n0" / "history-n0.jsonl", every, tail=b'{"log":"torn')
    # n1 has two events otherwise and one twice, contradicts itself in a log of its own, and has
    # two lines that are none.
    other = [
        event | {"winner": 9, "broker_id": 3} if event is hand[20]
        else event | {"set_before": [1, 2], "sync_state_set": [3, 1, 2]}
        if (event.get("broker_name"), event.get("sync_state_set")) == ("moved", [1, 2])
        and event["time_ms"] == NOON + 2_000
        else event
        for event in hand
    ]  # fmt: skip
    itself = HistoryWriter("log-d")
    itself.first("itself", NOON)
    itself.events += [itself.events[1] | {"broker_id": 2}]
    write(
        folder / "n1" / "history-n1.jsonl",
        [*other[:30], b"garbage", b"{}", *other[30:], other[5], *chances, *real,
         *itself.events],
    )  # fmt: skip
    every += itself.events[:-1]
    # n2 begins late, ends early, and lacks an event in between; its full file has a number.
    late = [event for event in hand[10:-1] if event is not hand[40]]
    write(folder / "n2" / "history-n2.000001.jsonl", late[:50])
    write(folder / "n2" / "history-n2.jsonl", late[50:] + real)
    arguments = [
        "--history", f"{folder}/n0,{folder}/n1", "--history", f"{folder}/n2",
        "--stores", f"{folder}/stores/*", "--stores", str(GOLDEN), "--output", f"{folder}/out",
        "--no-report", "--json", "--quiet",
    ]  # fmt: skip
    with somewhere(ELSEWHERE):
        result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result, json.loads(result.stdout), folder, every


FOLDERS = dataset.partitioning(
    pa.schema([("group", pa.string()), ("day", pa.date32())]), flavor="hive"
)


def rows_of(folder, name):
    """Rows of a table as dicts, with the columns that are folders."""
    return dataset.dataset(f"{folder}/{name}", partitioning=FOLDERS).to_table().to_pylist()


@pytest.fixture(scope="module")
def table(ran):
    """Rows of a table as dicts, in the order of day and the columns named."""
    read = {}

    def rows(name, group=None, *order):
        if name not in read:
            read[name] = rows_of(f"{ran[2]}/out", name)
        return sorted(
            (row for row in read[name] if group is None or row["group"] == group),
            key=lambda row: [str(row[each]) for each in ("day", *order)],
        )

    return rows


def ms(moment):
    return None if moment is None else round(moment.replace(tzinfo=UTC).timestamp() * 1000)


def one(rows, **fields):
    (row,) = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    return row


# The time line takes two masters of one epoch, or two clusters, for one.
APART = ("twice", "shared", f"shared ({LOG})")

# --- against the time line ---------------------------------------------------------------------


def cause(reason):
    if reason.startswith("named "):
        return "named"
    head = reason.partition(": ")[0].lower()
    return "_".join("".join(c if c.isalnum() else " " for c in head).split())


def read(events):
    return [lenient_event(json.dumps(event)) for event in events]


def as_row(story):
    """The fields of a story by the names of table `failovers`."""
    same = ("master_epoch", "kind", "how", "address", "unavailable_ms", "unclean", "overtaken",
            "complete", "truncated_bytes")  # fmt: skip
    moments = {"detected_at": story.detected_ms, "elected_at": story.elected_ms,
               "role_at": story.time_of("role changed"), "opened_at": story.opened_ms,
               "first_ack_at": story.first_ack_ms}  # fmt: skip
    return {
        **{name: getattr(story, name) for name in same},
        **{name: moment or None for name, moment in moments.items()},
        **{n: getattr(story, n) or None for n in ("detected_by", "master_before")},
        "silent_ms": story.silent_ms if story.silent_ms >= 0 else None,
        "held_ms": story.held_ms if story.held_ms >= 0 else None,
        **{n: list(getattr(story, n)) for n in ("set_before", "sync_state_set")},
        "group": story.broker_name, "cause": cause(story.reason), "master": story.winner,
        "clock": bool(story.out_of_order()),
    }  # fmt: skip


def test_failovers_are_the_stories_of_the_time_line(ran, table):
    """Field by field: written by hand, by chance and by a real cluster."""
    expected = [
        as_row(story) for story in failovers(read(ran[3])) if story.broker_name not in APART
    ]
    rows = []
    for row in table("failovers"):
        row = {**row, "clock": row["clock_problem"] is not None}
        row = {name: ms(value) if name.endswith("_at") else value for name, value in row.items()}
        rows.append(row)
    found = {(row["group"], row["master_epoch"]): row for row in rows if row["group"] not in APART}
    assert len(found) == len(expected) > 180
    wrong = [
        (each["group"], each["master_epoch"], name, found[key][name], value)
        for each in expected
        for name, value in each.items()
        if found[key := (each["group"], each["master_epoch"])][name] != value
    ]
    assert not wrong, f"{len(wrong)} differ, (group, epoch, field, here, time line): {wrong[:12]}"
    kinds = {row["kind"] for row in rows}
    assert kinds == {
        "first_election",
        "failover",
        "planned_switch",
        "operator_election",
        "unclean_election",
    }
    for name in ("held_ms", "truncated_bytes", "clock", "overtaken"):
        assert sum(bool(each[name]) for each in expected) > 5, name


# --- tables ------------------------------------------------------------------------------------


def test_a_failover_has_its_parts(table):
    row = one(table("failovers", "midnight"), master_epoch=2)
    assert (row["kind"], row["cause"], row["detected_by"]) == ("failover", "session_silent", "n0")
    assert row["how"] == "broker 1 fell silent, its last word 812 ms before"
    parts = [row[n] for n in ("silent_ms", "detect_ms", "elect_ms", "role_ms", "open_ms")]
    assert parts == [812, 812, 1, 49, 59_950]
    assert (row["first_ack_ms"], row["unavailable_ms"], row["idle"]) == (15_000, 75_000, False)
    assert row["without_writes_ms"] == 75_812  # with the silence by which it was missed
    assert (row["truncated_bytes"], row["complete"]) == (210, True)


COSTS = [
    # A planned switch costs its hold, too.
    ("planned", {"kind": ["planned_switch"], "cause": ["planned_switch"], "held_ms": [7],
                 "unavailable_ms": [32], "detect_ms": [9], "without_writes_ms": [32]}),
    # Where no client waited the opening counts.
    ("idle", {"idle": [True], "unavailable_ms": [12]}),
    # A master that acknowledged nothing leaves its outage to the next one.
    ("two", {"overtaken": [True, False], "unavailable_ms": [None, 1_060 + 20 - 998]}),
    # A clock that is hours ahead makes no hours of outages.
    ("ahead", {"unavailable_ms": [10 * HOUR + 22, 22] * 3, "without_writes_ms": [None, 22] * 3}),
    # A silence that began in an outage counts once.
    ("hangs", {"without_writes_ms": [822, 822]}),
]  # fmt: skip
DAYS = [
    # An outage over midnight is split; its master was silent for 812 ms when it was missed.
    ("midnight", [(1, 30_812, 75_812, False), (0, 45_000, 75_812, False)]),
    # One of several days has 24 hours in each at most; the second ended as a day began.
    ("days", [(1, DAY // 2, 2 * DAY, False), (0, DAY, 2 * DAY, False),
              (1, DAY // 2 + 1_000, 2 * DAY, False), (0, 0, 0, False)]),
    # An open one lasts until the history ends, also if it waits for an operator.
    ("open", [(1, HOUR + 9, HOUR + 9, True)]),
    ("waits", [(1, 2 * HOUR, 2 * HOUR, True)]),
    # A master that was lost before it served leaves one.
    ("again", [(1, 2 * HOUR + 2, 2 * HOUR + 2, True)]),
    ("two", [(1, 82, 82, False)]),
    ("hangs", [(2, 822 + 400, 822, False)]),
    # A wrong clock makes no outage, and no days.
    *((group, [(0, 0, 0, False)]) for group in ("seventies", "future", "century")),
    ("ahead", [(3, 3 * 22, 22, False)]),
    # Days without one are there; the reports of a master at work got lost.
    *((group, [(0, 0, 0, False)]) for group in ("alone", "unheard", "unborn")),
]  # fmt: skip
DAY_NAMES = ("outages", "unavailable_ms", "longest_ms", "open")


@pytest.mark.parametrize(("group", "expected"), COSTS)
def test_what_the_changes_behind_the_first_election_cost(table, group, expected):
    rows = table("failovers", group, "master_epoch")[1:]
    assert {name: [row[name] for row in rows] for name in expected} == expected


@pytest.mark.parametrize(("group", "days"), DAYS)
def test_days_without_writes(table, group, days):
    rows = table("unavailability", group)
    assert [tuple(row[name] for name in DAY_NAMES) for row in rows] == days
    begin = datetime(2026, 11, 20, tzinfo=UTC).date()
    assert [row["day"] for row in rows] == [begin + timedelta(days=n) for n in range(len(rows))]
    assert all(row["unavailable_ms"] <= DAY for row in table("unavailability"))


def test_masterships_end_with_the_next_one_or_with_a_loss(table):
    rows = table("masterships", "midnight", "master_epoch")
    assert [(r["broker_id"], r["ended_by"]) for r in rows] == [(1, "failover"), (2, None)]
    assert rows[0]["ended_at"] == rows[1]["began_at"]
    assert rows[0]["duration_ms"] == ms(rows[1]["began_at"]) - (NOON - 1)
    assert rows[1]["duration_ms"] is None
    for group in ("open", "waits"):
        row = one(table("masterships", group))
        assert (row["ended_by"], ms(row["ended_at"])) == ("master_lost", NOON + HOUR)
    assert one(table("masterships", "files"), master_epoch=5)["seen_by"] == ["n0", "n1", "n2"]
    assert one(table("masterships", "chance-00"), master_epoch=1)["seen_by"] == ["n0", "n1"]


def test_reigns_of_one_group_follow_one_another(table):
    """Each ends where the next one begins, or its loss; contradicting clocks give no duration."""
    for group in ("days", "ahead", "backwards", "files", "real"):
        rows = sorted(table("masterships", group), key=lambda row: row["master_epoch"])
        assert len(rows) >= 3
        for row, after in pairwise(rows):
            lost = row["ended_by"] == "master_lost"
            assert row["ended_at"] == after["began_at"] or lost
            assert not lost or row["began_at"] < row["ended_at"] < after["began_at"]
        assert all((row["duration_ms"] or 0) >= 0 for row in rows)
    assert table("masterships", "backwards", "master_epoch")[1]["duration_ms"] is None


def test_when_an_open_outage_began(table):
    for group, began in (("again", [NOON + HOUR - 2]), ("unheard", [])):
        found = [row for row in table("findings", group) if row["kind"] == "outage_open"]
        assert [ms(row["at"]) for row in found] == began


def test_groups_of_one_name_in_two_clusters_are_kept_apart(table):
    """Each has epochs 1 and 2 with masters of its own: no rule is broken."""
    here, other = f"shared ({LOG})", "shared"
    for group, masters in ((here, [1, 2, 1]), (other, [1, 3])):
        rows = table("failovers", group, "master_epoch")
        assert [row["master"] for row in rows] == masters
        worse = {row["kind"] for row in table("findings", group) if row["severity"] != "info"}
        assert worse <= {"group_in_several_logs"}
    (found,) = [row for row in table("findings") if row["kind"] == "group_in_several_logs"]
    assert (found["subject"], here in found["text"]) == ("shared", True)
    kinds = {row["kind"] for row in table("findings", "waits")}
    assert "group_in_several_clusters" in kinds
    assert not kinds & {"epoch_starts_differ", "epoch_untold", "replica_behind"}


def test_set_changes_truncations_and_controllers(table):
    rows = table("set_changes", "alone", "at")
    assert [(r["set_after"], r["joined"], r["left"], r["size_after"]) for r in rows] == [
        ([1], [1], [], 1),
        ([1, 2], [2], [], 2),
        ([1, 2, 3], [3], [], 3),
        ([1], [], [2, 3], 1),
        ([1, 2, 3], [2, 3], [], 3),
    ]
    assert [r["kind"] for r in rows] == ["elected"] + ["set_altered"] * 4
    moved = table("set_changes", "moved", "at")  # in another order it is the same set
    assert [r["set_after"] for r in moved] == [[1], [1, 2], [1, 2, 3], [1, 2]]
    cuts = table("truncations", "midnight", "at")
    assert [(r["broker_id"], r["from_offset"], r["to_offset"], r["bytes"]) for r in cuts] == [
        (1, 900, 700, 200),
        (3, 50, 40, 10),
    ]
    leads = [(r["leader"], r["leader_before"]) for r in table("controllers", None, "at")]
    assert ("n1", "n0") in leads


# --- findings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "kind", "severity", "words"),
    [
        ("unclean", "unclean_election", "critical", "epoch 2"),
        ("twice", "two_masters_in_epoch", "critical", "brokers 2, 3"),
        ("reports", "two_masters_in_epoch", "critical", "brokers 2, 3"),
        ("back", "epoch_went_back", "critical", "epoch 6 after epoch 7"),
        ("below", "start_below_confirmed", "critical", "up to 400, where 500 was confirmed"),
        ("alone", "set_of_one", "warning", "for 120 s"),
        ("skew", "clock_problem", "warning", "behind that of controller n0"),
        ("diverged", "diverged", "warning", "no common epoch"),
        ("seventies", "clock_problem", "warning", "behind that of controller n0"),
        ("future", "clock_problem", "warning", "from 2026-11-20 12:00:00"),
        ("century", "clock_problem", "warning", "recorded 1 events more than 366 days"),
        ("waits", "outage_open", "warning", "no master since"),
        ("open", "outage_open", "warning", "the session of broker 1 closed"),
        ("midnight", "epoch_file_unreadable", "warning", "midnight-2"),
        ("files", "epoch_starts_differ", "critical", "begins at 90 in"),
        ("files", "start_below_confirmed", "critical", "begins at 90 in"),
        ("files", "epoch_gap", "warning", "the first is 3"),
        ("files", "epoch_untold", "warning", "1 epochs from 6 to 6"),
        ("files", "replica_behind", "info", "up to 4, the newest is 6"),
        ("untold", "group_untold", "info", "from 4 to 5"),
        ("broker-a", "group_untold", "info", "from 1 to 3"),
        (None, "damaged_lines", "warning", "2 lines of"),
        (None, "history_ends_early", "info", f"controller n2 ends at index 9 of log {OTHER_LOG}"),
        (
            "ahead",
            "clock_problem",
            "warning",
            "beyond the next election, at 2026-11-20 14:59:59.999",
        ),
        ("backwards", "clock_problem", "warning", "is 3600000 ms older than its own"),
        ("stopped", "outage_open", "info", "said goodbye"),
        ("rotated", "epochs_before_history", "info", "begin with epoch 5"),
        ("rotated", "epochs_older_than_history", "info", "2 epochs from 3 to 4"),
        ("lacking", "epoch_not_in_files", "warning", "1 epochs from 3 to 3"),
        ("elsewhere", "start_not_as_told", "warning", "begins at 210 in"),
        ("copied", "files_older_than_history", "info", "2 epochs from 3 to 4"),
        ("copied", "epoch_file_from_backup", "info", "copied-1"),
        ("copied", "epoch_file_missing", "warning", "copied-2"),
        ("nobody", "epoch_file_missing", "info", "nobody-1"),
        (None, "store_without_identity", "warning", "nameless"),
        ("moved", "events_disagree", "critical", " have 1 events with different contents"),
        ("itself", "events_disagree", "critical", "Controller n1 has 1 events more than once"),
        (None, "history_begins_late", "info", "controller n2 begins at index 11"),
    ],
)
def test_each_finding(table, group, kind, severity, words):
    found = [row for row in table("findings") if (row["group"], row["kind"]) == (group, kind)]
    assert found, kind
    assert {row["severity"] for row in found} == {severity}
    assert any(words in row["text"] for row in found), [row["text"] for row in found]
    assert all(json.loads(row["evidence"]) and row["subject"] for row in found)


def test_what_controllers_tell_differently_or_not_at_all(table):
    (differ,) = [row for row in table("findings", "open") if row["kind"] == "events_disagree"]
    evidence = json.loads(differ["evidence"])
    assert differ["severity"] == "critical"
    assert evidence["controllers"] in (["n0", "n1"], ["n1", "n2"])
    assert (evidence["log"], evidence["raftIndex"], evidence["events"]) == (LOG, 21, 1)
    (lacks,) = [row for row in table("findings") if row["kind"] == "missing_events"]
    evidence = json.loads(lacks["evidence"])
    assert (lacks["severity"], evidence["controller"]) == ("warning", "n2")
    assert (evidence["events"], evidence["firstRaftIndex"], evidence["lastRaftIndex"]) == (
        1,
        41,
        41,
    )


@pytest.mark.parametrize("group", ["real", "planned", "two", "broker-a"])
def test_what_is_normal_is_no_warning(table, group):
    """Kills, hangs, switches, rejoins that cut; a Java broker's stores that no history has."""
    assert [row for row in table("findings", group) if row["severity"] != "info"] == []


# --- the command -------------------------------------------------------------------------------


def test_the_command_says_what_it_found(ran):
    result, summary, folder, every = ran
    assert result.exit_code == 1
    assert summary == json.loads((folder / "out" / "summary.json").read_text())
    keys = {(event["log"], event["raft_index"], event.get("part", 0)) for event in every}
    assert summary["events"] == len(keys)
    assert summary["controllers"] == ["n0", "n1", "n2"]
    assert summary["findings"]["critical"] == sum(
        summary["findings_by_kind"][kind]
        for kind in ("events_disagree", "unclean_election", "two_masters_in_epoch",
                     "epoch_went_back", "start_below_confirmed", "epoch_starts_differ")
    )  # fmt: skip
    group = one(summary["groups"], group="midnight")
    assert (group["masters"], group["failovers"], group["outages"]) == (2, 1, 1)
    assert group["unavailable_ms"] == 75_812
    worst = summary["worst_failovers"][0]
    assert (worst["group"], worst["detected_at"]) == ("days", "2026-11-20 12:00:00")
    assert group["first_event"] == "2026-11-20T12:00:00.000+00:00"
    assert summary["failover_ms"]["planned_switch"]["count"] >= 1
    assert [path.name for path in (folder / "out").glob("_*")] == ["_lock"]


def test_an_earlier_result_is_not_mixed_with(ran, tmp_path):
    arguments = ["--history", f"{ran[2]}/n0", "--quiet", "--no-report", "--output"]
    again = CliRunner().invoke(main, [*arguments, f"{ran[2]}/out"])
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    (tmp_path / "mine.txt").write_text("kept")
    other = CliRunner().invoke(main, [*arguments, str(tmp_path), "--overwrite"])
    assert (other.exit_code, "mine.txt" in other.stderr) == (2, True)
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_history_without_events_is_a_result_too(tmp_path):
    """One controller wrote nothing yet, another one only what no calendar has."""
    write(tmp_path / "n0" / "history-n0.jsonl", [], tail=b'{"log":"torn')
    out = str(tmp_path / "out")
    arguments = ["--quiet", "--no-report", "--json", "--output", out, "--history"]
    empty = CliRunner().invoke(main, [*arguments, f"{tmp_path}/n0"])
    assert (empty.exit_code, json.loads(empty.stdout)["events"]) == (0, 0), empty.stderr
    for name in TABLES:
        assert rows_of(out, name) == [], name
    log = HistoryWriter()
    log.first("micros", NOON * 1000)
    write(tmp_path / "n1" / "history-n1.jsonl", log.events)
    odd = CliRunner().invoke(main, [*arguments, f"{tmp_path}/n*", "--overwrite"])
    assert odd.exit_code == 0, odd.stderr
    texts = [each["text"] for each in json.loads(odd.stdout)["first_findings"]]
    assert any(text.startswith("6 of 6 events have no time") for text in texts), texts


def test_wild_numbers_of_a_broker_stop_nothing(tmp_path):
    log = HistoryWriter()
    log.first("wild", NOON)
    log.add("controller_leader_changed", NOON, node="n0", proposed_ms=10**17, controller_epoch=1)
    log.report("truncated", "wild", 1, 2, NOON + 60, fromOffset=1 << 70, toOffset=0)
    log.report("drained", "wild", 1, 1, NOON + 100, heldMs=1 << 70, drainedOffset=1)
    log.elected("wild", 2, 2, NOON + 110, master_before=1, reason="planned switch")
    log.report("drained", "wild", 2, 2, NOON + 200, heldMs=9 * 10**15, drainedOffset=1)
    log.elected("wild", 3, 1, NOON + 210, master_before=2, reason="planned switch")
    log.served("wild", 3, 1, NOON + 210, waited=10**16)
    log.events[-1]["max_offset"] = 1 << 64  # in no column of 64 bits: no event
    write(tmp_path / "n0" / "history-n0.jsonl", log.events)
    out = str(tmp_path / "out")
    done = CliRunner().invoke(
        main, ["--history", f"{tmp_path}/n0", "--output", out, "--quiet", "--json"]
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["findings_by_kind"]["damaged_lines"] == 1
    assert [row["master_epoch"] for row in rows_of(out, "failovers")] == [1, 2, 3]
    assert [row["bytes"] for row in rows_of(out, "truncations")] == [0]


def test_wrong_input_is_named(tmp_path):
    odd = tmp_path / "odd" / "odd.parquet"
    for folder in (odd.parent, tmp_path / "empty"):
        folder.mkdir()
    pq.write_table(pa.table({"log": ["l"]}), odd)
    for words, *arguments in (
        ("nowhere", "--history", str(tmp_path / "nowhere*")),
        ("--history-parquet",),
        ("--stores", "--history", "x", "--stores", ""),
        ("no Parquet files are there", "--history-parquet", str(tmp_path / "empty")),
        ("no column kind, raft_index, time", "--history-parquet", str(odd.parent)),
        ("--master", "--history", "x", "--engine", "local", "--master", "local[2]"),
        ("--until", "--history", "x", "--since", "2026-11-21", "--until", "2026-11-20"),
    ):
        output = str(tmp_path / "out")
        result = CliRunner().invoke(main, [*arguments, "--quiet", "--output", output])
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "out" / "summary.json").exists()


def test_rows_of_a_span_of_time(ran, tmp_path):
    out = str(tmp_path / "out")
    arguments = [
        "--history", f"{ran[2]}/n0", "--output", out, "--no-report", "--quiet",
        "--since", "2026-11-20T23:00", "--until", "2026-11-21T12:00:00", "--json",
    ]  # fmt: skip
    done = CliRunner().invoke(main, arguments)
    rows = rows_of(out, "failovers")
    assert [r["master_epoch"] for r in rows if r["group"] == "midnight"] == [2]
    days = [row for row in rows_of(out, "unavailability") if row["group"] == "midnight"]
    assert len(days) == 2
    counts = json.loads(done.stdout)["rows"]
    assert (counts["failovers"], counts["unavailability"]) == (
        len(rows),
        len(rows_of(out, "unavailability")),
    )


def same(here, there, *, without=()):
    """Both folders have the same rows, but findings of these kinds."""
    for name in TABLES:
        both = []
        for folder in (here, there):
            rows = [row for row in rows_of(folder, name) if row.get("kind") not in without]
            both.append(sorted(str(sorted(row.items())) for row in rows))
        assert both[0] == both[1] != [], name


def test_the_same_from_parquet(ran, tmp_path):
    """What stream_history writes has no damaged lines, and may come without a controller's name."""
    for name in ("n0", "n1", "n2"):
        rows = open_arrow(f"{ran[2]}/{name}", table="history", mode="PERMISSIVE").read_all()
        rows = rows.filter(pc.field("corrupt").is_null())
        (tmp_path / "named" / f"group={name}").mkdir(parents=True)
        pq.write_table(
            rows.drop_columns(["corrupt", "file"]), f"{tmp_path}/named/group={name}/x.parquet"
        )
        (tmp_path / "bare").mkdir(exist_ok=True)
        pq.write_table(
            rows.drop_columns(["corrupt", "file", "controller", "line_offset"]),
            f"{tmp_path}/bare/{name}.parquet",
        )
    (tmp_path / "named" / "_stream").mkdir()
    (tmp_path / "named" / "_stream" / "staged.parquet").write_bytes(b"half")
    arguments = [
        "--stores", f"{ran[2]}/stores/*", "--stores", str(GOLDEN), "--no-report", "--quiet",
        "--json", "--history-parquet",
    ]  # fmt: skip
    out = f"{tmp_path}/out"
    assert CliRunner().invoke(main, [*arguments, f"{tmp_path}/named", "--output", out]).exit_code
    same(out, f"{ran[2]}/out", without=("damaged_lines",))
    bare = CliRunner().invoke(main, [*arguments, f"{tmp_path}/bare", "--output", f"{out}2"])
    summary = json.loads(bare.stdout)
    assert (summary["controllers"], summary["events"]) == ([STREAM], ran[1]["events"])


class Counted(dict):
    """Counts how often it is gone through."""

    times = 0

    def items(self):
        Counted.times += 1
        return super().items()


def test_what_controllers_have_of_many_logs_is_not_gone_through_for_each_of_them():
    places = [((f"log{n}", rank), (rank, 0)) for n in range(100) for rank in (0, 1)]
    facts = Facts(("n0", "n1"), {}, {}, {}, Counted(places), Counted(places))
    found = [each.kind for each in of_all(facts, {})]
    assert (found.count("history_begins_late"), found.count("history_ends_early")) == (100, 100)
    assert Counted.times < 10


@pytest.mark.timeout(300)  # Spark starts, and runs four stages
def test_spark_gives_the_same(ran, session, tmp_path, monkeypatch):
    """Files in pieces, a shuffle by group, several tasks; with the days of another time zone."""
    monkeypatch.setattr(history_job, "SPLIT_BYTES", 700_000)
    out = str(tmp_path / "out")
    arguments = [
        *(word for name in ("n0", "n1", "n2") for word in ("--history", f"{ran[2]}/{name}")),
        "--stores", f"{ran[2]}/stores/*", "--stores", str(GOLDEN), "--output", out, "--json",
        "--no-report", "--quiet", "--engine", "spark",
    ]  # fmt: skip
    session.conf.set("spark.sql.session.timeZone", ELSEWHERE)
    with somewhere(ELSEWHERE):
        result = CliRunner().invoke(main, arguments)
    session.conf.set("spark.sql.session.timeZone", "UTC")
    assert result.exit_code == 1, result.output
    same(out, f"{ran[2]}/out")
    mine, theirs = json.loads(result.stdout), dict(ran[1])
    mine["generated_at"] = theirs["generated_at"]
    mine["inputs"] = theirs["inputs"]
    assert mine == theirs
