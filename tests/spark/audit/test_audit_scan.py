"""Replicas against each other, range by range, without Spark: where they differ, and how."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.records.codec import encode_blank
from batonmq.spark.differences.checkpoint_findings import checkpoint_findings
from batonmq.spark.differences.replica_groups import find_groups, log_files
from batonmq.spark.differences.table import plan_tasks
from batonmq.spark.read.log_range import Block
from batonmq.spark.read.storage import gather
from batonmq.spark.read.store_facts import StoreError
from tests.spark.audit.replica_files import (
    FILE_SIZE,
    Replicas,
    audited,
    counts,
    edit,
    epochs_text,
    fields,
    findings,
    key,
    raw,
    scan,
)
from tests.spark.log_files import LogFiles, message

GOLDEN = Path(__file__).parents[2] / "golden" / "java-5.3.3" / "store"


@pytest.fixture(params=[{}, {"split_bytes": 1500, "batch_bytes": 700}])
def options(request):
    """The second ones are so small that a file has several ranges and a range several stretches."""
    return request.param


@pytest.fixture
def replicas(tmp_path):
    return Replicas(tmp_path)


def brief(found):
    """What most tests look at."""
    return [
        (f["severity"], f["kind"], f["replicas"], f["physical_offset"], f["unique_key"])
        for f in found
    ]


def test_equal_replicas_are_clean(replicas, options):
    assert len(list((replicas.roots[0] / "commitlog").iterdir())) > 1
    rows = scan(replicas.paths, **options)
    assert [row for row in rows if row["part"] == "finding"] == []
    messages = [row for row in rows if row["part"] == "message"]
    assert [row["unique_key"] for row in messages] == [key(number) for number in range(60)]
    assert [row["physical_offset"] for row in messages] == replicas.offsets
    assert {(row["have"], row["lack"]) for row in messages} == {(7, 0)}
    assert {row["epoch"] for row in messages[:30]} == {3} and messages[30]["epoch"] == 4
    assert counts(replicas.paths, **options) == (60, 60)


@pytest.mark.parametrize(
    ("number", "at", "field", "name"),
    [
        (7, 90, "body", "body"),
        (31, 15, "header", "queue id"),
        (40, -30, "properties", "properties"),
        (0, 2, "header", "size"),
        (59, 5, "header", "magic"),
    ],
)
def test_a_flipped_byte_is_named_with_its_message(replicas, options, number, at, field, name):
    offset = replicas.offsets[number]
    replicas.flip(2, offset + at % replicas.size(number))
    (found,) = findings(replicas.paths, **options)
    assert brief([found]) == [("critical", "divergent", ["broker-a#2"], offset, key(number))]
    assert found["field"] == field and f"1 byte differs in {name}," in found["detail"]
    assert f"the first at {offset + at % replicas.size(number)}" in found["detail"]
    assert found["epoch"] == 3 + (number >= 30)
    assert found["file"].startswith(str(replicas.roots[1]))
    assert (found["topic"], found["queue_id"]) == ("T", number % 2)
    assert found["queue_offset"] == number // 2
    assert counts(replicas.paths, **options) == (60, 59)


def test_of_two_replicas_the_whole_record_is_believed(tmp_path, options):
    two = Replicas(tmp_path, count=2)
    two.flip(1, two.offsets[20] + 95)
    (found,) = findings(two.paths, **options)
    assert brief([found]) == [("critical", "divergent", ["broker-a#1"], two.offsets[20], key(20))]
    assert "property CRC is wrong" in found["detail"]


def test_another_body_with_a_good_crc_is_outvoted(replicas, options):
    other = message(replicas.offsets[9], **{**fields(9), "body": b"BODY 9 " * 10})
    replicas.write(3, replicas.offsets[9], other)
    (found,) = findings(replicas.paths, **options)
    assert brief([found]) == [
        ("critical", "divergent", ["broker-a#3"], replicas.offsets[9], key(9))
    ]
    assert "body CRC" in found["detail"] and "both are whole" in found["detail"]
    rows = [row for row in scan(replicas.paths) if row["part"] == "message"]
    held = [(row["have"], row["lack"]) for row in rows if row["unique_key"] == key(9)]
    assert sorted(held) == [(3, 4), (4, 3)]


def test_a_message_that_was_cut_out_is_missing(replicas, options):
    replicas.write(2, replicas.offsets[12], bytes(replicas.size(12)))
    (found,) = findings(replicas.paths, **options)
    assert brief([found]) == [
        ("critical", "missing", ["broker-a#2"], replicas.offsets[12], key(12))
    ]
    assert found["detail"] == "zeros where it should be"


def test_a_file_that_ends_early_misses_what_it_confirms(replicas, options):
    start = replicas.offsets[-1] - replicas.offsets[-1] % FILE_SIZE
    path = replicas.roots[2] / "commitlog" / f"{start:020d}"
    path.write_bytes(path.read_bytes()[: replicas.offsets[57] - start])
    found = findings(replicas.paths, **options)
    assert brief(found) == [
        ("critical", "missing", ["broker-a#3"], replicas.offsets[n], key(n)) for n in (57, 58, 59)
    ]


def test_a_file_that_is_gone_misses_all_its_messages(replicas):
    path = replicas.roots[0] / "commitlog" / f"{FILE_SIZE:020d}"
    path.unlink()
    found = findings(replicas.paths)
    inside = [n for n, at in enumerate(replicas.offsets) if FILE_SIZE <= at < 2 * FILE_SIZE]
    assert len(inside) > 10
    assert brief(found) == [
        ("critical", "missing", ["broker-a#1"], replicas.offsets[n], key(n)) for n in inside
    ]
    assert {f["detail"] for f in found} == {f"{path} is missing"}
    for root in replicas.roots[1:]:
        (root / "commitlog" / f"{FILE_SIZE:020d}").unlink()
    (found,) = findings(replicas.paths)
    assert found["kind"] == "missing" and found["size"] == replicas.end - FILE_SIZE
    assert found["detail"].startswith("no replica has a file that holds the log from 8192 to")


def test_a_tail_counts_only_below_confirm_offset(tmp_path, options):
    three = Replicas(tmp_path)
    cut = three.offsets[55]
    for number in (1, 2, 3):
        three.confirm(number, cut)
    three.write(3, cut, bytes(three.end - cut))
    three.flip(2, three.offsets[58] + 95)
    assert findings(three.paths, **options) == []
    assert counts(three.paths, **options) == (55, 55)
    found = findings(three.paths, unconfirmed=True, **options)
    assert brief(found) == [
        ("info", "lagging", ["broker-a#3"], cut, None),
        ("info", "divergent", ["broker-a#2"], three.offsets[58], key(58)),
    ]
    assert found[1]["detail"].startswith(f"above its confirmOffset {cut}: ")
    three.confirm(2, three.end)
    three.confirm(3, three.end)
    found = findings(three.paths, **options)
    lag = [f for f in found if f["kind"] == "lagging"]
    assert [(f["replicas"], f["physical_offset"], f["size"]) for f in lag] == [
        (["broker-a#1"], cut, three.end - cut)
    ]
    lost = [(f["kind"], f["replicas"][0], f["unique_key"]) for f in found if f not in lag]
    assert sorted(lost, key=str) == sorted(
        # Number 58 is bad in the second, and the first does not answer for it any more.
        [
            *(("missing", "broker-a#3", key(n)) for n in (55, 56, 57, 59)),
            ("damaged", "broker-a#2", None),
        ],
        key=str,
    )


def test_a_replica_that_lags_or_has_expired_more_is_told_and_clean(replicas, options):
    (replicas.roots[1] / "commitlog" / f"{0:020d}").unlink()
    replicas.confirm(3, replicas.offsets[50])
    found = findings(replicas.paths, **options)
    assert {(f["severity"], f["kind"], f["replicas"][0]) for f in found} == {
        ("info", "expired", "broker-a#2"),
        ("info", "lagging", "broker-a#3"),
    }
    assert counts(replicas.paths, **options) == (60, 60)
    # What two of three keep is compared all the same.
    replicas.flip(1, replicas.offsets[3] + 95)
    grave = [f for f in findings(replicas.paths, **options) if f["kind"] == "divergent"]
    assert brief(grave) == [("critical", "divergent", ["broker-a#1"], replicas.offsets[3], key(3))]


def test_damage_in_all_replicas_is_named(replicas, options):
    for number in (1, 2, 3):
        replicas.flip(number, replicas.offsets[40] + 95)
    found = findings(replicas.paths, **options)
    damaged = [f for f in found if f["kind"] == "damaged"]
    (bad,) = damaged
    assert (bad["physical_offset"], bad["size"]) == (replicas.offsets[40], replicas.size(40))
    assert bad["replicas"] == ["broker-a#1", "broker-a#2", "broker-a#3"]
    assert bad["severity"] == "critical" and bad["epoch"] == 4
    assert "property CRC is wrong" in bad["detail"]
    messages = [row for row in scan(replicas.paths, **options) if row["part"] == "message"]
    assert (0, 20) not in {(row["queue_id"], row["queue_offset"]) for row in messages}


def test_bytes_behind_a_blanks_head_may_differ(replicas):
    last = max(at for at in replicas.offsets if at < FILE_SIZE)
    blank = last + replicas.size(replicas.offsets.index(last))
    room = FILE_SIZE - blank
    assert room > 8
    replicas.write(2, blank, encode_blank(room) + b"x" * (room - 8))
    assert findings(replicas.paths) == []
    replicas.write(2, blank, encode_blank(room - 1))
    (found,) = findings(replicas.paths)
    assert found["kind"] == "damaged" and found["physical_offset"] == blank


def test_gaps_and_steps_back_of_queue_offsets(tmp_path):
    files = LogFiles(tmp_path / "store", file_size=FILE_SIZE)
    for number in (0, 1, 2, 5, 4, 0, 1):
        files.add(number=number)
    found = [f for f in audited(files.save()) if f["kind"] != "queue_behind"]
    assert [(f["severity"], f["kind"], f["queue_offset"]) for f in found] == [
        ("critical", "gap", 3),
        ("critical", "reordered", 4),
        ("warning", "reordered", 0),
    ]
    assert found[0]["detail"] == "2 queue offsets from 3 on have no message in the log"


def test_lists_of_epochs_are_compared_where_both_have_bytes(replicas):
    half = replicas.offsets[30]
    replicas.begin_epoch(6, replicas.end, 2)
    assert findings(replicas.paths) == []
    early = replicas.offsets[20]
    (replicas.roots[2] / "epochFileCheckpoint").write_text(epochs_text((3, 0), (5, early)))
    found = findings(replicas.paths)
    assert {f["kind"] for f in found} == {"epochs_differ"} and len(found) == 4
    first = found[0]
    assert (first["physical_offset"], first["size"]) == (early, half - early)
    assert first["replicas"] == ["broker-a#1", "broker-a#3"]
    replicas.flip(1, replicas.offsets[25] + 95)
    grave = [f for f in findings(replicas.paths) if f["kind"] == "divergent"]
    assert grave[0]["epoch"] is None
    assert "its epoch is 3 by broker-a#1, 3 by broker-a#2, 5 by broker-a#3" in grave[0]["detail"]


class CountedTuple(tuple):
    """Counts how often its entries are gone through."""

    times = 0

    def __iter__(self):
        CountedTuple.times += 1
        return super().__iter__()


def test_long_lists_of_epochs_are_not_gone_through_for_each_of_their_epochs(replicas):
    (group,) = find_groups(replicas.paths, group=None, unconfirmed=False, with_tails=False)
    entries = CountedTuple(EpochEntry(n, n, n + 1) for n in range(500))
    many = [replace(each, facts=replace(each.facts, epochs=entries)) for each in group.replicas]
    group = replace(group, replicas=tuple(many))
    assert [*checkpoint_findings(group, log_files(group))] == []
    assert CountedTuple.times < 50


def test_java_replicas_are_clean_and_their_wounds_are_found(tmp_path):
    rows = scan([GOLDEN / "*"])
    assert {row["part"] for row in rows} == {"message", "count"}
    assert audited(GOLDEN / "*") == []
    assert counts([GOLDEN / "*"]) == (22, 22)
    # Messages of a batch have keys of their own beside that of the batch.
    batch = [row for row in rows if row["part"] == "message" and row["batch_key"]]
    assert len(batch) == 3 == len({row["unique_key"] for row in batch})
    shutil.copytree(GOLDEN, tmp_path / "java")
    log = tmp_path / "java" / "b1" / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[6269 + 20] ^= 1  # the queue offset, which Java's body CRC does not cover
    log.write_bytes(data)
    (found,) = findings([tmp_path / "java" / "*"])
    assert found["kind"] == "divergent" and found["field"] == "header"
    assert (found["physical_offset"], found["epoch"]) == (6269, 2)
    assert "queue offset" in found["detail"]


def test_stores_that_cannot_be_compared_are_refused(tmp_path, replicas):
    with pytest.raises(FileNotFoundError, match="nothing matches"):
        scan([tmp_path / "none-*"])
    with pytest.raises(StoreError, match="is no store"):
        scan([tmp_path])
    (replicas.roots[0] / "brokerIdentity").unlink()
    with pytest.raises(ValueError, match="name it with --group"):
        scan(replicas.paths)
    assert findings(replicas.paths, group="G") == []
    (replicas.roots[1] / "checkpoint").unlink()
    with pytest.raises(StoreError, match=r"--unconfirmed\) reads its log to the end"):
        scan(replicas.paths, group="G")
    assert counts(replicas.paths, group="G", unconfirmed=True) == (60, 60)
    other = LogFiles(tmp_path / "other", file_size=2 * FILE_SIZE)
    for number in range(60):
        other.add(**fields(number))
    with pytest.raises(ValueError, match="files of one size"):
        scan([*replicas.paths, other.save()], group="G", unconfirmed=True)


def test_small_ranges_share_a_task(tmp_path):
    every = Replicas(tmp_path, count=2)
    (group,) = find_groups(every.paths, group=None, unconfirmed=False, with_tails=False)
    tasks = list(plan_tasks(group, 1500))
    assert len(tasks) > 8

    def size_of(task):
        return task.end - task.begin

    for size_bytes in (1, 3000, 1 << 30):
        packs = gather(tasks, size_of, size_bytes)
        assert [task for pack in packs for task in pack] == tasks
        sizes = [sum(map(size_of, pack)) for pack in packs]
        assert all(size <= size_bytes or len(p) == 1 for size, p in zip(sizes, packs, strict=True))
    assert len(packs) == 1 and gather([], size_of, 1) == []


# --- bytes that were exchanged, moved along or copied as they are: their headers name other places


def exchanged(replicas, data):
    one, two = raw(replicas, 20), raw(replicas, 22)
    data[one], data[two] = data[two], data[one]
    return [20, 22]


def neighbours_of_other_sizes(replicas, data):
    nine, ten = raw(replicas, 9), raw(replicas, 10)
    assert nine.stop - nine.start != ten.stop - ten.start
    data[nine.start : ten.stop] = data[ten] + data[nine]
    return [9, 10]


def cut_out_so_that_all_behind_moves(replicas, data):
    gone = raw(replicas, 20)
    del data[gone]
    data += bytes(gone.stop - gone.start)
    return [n for n, at in enumerate(replicas.offsets) if gone.start <= at < FILE_SIZE]


def copied_over_another(replicas, data):
    data[raw(replicas, 22)] = data[raw(replicas, 20)]
    return [22]


@pytest.mark.parametrize(
    ("count", "change"),
    [(count, exchanged) for count in (2, 3, 5)]
    + [
        (3, neighbours_of_other_sizes),
        (3, cut_out_so_that_all_behind_moves),
        (3, copied_over_another),
    ],
)
def test_each_place_whose_bytes_lie_elsewhere_is_told_with_its_message(
    tmp_path, count, change, options
):
    """Their headers name another place: no reader takes them for messages, nor does the audit."""
    replicas = Replicas(tmp_path, count=count)
    places = []
    edit(replicas, 2, lambda data: places.extend(change(replicas, data)))
    found = findings(replicas.paths, **options)
    assert [(f["physical_offset"], f["unique_key"]) for f in found] == [
        (replicas.offsets[n], key(n)) for n in places
    ]
    assert {f["kind"] for f in found} <= {"missing", "divergent"}
    assert {(f["severity"], *f["replicas"]) for f in found} == {("critical", "broker-a#2")}
    assert counts(replicas.paths, **options) == (60, 60 - len(places))


def test_a_copy_of_a_record_within_a_damaged_body_is_no_message(tmp_path):
    """Both lie where no record begins."""
    replicas = Replicas(tmp_path, count=2, messages=4)
    one = raw(replicas, 1)

    def damage(data):
        data[one.start + 8] ^= 1
        data[replicas.end : replicas.end + one.stop - one.start] = data[raw(replicas, 2)]

    edit(replicas, 2, damage)
    replicas.confirm(2, replicas.end + one.stop - one.start)
    kinds = {(f["kind"], f["physical_offset"]) for f in findings(replicas.paths)}
    assert kinds == {("divergent", one.start), ("damaged", replicas.end), ("lagging", replicas.end)}


def test_each_of_many_bad_records_is_found_without_a_look_at_all_others(tmp_path, monkeypatch):
    """With one look a block at each place a stretch of many would take hours."""
    stores, looked = [], []
    for number in (1, 2, 3):
        files = LogFiles(tmp_path / f"r-{number}", file_size=1 << 20)
        offsets = [files.add(**fields(n)) for n in range(600)]
        for at in offsets[::2] if number == 2 else ():
            files.data[at + 95] ^= 1
        stores.append(files.save(identity=f"C#r#{number}"))
    plain = Block.starts.fget
    monkeypatch.setattr(Block, "starts", property(lambda self: looked.append(0) or plain(self)))
    found = findings(stores)
    assert [f["physical_offset"] for f in found] == offsets[::2]
    assert {(f["kind"], *f["replicas"]) for f in found} == {("divergent", "r#2")}
    assert len(looked) < 20 * len(offsets)


def test_a_log_file_that_was_emptied_has_not_expired(replicas):
    (replicas.roots[1] / "commitlog" / f"{0:020d}").write_bytes(b"")
    found = findings(replicas.paths)
    inside = [n for n, at in enumerate(replicas.offsets) if at < FILE_SIZE]
    assert [(f["kind"], f["unique_key"]) for f in found] == [("missing", key(n)) for n in inside]
    assert {f["detail"] for f in found} == {f"{found[0]['file']} is empty"}
    shutil.rmtree(replicas.roots[1] / "commitlog")


def test_a_longer_log_that_nobody_confirms_is_told_if_asked_for(tmp_path):
    longer = Replicas(tmp_path / "longer", count=1, messages=61)
    replicas = Replicas(tmp_path, count=3)
    start = replicas.end - replicas.end % FILE_SIZE
    name = f"{start:020d}"
    shutil.copy(longer.roots[0] / "commitlog" / name, replicas.roots[2] / "commitlog" / name)
    assert findings(replicas.paths) == []
    found = findings(replicas.paths, unconfirmed=True)
    assert [(f["severity"], f["kind"], *f["replicas"]) for f in found] == [
        ("info", "lagging", "broker-a#1"),
        ("info", "lagging", "broker-a#2"),
    ]
    assert found[0]["physical_offset"] == replicas.end
    assert found[0]["size"] == longer.end - replicas.end
