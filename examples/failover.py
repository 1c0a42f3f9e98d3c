"""Shows a failover as an application sees it: sends, and reads everything back at the end.

While it runs, kill the master (`mqctl brokerStatus -b HOST:PORT` shows its pid), or switch:
    mqctl electMaster -bn broker-a -b 2 -c DefaultCluster
"""

import argparse
import asyncio
import time
import uuid
from collections import Counter

from batonmq import (
    ConsumeFromWhere,
    LitePullConsumer,
    LitePullOptions,
    Message,
    Producer,
    SendFailedError,
)


async def send_for(producer: Producer, topic: str, run: str, seconds: float) -> set[str]:
    """Keys of all acknowledged messages."""
    acknowledged: set[str] = set()
    address, longest, failed = "", 0.0, 0
    started = last = time.monotonic()
    while last - started < seconds:
        key = f"{run}-{len(acknowledged) + failed}"
        try:
            # Within its deadline of 3 s a send finds the new master by itself.
            result = await producer.send(Message.of(topic, "x" * 100, keys=key))
        except SendFailedError as error:
            failed += 1  # not acknowledged: it may be stored, or not
            print(f"failed: {error}")
            last = time.monotonic()
            continue
        now = time.monotonic()
        longest = max(longest, now - last)
        if result.acknowledged:
            acknowledged.add(key)
        if result.address != address:
            waited = "" if not address else f" after {(now - last) * 1000:.0f} ms without an ack"
            print(f"acknowledged by {result.address}{waited}", flush=True)
            address = result.address
        last = now
        await asyncio.sleep(0.002)
    print(f"acknowledged {len(acknowledged)}, failed {failed}, longest gap {longest * 1000:.0f} ms")
    return acknowledged


async def main(name_servers: str, topic: str, seconds: float) -> None:
    run = uuid.uuid4().hex[:8]
    async with Producer("example-steady", name_servers=name_servers) as producer:
        acknowledged = await send_for(producer, topic, run, seconds)

    options = LitePullOptions(from_where=ConsumeFromWhere.FIRST)
    consumer = LitePullConsumer(f"example-{run}", name_servers=name_servers, options=options)
    consumer.subscribe(topic)
    seen: Counter[str] = Counter()
    async with consumer:
        while not acknowledged <= seen.keys():
            messages = await consumer.poll(timeout_ms=10_000)
            if not messages:
                break  # 10 s without a message: what is missing now is lost
            seen.update(message.keys for message in messages if message.keys.startswith(run))
    lost = acknowledged - seen.keys()
    twice = sum(count > 1 for count in seen.values())
    # A try without an answer may have been stored; the next try then stores the message again.
    print(f"read back {len(seen)}: lost {len(lost)}, stored twice {twice}")
    if lost:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExampleFailover")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic, args.seconds))
