"""What must never be called clean: whole logs, lists and epochs that are gone, without Spark."""

import shutil

import pytest

from tests.spark.audit.replica_files import (
    FILE_SIZE,
    Replicas,
    counts,
    fields,
    findings,
    key,
    scan,
)
from tests.spark.log_files import message


@pytest.fixture
def replicas(tmp_path):
    return Replicas(tmp_path)


def cut_log(root, offset):
    """What a store keeps of its log up to an offset."""
    for path in sorted((root / "commitlog").iterdir()):
        start = int(path.name)
        if start >= offset:
            path.unlink()
        elif start + FILE_SIZE > offset:
            data = path.read_bytes()[: offset - start]
            path.write_bytes(data.ljust(FILE_SIZE, b"\0"))


def brief(found):
    return [(f["severity"], f["kind"], f["replicas"], f["physical_offset"]) for f in found]


def grave(found):
    return [f for f in found if f["severity"] != "info"]


@pytest.mark.parametrize("whole_logs", [False, True])
def test_a_later_epoch_that_begins_below_what_others_confirm(replicas, whole_logs):
    cut = replicas.offsets[40]
    cut_log(replicas.roots[0], cut)
    replicas.confirm(1, cut)
    replicas.begin_epoch(5, cut, 1)
    rows = scan(replicas.paths, whole_logs=whole_logs)
    (found,) = grave([row for row in rows if row["part"] == "finding"])
    assert brief([found]) == [("critical", "missing", ["broker-a#1"], cut)]
    assert (found["size"], found["epoch"]) == (replicas.end - cut, 4)
    assert "which broker-a#2, broker-a#3 confirm in epoch 4" in found["detail"]
    # A message that only replicas behind the later epoch have is none to rely on.
    current = [row["amount"] for row in rows if row["part"] == "message"]
    assert current == [1] * 40 + [0] * 20


def test_messages_of_an_old_master_that_its_successors_passed_over(replicas):
    at = replicas.offsets[58]
    replicas.confirm(1, at)
    position = at
    for number in (58, 59):
        other = {**fields(number), "properties": fields(number + 100)["properties"]}
        raw = message(position, **other)
        for who in (2, 3):
            replicas.write(who, position, raw)
        position += len(raw)
    replicas.begin_epoch(5, at, 2, 3)
    rows = scan(replicas.paths, whole_logs=True)
    found = {
        row["unique_key"]: (row["amount"], row["have"], row["lack"])
        for row in rows
        if row["part"] == "message" and row["physical_offset"] >= at
    }
    assert found == {
        key(58): (0, 1, 6),
        key(59): (0, 1, 6),
        key(158): (1, 6, 0),
        key(159): (1, 6, 0),
    }


def test_a_tail_behind_a_later_epoch_that_has_no_message_yet(replicas):
    at = replicas.offsets[58]
    for number in (1, 2, 3):
        replicas.confirm(number, at)
    for root in replicas.roots[1:]:
        cut_log(root, at)
    replicas.begin_epoch(5, at, 2, 3)
    rows = scan(replicas.paths, whole_logs=True)
    current = {r["unique_key"]: r["amount"] for r in rows if r["part"] == "message"}
    assert current[key(57)] == 1 and (current[key(58)], current[key(59)]) == (0, 0)


def test_a_replica_without_a_commit_log(replicas):
    shutil.rmtree(replicas.roots[1] / "commitlog")
    found = findings(replicas.paths)
    assert brief(found) == [("critical", "missing", ["broker-a#2"], 0)]
    assert found[0]["size"] == replicas.end and "has no file" in found[0]["detail"]
    assert counts(replicas.paths) == (60, 60)


@pytest.mark.parametrize("count", [1, 3])
def test_no_replica_has_a_commit_log(tmp_path, count):
    replicas = Replicas(tmp_path, count=count)
    for root in replicas.roots:
        shutil.rmtree(root / "commitlog")
    found = findings(replicas.paths)
    assert brief(found) == [
        ("critical", "missing", [replicas.name(n + 1)], 0) for n in range(count)
    ]


def test_a_new_replica_without_anything_is_only_behind(replicas):
    shutil.rmtree(replicas.roots[1] / "commitlog")
    (replicas.roots[1] / "epochFileCheckpoint").unlink()
    replicas.confirm(2, 0)
    found = findings(replicas.paths)
    assert brief(found) == [("info", "lagging", ["broker-a#2"], 0)]


def test_nothing_is_confirmed_anywhere(replicas):
    for number in (1, 2, 3):
        replicas.confirm(number, 0)
    replicas.flip(2, replicas.offsets[7] + 95)
    found = findings(replicas.paths)
    assert brief(found) == [("warning", "unchecked", [replicas.name(n)], 0) for n in (1, 2, 3)]
    assert found[0]["size"] == replicas.end and "--unconfirmed" in found[0]["detail"]
    found = findings(replicas.paths, unconfirmed=True)
    assert brief(found) == [("critical", "divergent", ["broker-a#2"], replicas.offsets[7])]


def test_epoch_lists_that_cannot_be_read_or_are_gone(replicas):
    (replicas.roots[1] / "epochFileCheckpoint").write_text("garbage")
    (replicas.roots[2] / "epochFileCheckpoint").unlink()
    found = findings(replicas.paths)
    assert brief(found) == [
        ("warning", "epochs_differ", ["broker-a#2"], None),
        ("warning", "epochs_differ", ["broker-a#3"], None),
    ]
    assert "its epochs cannot be read: " in found[0]["detail"]
    assert "it has no list of epochs; broker-a#1 has one" in found[1]["detail"]


@pytest.mark.parametrize("number", [45, 50])
def test_a_wrong_size_leads_no_message_behind_it_astray(replicas, number):
    """The damaged record seems to reach behind the confirmed end; what follows is there."""
    size = replicas.end - replicas.offsets[number] + 16
    replicas.write(1, replicas.offsets[number], size.to_bytes(4, "big"))
    (found,) = findings(replicas.paths)
    assert brief([found]) == [("critical", "divergent", ["broker-a#1"], replicas.offsets[number])]
    rows = [r for r in scan(replicas.paths) if r["part"] == "message"]
    held = {r["unique_key"]: (r["have"], r["lack"]) for r in rows}
    assert held.pop(key(number)) == (6, 1)
    assert set(held.values()) == {(7, 0)}


def test_the_epoch_of_a_finding_is_that_of_the_replicas_that_hold_the_message(replicas):
    """The third replica has a tail of its own in epoch 4, the others went on in epoch 5."""
    at = replicas.offsets[58]
    raw = message(at, **{**fields(58), "properties": fields(158)["properties"]})
    replicas.write(3, at, raw)
    replicas.begin_epoch(5, at, 1, 2)
    rows = scan(replicas.paths)
    found = {
        (row["kind"], row["unique_key"]): (row["epoch"], row["detail"])
        for row in rows
        if row["part"] == "finding" and row["kind"] != "epochs_differ"
    }
    said = "its epoch is 5 by broker-a#1, 5 by broker-a#2, 4 by broker-a#3"
    assert {which: epoch for which, (epoch, _) in found.items()} == {
        ("missing", key(58)): 5,
        ("extra", key(158)): 4,
    }
    assert all(detail.endswith(said) for _, detail in found.values())
    held = {row["unique_key"]: row["epoch"] for row in rows if row["part"] == "message"}
    assert (held[key(57)], held[key(58)], held[key(158)], held[key(59)]) == (4, 5, 4, None)
