"""Sends messages that consumers see only if a local transaction was committed.

The broker stores a half message first, which no consumer sees. Then the local transaction runs, and
its outcome makes the message visible or drops it. If the outcome stays unknown, the broker asks
later: `check` answers from what the application stored.
"""

import argparse
import asyncio
import uuid

from batonmq import (
    ConsumeFromWhere,
    LitePullConsumer,
    LitePullOptions,
    Message,
    MessageExt,
    TransactionProducer,
    TransactionState,
)

# In the place of the application's database: the outcome of each payment by its key.
payments: dict[str, TransactionState] = {}


def pay(message: Message) -> TransactionState:
    """The local transaction. An exception would roll the message back."""
    match message.body:
        case b"good card":
            payments[message.keys] = TransactionState.COMMIT
        case b"stolen card":
            payments[message.keys] = TransactionState.ROLLBACK
        case _:  # paid, but this process cannot say so now: it crashed, say
            payments[message.keys] = TransactionState.COMMIT
            return TransactionState.UNKNOWN
    return payments[message.keys]


def check(message: MessageExt) -> TransactionState:
    """The broker asks what became of a transaction; any producer of the group may be asked."""
    print(f"the broker asks for the outcome of {message.body.decode()!r}")
    # Not known here means not known yet: the broker asks again.
    return payments.get(message.keys, TransactionState.UNKNOWN)


async def main(name_servers: str, topic: str) -> None:
    keys = {card: uuid.uuid4().hex for card in ("good card", "stolen card", "slow card")}
    producer = TransactionProducer("example-payments", check, name_servers=name_servers)
    consumer = LitePullConsumer(
        "example-receipts",
        name_servers=name_servers,
        options=LitePullOptions(from_where=ConsumeFromWhere.FIRST),
    )
    consumer.subscribe(topic)
    async with producer, consumer:
        for card, key in keys.items():
            # Seconds until the broker asks for an outcome; by default the broker's own time.
            message = Message.of(topic, card, keys=key)
            message.properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] = "1"
            result = await producer.send_in_transaction(message, pay)
            print(f"{card}: {result.state.name}, ended: {result.ended}")
        expected = {keys["good card"], keys["slow card"]}
        async for received in consumer:
            if received.keys not in keys.values():
                continue  # of an earlier run
            print(f"consumers see {received.body.decode()!r}")
            expected.remove(received.keys)
            if not expected:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name-servers", default="127.0.0.1:9876", help="host:port;host:port")
    parser.add_argument("--topic", default="ExamplePayments")
    args = parser.parse_args()
    asyncio.run(main(args.name_servers, args.topic))
