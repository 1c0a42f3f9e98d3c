"""Sends messages one by one, then a batch, and prints where each was stored."""

import argparse
import asyncio

from batonmq import Message, Producer


async def main(name_servers: str, topic: str, count: int) -> None:
    async with Producer("example-producers", name_servers=name_servers) as producer:
        for number in range(count):
            message = Message.of(
                topic,
                f"espresso {number}",
                tags="coffee",  # consumers can subscribe to some tags only
                keys=f"order-{number}",  # `mqctl queryMsgByKey` finds the message by it
            )
            result = await producer.send(message)
            # True: every in-sync replica has it, so it survives the loss of the master.
            # False: stored, but not confirmed in time. Send again if that matters.
            assert result.acknowledged, result.status
            print(f"sent order-{number} to {result.queue} at offset {result.queue_offset}")

        # One request, one queue, all or nothing.
        batch = [Message.of(topic, f"tea {number}", tags="tea") for number in range(3)]
        result = await producer.send_batch(batch)
        print(f"sent a batch of {len(batch)} to {result.queue} from offset {result.queue_offset}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleOrders")
    parser.add_argument("--count", type=int, default=10)
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic, args.count))
