"""The probe: a process outside the cluster that writes without pause and tells what was acked.

`python -m faults.probe` keeps several connections to every broker address and sends on each of
them in turn, at a fixed pace, whoever is master just now: it finds a new master without being told.
Its output has a line per acknowledged write, see `Ack.line`. It ends when its input ends.

With `--acked FILE` each acknowledged write is a JSON line of that file as well, for those who look
for it in the stores; see `acked_line`. The file is complete when the probe has ended.

A connection on which nothing is answered any more for a second is put aside, as a client would,
and another is made; the old one is still read, to see what a woken or mended broker says late.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TextIO, cast

import uvloop

from bench import wire
from faults.records import Ack, key_of

TOPIC: Final = "Faults"
QUEUES: Final = 8
CONNECT_S: Final = 0.25
RETRY_S: Final = 0.01
SILENT_S: Final = 1.0
IN_FLIGHT_MAX: Final = 64


class _Line(asyncio.Protocol):
    """One connection to one broker. `gone` is set when it has ended."""

    def __init__(self, probe: Probe, broker: int, sender: int) -> None:
        self._probe = probe
        self._broker = broker
        self._queue_id = sender % QUEUES
        self.number = probe.next_line()
        self._frames = wire.Frames()
        self._in_flight: dict[int, float] = {}
        self._transport: asyncio.Transport | None = None
        self.gone = asyncio.Event()
        self.heard_s = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    @property
    def is_silent(self) -> bool:
        waiting = next(iter(self._in_flight.values()), None)
        now = time.monotonic()
        return waiting is not None and now - max(waiting, self.heard_s) > SILENT_S

    def send(self) -> None:
        if len(self._in_flight) >= self._probe.window or self.gone.is_set():
            return
        assert self._transport is not None
        number = self._probe.next_number()
        key = key_of(self._probe.prefix, number)
        ext = wire.send_ext(TOPIC, self._queue_id, key, wire.now_ms())
        self._in_flight[number] = time.monotonic()
        self._transport.write(wire.encode(wire.SEND_V2, ext, number, self._probe.body))

    def data_received(self, data: bytes) -> None:
        now = self.heard_s = time.monotonic()
        acked = 0
        for reply in self._frames.feed(data):
            sent = self._in_flight.pop(reply.opaque, None)
            self._probe.codes[reply.code] += 1
            if sent is not None and reply.code == wire.OK:
                acked += 1
                self._probe.tell(Ack(reply.opaque, self.number, self._broker, sent, now), reply)
        if self._probe.full_load:
            for _ in range(2 * acked):  # up to the window
                self.send()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Probe:
    """Writes to all brokers until it is cancelled."""

    def __init__(
        self,
        brokers: list[str],
        *,
        prefix: str,
        senders: int,
        interval_s: float,
        body: int,
        full_load: bool = False,
        acked: TextIO | None = None,
    ) -> None:
        self._acked = acked
        self._brokers = brokers
        self.prefix = prefix
        self._senders = senders
        self._interval_s = interval_s
        self.body = b"f" * body
        self.window = IN_FLIGHT_MAX
        self.full_load = full_load
        self.codes: Counter[int] = Counter()
        self._numbers = itertools.count(1)
        self._line_numbers = itertools.count(1)
        self._lines: dict[tuple[int, int], _Line] = {}
        self._out: list[str] = []

    def next_number(self) -> int:
        return next(self._numbers)

    def next_line(self) -> int:
        return next(self._line_numbers)

    def tell(self, ack: Ack, reply: wire.Reply) -> None:
        if self._acked is not None:
            line = acked_line(self.prefix, ack, reply.ext)
            self._acked.write(json.dumps(line) + "\n")
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(ack.text())

    def _flush(self) -> None:
        sys.stdout.write("".join(self._out))
        sys.stdout.flush()
        self._out.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for broker in range(len(self._brokers)):
                for sender in range(self._senders):
                    tasks.create_task(self._keep(broker, sender))
            tasks.create_task(self._pace())

    async def _pace(self) -> None:
        due = time.monotonic()
        for sender in itertools.cycle(range(self._senders)):
            for broker in range(len(self._brokers)):
                line = self._lines.get((broker, sender))
                if line is not None:
                    line.send()
            due = max(due + self._interval_s, time.monotonic() - 5 * self._interval_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _keep(self, broker: int, sender: int) -> None:
        """Keeps one connection to a broker, a new one whenever the old is gone or silent."""
        loop = asyncio.get_running_loop()
        host, port = wire.split_address(self._brokers[broker])
        aside: list[_Line] = []
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, line = await loop.create_connection(
                        lambda: _Line(self, broker, sender), host, port
                    )
            except (OSError, TimeoutError):
                await asyncio.sleep(RETRY_S)
                continue
            self._lines[broker, sender] = line
            while not line.gone.is_set() and not line.is_silent:
                try:
                    async with asyncio.timeout(SILENT_S / 4):
                        await line.gone.wait()
                except TimeoutError:
                    pass
            del self._lines[broker, sender]
            aside = [one for one in aside if not one.gone.is_set()]
            while len(aside) >= 4:
                aside.pop(0).close()
            aside.append(line)


def acked_line(prefix: str, ack: Ack, ext: Mapping[str, str]) -> dict[str, object]:
    """What the answer to a send says of where the message is. A producer is one connection, on
    which numbers grow as they were sent."""
    return {
        "topic": TOPIC,
        "broker": wire.BROKER_NAME,
        "queue_id": int(ext["queueId"]),
        "queue_offset": int(ext["queueOffset"]),
        "unique_key": key_of(prefix, ack.number),
        "msg_id": ext["msgId"],
        "producer": f"{prefix}-{ack.line}",
        "number": ack.number,
    }


async def _run(probe: Probe) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def heard() -> None:
        if not sys.stdin.readline():
            ended.set()

    loop.add_reader(sys.stdin.fileno(), heard)
    writing = asyncio.create_task(probe.run())
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait({writing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if writing.done():
        writing.result()
    writing.cancel()
    print(f"codes {dict(probe.codes)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="faults.probe")
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--interval-ms", type=float, default=2.0)
    parser.add_argument("--body", type=int, default=128)
    parser.add_argument("--full-load", action="store_true", help="as much as is acknowledged")
    parser.add_argument("--acked", type=Path, help="a file for what was acknowledged, made anew")
    parser.add_argument("brokers", nargs="+")
    arguments = parser.parse_args()
    with ExitStack() as files:
        acked = arguments.acked and files.enter_context(arguments.acked.open("w"))
        probe = Probe(
            arguments.brokers,
            prefix=arguments.prefix,
            senders=arguments.senders,
            interval_s=arguments.interval_ms / 1000,
            body=arguments.body,
            full_load=arguments.full_load,
            acked=acked,
        )
        uvloop.run(_run(probe))


if __name__ == "__main__":
    main()
