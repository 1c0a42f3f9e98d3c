"""Consume queues against the log, in this process."""

import shutil
import struct

import pytest

from tests.spark.audit.replica_files import audited, real_store
from tests.spark.log_files import write_checkpoint

UNIT = 20
BEHIND = "the consume queue ends at {}; {} confirmed messages have no unit yet"


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template") / "store"
    real_store(root)
    return root


@pytest.fixture
def two(template, tmp_path):
    """Two equal stores of ours with consume queues: 30 messages in each of two queues."""
    shutil.copytree(template, tmp_path / "q-1")
    shutil.copytree(template, tmp_path / "q-2")
    (tmp_path / "q-2" / "brokerIdentity").write_text("C#broker-q#2")
    return [tmp_path / "q-1", tmp_path / "q-2"]


def queue_file(root, queue_id, offset):
    """(path, position) of a unit; files have 20 units."""
    start = offset * UNIT // 400 * 400
    return root / "consumequeue" / "T" / str(queue_id) / f"{start:020d}", offset * UNIT - start


def unit_at(root, queue_id, offset):
    path, at = queue_file(root, queue_id, offset)
    return struct.unpack(">qiq", path.read_bytes()[at : at + UNIT])


def write_unit(root, queue_id, offset, *unit):
    path, at = queue_file(root, queue_id, offset)
    data = bytearray(path.read_bytes())
    data[at : at + UNIT] = struct.pack(">qiq", *unit)
    path.write_bytes(data)


@pytest.fixture(params=[{}, {"range_bytes": 1500, "chunk_bytes": 700}])
def options(request):
    return request.param


def test_queues_of_a_store_of_ours_are_right(two, options):
    assert audited(*two, **options) == []


def test_a_queue_file_that_ends_within_a_unit_is_read_all_the_same(two, options):
    path, _ = queue_file(two[1], 1, 29)
    path.write_bytes(path.read_bytes()[:-7])
    assert audited(*two, **options) == []


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("queue_wrong", lambda o, s, t: (o + 1, s, t), "its unit points to {s} bytes at {o1}"),
        ("queue_wrong", lambda o, s, t: (o, s + 1, t), "its unit points to {s1} bytes at {o}"),
        ("queue_wrong", lambda o, s, t: (o, s, t + 1), "has tags code {t1}, its tags make {t}"),
        ("queue_wrong", lambda o, s, t: (-o, s, t), "its unit points to {s} bytes at -{o}"),
        ("queue_missing", lambda o, s, t: (0, 0, 0), "was never written"),
        ("queue_wrong", lambda o, s, t: (1 << 60, s, t), "its unit points to {s} bytes at 1152921"),
    ],
)
def test_a_bad_unit_is_named_with_its_message(two, options, kind, change, says):
    offset, size, tags = unit_at(two[1], 1, 7)
    write_unit(two[1], 1, 7, *change(offset, size, tags))
    found = audited(*two, **options)
    (named,) = {
        (f["severity"], f["kind"], f["topic"], f["queue_id"], f["queue_offset"]) for f in found
    }
    assert named == ("critical", kind, "T", 1, 7)
    (mine,) = [f for f in found if f["physical_offset"] == offset]
    assert mine["replicas"] == ["broker-q#2"]
    names = {"o": offset, "s": size, "t": tags, "o1": offset + 1, "s1": size + 1, "t1": tags + 1}
    assert says.format(**names) in mine["detail"]
    assert mine["file"] == str(queue_file(two[1], 1, 7)[0])


def test_two_units_changed_for_each_other(two, options):
    one, other = unit_at(two[0], 0, 3), unit_at(two[0], 0, 4)
    write_unit(two[0], 0, 3, *other)
    write_unit(two[0], 0, 4, *one)
    found = {(f["kind"], f["queue_offset"]) for f in audited(*two, **options)}
    assert found == {("queue_wrong", 3), ("queue_wrong", 4)}


def test_a_unit_behind_the_last_message_points_to_none(two, options):
    last = unit_at(two[0], 0, 29)
    write_unit(two[0], 0, 30, *last)
    (found,) = audited(*two, **options)
    assert (found["kind"], found["queue_offset"]) == ("queue_wrong", 30)
    assert "where no message of this queue offset lies" in found["detail"]


def test_a_queue_that_is_behind_or_gone_is_counted(two, options):
    for offset in (27, 28, 29):
        write_unit(two[1], 0, offset, 0, 0, 0)
    shutil.rmtree(two[0] / "consumequeue" / "T" / "1")
    found = {
        (*f["replicas"], f["queue_id"], f["queue_offset"]): f for f in audited(*two, **options)
    }
    assert {key: (f["severity"], f["kind"], f["detail"]) for key, f in found.items()} == {
        ("broker-q#2", 0, 27): ("info", "queue_behind", BEHIND.format(27, 3)),
        ("broker-q#1", 1, 0): ("info", "queue_behind", BEHIND.format(0, 30)),
    }


def test_units_above_confirm_offset_and_of_expired_messages_are_no_concern(two, options):
    half = unit_at(two[0], 1, 20)[0]
    write_checkpoint(two[0], half)
    write_unit(two[0], 1, 25, half + 1, 2, 3)  # its message is not confirmed there
    (two[1] / "commitlog" / f"{0:020d}").unlink()
    write_unit(two[1], 0, 1, 1, 2, 3)  # its message has expired there
    kinds = {(f["kind"], f["replicas"][0]) for f in audited(*two, **options)}
    assert kinds == {("lagging", "broker-q#1"), ("expired", "broker-q#2")}


def test_a_hole_in_the_newest_file_is_not_the_queues_end(two, options):
    for offset in (24, 25):
        write_unit(two[1], 0, offset, 0, 0, 0)
    found = audited(*two, **options)
    assert sorted((f["severity"], f["kind"], f["queue_offset"]) for f in found) == [
        ("critical", "queue_missing", 24),
        ("critical", "queue_missing", 25),
    ]
