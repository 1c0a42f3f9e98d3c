"""A range of one queue is read whole, or the read says why not: against answers made by hand."""

import asyncio
from itertools import chain

import pytest

from batonmq.client.consumer.pulling import PulledRecords, PullStatus
from batonmq.client.errors import NoRouteError
from batonmq.protocol.message import MessageQueue
from batonmq.spark.live import cluster, range_reader
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.offsets import DataLossError, QueueRange
from batonmq.spark.live.options import TopicOptions
from batonmq.spark.live.range_reader import TopicRangeReader
from tests.spark.log_files import message

QUEUE = MessageQueue("T", "b", 0)


class Queue:
    """Holds [low, high), shows it up to `shown`, and answers with at most `answer_max` messages.

    `first`: what happens to the first pulls instead, answers or errors to raise.
    """

    def __init__(self, low=0, high=100, *, answer_max=32, absent=(), wanted=None, **fields):
        self.low, self.high, self.shown = low, high, high
        self.answer_max = answer_max
        self.absent = set(absent)
        self.wanted = wanted
        self.fields = fields
        self.first = []
        self.pulls = 0

    async def pull(self, client, request, *, deadline_ms):
        self.pulls += 1
        if self.first:
            answer = self.first.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        offset = request.offset
        if not self.low <= offset <= self.high:
            near = self.low if offset < self.low else self.high
            return self.answer(PullStatus.OFFSET_ILLEGAL, near)
        if offset >= self.shown:
            return self.answer(PullStatus.NO_NEW_MSG, offset)
        found = []
        limit = min(self.answer_max, request.max_messages)
        while offset < self.shown and len(found) < limit:
            is_wanted = self.wanted is None or offset % self.wanted == 0
            if offset not in self.absent and is_wanted:
                found.append(message(1000 + 200 * offset, number=offset, **self.fields))
            offset += 1
        return self.answer(
            PullStatus.FOUND if found else PullStatus.NO_MATCHED_MSG, offset, b"".join(found)
        )

    def answer(self, status, next_offset, records=b""):
        return PulledRecords(status, next_offset, self.low, self.shown, records)

    async def shortfall(self, client, group, queue, offset, deadline_ms):
        return None if offset <= self.high else (self.low, self.high)


@pytest.fixture
def read(monkeypatch):
    """Reads [begin, end) of a `Queue`; the offsets of each window."""

    def run(queue, begin, end, *, tags=(), fail=True, window_bytes=2000):
        monkeypatch.setattr(cluster, "pull_records", queue.pull)
        monkeypatch.setattr(range_reader, "shortfall", queue.shortfall)
        options = TopicOptions(
            name_servers=(), topics=("T",), tags=tags, group="g", batch_bytes=window_bytes,
            operation_timeout_ms=200, fail_on_data_loss=fail,
        )  # fmt: skip
        reader = TopicRangeReader(None, QueueRange(QUEUE, begin, end), options)

        async def windows():
            found = []
            while (window := await reader.next_window()) is not None:
                assert window.begin < window.end
                found.append(window.records.queue_offset.tolist())
            return found

        return asyncio.run(windows())

    return run


def flat(windows):
    return list(chain.from_iterable(windows))


@pytest.mark.parametrize("answer_max", [1, 3, 31, 32])
@pytest.mark.parametrize(("begin", "end"), [(0, 100), (7, 8), (5, 70), (9, 9)])
def test_a_range_comes_whole_and_in_order(read, begin, end, answer_max):
    windows = read(Queue(answer_max=answer_max), begin, end)
    assert flat(windows) == list(range(begin, end))


def test_windows_are_bounded_and_pulls_go_ahead(read):
    queue = Queue(high=10_000)
    windows = read(queue, 0, 10_000, window_bytes=1)
    assert {len(window) for window in windows[:-1]} == {range_reader.AHEAD * 32}
    assert queue.pulls <= 10_000 / 32 + range_reader.AHEAD


def test_a_failover_in_the_middle_is_waited_for(read):
    queue = Queue()
    queue.first = [
        NoRouteError("T", ["h:1"]),
        queue.answer(PullStatus.NO_NEW_MSG, 0),
        NoRouteError("T", ["h:1"]),
    ]
    assert flat(read(queue, 0, 100)) == list(range(100))


def test_a_range_that_does_not_come_fails_the_read(read):
    queue = Queue()
    queue.shown = 60
    with pytest.raises(ClusterError, match=r"nothing came for offset 60 of \[0, 100\) in 200 ms"):
        read(queue, 0, 100)
    with pytest.raises(ClusterError, match="NO_NEW_MSG"):
        read(queue, 0, 100, fail=False)


@pytest.mark.parametrize(
    ("queue", "begin", "says", "left"),
    [
        (Queue(low=30), 0, r"\[0, 90\), available are \[30, 100\): the messages", range(30, 90)),
        (Queue(high=49), 60, r"\[60, 90\), available are \[0, 49\): the queue ends", range(0)),
        (
            Queue(absent=[40, 41]),
            0,
            r"offsets \[40, .*the log behind these offsets is gone \(2",
            [*range(40), *range(42, 90)],
        ),
    ],
)
def test_what_is_lost_fails_the_read_or_is_passed_over(read, queue, begin, says, left):
    with pytest.raises(DataLossError, match=says):
        read(queue, begin, 90)
    assert flat(read(queue, begin, 90, fail=False)) == list(left)


def test_a_tag_leaves_gaps_that_are_no_loss(read):
    queue = Queue(wanted=7, high=200)
    offsets = flat(read(queue, 3, 150, tags=("a",)))
    assert offsets == [n for n in range(3, 150) if n % 7 == 0]
    assert flat(read(Queue(wanted=1000), 1, 100, tags=("a",))) == []


@pytest.mark.parametrize(
    "properties", [b"TAGS\x01a\x02", b"ORDER\x011234567890\x02", b"BORN\x011700000000000\x02"]
)
def test_records_without_a_property_crc_are_whole_whatever_their_properties_end_in(
    read, properties
):
    """A Java broker appends none by default; ten digits at the end look like half of one."""
    queue = Queue(append_prop_crc=False, properties=properties)
    assert flat(read(queue, 0, 100)) == list(range(100))


@pytest.mark.parametrize("has_crc", [True, False])
def test_a_damaged_answer_fails_the_read(read, has_crc):
    queue = Queue(append_prop_crc=has_crc, properties=b"ORDER\x011234567890\x02")
    record = message(1000, **queue.fields)
    torn = record.replace(b"body 0", b"bodx 0")
    assert torn != record
    queue.first = [queue.answer(PullStatus.FOUND, 1, torn)] * range_reader.AHEAD
    with pytest.raises(ClusterError, match=r"the reply for offsets \[0, 1\) is damaged"):
        read(queue, 0, 1)
