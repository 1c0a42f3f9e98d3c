"""Two consumer groups on the load's topic: one keeps up, the other one is too slow for it.

`python -m faults.aftermath.readers NAME_SERVERS` consumes until its input ends, then says in one
JSON line how many messages each group has consumed. So there is a lag to be told of, and somebody
who reads through every failover.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import uvloop

from batonmq.consume_types import ConsumeContext, ConsumeFromWhere
from batonmq.push_consumer import PushConsumer
from batonmq.push_options import ConsumeOptions, PushConsumerOptions
from bench.proc import spawn_talking
from faults.probe import TOPIC
from protocol.message import MessageExt

QUICK: Final = "demo_quick"
SLOW: Final = "demo_slow"
SLOW_S: Final = 0.05
PERSIST_MS: Final = 500
END_S: Final = 15.0


class Reader:
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
    ended = asyncio.Event()

    def heard() -> None:
        if not sys.stdin.readline():
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), heard)
    readers = {
        QUICK: Reader(QUICK, name_servers, 0.0),
        SLOW: Reader(SLOW, name_servers, SLOW_S),
    }
    async with readers[QUICK].consumer, readers[SLOW].consumer:
        await ended.wait()
    print(json.dumps({name: reader.consumed for name, reader in readers.items()}), flush=True)


class Readers:
    """Both groups as a process while a `with` block runs; `consumed` by group after it.

    Raises RuntimeError if they ended otherwise than asked to.
    """

    def __init__(self, name_servers: str, log: Path) -> None:
        self.consumed: dict[str, int] = {}
        self._log = log
        self._process = spawn_talking(
            [sys.executable, "-m", "faults.aftermath.readers", name_servers], log
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
            text = process.stdout.read() if kind is None else ""
            process.wait(END_S if kind is None else 0.0)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()
        finally:
            process.stdout.close()
        if kind is not None:
            return
        if process.returncode or not text:
            raise RuntimeError(f"the consumers ended with {process.returncode}, see {self._log}")
        self.consumed = json.loads(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="faults.aftermath.readers")
    parser.add_argument("name_servers", help="host:port, several joined by ';'")
    uvloop.run(_run(parser.parse_args().name_servers))


if __name__ == "__main__":
    main()
