"""What users hand to the tables of stores: odd paths and names, useless numbers, much damage.

Without Spark.
"""

import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from batonmq.spark.read import log_range
from batonmq.spark.read.columns import timestamps
from batonmq.spark.read.damage import DamagedFile
from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.storage import locate, split_paths
from batonmq.spark.read.store_facts import StoreError
from tests.spark.log_files import LogFiles, write_index, write_queue
from tests.spark.table_rows import good_and_bad, read


def test_times_outside_the_years_of_sql_are_null():
    """A client may write any number; Spark would store it, and fail where rows are collected."""
    first, last = datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, 23, 59, 59, 999000, UTC)
    ends = [-62_104_060_800_000, 253_370_764_799_999]
    column = timestamps(np.array([*ends, ends[0] - 1, ends[1] + 1, 2**62, -(2**63), -1]))
    assert column.to_pylist()[:2] == [first, last]
    assert [each.as_py() is None for each in column] == [False] * 2 + [True] * 4 + [False]


@pytest.mark.parametrize("size", [0, 30, 40, 400, 1041, None])
def test_a_bad_index_file_is_damage_and_does_not_hide_the_others(tmp_path, size):
    """One of no possible size; None: one whose head counts more entries than fit."""
    files = LogFiles(tmp_path / "store")
    files.add()
    path = files.save()
    write_index(path, "20260101000000000", 3)
    bad = write_index(path, "20260102000000000", 500)
    says = r"its header counts 500 entries, 40 fit"
    if size is not None:
        bad.write_bytes(bytes(size))
        says = rf"{size} bytes .*maxHashSlotNum.*"
    with pytest.raises(DamagedFile, match=rf"{bad}: {says} at offset 0"):
        read(path, table="index")
    rows = read(path, table="index", mode="PERMISSIVE")
    assert [row["entry"] for row in rows] == [1, 2, None]
    size = bad.stat().st_size
    assert (rows[2]["corrupt"]["bytes"], rows[2]["physical_offset"]) == (size, None)


def test_folders_and_files_that_only_look_like_numbers_are_not_read(log_files):
    log_files.add()
    path = Path(log_files.save())
    (path / "commitlog" / ("9" * 20)).write_bytes(b"x" * 100)
    (path / "commitlog" / ("²" * 20)).write_bytes(b"x" * 100)
    for name in ("0", "²", "99999999999", "-1"):
        write_queue(path, (0, log_files.end, 0), queue_id=name)
    for options in ({}, {"unconfirmed": "true"}, {"table": "consumequeue"}):
        (row,) = read(path, **options)
        assert (row["queue_id"], row["physical_offset"]) == (0, 0)


def test_a_broker_id_that_no_column_holds_is_refused(log_files):
    path = log_files.save(identity="C#broker-a#99999999999999999999")
    with pytest.raises(StoreError, match=r"brokerIdentity .*must be cluster#name#id"):
        read(path)


def test_a_path_in_every_spelling(tmp_path, monkeypatch):
    root = tmp_path / "a folder, with ü and #"
    files = LogFiles(root / "store")
    files.add()
    files.save()
    monkeypatch.chdir(root)
    given = [f"{root}/store/", f"{root}//store", f"file:{root}/store", f"file://{root}/./store"]
    rows = read(json.dumps(["store", "./sto*/", f"{root}/*", *given]))
    assert [row["store"] for row in rows] == [f"{root}/store"]  # one place has one name
    assert len(read(f"{root}/store")) == 1  # it exists as it is
    with pytest.raises(FileNotFoundError, match="a path that holds a comma is given as a JSON"):
        read(f"{root}/st*")
    assert len(read("store, ./store ,")) == 1


@pytest.fixture
def as_nobody():
    """A folder, and no rights but those that files give: root may read everything."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        try:
            yield Path(name), lambda: os.seteuid(65534 if user == 0 else user)
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("denied", ["commitlog", f"commitlog/{0:020d}", "checkpoint", "."])
def test_what_may_not_be_read_fails_in_every_mode_by_name(as_nobody, denied):
    """It is no damage: the bytes may be whole."""
    folder, drop_rights = as_nobody
    files = LogFiles(folder / "store")
    files.add()
    path = Path(files.save())
    (path / denied).chmod(0)
    drop_rights()
    for mode in ("FAILFAST", "PERMISSIVE"):
        with pytest.raises(PermissionError, match=rf"'{path / denied}.*Permission denied"):
            read(path, mode=mode)
    os.seteuid(0 if os.getuid() == 0 else os.getuid())
    (path / denied).chmod(0o755)


@pytest.mark.parametrize("text", ["[ab]*/store", '["/a"', "[1]", '{"a": 1}['])
def test_what_begins_like_a_list_and_is_none_is_refused(text):
    if text[0] == "[":
        with pytest.raises(ValueError, match=r"no JSON list of paths; .*\./ before it"):
            split_paths(text)
    else:
        assert split_paths(text) == [text]


@pytest.mark.parametrize("uri", ["file://host/data", "file:data", "file://"])
def test_a_local_uri_names_an_absolute_path(uri):
    with pytest.raises(ValueError, match="a local URI is file:///path"):
        locate(uri)


def test_epochs_that_cannot_be_read_are_damage_and_the_messages_are_there(log_files, caplog):
    for number in range(3):
        log_files.add(number=number)
    path = log_files.save(epochs="garbled")
    with pytest.raises(StoreError, match=r"epochFileCheckpoint: .*; read with mode DROPMALFORMED"):
        read(path)
    rows = read(path, mode="PERMISSIVE")
    good, bad = good_and_bad(rows)
    assert good == [0, 1, 2] and bad == [("epochFileCheckpoint", 0, 0)]
    assert {(row["epoch"], row["broker"]) for row in rows} == {(None, "broker-a")}
    dropped = read(path, mode="DROPMALFORMED")
    assert [row["queue_offset"] for row in dropped] == [0, 1, 2]
    assert f"stretches=1 bytes=0 first={path}/epochFileCheckpoint: " in caplog.text


def test_many_bad_records_cost_no_window_each(tmp_path, monkeypatch):
    """What lies behind a bad record is decoded again: a window each would take hours a file."""
    files = LogFiles(tmp_path / "store", file_size=1 << 20)
    offsets = [files.add(number=number, body=b"b" * 500) for number in range(600)]
    for at in offsets[::2]:
        files.data[at + 300] ^= 1
    path = files.save()
    decoded = []
    chain = log_range.chain

    def counted(window, position, stop):
        decoded.append(len(window))
        return chain(window, position, stop)

    monkeypatch.setattr(log_range, "chain", counted)
    good, bad = good_and_bad(read(path, mode="PERMISSIVE", columns="queue_offset"))
    assert good == list(range(1, 600, 2))
    assert [offset for _, offset, _ in bad] == offsets[::2]
    assert sum(decoded) < 60 * files.end


def test_a_record_torn_in_its_properties_is_damage(log_files):
    """Without a CRC of the whole record only the end of its properties tells."""
    for number in range(3):
        log_files.add(number=number, properties=b"KEYS\x01key\x02", append_prop_crc=False)
    size = log_files.end // 3
    log_files.data[2 * size - 2 : 2 * size] = bytes(2)
    good, bad = good_and_bad(read(log_files.save(), mode="PERMISSIVE"))
    assert (good, bad) == ([0, 2], [("0" * 20, size, size)])


def test_a_table_of_a_catalog_is_refused_with_the_way_out():
    given = {"path": "/s", "owner": "me", "provider": "batonmq", "location": "file:/s"}
    with pytest.raises(ValueError, match="CREATE TEMPORARY VIEW"):
        ReadOptions.from_mapping(given)
