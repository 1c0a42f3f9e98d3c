"""Consumes what producer.py sends: the client calls a listener with each message.

Members of a group share the queues of a topic: start it twice, and each gets a part.
"""

import argparse
import asyncio
from collections.abc import Sequence

from batonmq import (
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    MessageExt,
    PushConsumer,
    PushConsumerOptions,
)


async def main(name_servers: str, topic: str, tags: str, count: int) -> None:
    enough = asyncio.Event()
    seen: set[str] = set()

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        for message in messages:
            text = message.body.decode()
            print(f"got {text!r} from {context.queue} at offset {message.queue_offset}")
            # Delivery is at least once: after a crash or a failover a message may come again.
            seen.add(message.uniq_key)
        if count and len(seen) >= count:
            enough.set()
        # RECONSUME_LATER, or an exception: the broker delivers these messages again later.
        return ConsumeStatus.SUCCESS

    # FIRST: a new group begins at the oldest message. A known group continues where it was.
    options = PushConsumerOptions(from_where=ConsumeFromWhere.FIRST)
    consumer = PushConsumer("example-pushed", listener, name_servers=name_servers, options=options)
    consumer.subscribe(topic, tags)
    async with consumer:
        await enough.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleOrders")
    parser.add_argument("--tags", default="coffee || tea", help="`*` for all")
    parser.add_argument("--count", type=int, default=0, help="end after so many; 0: never")
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic, args.tags, args.count))
