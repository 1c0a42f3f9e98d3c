"""Asks questions through a topic, and answers them: a call that survives a failover."""

import argparse
import asyncio
from collections.abc import Sequence

from batonmq import ConsumeContext, Message, MessageExt, NoReplyError, Producer, PushConsumer


async def main(name_servers: str, topic: str) -> None:
    asking = Producer("example-asking", name_servers=name_servers)
    replying = Producer("example-replying", name_servers=name_servers)

    async def answer(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        for message in messages:
            question = message.body.decode()
            await replying.reply(message, question.upper().encode())

    consumer = PushConsumer("example-answers", answer, name_servers=name_servers)
    consumer.subscribe(topic)
    # The two sides are usually two programs.
    async with asking, replying, consumer:
        for question in ("how are you", "what time is it"):
            try:
                # A question is delivered at least once; the first answer counts.
                reply = await asking.request(Message.of(topic, question), timeout_ms=20_000)
            except NoReplyError as error:
                raise SystemExit(f"no answer: {error}") from None
            print(f"{question!r} was answered with {reply.body.decode()!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleQuestions")
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic))
