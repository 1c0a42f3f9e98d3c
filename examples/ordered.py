"""Keeps the steps of each order in their order, while different orders run side by side.

Messages of one queue are ordered, so all steps of one order go to the same queue. An orderly
consumer locks its queues at the broker and handles one message of a queue at a time.
"""

import argparse
import asyncio
import uuid
import zlib
from collections import defaultdict
from collections.abc import Sequence

from batonmq import (
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    PushConsumer,
    PushConsumerOptions,
)

STEPS = ("created", "paid", "packed", "shipped")


def queue_of_order(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    """The same queue for the same key, as long as the number of queues stays the same."""
    return queues[zlib.crc32(message.keys.encode()) % len(queues)]


async def main(name_servers: str, topic: str, orders: int) -> None:
    run = uuid.uuid4().hex[:8]  # what earlier runs sent is passed over
    keys = [f"{run}-{number}" for number in range(orders)]
    async with Producer("example-steps", name_servers=name_servers) as producer:
        for step in STEPS:
            for key in keys:
                await producer.send(Message.of(topic, step, keys=key), selector=queue_of_order)

    steps: dict[str, list[str]] = defaultdict(list)
    complete = asyncio.Event()

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        for message in messages:
            steps[message.keys].append(message.body.decode())
        if all(len(steps[key]) >= len(STEPS) for key in keys):
            complete.set()
        # RECONSUME_LATER would hold back this queue until these messages succeed.
        return ConsumeStatus.SUCCESS

    consumer = PushConsumer(
        "example-in-order",
        listener,
        orderly=True,
        name_servers=name_servers,
        options=PushConsumerOptions(from_where=ConsumeFromWhere.FIRST),
    )
    consumer.subscribe(topic)
    async with consumer:
        await complete.wait()
    for key in keys:
        print(f"order {key}: {', '.join(steps[key])}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleSteps")
    parser.add_argument("--orders", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic, args.orders))
