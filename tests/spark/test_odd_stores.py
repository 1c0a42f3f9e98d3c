"""Stores as found after an accident: nothing is left out in silence, nothing is made up."""

import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from batonmq.spark.read.damage import DamagedFile
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read
from tests.spark.log_files import (
    HOST_V4,
    HOST_V6,
    START_MS,
    LogFiles,
    plain_row,
    row_of,
    write_checkpoint,
)
from tests.spark.table_rows import good_and_bad, read


@pytest.fixture
def four(log_files):
    """26 messages of about 1 KiB over four files of 8 KiB; and their offsets."""
    offsets = [log_files.add(number=number, body=b"b" * 1000) for number in range(26)]
    path = log_files.save()
    assert len(list((log_files.root / "commitlog").iterdir())) == 4
    return path, offsets


def file_of(path, start):
    return Path(path) / "commitlog" / f"{start:020d}"


def without_a_middle_file(path, offsets):
    file_of(path, 8192).unlink()
    return [(8192, 8192)]


def without_the_last_file(path, offsets):
    file_of(path, 24576).unlink()
    return [(24576, confirmed(path) - 24576)]


def with_an_empty_last_file(path, offsets):
    file_of(path, 24576).write_bytes(b"")
    return [(24576, confirmed(path) - 24576)]


def cut_between_two_records(path, offsets):
    """The rest of its place, blank and all, is missing. The record before leaves no room for a
    blank, so it is not believed either."""
    last, cut = next(pair for pair in pairwise(offsets) if pair[1] > 12000)
    os.truncate(file_of(path, 8192), cut - 8192)
    return [(last, cut - last), (cut, 16384 - cut)]


def with_exchanged_names(path, offsets):
    one, two = file_of(path, 8192), file_of(path, 16384)
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)
    return [(8192, 8192), (16384, 8192)]


def confirmed(path):
    return struct.unpack_from(">q", (Path(path) / "checkpoint").read_bytes(), 32)[0]


@pytest.mark.parametrize(
    "harm",
    [
        without_a_middle_file,
        without_the_last_file,
        with_an_empty_last_file,
        cut_between_two_records,
        with_exchanged_names,
    ],
)
def test_what_is_in_no_file_and_what_no_record_holds_is_damage(four, harm):
    path, offsets = four
    lost = harm(path, offsets)
    good, bad = good_and_bad(read(path, mode="PERMISSIVE"))
    assert [each[1:] for each in bad] == lost
    assert {int(name) for name, _, _ in bad} == {at - at % 8192 for at, _ in lost}
    assert good == [
        n for n, at in enumerate(offsets) if not any(b <= at < b + size for b, size in lost)
    ]
    assert [row["queue_offset"] for row in read(path, mode="DROPMALFORMED")] == good
    with pytest.raises(DamagedFile, match=f" at log offset {lost[0][0]} "):
        read(path)


def test_a_log_without_any_file_of_what_is_confirmed_is_damage(four):
    path, _ = four
    for file in (Path(path) / "commitlog").iterdir():
        file.unlink()
    with pytest.raises(DamagedFile, match="no file of the log"):
        read(path)
    (Path(path) / "commitlog").rmdir()
    with pytest.raises(DamagedFile, match="no file of the log"):
        read(path)


def test_a_log_whose_first_files_expired_is_whole(four):
    path, offsets = four
    file_of(path, 0).unlink()
    file_of(path, 8192).unlink()
    assert len(read(path)) == sum(at >= 16384 for at in offsets)


def test_a_file_cut_within_a_record_is_damage_from_that_record_on(four):
    path, offsets = four
    at = next(each for each in offsets if each > 12000)
    os.truncate(file_of(path, 8192), at - 8192 + 500)
    good, bad = good_and_bad(read(path, mode="PERMISSIVE"))
    assert sum(size for _, _, size in bad) == 16384 - at and bad[0][1] == at
    assert good == [n for n, each in enumerate(offsets) if not at <= each < 16384]


def test_bytes_behind_a_files_end_are_damage(four):
    path, offsets = four
    with file_of(path, 8192).open("ab") as file:
        file.write(b"x" * 300)
    good, bad = good_and_bad(read(path, mode="PERMISSIVE"))
    assert bad and all(name == f"{8192:020d}" for name, _, _ in bad)
    assert good == list(range(len(offsets)))


def test_a_bad_first_record_does_not_lead_a_time_filter_astray(four):
    """Its time is not believed: files are then chosen by no time at all."""
    path, offsets = four
    number = offsets.index(16384) - 3
    with file_of(path, 16384).open("r+b") as file:
        file.seek(56)
        file.write(struct.pack(">q", START_MS - 10**9))
    late = {"startingTimestamp": str(START_MS + 1 + number + 1), "timeSlackMs": "0"}
    rows = read(path, mode="DROPMALFORMED", **late)
    wanted = [n for n in range(number + 1, len(offsets)) if offsets[n] != 16384]
    assert [row["queue_offset"] for row in rows] == wanted


def test_stores_with_nothing_in_them(tmp_path):
    empty = LogFiles(tmp_path / "empty")
    path = empty.save(confirm=0)
    assert read(path) == [] and read(path, unconfirmed="true") == []
    only = tmp_path / "only-a-checkpoint"
    only.mkdir()
    (only / "checkpoint").write_bytes((Path(path) / "checkpoint").read_bytes())
    for table in ("messages", "consumequeue", "index", "offsets", "epochs"):
        assert read(only, table=table) == []


def test_a_store_behind_links(four, tmp_path):
    path, offsets = four
    (tmp_path / "link").symlink_to(path)
    assert len(read(tmp_path / "link")) == len(offsets)
    real = file_of(path, 8192)
    real.rename(tmp_path / "elsewhere")
    real.symlink_to(tmp_path / "elsewhere")
    assert len(read(path)) == len(offsets)
    (tmp_path / "elsewhere").unlink()
    with pytest.raises(DamagedFile, match="no file of the log"):
        read(path)


def test_records_of_every_shape(tmp_path):
    """Both layouts, both kinds of hosts, nothing and the most of what a part may hold."""
    files = LogFiles(tmp_path / "store", file_size=1 << 20)
    shapes = [
        {"body": b""},
        {"topic": b"t" * 127},
        {"topic": b"t" * 255},
        {"topic": b"t" * 300},
        {"properties": b"big\x01" + b"v" * 32_000 + b"\x02"},
        {"properties": b"TAGS\x01x\x02" * 4000},
        {"born_host": HOST_V6, "store_host": HOST_V6, "sys_flag": 0x30},
        {"born_host": HOST_V4, "store_host": HOST_V6, "sys_flag": 0x20},
        {"body": b"\x78\x9c" + b"z" * 100, "sys_flag": 0x1},
        {"body": b"inner" * 50, "sys_flag": 0x80, "properties": b"INNER_NUM\x012\x02"},
        {"body": b"b" * 100_000},
    ]
    for number, shape in enumerate(shapes):
        files.add(number=number, **shape)
    rows = read(files.save(), batchBytes=str(1 << 16), maxRecordBytes="200000", splitBytes="250000")
    starts = [row["physical_offset"] for row in rows]
    assert [row["queue_offset"] for row in rows] == list(range(len(shapes)))
    assert [row_of(row) for row in rows] == [plain_row(bytes(files.data), at) for at in starts]


def test_a_window_that_arrow_cannot_address_is_refused():
    with pytest.raises(ValueError, match=r"batchBytes='2147483648'.* to 1073741824"):
        ReadOptions.from_mapping({"path": "/s", "batchBytes": str(1 << 31)})
    with pytest.raises(ValueError, match="maxRecordBytes"):
        ReadOptions.from_mapping({"path": "/s", "maxRecordBytes": str(1 << 31)})


def test_permissive_rows_are_marked_whatever_columns_are_named(four):
    path, _ = four
    with file_of(path, 0).open("r+b") as file:
        file.write(b"\xff")
    rows = read(path, mode="PERMISSIVE", columns="queue_id")
    assert list(rows[0]) == ["queue_id", "corrupt"] and rows[0]["corrupt"]["offset"] == 0
    assert list(read(path, mode="PERMISSIVE", columns="corrupt,topic")[0]) == ["corrupt", "topic"]


def test_a_log_that_grows_and_is_cut_above_the_confirmed_end_while_it_is_read(four):
    """A read is of what was confirmed when it was planned, whatever is done behind that."""
    path, offsets = four
    confirmed = offsets[20]
    write_checkpoint(path, confirmed)
    work = Read(ReadOptions.from_mapping({"path": path}))
    seen = []
    for number, each in enumerate(work.plan()):
        last = file_of(path, 24576)
        raw = bytearray(last.read_bytes())
        behind = max(0, confirmed - 24576)
        raw[behind:] = bytes(len(raw) - behind) if number % 2 else b"\xab" * (len(raw) - behind)
        last.write_bytes(raw)
        seen += [row["queue_offset"] for b in work.run(each) for row in b.to_pylist()]
    assert seen == list(range(20))


# --- records that the confirmed end cuts, and damage that only looks like one ---


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
    good, bad = good_and_bad(read(path, mode="PERMISSIVE"))
    assert good == [n for n in range(10) if n != number]
    assert bad == [(f"{0:020d}", at, offsets[number + 1] - at)]


def test_a_record_that_the_confirmed_end_cuts_is_not_there_if_it_is_whole_behind_it(ten):
    path, offsets = ten
    for cut in (1, 7, 8, 100):
        write_checkpoint(path, offsets[6] + cut)
        assert good_and_bad(read(path, mode="PERMISSIVE")) == (list(range(6)), [])


@pytest.mark.parametrize("kept", [0, 3, 50])
def test_confirmed_bytes_that_no_record_holds_are_damage(ten, kept):
    """A log that ends below its confirmed end: within a record, or with zeros."""
    path, offsets = ten
    put(path, offsets[9] + kept, bytes(offsets[-1] - offsets[9] - kept))
    for cut in (4, 60):
        write_checkpoint(path, offsets[9] + cut)
        good, bad = good_and_bad(read(path, mode="PERMISSIVE"))
        assert good == list(range(9)) and bad == [(f"{0:020d}", offsets[9], cut)]
