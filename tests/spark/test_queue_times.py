"""Messages through queues, by time and up to the confirmed end: damage takes no row unseen."""

import struct
from pathlib import Path

import pytest

from batonmq.spark.read.damage import DamagedFile
from batonmq.spark.read.selection import Selection
from tests.spark.log_files import START_MS, LogFiles
from tests.spark.table_rows import read, told

UNIT = struct.Struct(">qiq")
COUNT = 40
SPANS = {"from": (12, None), "until": (None, 27), "between": (12, 27)}


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
        folder = self.root / "consumequeue" / "T" / "0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{0:020d}").write_bytes(b"".join(self.units) + bytes(20 * unwritten))

    def rows(self, span, **options):
        """Numbers of the messages that were stored from the first to the last one of a span."""
        low, high = span
        wanted = Selection()
        if low is not None:
            wanted = wanted.within("store_ms", low=START_MS + 1 + low)
        if high is not None:
            wanted = wanted.within("store_ms", high=START_MS + 1 + high)
        rows = read(self.path, wanted, access="queues", timeSlackMs="0", **options)
        return [row["queue_offset"] for row in rows]


def numbers(span):
    low, high = span
    return range(0 if low is None else low, COUNT if high is None else high + 1)


@pytest.fixture
def store(tmp_path):
    return QueueStore(tmp_path / "store")


def record_of(store, number):
    at = store.offsets[number]
    return Path(store.path) / "commitlog" / f"{at - at % 8192:020d}", at % 8192


def zero_unit(store, number):
    store.units[number] = bytes(20)


def negative_unit(store, number):
    store.units[number] = UNIT.pack(-1, 5, 0)


def far_unit(store, number):
    store.units[number] = b"\x40" + store.units[number][1:]


def first_unit(store, number):
    store.units[number] = UNIT.pack(8, 800, 0)


def large_unit(store, number):
    offset, _, code = UNIT.unpack(store.units[number])
    store.units[number] = UNIT.pack(offset, 1 << 30, code)


def bad_record(store, number):
    file, at = record_of(store, number)
    raw = bytearray(file.read_bytes())
    raw[at + 300] ^= 1
    file.write_bytes(raw)


HARMS = [zero_unit, negative_unit, far_unit, first_unit, large_unit, bad_record]


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
def test_a_time_is_found_and_nothing_behind_it_is_read(store, span):
    assert store.rows(span) == list(numbers(span))
    bad_record(store, 2)
    bad_record(store, COUNT - 2)
    if span == SPANS["between"]:
        assert store.rows(span) == list(numbers(span))


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
def test_damage_anywhere_in_a_queue_is_told_or_takes_no_row_of_the_wanted_time(
    tmp_path, span, harm
):
    """The search by time may hit it, and then must not end there."""
    for number in range(COUNT - 1):
        store = QueueStore(tmp_path / str(number))
        harm(store, number)
        store.write()
        try:
            rows = store.rows(span)
        except DamagedFile:
            continue
        assert number not in numbers(span), f"{number} is missing unseen"
        assert rows == list(numbers(span)), f"rows behind {number} are missing unseen"


@pytest.mark.parametrize("harm", HARMS)
def test_one_bad_unit_of_a_queue_is_one_damage(tmp_path, harm):
    for number in (0, 1, 17, COUNT - 2):
        store = QueueStore(tmp_path / str(number))
        harm(store, number)
        store.write()
        rows = read(store.path, access="queues", mode="PERMISSIVE")
        good, bad = told(rows)
        assert good == [each for each in range(COUNT) if each != number]
        assert len(bad) == 1


@pytest.mark.parametrize("table", ["consumequeue", "messages"])
def test_a_unit_across_the_confirmed_end_before_confirmed_ones_is_damage(store, table):
    far_unit(store, 7)
    store.write()
    with pytest.raises(DamagedFile, match="queue offset 7"):
        read(store.path, table=table, access="queues")


@pytest.mark.parametrize("span", [(12, None), (None, 35), (32, 35)])
def test_a_queue_that_still_shows_what_has_expired(store, span):
    """Most of it, so that a search begins among what is gone."""
    for file in sorted((store.root / "commitlog").iterdir())[:3]:
        file.unlink()
    kept = [number for number, at in enumerate(store.offsets) if at >= 3 * 8192]
    assert COUNT // 2 < kept[0] < 32
    assert store.rows(span) == [number for number in numbers(span) if number in kept]


def test_a_bad_unit_that_points_to_what_has_expired_is_told_once(store):
    (store.root / "commitlog" / f"{0:020d}").unlink()
    kept = [number for number, at in enumerate(store.offsets) if at >= 8192]
    first_unit(store, 30)
    store.write()
    good, bad = told(read(store.path, access="queues", mode="PERMISSIVE"))
    assert good == [number for number in kept if number != 30] and len(bad) == 1


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
def test_what_is_not_confirmed_is_not_there(store, span):
    store.save(confirm=store.offsets[20])
    assert store.rows(span) == [number for number in numbers(span) if number < 20]
    assert store.rows(span, unconfirmed="true") == list(numbers(span))


@pytest.mark.parametrize("number", [0, COUNT // 2, COUNT - 2])
def test_zeros_within_a_queue_do_not_shorten_the_lag(store, number):
    zero_unit(store, number)
    store.write(unwritten=COUNT)
    config = store.root / "config"
    config.mkdir()
    (config / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:5}}}')
    (row,) = read(store.path, table="offsets")
    assert (row["max_offset"], row["lag"]) == (COUNT, COUNT - 5)
