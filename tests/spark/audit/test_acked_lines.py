"""What is said about a bad line of an acknowledged list; no Spark."""

import gzip

import pytest

from batonmq.spark.audit.acked_lines import entry_fault, first_fault, has_torn_end
from batonmq.spark.read.storage import Storage

GOOD = '{"topic": "T", "queue_id": 0, "queue_offset": 7}\n'


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"unique_key": "K"}, None),
        ({"msg_id": "7F"}, None),
        ({"topic": "T", "queue_id": 0, "queue_offset": 0}, None),
        ({"topic": "T", "queue_id": 0}, "names no message"),
        ({"queue_id": 0, "queue_offset": 0}, "names no message"),
        ({"unique_key": "K", "queue_id": "0"}, "has queue_id='0', which is no whole number"),
        ({"unique_key": "K", "queue_id": 1 << 31}, "no whole number of 32 bits"),
        ({"unique_key": "K", "number": True}, "has number=True"),
        ({"unique_key": "K", "body_crc": 0.5}, "has body_crc=0.5"),
    ],
)
def test_faults_of_entries(entry, fault):
    said = entry_fault(entry)
    assert said is None if fault is None else fault in said


@pytest.mark.parametrize(
    ("name", "text", "says", "is_last"),
    [
        ("a.jsonl", GOOD + "\n[1]\n" + GOOD, "line 3: '[1]' is no JSON object; an entry", False),
        ("a.jsonl", GOOD + GOOD + '{"topic": "T', 'line 3: \'{"topic": "T\' is no JSON', True),
        ("a.csv", "msg_id,number\nA,1\nB,x\n", "line 3: 'B,x' has number='x', which", True),
        ("a.csv", "msg_id,number\nA\nB,2\n", "line 2: 'A' has 1 fields, the first line 2", False),
        ("a.csv", "msg_id,number\n,1\n", "line 2: ',1' names no message", True),
        ("a.jsonl", GOOD, "an entry that cannot be read", False),
    ],
)
def test_the_first_bad_line_is_named(tmp_path, name, text, says, is_last):
    path = tmp_path / name
    path.write_text(text)
    sentence, last = first_fault(Storage(""), str(path))
    assert sentence.startswith(str(path)) and says in sentence and last is is_last
    assert "queue_offset (a number)" in sentence
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert says in first_fault(Storage(""), str(packed))[0]


def test_a_line_without_its_end(tmp_path):
    path = tmp_path / "a.jsonl"
    for text, torn in ((GOOD, False), (GOOD + GOOD[:10], True), (GOOD[:10], True), ("", False)):
        path.write_text(text)
        assert has_torn_end(Storage(""), str(path)) is torn, text
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(b"x")
    assert not has_torn_end(Storage(""), str(packed))
