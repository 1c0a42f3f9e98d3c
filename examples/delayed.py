"""Sends messages that consumers get later, to the millisecond, and takes one of them back."""

import argparse
import asyncio
import time
import uuid
from collections.abc import Sequence

from batonmq import (
    ConsumeContext,
    ConsumeFromWhere,
    Message,
    MessageExt,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    ResponseError,
)


async def main(name_servers: str, topic: str) -> None:
    run = uuid.uuid4().hex[:8]
    got: asyncio.Queue[str] = asyncio.Queue()

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        for message in messages:
            if message.keys == run:  # not of an earlier run
                got.put_nowait(message.body.decode())

    consumer = PushConsumer(
        "example-later",
        listener,
        name_servers=name_servers,
        options=PushConsumerOptions(from_where=ConsumeFromWhere.FIRST),
    )
    consumer.subscribe(topic)
    async with Producer("example-timers", name_servers=name_servers) as producer, consumer:
        started = time.monotonic()
        # By a delay in seconds, or at a time: a datetime with a time zone, or seconds since 1970.
        await producer.send(Message.of(topic, "first", keys=run), delay=0.5)
        await producer.send(Message.of(topic, "third", keys=run), deliver_at=time.time() + 2)
        second = await producer.send(Message.of(topic, "second", keys=run), delay=1)
        # Until it is due a message can be taken back. Brokers do not allow it by default:
        # mqctl updateBrokerConfig -c DefaultCluster -k recallMessageEnable -v true
        try:
            await producer.recall(topic, second.recall_handle)
            print("recalled 'second'")
        except ResponseError as error:
            print(f"not recalled: {error}")
        text = ""
        while text != "third":
            text = await got.get()
            print(f"got {text!r} after {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleLater")
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic))
