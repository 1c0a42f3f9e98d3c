"""The sink without Spark or a cluster: order, keys, rows that wait, the list of acknowledged ones."""

import asyncio

import pytest

from batonmq.send_result import SendResult, SendStatus
from protocol.message import MessageQueue
from spark.live.sink_options import SinkOptions
from spark.live.sink_sender import SinkError, SinkSender, row_of

QUEUE = MessageQueue("T", "b", 0)


def rows_of(*bodies, prefix="job-0-0-", **more):
    return [row_of(n, prefix, {"body": body, **more}, "T") for n, body in enumerate(bodies)]


class Sender(SinkSender):
    """Sends into `stored`; `fails`: bodies whose request fails. Every queue is QUEUE."""

    def __init__(self, *, fails=(), **options):
        self.acks = []
        self.stored = []
        super().__init__(SinkOptions(("h:1",), topic="T", **options), self.acks.extend)
        self._fails = set(fails)

    async def _queue_of(self, row):
        return QUEUE if row.queue_id is not None else None

    async def _send(self, rows, queue):
        await asyncio.sleep(0)
        bodies = [row.message.body for row in rows]
        if self._fails & set(bodies):
            raise SinkError("refused")
        self.stored += bodies
        return SendResult(
            SendStatus.SEND_OK, "id", ",".join("0" * 31 + "1" for _ in rows), queue or QUEUE, 5
        )


@pytest.mark.parametrize("batch_messages", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 3, 8])
def test_behind_a_failed_request_of_a_queue_nothing_is_sent(batch_messages, in_flight):
    bodies = [b"%d" % n for n in range(12)]

    async def run(sender):
        await sender.add(rows_of(*bodies, queue_id=0))
        await sender.finish()

    options = {"batch_messages": batch_messages, "in_flight": in_flight}
    whole = Sender(**options)
    asyncio.run(run(whole))
    assert whole.stored == bodies
    assert [ack["unique_key"] for ack in whole.acks] == [
        row.unique_key for row in rows_of(*bodies, queue_id=0)
    ]
    broken = Sender(fails=[b"4"], **options)
    with pytest.raises(SinkError, match="refused"):
        asyncio.run(run(broken))
    assert broken.stored == bodies[:4]
    assert len(broken.acks) == 4


def test_a_key_names_the_row_and_not_only_its_place():
    """What is done again in another order must give no row the key of another."""
    first = rows_of(b"a", b"b", b"c")
    assert [row.unique_key for row in rows_of(b"a", b"b", b"c")] == [r.unique_key for r in first]
    assert all(row.unique_key.startswith(f"job-0-0-{row.number}-") for row in first)
    again = rows_of(b"b", b"a", b"c")
    of_body = {row.unique_key: row.message.body for row in first}
    assert all(of_body.get(row.unique_key, row.message.body) == row.message.body for row in again)
    assert again[2].unique_key == first[2].unique_key
    twice = rows_of(b"a", b"a")
    assert twice[0].unique_key != twice[1].unique_key, "equal rows are two messages"


def test_everything_that_a_row_says_is_in_its_key():
    said = [
        {"body": "x"},
        {"body": "y"},
        {"body": "x", "topic": "U"},
        {"body": "x", "keys": "k"},
        {"body": "x", "tags": "k"},
        {"body": "x", "properties": [("a", "1")]},
        {"body": "x", "properties": [("a", "1"), ("b", "2")]},
        {"body": "x", "properties": [("a", "12")]},
        {"body": "x", "queue_id": 1},
        {"body": "x", "queue_id": 1, "broker": "b"},
        {"body": "x", "sharding_key": "k"},
    ]
    keys = [row_of(0, "j-", values, "T").unique_key for values in said]
    assert len(set(keys)) == len(said)
    turned = {"body": b"x", "properties": [("b", "2"), ("a", "1")]}
    assert row_of(0, "j-", turned, "T").unique_key == keys[6], "a map has no order"
