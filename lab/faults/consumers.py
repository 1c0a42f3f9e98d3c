"""Two consumer groups that read the load through every fault, and what each of them was given.

`python -m lab.faults.consumers NAME_SERVERS PREFIX FOLDER` consumes until its input ends. The
number of each delivered write of the probe of that prefix is a line of `FOLDER/GROUP`. One group
stays; the other one comes and goes, so queues are rebalanced and offsets are picked up where they
were left.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self, TextIO

import uvloop

from batonmq.client.consumer.listener import ConsumeContext
from batonmq.client.consumer.options import ConsumeFromWhere, PushConsumerOptions
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt
from lab.cluster.acks import Ack, padded, parts_of
from lab.cluster.checks import BrokenPromise
from lab.cluster.probe import TOPIC
from lab.cluster.processes import Helper, input_ended

STAYING: Final = "faults_staying"
COMING: Final = "faults_coming"
GROUPS: Final = (STAYING, COMING)
STAY_S: Final = 4.0
AWAY_S: Final = 1.0
PERSIST_MS: Final = 500
DELIVERY_S: Final = 60.0
LOOK_S: Final = 0.05


class GivenFile:
    """What one group was given, written as it comes. A write counts once its line is out: a
    message that this process loses with its end is given again."""

    def __init__(self, prefix: str, file: TextIO) -> None:
        self._prefix = padded(prefix)
        self._file = file

    async def consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        keys = (parts_of(message.uniq_key) for message in messages)
        numbers = [number for prefix, number in keys if prefix == self._prefix]
        self._file.write("".join(f"{number}\n" for number in numbers))
        self._file.flush()


def _consumer(group: str, name_servers: str, given: GivenFile) -> PushConsumer:
    options = PushConsumerOptions(from_where=ConsumeFromWhere.FIRST, persist_ms=PERSIST_MS)
    consumer = PushConsumer(group, given.consume, name_servers=name_servers, options=options)
    consumer.subscribe(TOPIC)
    return consumer


async def _come_and_go(name_servers: str, given: GivenFile) -> None:
    while True:
        with contextlib.suppress(BatonError):  # no broker answers: it tries again
            async with _consumer(COMING, name_servers, given):
                await asyncio.sleep(STAY_S)
        await asyncio.sleep(AWAY_S)


async def _run(name_servers: str, prefix: str, folder: Path) -> None:
    with contextlib.ExitStack() as files:
        staying, coming = (
            GivenFile(prefix, files.enter_context((folder / group).open("a"))) for group in GROUPS
        )
        async with _consumer(STAYING, name_servers, staying):
            guest = asyncio.create_task(_come_and_go(name_servers, coming))
            print("ready", flush=True)
            await input_ended().wait()
            guest.cancel()
            await asyncio.gather(guest, return_exceptions=True)
    print("{}", flush=True)


class GivenNumbers:
    """What the groups whose files are in `folder` were given so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers: dict[str, set[int]] = {group: set() for group in GROUPS}
        self._read: dict[str, int] = dict.fromkeys(GROUPS, 0)

    def check(self, acks: Iterable[Ack], limit_s: float = DELIVERY_S) -> list[BrokenPromise]:
        """Waits until each group was given each of these writes at least once; what is missing."""
        wanted = {ack.number for ack in acks}
        missing: dict[str, list[int]] = {}
        deadline = time.monotonic() + limit_s
        while True:
            for group in GROUPS:
                self._read_on(group)
            missing = {group: sorted(wanted - self._numbers[group]) for group in GROUPS}
            if not any(missing.values()) or time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        return [
            BrokenPromise("not delivered", f"{len(lost)} writes to {group}, the first: {lost[:5]}")
            for group, lost in missing.items()
            if lost
        ]

    def _read_on(self, group: str) -> None:
        path = self._folder / group
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read[group])
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[group] += whole
        self._numbers[group].update(map(int, data[:whole].split()))


class Consumers(GivenNumbers):
    """The process of both groups, with what they were given."""

    def __init__(self, name_servers: str, prefix: str, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir()
        log = folder / "process.log"
        self._helper = Helper("lab.faults.consumers", name_servers, prefix, str(folder), log=log)

    def __enter__(self) -> Self:
        self._helper.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self._helper.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.faults.consumers")
    parser.add_argument("name_servers", help="host:port, several joined by ';'")
    parser.add_argument("prefix", help="of the probe whose writes count")
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    uvloop.run(_run(asked.name_servers, asked.prefix, asked.folder))


if __name__ == "__main__":
    main()
