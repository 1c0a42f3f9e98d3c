"""The units of consume queues up to the confirmed end, and how far groups are behind them: damage
takes no row unseen.
"""

import json
import struct

import pytest

from batonmq.spark.read.damage import DamagedFile
from tests.spark.log_files import LogFiles, write_queue
from tests.spark.table_rows import good_and_bad, read

UNIT = struct.Struct(">qiq")
COUNT = 40
IN_FILE = 10


class QueueStore(LogFiles):
    """Forty messages of one queue over several log files, and its units over four queue files."""

    def __init__(self, root):
        super().__init__(root)
        self.offsets = [self.add(number=number, body=b"b" * 700) for number in range(COUNT)]
        sizes = [int.from_bytes(self.data[at : at + 4], "big") for at in self.offsets]
        self.units = [UNIT.pack(at, size, 0) for at, size in zip(self.offsets, sizes, strict=True)]
        self.path = self.save()
        self.write()

    def write(self, *, unwritten=100):
        """The queue's files as the units are now, with room behind them."""
        units = [*self.units, bytes(UNIT.size * unwritten)]
        for start in range(0, COUNT, IN_FILE):
            end = start + IN_FILE + (start + IN_FILE == COUNT)
            write_queue(self.root, *units[start:end], start=start * UNIT.size)

    def rows(self, **options):
        return read(self.path, table="consumequeue", **options)

    def file(self, unit):
        start = unit // IN_FILE * IN_FILE * UNIT.size
        return self.root / "consumequeue" / "T" / "0" / f"{start:020d}"

    def commit(self, text, name="consumerOffset.json"):
        """A file of committed offsets."""
        (self.root / "config").mkdir(exist_ok=True)
        (self.root / "config" / name).write_text(text)


@pytest.fixture
def store(tmp_path):
    return QueueStore(tmp_path / "store")


ZERO, NEGATIVE = bytes(UNIT.size), UNIT.pack(-1, 5, 0)
SOME = (0, 1, 17, COUNT - 2)


@pytest.mark.parametrize(
    ("numbers", "harm"),
    [
        (range(COUNT - 1), lambda unit: ZERO),
        (SOME, lambda unit: NEGATIVE),
        (SOME, lambda unit: b"\x40" + unit[1:]),  # it points far ahead
    ],
)
def test_one_bad_unit_of_a_queue_is_one_damage_of_the_queue(store, numbers, harm):
    for number in numbers:
        good = store.units[number]
        store.units[number] = harm(good)
        store.write()
        at = number * UNIT.size
        says = rf"no unit of T 0 at queue offset {number} at offset {at} \(20 b"
        with pytest.raises(DamagedFile, match=says):
            store.rows()
        rows = store.rows(mode="PERMISSIVE")
        expected = [each for each in range(COUNT) if each != number]
        assert good_and_bad(rows) == (expected, [(store.file(number).name, at, UNIT.size)])
        (bad,) = [row for row in rows if row["corrupt"] is not None]
        assert bad["physical_offset"] is None, "nothing is said of an offset in the log"
        store.units[number] = good


def test_a_missing_or_short_file_of_a_queue_is_damage(store):
    store.write(unwritten=0)  # all files have one size
    second = store.file(IN_FILE)
    with second.open("r+b") as file:
        file.truncate(70)  # three units and a half
    good, bad = good_and_bad(store.rows(mode="PERMISSIVE"))
    assert good == [*range(13), *range(20, COUNT)]
    assert bad == [(second.name, 260, 140)]
    second.unlink()
    with pytest.raises(DamagedFile, match=r"no file of queue T 0 .*200 "):
        store.rows()
    good, bad = good_and_bad(store.rows(mode="PERMISSIVE"))
    assert good == [*range(10), *range(20, COUNT)] and bad == [(second.name, 200, 200)]


def test_what_is_not_confirmed_is_not_there(store):
    store.save(confirm=store.offsets[20])
    assert [row["queue_offset"] for row in store.rows()] == list(range(20))
    rows = store.rows(unconfirmed="true")
    assert [row["queue_offset"] for row in rows] == list(range(COUNT))


@pytest.mark.parametrize("number", [COUNT - IN_FILE, COUNT - 5, COUNT - 2])
def test_zeros_within_a_queue_do_not_shorten_the_lag(store, number):
    store.units[number] = ZERO
    store.write(unwritten=COUNT)
    store.commit('{"offsetTable":{"T@g":{0:5}}}')
    (row,) = read(store.path, table="offsets")
    assert (row["max_offset"], row["lag"]) == (COUNT, COUNT - 5)


@pytest.mark.parametrize(
    "text",
    [
        '{"offsetTable":{"T@g":{"99999999999":1}}}',
        '{"offsetTable":{"T@g":{0:99999999999999999999}}}',
        '{"offsetTable":{"T@g":{"\\u00b2":1}}}',
        '{"offsetTable":{"T@g":{0:true}}}',
        '{"offsetTable":[]}',
        '{"offsetTable":{"T@g":{"0":-9223372036854775808}}}',
        "[" * 100_000,
        '{"offsetTable":{"T@g":{0:1}',
        "\0\0\0\0",
    ],
)
def test_offsets_that_can_be_none_are_damage(store, text):
    store.commit(text)
    with pytest.raises(DamagedFile, match=r"consumerOffset\.json"):
        read(store.path, table="offsets")
    (row,) = read(store.path, table="offsets", mode="PERMISSIVE")
    assert row["corrupt"]["bytes"] == len(text.encode()) and row["group"] is None
    store.commit(json.dumps({"offsetTable": {"T@g": {"0": 20}}}), "consumerOffset.json.bak")
    (row,) = read(store.path, table="offsets")
    assert (row["offset"], row["lag"]) == (20, 20)
