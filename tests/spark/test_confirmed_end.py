"""Records that the confirmed end cuts, and damage that only looks like one."""

from pathlib import Path

import pytest

from batonmq.spark.read.damage import DamagedFile
from tests.spark.log_files import write_checkpoint
from tests.spark.table_rows import read, told


@pytest.fixture
def ten(log_files):
    """Ten confirmed messages in one file; the path, and their offsets with the end."""
    offsets = [log_files.add(number=number, body=b"b" * 200) for number in range(10)]
    return log_files.save(), [*offsets, log_files.end]


def put(path, at, data):
    with (Path(path) / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("number", [0, 6, 8, 9])
@pytest.mark.parametrize("behind", [1, 100, 4000])
def test_a_size_that_points_across_the_confirmed_end_is_damage(ten, number, behind):
    """Were it taken for a record that is not confirmed, all behind it would be missing unseen."""
    path, offsets = ten
    at, end = offsets[number], offsets[-1]
    put(path, at, (end - at + behind).to_bytes(4, "big"))
    with pytest.raises(DamagedFile, match=f"confirmed end.* at log offset {at} "):
        read(path)
    good, bad = told(read(path, mode="PERMISSIVE"))
    assert good == [n for n in range(10) if n != number]
    assert bad == [(f"{0:020d}", at, offsets[number + 1] - at)]


def test_a_record_that_the_confirmed_end_cuts_is_not_there_if_it_is_whole_behind_it(ten):
    path, offsets = ten
    for cut in (1, 7, 8, 100):
        write_checkpoint(path, offsets[6] + cut)
        assert told(read(path, mode="PERMISSIVE")) == (list(range(6)), [])


@pytest.mark.parametrize("kept", [0, 3, 50])
def test_confirmed_bytes_that_no_record_holds_are_damage(ten, kept):
    """A log that ends below its confirmed end: within a record, or with zeros."""
    path, offsets = ten
    put(path, offsets[9] + kept, bytes(offsets[-1] - offsets[9] - kept))
    for cut in (4, 60):
        write_checkpoint(path, offsets[9] + cut)
        good, bad = told(read(path, mode="PERMISSIVE"))
        assert good == list(range(9)) and bad == [(f"{0:020d}", offsets[9], cut)]
