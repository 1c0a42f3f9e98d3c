"""Bytes of a replica's log that were exchanged, moved along or copied as they are, without Spark.

Their records name another place than the one where they lie: no reader takes them for messages.
"""

import shutil

import pytest

from tests.spark.audit.replica_files import (
    FILE_SIZE,
    Replicas,
    counts,
    edit,
    exchange,
    findings,
    key,
    raw,
)

SMALL = [{}, {"range_bytes": 1500, "chunk_bytes": 700}]


@pytest.fixture
def replicas(tmp_path):
    return Replicas(tmp_path)


def brief(found):
    return sorted((f["kind"], f["replicas"], f["physical_offset"], f["unique_key"]) for f in found)


def identities(found, number):
    return {f["identity"] for f in found if f["unique_key"] == key(number)}


@pytest.mark.parametrize("options", SMALL)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_exchanged_bytes_are_missing_here_and_extra_there(tmp_path, count, options):
    """What joins the two to `reordered` is asked of Spark; both name the same identity."""
    replicas = Replicas(tmp_path, count=count)
    one, two = raw(replicas, 20), raw(replicas, 22)

    exchange(replicas, 2, 20, 22)
    found = findings(replicas.paths, queues=False, **options)
    assert brief(found) == [
        ("extra", ["broker-a#2"], one.start, key(22)),
        ("extra", ["broker-a#2"], two.start, key(20)),
        ("missing", ["broker-a#2"], one.start, key(20)),
        ("missing", ["broker-a#2"], two.start, key(22)),
    ]
    assert {f["severity"] for f in found} == {"critical"} and {f["epoch"] for f in found} == {3}
    assert len(identities(found, 20)) == len(identities(found, 22)) == 1
    gone = next(f for f in found if f["kind"] == "missing" and f["unique_key"] == key(20))
    assert gone["detail"] == (
        f"another message lies there, whose header has the offset {two.start}: {key(22)}"
    )
    assert counts(replicas.paths, queues=False, **options) == (60, 58)


@pytest.mark.parametrize("options", SMALL)
def test_neighbours_of_other_sizes_are_exchanged(replicas, options):
    nine, ten = raw(replicas, 9), raw(replicas, 10)
    assert nine.stop - nine.start != ten.stop - ten.start

    def change(data):
        data[nine.start : ten.stop] = data[ten] + data[nine]

    edit(replicas, 2, change)
    found = findings(replicas.paths, queues=False, **options)
    assert brief(found) == [
        ("extra", ["broker-a#2"], nine.start, key(10)),
        ("extra", ["broker-a#2"], nine.start + ten.stop - ten.start, key(9)),
        ("missing", ["broker-a#2"], nine.start, key(9)),
        ("missing", ["broker-a#2"], ten.start, key(10)),
    ]


@pytest.mark.parametrize("options", SMALL)
def test_bytes_cut_out_of_the_middle_move_all_that_follow(replicas, options):
    gone = raw(replicas, 20)
    size = gone.stop - gone.start
    behind = [n for n, at in enumerate(replicas.offsets) if gone.stop <= at < FILE_SIZE]

    def cut(data):
        del data[gone]
        data += bytes(size)

    edit(replicas, 2, cut)
    found = findings(replicas.paths, queues=False, **options)
    assert [f["physical_offset"] for f in found if f["unique_key"] == key(20)] == [gone.start]
    moved = [(n, replicas.offsets[n]) for n in behind]
    assert brief(f for f in found if f["unique_key"] != key(20)) == sorted(
        [
            *(("extra", ["broker-a#2"], at - size, key(n)) for n, at in moved),
            *(("missing", ["broker-a#2"], at, key(n)) for n, at in moved),
        ]
    )
    assert counts(replicas.paths, queues=False, **options) == (60, 60 - len(behind) - 1)


@pytest.mark.parametrize("options", SMALL)
def test_a_copy_over_another_message(replicas, options):
    one, two = raw(replicas, 20), raw(replicas, 22)

    def copy(data):
        data[two] = data[one]

    edit(replicas, 2, copy)
    found = findings(replicas.paths, queues=False, **options)
    assert brief(found) == [
        ("extra", ["broker-a#2"], two.start, key(20)),
        ("missing", ["broker-a#2"], two.start, key(22)),
    ]


def test_a_copy_of_a_record_within_a_damaged_body_is_no_message(tmp_path):
    """Both lie where no record begins; only what is nowhere else in its replica is told."""
    replicas = Replicas(tmp_path, count=2, messages=4)
    one = raw(replicas, 1)

    def damage(data):
        data[one.start + 8] ^= 1
        data[replicas.end : replicas.end + one.stop - one.start] = data[raw(replicas, 2)]

    edit(replicas, 2, damage)
    replicas.confirm(2, replicas.end + one.stop - one.start)
    kinds = {(f["kind"], f["physical_offset"]) for f in findings(replicas.paths, queues=False)}
    assert kinds == {("divergent", one.start), ("damaged", replicas.end), ("lagging", replicas.end)}


def test_a_log_file_that_was_emptied_has_not_expired(replicas):
    (replicas.roots[1] / "commitlog" / f"{0:020d}").write_bytes(b"")
    found = findings(replicas.paths, queues=False)
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
    assert findings(replicas.paths, queues=False) == []
    found = findings(replicas.paths, queues=False, unconfirmed=True)
    assert [(f["severity"], f["kind"], *f["replicas"]) for f in found] == [
        ("info", "lagging", "broker-a#1"),
        ("info", "lagging", "broker-a#2"),
    ]
    assert found[0]["physical_offset"] == replicas.end
    assert found[0]["size"] == longer.end - replicas.end
