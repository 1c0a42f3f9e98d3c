"""What a topic's queues hold, and whether that is what was acknowledged.

Reads go through the ordinary client, queue by queue from the first to the last offset.
"""

from collections import Counter
from collections.abc import Iterable

from batonmq import ClientOptions
from batonmq.blocking import BlockingPullConsumer
from batonmq.client.consumer.pulling import PullStatus
from batonmq.protocol.message import MessageExt, MessageQueue
from batonmq.protocol.records.codec import decode_records
from lab.cluster import frames
from lab.cluster.connection import BlockingConnection
from lab.cluster.writer import WriterThread, number_in

RETRIES_MAX = 1000
"""Answers without a message, for example while nothing is confirmed."""


def read_topic(
    name_servers: str, topic: str, options: ClientOptions | None = None
) -> dict[int, list[MessageExt]]:
    """All messages below confirmOffset, by queue id, in queue order."""
    with BlockingPullConsumer(
        "reader", name_servers=name_servers, client_options=options
    ) as consumer:
        return {
            queue.queue_id: _read_queue(consumer, queue) for queue in consumer.fetch_queues(topic)
        }


def first_messages(address: str, topic: str, count: int) -> list[MessageExt]:
    """At least the first `count` messages of queue 0, as that broker serves them. Fails if it
    refuses, for example because it is not the master."""
    found: list[MessageExt] = []
    retries = 0
    with BlockingConnection(address) as connection:
        while len(found) < count:
            reply = connection.pull(topic, len(found))
            retries += reply.code == frames.PULL_RETRY
            assert reply.code == frames.OK or retries < RETRIES_MAX, reply
            found += decode_records(reply.body)
    return found


def stored_keys(name_servers: str, topic: str) -> Counter[str]:
    """How often each key (KEYS) is in the topic."""
    stored = read_topic(name_servers, topic)
    return Counter(message.keys for queue in stored.values() for message in queue)


def _read_queue(consumer: BlockingPullConsumer, queue: MessageQueue) -> list[MessageExt]:
    offset = consumer.min_offset(queue)
    found: list[MessageExt] = []
    while offset < consumer.max_offset(queue):
        result = consumer.pull(queue, offset, 32)
        if result.status is PullStatus.FOUND:
            found += result.messages
        offset = max(result.next_begin_offset, offset)
    return found


def check_writers(
    name_servers: str,
    topic: str,
    writers: Iterable[WriterThread],
    options: ClientOptions | None = None,
) -> int:
    """Every acknowledged message is where its ack said, in order, once per queue offset.

    The number of messages in the topic. Fails naming what is lost.
    """
    stored = read_topic(name_servers, topic, options)
    for writer in writers:
        messages = stored.get(writer.queue_id, [])
        offsets = [message.queue_offset for message in messages]
        strays = [(want, seen) for want, seen in enumerate(offsets) if want != seen]
        assert not strays, f"queue offsets are 0, 1, 2, … without doubles, not {strays[:3]}"
        numbers = [number_in(message.body) for message in messages]
        assert {queue_id for queue_id, _ in numbers} <= {writer.queue_id}
        by_offset = {offset: number for offset, (_, number) in zip(offsets, numbers, strict=True)}
        lost = [ack for ack in writer.acks if by_offset.get(ack.queue_offset) != ack.number]
        assert not lost, f"{len(lost)} acknowledged messages lost, the first: {lost[0]}"
        order = [number for _, number in numbers]
        assert order == sorted(order), f"queue {writer.queue_id} holds its numbers out of order"
    return sum(map(len, stored.values()))
