"""The whole audit: what crosses ranges, acknowledged lists, the command and what it writes."""

import json
import shutil
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batonmq.client.producer.sending import SendResult, SendStatus
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.message_id import encode_offset_msg_id
from batonmq.spark.audit.audit import AuditRequest, findings_text, plan_audit, run_audit
from batonmq.spark.audit.summary import lines_of, summary_of
from batonmq.spark.jobs.message_audit import main
from batonmq.spark.live.sink_sender import AckFile, _acks, row_of, write_committed
from batonmq.spark.steps.sql import DuckEngine, SparkEngine
from lab.cluster.acks import Ack as ProbeAck
from lab.cluster.acks import key_of
from lab.cluster.frames import BROKER_NAME
from lab.cluster.probe import TOPIC, acked_line
from tests.spark.audit.replica_files import (
    FILE_SIZE,
    Replicas,
    fields,
    key,
    real_store,
    write_acked,
)
from tests.spark.log_files import HOST_V4, LogFiles, message

GOLDEN = Path(__file__).parents[2] / "golden" / "java-5.3.3" / "store"


def entry(broker, number, /, **other):
    """What a producer has as the answer for message `number`."""
    return {
        "topic": "T",
        "broker": broker,
        "queue_id": number % 2,
        "queue_offset": number // 2,
        "unique_key": key(number),
        "body_crc": zlib.crc32(fields(number)["body"]),
    } | other


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """One audit of several groups, each with a wound of its own, and a list of all of them."""
    root = tmp_path_factory.mktemp("many")
    acked = []
    clean = Replicas(root, broker="clean")
    acked += [entry("clean", n, producer="p", number=n) for n in range(60)]

    swap = Replicas(root, broker="swap")
    first, second = swap.offsets[20], swap.offsets[22]
    swap.write(2, first, message(first, **{**fields(22), "queue_offset": 10}))
    swap.write(2, second, message(second, **{**fields(20), "queue_offset": 11}))

    gap = Replicas(root, count=2, broker="gap")
    last = max(n for n in range(60) if gap.offsets[n] < FILE_SIZE)
    for number in (1, 2):
        gap.flip(number, gap.offsets[last] + 95)

    moved = Replicas(root, count=2, broker="moved")
    acked += [entry("moved", n) for n in range(50) if n != 40]
    acked += [entry("moved", 40, queue_offset=27)]
    acked += [entry("moved", 60)]  # lost
    acked += [{"broker": "moved", "unique_key": key(51)}, {"broker": "moved", "unique_key": "K"}]
    there = encode_offset_msg_id(HOST_V4, moved.offsets[52])
    nowhere = encode_offset_msg_id(HOST_V4, moved.offsets[52] + 1)
    acked += [{"broker": "moved", "msg_id": there}, {"broker": "moved", "msg_id": nowhere}]
    place = {"topic": "T", "broker": "moved", "queue_id": 1}
    acked += [{**place, "queue_offset": 26}, {**place, "queue_offset": 77}]
    acked += [entry("moved", 54, body_crc=7)]
    # The producer sent number 56 before 54, and was answered the other way round.
    acked += [
        entry("moved", 56, producer="q", number=1),
        entry("moved", 54, producer="q", number=2),
    ]
    moved.flip(2, moved.offsets[30] + 95)

    old = Replicas(root, count=2, broker="old")
    for store in old.roots:
        (store / "commitlog" / f"{0:020d}").unlink()
    acked += [entry("old", n) for n in range(60)]
    acked += [entry("old", 70), {"broker": "old", "unique_key": "gone"}]

    tail = Replicas(root, count=2, broker="tail")
    for number in (1, 2):
        tail.confirm(number, tail.offsets[50])
    acked += [entry("tail", n) for n in range(60)]
    acked += [entry("elsewhere", 1)]

    passed = Replicas(root, broker="passed")
    at = passed.offsets[58]
    passed.confirm(1, at)  # the old master, whose checkpoint is a little old
    for number in (58, 59):
        other = {**fields(number), "properties": fields(number + 100)["properties"]}
        raw = message(passed.offsets[number], **other)
        for who in (2, 3):
            passed.write(who, passed.offsets[number], raw)
    passed.begin_epoch(5, at, 2, 3)
    acked += [entry("passed", n) for n in range(59)]
    acked += [{"topic": "T", "broker": "passed", "queue_id": 1, "queue_offset": 40}]
    acked += [{"broker": "passed", "unique_key": key(59)}]

    late = LogFiles(root / "late-1", file_size=FILE_SIZE)
    for number in range(20):
        late.add(**{**fields(number), "queue_offset": number // 2 + 5 * (number % 2)})
    late.save(identity="C#late#1")

    twice = LogFiles(root / "twice-1", file_size=FILE_SIZE)
    places = [twice.add(**fields(n)) for n in range(4)]
    places.append(twice.add(**{**fields(4), "properties": fields(1)["properties"]}))
    places.append(twice.add(**{**fields(5), "properties": fields(1)["properties"]}))
    twice.add(**{**fields(6), "topic": b"%RETRY%g", "properties": fields(1)["properties"]})
    twice.save(identity="C#twice#1")

    real_store(root / "queued-1", identity="C#queued#1")
    shutil.copytree(root / "queued-1", root / "queued-2")
    (root / "queued-2" / "brokerIdentity").write_text("C#queued#2")
    units = root / "queued-2" / "consumequeue" / "T" / "1" / f"{0:020d}"
    data = bytearray(units.read_bytes())
    data[7 * 20 : 8 * 20] = bytes(20)
    data[9 * 20 + 7] ^= 1  # where unit 9 points to
    units.write_bytes(data)

    request = AuditRequest(
        (str(root / "*-?"),),
        acked=(write_acked(root / "acked.jsonl", acked),),
        chunk_bytes=3000,
        limit=3,
    )
    result, rows = audited(DuckEngine(), request)
    return {
        "request": request,
        "root": root,
        "result": result,
        "rows": rows,
        "stores": {each.broker: each for each in (clean, swap, gap, moved, old, tail, passed)},
        "last": last,
        "twice": places,
    }


def audited(engine, request):
    """(result, all findings)."""
    with engine:
        result = run_audit(engine, request, plan_audit(request), nullcontext)
        return result, engine.rows(findings_text()).to_pylist()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning:pyspark")
def test_both_engines_find_the_same(many, session):
    result, rows = audited(SparkEngine(session), many["request"])

    def plain(found):
        return sorted(json.dumps(row, sort_keys=True) for row in found)

    assert plain(rows) == plain(many["rows"])
    mine = many["result"]
    assert (result.counts, result.acked) == (mine.counts, mine.acked)
    assert plain(result.kinds) == plain(mine.kinds)
    assert plain(result.first) == plain(mine.first)


def of(many, group, *kinds):
    """The findings of one group, of some kinds; those that everyone has are left out."""
    plain = ("queue_behind", "not_acked")
    return [
        row
        for row in many["rows"]
        if row["group"] == group and (row["kind"] in kinds if kinds else row["kind"] not in plain)
    ]


def test_a_clean_group_among_others(many):
    assert of(many, "clean") == []
    counts = many["result"].counts["clean"]
    assert (counts["messages"], counts["agreed"]) == (60, 60)


def test_what_is_missing_here_and_extra_there_was_reordered(many):
    """Two messages were exchanged, written anew for their places."""
    group = "swap"
    found = of(many, group)
    offsets = many["stores"][group].offsets
    assert {(f["kind"], f["severity"], *f["replicas"]) for f in found} == {
        ("reordered", "critical", f"{group}#2")
    }
    places = {f["unique_key"]: (f["physical_offset"], f["detail"]) for f in found}
    lies = "in this replica it lies at {}, queue 0 offset {}"
    assert places == {
        key(20): (offsets[20], lies.format(offsets[22], 11)),
        key(22): (offsets[22], lies.format(offsets[20], 10)),
    }
    assert {f["epoch"] for f in found} == {3}


def test_damage_at_the_end_of_a_range_is_told_without_the_gap_it_leaves(many):
    last, offsets = many["last"], many["stores"]["gap"].offsets
    (damaged,) = of(many, "gap")  # the queue's gap is the same defect
    assert damaged["physical_offset"] == offsets[last]
    assert damaged["replicas"] == ["gap#1", "gap#2"]
    assert offsets[last + 2] > FILE_SIZE > offsets[last]


def test_lost_moved_and_changed_messages_of_an_acknowledged_list(many):
    offsets = many["stores"]["moved"].offsets
    lost = of(many, "moved", "lost")
    assert {(f["unique_key"], f["queue_id"], f["queue_offset"]) for f in lost} == {
        (key(60), 0, 30),
        ("K", None, None),
        (None, 1, 77),
        (None, None, None),
    }
    by_key = {f["unique_key"]: f for f in lost if f["unique_key"]}
    assert by_key[key(60)]["epoch"] == 4
    assert by_key[key(60)]["detail"].endswith(f"before it in its queue lies at {offsets[58]}")
    (by_id,) = [f for f in lost if f["topic"] is None and f["unique_key"] is None]
    assert by_id["physical_offset"] == offsets[52] + 1
    moved = {f["unique_key"]: f for f in of(many, "moved", "reordered")}
    assert set(moved) == {key(40), key(54)}
    assert moved[key(40)]["severity"] == "critical"
    assert moved[key(40)]["detail"] == "acknowledged here, lies at queue 0 offset 20 of T"
    assert moved[key(40)]["physical_offset"] == offsets[40]
    assert moved[key(54)]["severity"] == "warning"
    assert moved[key(54)]["detail"] == (
        "number 2 of producer q was acknowledged here, number 1 before it at queue offset 28"
    )
    changed = {f["unique_key"]: f for f in of(many, "moved", "divergent")}
    assert set(changed) == {key(30), key(54)}
    assert (
        changed[key(54)]["field"] == "body" and "acknowledged one 7" in changed[key(54)]["detail"]
    )
    assert changed[key(30)]["replicas"] == ["moved#2"]
    # What the comparison of replicas tells is not reported again for the list.
    assert of(many, "moved", "acked_missing") == []
    assert changed[key(30)]["detail"].endswith("; it was acknowledged")
    assert changed[key(30)]["physical_offset"] == offsets[30]
    extra = {f["unique_key"] for f in of(many, "moved", "not_acked")}
    assert extra == {key(n) for n in (50, 55, 57, 58, 59)}
    assert {f["severity"] for f in of(many, "moved", "not_acked")} == {"info"}


def test_what_expired_is_not_called_lost(many):
    found = of(many, "old")
    assert sorted((f["kind"], f["severity"], f["unique_key"]) for f in found) == [
        ("lost", "critical", key(70)),
        ("unchecked", "warning", "gone"),
    ]


def test_what_only_an_old_master_holds_is_lost(many):
    offsets = many["stores"]["passed"].offsets
    lost = {f["unique_key"]: f for f in of(many, "passed", "lost")}
    assert set(lost) == {key(58), key(59), None}
    for number in (58, 59):
        one = lost[key(number)]
        assert (one["severity"], one["replicas"]) == ("critical", ["passed#1"])
        assert one["physical_offset"] == offsets[number]
        assert one["detail"].startswith("acknowledged, and only in passed#1: ")
    assert lost[None]["detail"] == "acknowledged, and in no replica"
    assert {f["kind"] for f in of(many, "passed")} == {"lost", "lagging"}


def test_a_queue_that_does_not_begin_with_the_log(many):
    (gap,) = of(many, "late")
    assert (gap["severity"], gap["kind"]) == ("critical", "gap")
    assert (gap["queue_id"], gap["queue_offset"]) == (1, 0)
    assert gap["detail"] == "5 queue offsets from 0 on have no message in the log"


def test_entries_of_brokers_without_a_store_are_a_warning(many):
    (unchecked,) = of(many, None)
    assert (unchecked["severity"], unchecked["kind"]) == ("warning", "unchecked")
    assert unchecked["detail"].startswith(
        "1 entries of the acknowledged list are of broker elsewhere,"
    )


def test_counts_of_the_acknowledged_list(many):
    counts = SimpleNamespace(**many["result"].acked)
    expired = sum(at < FILE_SIZE for at in many["stores"]["old"].offsets)
    assert counts.expired == expired > 20
    assert counts.unconfirmed == 10
    assert (counts.lost, counts.unchecked, counts.other_brokers) == (8, 1, 1)
    assert (counts.elsewhere, counts.not_everywhere) == (1, 1)
    assert counts.entries == 60 + 60 + 62 + 60 + 1 + 61
    assert counts.found == counts.entries - expired - 8 - 1 - 1
    assert of(many, "tail") == []


def test_every_place_of_a_key_but_the_first_is_found(many):
    found = of(many, "twice", "duplicated")
    places = many["twice"]
    assert sorted((f["physical_offset"], f["queue_id"], f["queue_offset"]) for f in found) == [
        (places[4], 0, 2),
        (places[5], 1, 2),
    ]
    assert {f["severity"] for f in found} == {"info"}
    assert {f["detail"] for f in found} == {f"first at {places[1]}, queue 1 offset 0"}


def test_the_verdict_comes_first_and_the_gravest_findings(many):
    result = many["result"]
    assert not result.is_clean
    assert result.count() == len(many["rows"])
    summary = summary_of(result, ["x"])
    lines = lines_of(json.loads(json.dumps(summary, default=str)))
    assert lines[0].startswith("clean: 3 replicas agree on 60 of 60 messages, ")
    assert lines[0].endswith("; nothing wrong")
    (acked,) = [line for line in lines if line.startswith("acknowledged: ")]
    assert "303 messages, 8 lost, " in acked and acked.endswith("1 of brokers that are not audited")
    assert "note: twice has one store here: there is nothing to compare it with" in lines
    assert any("critical: swap: 2 at another place or out of order in swap#2" in x for x in lines)
    assert {row["severity"] for row in summary["first"]} == {"critical"}
    assert lines[-1] == f"and {len(many['rows']) - 3:,} more"


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments), "--quiet"])


def test_the_command_says_clean_with_its_exit_code():
    done = run("--stores", GOLDEN / "*")
    assert done.exit_code == 0, done.output
    assert done.stdout == (
        "broker-a: 2 replicas agree on 22 of 22 messages, all have log offsets 0 to 6,760; "
        "nothing wrong\n"
    )


def test_the_command_finds_writes_and_replaces(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "java")
    log = tmp_path / "java" / "b1" / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[6269 + 88] ^= 1  # the first byte of its body
    log.write_bytes(data)
    decoded = (GOLDEN / "b0" / "commitlog.decoded.jsonl").read_text()
    lines = [json.loads(each) for each in decoded.splitlines()]
    acked = write_acked(
        tmp_path / "acked.jsonl",
        [
            {
                "topic": line["topic"],
                "queue_id": line["queueId"],
                "queue_offset": line["queueOffset"],
                "unique_key": line["properties"].get("UNIQ_KEY"),
                "msg_id": line["msgId"],
            }
            for line in lines
        ],
    )
    out = tmp_path / "out"
    arguments = ["--stores", tmp_path / "java" / "*", "--acked", acked, "--output", out, "--json"]
    done = run(*arguments)
    assert done.exit_code == 1, done.output
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["verdict"] == "found" and summary["findings"]["critical"] == 1
    assert summary["acked"]["lost"] == 0 and summary["acked"]["found"] == 22
    rows = pq.read_table(out / "findings").to_pylist()
    assert [(r["kind"], r["field"], r["physical_offset"], r["epoch"]) for r in rows] == [
        ("divergent", "body", 6269, 2)
    ]
    assert rows[0]["replicas"] == ["broker-a#2"]
    assert rows[0]["detail"].endswith("body CRC is wrong; it was acknowledged")
    assert summary["acked"]["not_everywhere"] == 1
    refused = run(*arguments)
    assert refused.exit_code == 2 and "--overwrite replaces it" in refused.stderr
    shutil.copy(GOLDEN / "b0" / "commitlog" / f"{0:020d}", log)
    assert run(*arguments, "--overwrite").exit_code == 0
    assert pq.read_table(out / "findings").num_rows == 0


def test_two_clusters_have_a_group_of_one_name(tmp_path):
    clusters = ("east", "west")
    for cluster in clusters:
        stores = Replicas(tmp_path / cluster, count=2, messages=10)
        for number, root in enumerate(stores.roots, 1):
            (root / "brokerIdentity").write_text(f"{cluster}#broker-a#{number}")
    arguments = [
        "--stores",
        tmp_path / "*" / "broker-*",
        "--no-duplicates",
        "--no-queues",
        "--acked",
    ]
    names = [f"{cluster}#broker-a" for cluster in clusters]
    acked = tmp_path / "acked.jsonl"
    # Which of the two is meant nobody can know. The list grows between the runs.
    refused = run(*arguments, write_acked(acked, [entry("broker-a", 1)]))
    assert refused.exit_code == 2 and refused.stdout == ""
    said = (
        "names broker broker-a, which may be any of east#broker-a, west#broker-a: give the stores"
    )
    assert said in refused.stderr
    entries = [entry(name, number) for name in names for number in range(10)]
    lost = run(*arguments, write_acked(acked, [*entries, entry(names[1], 10)]), "--json")
    assert lost.exit_code == 1, lost.output
    summary = json.loads(lost.stdout)
    assert [(g["group"], g["messages"], g["agreed"]) for g in summary["groups"]] == [
        (name, 10, 10) for name in names
    ]
    assert (summary["acked"]["entries"], summary["acked"]["found"]) == (21, 20)
    (found,) = [f for f in summary["first"] if f["severity"] == "critical"]
    assert (found["group"], found["kind"], found["unique_key"]) == (names[1], "lost", key(10))


def test_lists_of_the_sink_and_of_the_probe_are_taken_as_they_are(tmp_path):
    """A task of the sink was killed while it wrote; its last line is cut off."""
    files = LogFiles(tmp_path / "b-1", file_size=FILE_SIZE)
    rows, probed = [], []
    for number in range(10):
        row = row_of(number, "job-0-0-", {"body": b"x"}, "T")
        own = b"UNIQ_KEY\x01%b\x02" % row.unique_key.encode()
        files.add(number=number, properties=own)
        rows.append(row)
    for number in range(6):
        own = b"UNIQ_KEY\x01%b\x02" % key_of("ab", number).encode()
        at = files.add(topic=TOPIC.encode(), number=number, properties=own)
        ext = {"queueId": "0", "queueOffset": str(number)}
        ext["msgId"] = encode_offset_msg_id(HOST_V4, at)
        probed.append(acked_line("ab", ProbeAck(number, 0, 1, 0.0, 0.1), ext))
    files.save(identity=f"C#{BROKER_NAME}#1")
    folder = tmp_path / "acks"
    queue = MessageQueue("T", BROKER_NAME, 0)
    with AckFile(str(folder), "acks-job-0-0-") as report:
        for first in (0, 5):
            answer = SendResult(SendStatus.SEND_OK, "", "", queue, first)
            report.add(_acks(rows[first : first + 5], answer))
    write_committed(str(folder), "job", 0, {"messages": 10})
    (lines,) = folder.glob("acks-*")
    (folder / "acks-job-0-1-abc.jsonl").write_bytes(lines.read_bytes()[:50])
    probe = write_acked(tmp_path / "probe.jsonl", probed)
    done = run("--stores", tmp_path / "b-1", "--acked", folder, "--acked", probe)
    assert done.exit_code == 0, done.output
    assert "acknowledged: 16 messages, 0 lost, 16 found\n" in done.stdout
    assert "acks-job-0-1-abc.jsonl ends within a line, which is left out" in done.stdout
    assert "not in the acknowledged list" not in done.stdout
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    done = run("--stores", tmp_path / "b-1", "--acked", empty, "--no-duplicates")
    assert done.exit_code == 1 and "has no entry, so nothing is held against it" in done.stdout


def test_wrong_input_is_a_sentence(tmp_path):
    none = run("--stores", tmp_path / "none")
    assert none.exit_code == 2 and "is no store" in none.stderr
    (tmp_path / "bad.jsonl").write_text("topic,queue_id,queue_offset\nT,0,1\n")
    bad = run("--stores", GOLDEN / "*", "--acked", tmp_path / "bad.jsonl")
    assert bad.exit_code == 2, bad.output
    assert f"{tmp_path}/bad.jsonl, line 1: 'topic,queue_id" in bad.stderr
    assert "is no JSON object; an entry has unique_key, or msg_id, or topic, queue_id" in bad.stderr
    # A shell's empty variable must not turn off what was asked for.
    for option in ("--stores", "--acked"):
        nothing = run("--stores", GOLDEN / "*", option, "")
        assert nothing.exit_code == 2 and f"'{option}': '': it must name a path" in nothing.stderr
    missing = run("--stores", GOLDEN / "*", "--acked", tmp_path / "none.jsonl")
    assert missing.exit_code == 2 and "nothing matches" in missing.stderr
