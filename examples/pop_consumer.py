"""Receives single messages and acknowledges each (POP), as with a job queue.

Members of a group share every queue, so there may be more members than queues. What is not
acknowledged within its invisible time is delivered again, to any member.
"""

import argparse
import asyncio
import uuid

from batonmq import Message, PopConsumer, Producer


async def main(name_servers: str, topic: str) -> None:
    run = uuid.uuid4().hex[:8]
    async with Producer("example-jobs", name_servers=name_servers) as producer:
        for job in ("resize", "rotate", "crop"):
            await producer.send(Message.of(topic, job, keys=run))

    async with PopConsumer("example-workers", name_servers=name_servers) as consumer:
        await consumer.subscribe(topic)
        done = 0
        while done < 3:
            # No other member gets these messages for 10 s. Empty after the time-out.
            for message in await consumer.receive(topic, invisible_ms=10_000, timeout_ms=5_000):
                job = message.body.decode()
                if message.keys == run and job == "rotate" and not message.reconsume_times:
                    print("'rotate' cannot be done now: again in 1 s")
                    await consumer.change_invisible_time(message, 1_000)
                    continue
                await consumer.ack(message)
                if message.keys == run:  # not of an earlier run
                    print(f"{job!r} is done, try {message.reconsume_times + 1}")
                    done += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleJobs")
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic))
