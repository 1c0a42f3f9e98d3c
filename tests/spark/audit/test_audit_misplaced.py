"""Bytes of a replica's log that were exchanged, moved along or copied as they are, without Spark.

Their records name another place than the one where they lie: no reader takes them for messages.
"""

import shutil

import pytest

from batonmq.spark.read.log_range import Block
from tests.spark.audit.replica_files import (
    FILE_SIZE,
    Replicas,
    counts,
    edit,
    fields,
    findings,
    key,
    raw,
)
from tests.spark.log_files import LogFiles

SMALL = [{}, {"split_bytes": 1500, "batch_bytes": 700}]


@pytest.fixture
def replicas(tmp_path):
    return Replicas(tmp_path)


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


@pytest.mark.parametrize("options", SMALL)
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
