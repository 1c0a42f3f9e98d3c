"""The tables of stores: a Java broker's golden ones, ours, and damaged ones."""

import json
import shutil
from pathlib import Path

import pytest

from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.spark.read.damage import DamagedFile
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read
from batonmq.spark.read.store_facts import StoreError
from tests.spark.audit.replica_files import real_store
from tests.spark.log_files import (
    HOST_V4,
    START_MS,
    LogFiles,
    row_of,
    write_checkpoint,
    write_queue,
)
from tests.spark.table_rows import good_and_bad, read

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "store"


def golden_lines(name):
    lines = (GOLDEN / name / "commitlog.decoded.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_message_of_a_java_store():
    rows = read(GOLDEN / "*")
    for name, number in (("b0", 1), ("b1", 2)):
        mine = [row for row in rows if row["store"].endswith(name)]
        mine.sort(key=lambda row: row["physical_offset"])
        lines = golden_lines(name)
        assert len(mine) == len(lines) == 22
        assert {(r["cluster"], r["broker"], r["broker_id"]) for r in mine} == {
            ("DefaultCluster", "broker-a", number)
        }
        for row, line in zip(mine, lines, strict=True):
            got = row_of(row)
            assert got["topic"] == line["topic"]
            assert got["queue_id"] == line["queueId"]
            assert got["queue_offset"] == line["queueOffset"]
            assert got["physical_offset"] == line["physicalOffset"]
            assert got["born_at"] == line["bornTimestamp"]
            assert got["store_at"] == line["storeTimestamp"]
            assert got["properties"] == line["properties"]
            assert got["body"].hex() == line["bodyHex"]
            offset = line["physicalOffset"]
            assert row["epoch"] == 1 + (offset >= 6269) + (offset >= 6516)


def test_queue_units_index_entries_and_epochs_of_a_java_store():
    lines = golden_lines("b0")
    units = read(GOLDEN / "b0", table="consumequeue")
    places = {(u["topic"], u["queue_id"], u["queue_offset"]): u["physical_offset"] for u in units}
    assert places == {
        (line["topic"], line["queueId"], line["queueOffset"]): line["physicalOffset"]
        for line in lines
    }
    by_offset = {line["physicalOffset"]: line["properties"].get("TAGS") for line in lines}
    for unit in units:
        if unit["topic"] != "SCHEDULE_TOPIC_XXXX":
            assert unit["tags_code"] == tags_code(by_offset[unit["physical_offset"]])
    entries = read(GOLDEN / "b0", table="index")
    assert [entry["entry"] for entry in entries] == list(range(1, 42))
    assert all(entry["slot"] == entry["key_hash"] % 1000 for entry in entries)
    assert {entry["physical_offset"] for entry in entries} <= set(by_offset)
    epochs = read(GOLDEN / "b1", table="epochs")
    assert [(e["epoch"], e["start_offset"], e["end_offset"]) for e in epochs] == [
        (1, 0, 6269),
        (2, 6269, 6516),
        (3, 6516, None),
    ]
    assert {(e["broker_id"], e["confirm_offset"], e["from_backup"]) for e in epochs} == {
        (2, 6760, False)
    }


def test_offsets_and_lag_of_a_java_store():
    rows = read(GOLDEN / "b0", table="offsets")
    found = {(r["group"], r["topic"], r["queue_id"]): r for r in rows}
    assert len(found) == len(rows) == 18
    row = found["gold_orderly", "GoldTopic", 2]
    assert (row["offset"], row["max_offset"], row["lag"]) == (4, 4, 0)
    visible = sum(x["topic"] == "GoldTopic" and x["queueId"] == 3 for x in golden_lines("b0"))
    assert found["gold_consumer", "GoldTopic", 3]["lag"] == visible


def numbered(number):
    tag = f"tag{number % 5}"
    properties = b"TAGS\x01%b\x02KEYS\x01key%d\x02" % (tag.encode(), number)
    return NewMessage(
        f"T{number % 2}", number % 3, b"%d" % number * 100, properties, tags_code(tag),
        b"key%d" % number, None, born_timestamp=START_MS, born_host=HOST_V4,
    )  # fmt: skip


@pytest.fixture
def ours(tmp_path):
    real_store(tmp_path / "store", numbered, identity="", every_ms=1000)
    return tmp_path / "store"


def bodies(rows):
    """The numbers in the messages; the log also has the master's records of queue positions."""
    ours = [row["body"] for row in rows if row["topic"] != METADATA_TOPIC]
    return sorted(int(body[: len(body) // 100]) for body in ours)


def test_our_store_over_many_files_and_blanks(ours):
    assert len(list((ours / "commitlog").glob("0*"))) > 2
    rows = read(ours)
    assert bodies(rows) == list(range(60))
    assert {row["broker"] for row in rows} == {None}  # no controller gave it a name
    # What consumers can see, by a join with the queues.
    seen = {row["physical_offset"] for row in read(ours, table="consumequeue")}
    assert bodies([row for row in rows if row["physical_offset"] in seen]) == list(range(60))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"topic": "T1,none"}, lambda n: n % 2 == 1),
        ({"topicPattern": "T[1-9]"}, lambda n: n % 2 == 1),
        ({"topicPattern": "T"}, lambda n: False),  # of the whole name
        ({"queueId": "2"}, lambda n: n % 3 == 2),
        ({"tags": "tag1"}, lambda n: n % 5 == 1),
        (
            {
                "startingTimestamp": str(START_MS + 10_000),
                "endingTimestamp": str(START_MS + 30_000),
            },
            lambda n: 10 <= n < 30,
        ),
        (
            {
                "startingOffsets": '{"T0": {"BROKER": {"0": 3, "2": "latest"}}}',
                "endingOffsets": '{"T0": {"BROKER": {"0": 5}}}',
                "topic": "T0",
            },
            lambda n: n % 2 == 0 and (3 <= n // 6 < 5 if n % 3 == 0 else n % 3 != 2),
        ),
        ({"startingOffsets": "latest"}, lambda n: False),
        ({"endingOffsets": "earliest"}, lambda n: False),
    ],
)
def test_options_narrow_the_log_and_the_queues(ours, options, wanted):
    given = {name: text.replace("BROKER", str(ours)) for name, text in options.items()}
    expected = [number for number in range(60) if wanted(number)]
    assert bodies(read(ours, timeSlackMs="0", **given)) == expected
    if not {"tags", "startingTimestamp"} & options.keys():
        units = {row["physical_offset"] for row in read(ours, table="consumequeue", **given)}
        assert bodies([row for row in read(ours) if row["physical_offset"] in units]) == expected


def test_a_time_filter_opens_only_files_of_that_time(ours):
    options = {"path": str(ours), "timeSlackMs": "0"}
    everything = Read(ReadOptions.from_mapping(options)).plan()
    options["startingTimestamp"] = str(START_MS + 55_000)
    plan = Read(ReadOptions.from_mapping(options)).plan()
    assert len(plan) == 1 < len(everything)


def test_nothing_above_confirm_offset_unless_asked(log_files):
    for number in range(5):
        log_files.add(number=number)
    third = log_files.end
    for number in range(5, 8):
        log_files.add(number=number)
    path = log_files.save(confirm=third)
    assert [row["queue_offset"] for row in read(path)] == list(range(5))
    assert [row["queue_offset"] for row in read(path, unconfirmed="true")] == list(range(8))


def without_a_checkpoint(files):
    (files.root / "checkpoint").unlink()


def with_an_impossible_offset(files):
    write_checkpoint(files.root, -5)


def of_a_broker_without_controller(files):
    """Java keeps no confirmOffset then: nothing confirmed would mean no rows, in silence."""
    write_checkpoint(files.root, 0)
    (files.root / "brokerIdentity").unlink()


@pytest.mark.parametrize(
    "harm", [without_a_checkpoint, with_an_impossible_offset, of_a_broker_without_controller]
)
def test_a_store_that_does_not_say_what_is_confirmed_is_not_read_as_empty(log_files, harm):
    log_files.add()
    path = log_files.save()
    write_queue(path, (0, log_files.end, 0))
    harm(log_files)
    for table in ("messages", "consumequeue"):
        with pytest.raises(StoreError, match=r"has no confirmOffset: .*unconfirmed=true"):
            read(path, table=table)
        assert len(read(path, table=table, unconfirmed="true")) == 1


def test_a_store_that_confirms_nothing_yet_is_empty(log_files):
    log_files.add()
    assert read(log_files.save(confirm=0)) == []


def test_a_torn_tail_above_confirm_offset_is_the_end_of_the_log(log_files):
    first = log_files.add(number=0)
    end = log_files.end
    log_files.add(number=1)
    del log_files.data[-7:]
    path = log_files.save(confirm=end)
    rows = read(path, unconfirmed="true")
    assert [row["physical_offset"] for row in rows] == [first]


@pytest.fixture
def damaged(log_files):
    """Ten messages over two files; the body of the third and the size of the seventh are hit."""
    offsets = [log_files.add(number=number, body=b"b" * 1000) for number in range(10)]
    assert offsets[-1] > log_files.file_size
    log_files.data[offsets[2] + 100] ^= 1
    log_files.data[offsets[6]] ^= 0x7F
    return log_files.save(), offsets


def test_each_mode_of_damage(damaged, caplog):
    """Stop there, leave it out and count, or make a row of it."""
    path, offsets = damaged
    with pytest.raises(DamagedFile, match=rf"0{{20}}: .* at log offset {offsets[2]} .*DROPMALF"):
        read(path)
    kept = [row["queue_offset"] for row in read(path, mode="DROPMALFORMED")]
    size = offsets[3] - offsets[2] + offsets[7] - offsets[6]
    assert f"damage_left_out partition=0 stretches=2 bytes={size} first={path}" in caplog.text
    assert f"at log offset {offsets[2]} " in caplog.text
    rows = read(path, mode="PERMISSIVE")
    good, bad = good_and_bad(rows)
    assert good == kept == [0, 1, 3, 4, 5, 7, 8, 9]
    assert [offset for _, offset, _ in bad] == [offsets[2], offsets[6]]
    first = next(row for row in rows if row["corrupt"] is not None)
    assert first["corrupt"]["bytes"] == offsets[3] - offsets[2]
    assert "CRC" in first["corrupt"]["reason"]
    assert (first["broker"], first["body"]) == ("broker-a", None)
    assert first["physical_offset"] == offsets[2]


def test_a_missing_or_shortened_file_is_named(damaged):
    path, _ = damaged
    files = sorted((Path(path) / "commitlog").iterdir())
    given = ReadOptions.from_mapping({"path": path, "mode": "PERMISSIVE"})
    work = Read(given)
    plan = work.plan()
    with files[0].open("r+b") as file:
        file.truncate(100)
    (row,) = [row for batch in work.run(plan[0]) for row in batch.to_pylist()]
    assert "100 bytes where 8192 were listed" in row["corrupt"]["reason"]
    assert (row["corrupt"]["offset"], row["corrupt"]["bytes"]) == (0, 8192)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=files[1].name):
        list(work.run(plan[1]))


def test_an_entry_that_cannot_be_is_damage(ours):
    (index,) = (ours / "index").iterdir()
    raw = bytearray(index.read_bytes())
    raw[40 + 400 + 20 * 2 + 16] = 0x80  # the second entry's previous one becomes negative
    index.write_bytes(raw)
    with pytest.raises(DamagedFile, match="no index entry, number 2"):
        read(ours, table="index")


def test_lag_of_our_own_offsets(ours):
    offsets = ConsumerOffsetManager(ours / "config" / "consumerOffset.json")
    offsets.commit("g", "T0", 0, 4)
    offsets.commit("g", "gone", 0, 9)
    for write in offsets.writes_due():
        write()
    rows = read(ours, table="offsets")
    assert [(r["topic"], r["offset"], r["max_offset"], r["lag"]) for r in rows] == [
        ("T0", 4, 10, 6),
        ("gone", 9, None, None),
    ]


def test_patterns_and_lists_of_stores(tmp_path):
    for name in ("a1", "a2", "b1"):
        files = LogFiles(tmp_path / name)
        files.add()
        files.save(identity=f"C#{name}#1")
    assert {row["broker"] for row in read(tmp_path / "a*")} == {"a1", "a2"}
    both = json.dumps([str(tmp_path / "b1"), str(tmp_path / "a?")])
    rows = read(tmp_path / "b1", paths=both)
    assert sorted(row["broker"] for row in rows) == ["a1", "a2", "b1"]
    assert {row["store"] for row in rows} == {str(tmp_path / n) for n in ("a1", "a2", "b1")}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"table": "message"}, "one of messages, consumequeue"),
        ({"columns": "topic,bodies"}, "has no bodies; it has store,"),
        ({"columns": "topic,topic"}, "twice"),
        ({"mode": "loose"}, "FAILFAST, DROPMALFORMED, PERMISSIVE"),
        ({"unconfirmd": "true"}, "unknown option unconfirmd .*did you mean unconfirmed[?]"),
        ({"pushdown": "true"}, "unknown option pushdown for reading stores; there are"),
        ({"topic": "T", "topicPattern": "T.*"}, "exclude each other"),
        ({"topicPattern": "("}, "a regular expression"),
        ({"queueId": "one"}, "numbers of queues"),
        ({"startingOffsets": "3"}, "earliest, latest, or JSON"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "exclude each other"),
        ({"table": "index", "topic": "T"}, "topic does not narrow table=index"),
        ({"splitBytes": "12"}, "splitBytes='12'"),
        ({"unconfirmed": "yes"}, "true or false"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(options, says):
    with pytest.raises(ValueError, match=says):
        read(GOLDEN / "b0", **options)


def test_a_path_that_holds_nothing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing matches"):
        read(tmp_path / "*")
    with pytest.raises(StoreError, match="is no store"):
        read(tmp_path)
    shutil.copy(GOLDEN / "b0" / "brokerIdentity", tmp_path)
    (tmp_path / "commitlog").mkdir()
    assert read(tmp_path) == []
