"""The units of consume queues up to the confirmed end: damage takes no row unseen."""

import struct

import pytest

from batonmq.spark.read.damage import DamagedFile
from tests.spark.log_files import LogFiles, write_queue
from tests.spark.table_rows import read, told

UNIT = struct.Struct(">qiq")
COUNT = 40


class QueueStore(LogFiles):
    """Forty messages of one queue over several log files, and the units of its one queue file."""

    def __init__(self, root):
        super().__init__(root)
        self.offsets = [self.add(number=number, body=b"b" * 700) for number in range(COUNT)]
        ends = [int.from_bytes(self.data[at : at + 4], "big") for at in self.offsets]
        self.units = [UNIT.pack(at, size, 0) for at, size in zip(self.offsets, ends, strict=True)]
        self.path = self.save()
        self.write()

    def write(self, *, unwritten=100):
        """The queue's file as the units are now, with room behind them."""
        write_queue(self.root, *self.units, bytes(20 * unwritten))

    def rows(self, **options):
        return read(self.path, table="consumequeue", **options)


@pytest.fixture
def store(tmp_path):
    return QueueStore(tmp_path / "store")


def zero_unit(store, number):
    store.units[number] = bytes(20)


def negative_unit(store, number):
    store.units[number] = UNIT.pack(-1, 5, 0)


def far_unit(store, number):
    store.units[number] = b"\x40" + store.units[number][1:]


@pytest.mark.parametrize("harm", [zero_unit, negative_unit, far_unit])
def test_one_bad_unit_of_a_queue_is_one_damage(tmp_path, harm):
    for number in (0, 1, 17, COUNT - 2):
        store = QueueStore(tmp_path / str(number))
        harm(store, number)
        store.write()
        with pytest.raises(DamagedFile, match=f"queue offset {number}"):
            store.rows()
        good, bad = told(store.rows(mode="PERMISSIVE"))
        assert good == [each for each in range(COUNT) if each != number]
        assert bad == [(f"{0:020d}", number * UNIT.size, UNIT.size)]


def test_what_is_not_confirmed_is_not_there(store):
    store.save(confirm=store.offsets[20])
    assert [row["queue_offset"] for row in store.rows()] == list(range(20))
    rows = store.rows(unconfirmed="true")
    assert [row["queue_offset"] for row in rows] == list(range(COUNT))


@pytest.mark.parametrize("number", [0, COUNT // 2, COUNT - 2])
def test_zeros_within_a_queue_do_not_shorten_the_lag(store, number):
    zero_unit(store, number)
    store.write(unwritten=COUNT)
    config = store.root / "config"
    config.mkdir()
    (config / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:5}}}')
    (row,) = read(store.path, table="offsets")
    assert (row["max_offset"], row["lag"]) == (COUNT, COUNT - 5)
