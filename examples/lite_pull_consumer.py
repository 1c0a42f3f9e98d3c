"""Consumes what producer.py sends at the program's own pace, in a loop of its own."""

import argparse
import asyncio

from batonmq import ConsumeFromWhere, LitePullConsumer, LitePullOptions


async def main(name_servers: str, topic: str, count: int) -> None:
    options = LitePullOptions(from_where=ConsumeFromWhere.FIRST)
    consumer = LitePullConsumer("example-pulled", name_servers=name_servers, options=options)
    consumer.subscribe(topic)
    async with consumer:
        got = 0
        async for message in consumer:
            text = message.body.decode()
            print(f"got {text!r} from queue {message.queue_id} at offset {message.queue_offset}")
            # A message counts as processed once the loop asks for the next one. Progress is stored
            # every few seconds, when a queue goes to another member, and at the end.
            got += 1
            if got == count:
                break
        await consumer.commit()  # the last message, too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleOrders")
    parser.add_argument("--count", type=int, default=0, help="end after so many; 0: never")
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic, args.count))
