"""Two consumer groups on the load's topic: one keeps up, the other one is too slow for it.

`python -m lab.faults.aftermath.readers NAME_SERVERS` consumes until its input ends, then prints the
number of messages that each group has consumed (one JSON line). So there is a lag to report, and a
consumer that reads through every failover.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import uvloop

from batonmq.client.consumer.listener import ConsumeContext
from batonmq.client.consumer.options import ConsumeFromWhere, ConsumeOptions, PushConsumerOptions
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.protocol.message import MessageExt
from lab.cluster.probe import TOPIC
from lab.cluster.processes import Helper, input_ended

QUICK: Final = "demo_quick"
SLOW: Final = "demo_slow"
SLOW_S: Final = 0.05
PERSIST_MS: Final = 500


class GroupReader:
    """One group; `pause_s` is what each message costs it, one after the other if it is not 0."""

    def __init__(self, group: str, name_servers: str, pause_s: float) -> None:
        self.consumed = 0
        self._pause_s = pause_s
        self.consumer = PushConsumer(
            group,
            self._consume,
            name_servers=name_servers,
            options=PushConsumerOptions(
                from_where=ConsumeFromWhere.FIRST,
                persist_ms=PERSIST_MS,
                consume=ConsumeOptions(concurrency=1 if pause_s else 20, batch=1 if pause_s else 8),
            ),
        )
        self.consumer.subscribe(TOPIC)

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        await asyncio.sleep(self._pause_s * len(messages))
        self.consumed += len(messages)


async def _run(name_servers: str) -> None:
    readers = {
        QUICK: GroupReader(QUICK, name_servers, 0.0),
        SLOW: GroupReader(SLOW, name_servers, SLOW_S),
    }
    async with readers[QUICK].consumer, readers[SLOW].consumer:
        await input_ended().wait()
    print(json.dumps({name: reader.consumed for name, reader in readers.items()}), flush=True)


class Readers:
    """Both groups as a process while a `with` block runs; `consumed` by group after it.

    Raises RuntimeError if the process fails.
    """

    def __init__(self, name_servers: str, log: Path) -> None:
        self.consumed: dict[str, int] = {}
        self._helper = Helper("lab.faults.aftermath.readers", name_servers, log=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.consumed = self._helper.finish()
        else:
            self._helper.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.faults.aftermath.readers")
    parser.add_argument("name_servers", help="host:port, several joined by ';'")
    uvloop.run(_run(parser.parse_args().name_servers))


if __name__ == "__main__":
    main()
