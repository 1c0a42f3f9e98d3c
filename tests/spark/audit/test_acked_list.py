"""What is said about a bad entry of an acknowledged list; no Spark."""

import gzip

import pytest

from batonmq.spark.differences import acked_list
from batonmq.spark.differences.acked_list import entries_of, plan_lists

GOOD = '{"topic": "T", "queue_id": 0, "queue_offset": 7}\n'


def read(path):
    """(entries, the first line that is none) of a list."""
    rows = [row for piece in plan_lists([str(path)])[0] for row in entries_of(piece)]
    bad = [row for row in rows if "fault" in row]
    return [row for row in rows if "fault" not in row], bad[0] if bad else None


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ('{"unique_key": "K"}', None),
        ('{"msg_id": "7F", "more": [1]}', None),
        ('{"topic": "T", "queue_id": 0, "queue_offset": 0, "producer": 3}', None),
        ('{"topic": "T", "queue_id": 0}', "names no message"),
        ('{"queue_id": 0, "queue_offset": 0}', "names no message"),
        ('{"unique_key": "K", "queue_id": "0"}', "Expected `int | null`, got `str` - at `$.que"),
        ('{"unique_key": "K", "queue_id": 2147483648}', "Expected `int` <= 2147483647"),
        ('{"unique_key": "K", "number": 9223372036854775808}', "$.number"),
        ('{"unique_key": "K", "number": true}', "got `bool` - at `$.number`"),
        ('{"unique_key": "K", "body_crc": 0.5}', "got `float` - at `$.body_crc`"),
        ("[" * 100_000, "is no JSON object"),
    ],
)
def test_faults_of_entries(tmp_path, entry, fault):
    (tmp_path / "a.jsonl").write_text(GOOD + entry + "\n")
    found, error = read(tmp_path / "a.jsonl")
    assert len(found) == 2 - (fault is not None)
    assert error is None if fault is None else fault in error["fault"]


@pytest.mark.parametrize(
    ("text", "says", "is_torn"),
    [
        (GOOD + "\n[1]\n" + GOOD, "line 3: '[1]' is no JSON object; an entry", False),
        (GOOD + GOOD + '{"topic": "T', 'line 3: \'{"topic": "T\' is no JSON', True),
        (GOOD + "x\n", "line 2: 'x' is no JSON", False),
    ],
)
@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_the_first_bad_line_is_named(tmp_path, monkeypatch, text, says, is_torn, piece_bytes):
    monkeypatch.setattr(acked_list, "_PIECE_BYTES", piece_bytes)
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    _, error = read(path)
    assert error["fault"].startswith(str(path)) and says in error["fault"]
    assert "queue_offset (a number)" in error["fault"] and error["is_torn"] is is_torn
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    _, error = read(packed)
    assert says in error["fault"] and not error["is_torn"]


def test_a_line_above_the_limit_is_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(acked_list, "_LINE_MAX", 8)
    (tmp_path / "a.jsonl").write_text(" " * 20 + "\nx\n")
    assert "line 2: 'x'" in read(tmp_path / "a.jsonl")[1]["fault"]


@pytest.mark.parametrize("piece_bytes", [7, 1 << 20])
def test_lines_are_read_once_however_the_file_is_cut(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(acked_list, "_PIECE_BYTES", piece_bytes)
    path = tmp_path / "a.jsonl"
    for text, count in ((GOOD, 1), (GOOD * 3, 3), (GOOD + GOOD.strip(), 2), ("", 0)):
        path.write_text(text)
        found, error = read(path)
        assert (len(found), error) == (count, None), text


def test_a_list_that_is_shorter_than_when_it_was_listed_is_no_part_of_itself(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 3)
    (piece,), _ = plan_lists([str(path)])
    path.write_text(GOOD)
    with pytest.raises(OSError, match=r"a\.jsonl ends at 49, 147 bytes were listed: .*read again"):
        list(entries_of(piece))
