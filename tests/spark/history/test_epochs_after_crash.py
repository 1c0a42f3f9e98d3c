"""Table `epochs` of stores whose newest epoch stands in the redo file only: as the broker loads it.

Each case is loaded by both, and must come out the same.
"""

from functools import partial

import pytest

from batonmq.epoch.entry import MAX_OFFSET, EpochEntry
from batonmq.epoch.file_cache import EpochFileCache
from batonmq.protocol.errors import CorruptLogError
from batonmq.spark.read.damage import DamagedFile
from batonmq.spark.read.store_facts import EPOCH_FILE, StoreError
from tests.spark.table_rows import read

rows = partial(read, table="epochs")


def as_broker(store):
    """What a broker that starts on these files has; its start may mend them, so it comes last."""
    return [
        (e.epoch, e.start_offset, None if e.end_offset == MAX_OFFSET else e.end_offset)
        for e in EpochFileCache(store / EPOCH_FILE).entries
    ]


def epochs(store, **options):
    return [
        (row["epoch"], row["start_offset"], row["end_offset"]) for row in rows(store, **options)
    ]


@pytest.fixture
def store(tmp_path):
    """Epochs 1 and 2 in both files, 3 and 4 in the redo file only."""
    root = tmp_path / "store"
    root.mkdir()
    (root / "config").mkdir()
    (root / "brokerIdentity").write_text("c#broker-a#1")
    cache = EpochFileCache(root / EPOCH_FILE)
    cache.append(EpochEntry(1, 0))
    cache.append(EpochEntry(2, 100))
    cache.settle()
    cache.append(EpochEntry(3, 200))
    cache.append(EpochEntry(4, 200))
    assert b"3-" not in (root / EPOCH_FILE).read_bytes()
    return root


ALL = [(1, 0, 100), (2, 100, 200), (3, 200, 200), (4, 200, None)]


def settled(store, redo):
    """The redo record is of another list then."""
    EpochFileCache(store / EPOCH_FILE).settle()
    assert b"4-200" in (store / EPOCH_FILE).read_bytes()


def torn(*slots):
    def harm(store, redo):
        data = bytearray(redo.read_bytes())
        for slot in slots:
            data[slot * 512 + 20] ^= 1
        redo.write_bytes(data)

    return harm


def cut(size):
    return lambda store, redo: redo.write_bytes(redo.read_bytes()[:size])


def an_older_backup(store, redo):
    """It is not what the record continues."""
    (store / EPOCH_FILE).unlink()
    (store / f"{EPOCH_FILE}.bak").write_text("1\n0\n1-0\n")


def no_list(store, redo):
    """A record alone says nothing."""
    (store / EPOCH_FILE).unlink()
    (store / f"{EPOCH_FILE}.bak").unlink()


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda store, redo: None, ALL),
        (settled, ALL),
        *((torn(*slots), None) for slots in ((0,), (1,), (2,), (3,), (0, 1), (2, 3), range(4))),
        *((cut(size), None) for size in (0, 100, 512, 1024, 2048)),
        (an_older_backup, [(1, 0, None)]),
        (no_list, []),
    ],
)
def test_what_the_redo_file_continues(store, harm, expected):
    harm(store, store / f"{EPOCH_FILE}.redo")
    found = epochs(store)
    assert found == as_broker(store) and expected in (None, found)


def test_the_backup_is_continued_as_well(store):
    (store / EPOCH_FILE).write_text("garbage")
    assert {row["from_backup"] for row in rows(store)} == {True}
    assert epochs(store) == ALL == as_broker(store)


def test_an_unreadable_list_is_damage_of_that_store_only(store, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "brokerIdentity").write_text("c#broker-a#2")
    (other / EPOCH_FILE).write_text("1\n0\n7-0\n")
    (store / EPOCH_FILE).write_text("garbage")
    (store / f"{EPOCH_FILE}.bak").write_text("2\n0\n5-9\n5-10\n")
    both = tmp_path / "*"
    assert epochs(both, mode="DROPMALFORMED") == [(7, 0, None)]
    (bad,) = [row for row in rows(both, mode="PERMISSIVE") if row["corrupt"] is not None]
    assert bad["corrupt"]["file"] == str(store / EPOCH_FILE)
    assert "5-10 cannot follow 5-9" in bad["corrupt"]["reason"]
    assert (bad["broker"], bad["broker_id"]) == ("broker-a", 1)
    with pytest.raises(DamagedFile, match="epochFileCheckpoint"):
        rows(both)
    with pytest.raises(StoreError, match="epochFileCheckpoint"):
        read(both, unconfirmed="true")
    with pytest.raises(CorruptLogError):
        as_broker(store)
