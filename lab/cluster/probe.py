"""The probe: a process outside the cluster that writes without pause and reports each ack.

`python -m lab.cluster.probe` keeps several connections to every broker address and sends on each of
them in turn, at a fixed pace, whichever of them is master: it needs no route to find a new one.
Its output has a line for each acknowledged write (`Ack.text`), a first and a last one with the
number of replies by code (JSON). It ends when its input ends.

With `--acked FILE` each acknowledged write is also a JSON line of that file (`acked_line`), to be
looked for in the stores. The file is complete when the probe has ended.

A connection without a reply for a second is replaced by another one, as a client does; the old one
is still read, for the late replies of a broker that runs or is connected again.
Independent of batonmq.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO, cast

import uvloop

from lab.cluster import frames
from lab.cluster.acks import Ack, key_of
from lab.cluster.processes import input_ended

TOPIC: Final = "Faults"
QUEUES: Final = 8
CONNECT_S: Final = 0.25
RETRY_S: Final = 0.01
SILENT_S: Final = 1.0
IN_FLIGHT_MAX: Final = 64
REPLACED_MAX: Final = 4


class _Line(asyncio.Protocol):
    """One connection to one broker. `gone` is set when it has ended."""

    def __init__(self, probe: Probe, broker: int, sender: int) -> None:
        self._probe = probe
        self._broker = broker
        self._queue_id = sender % QUEUES
        self._number = next(probe.line_numbers)
        self._frames = frames.Frames()
        self._in_flight: dict[int, float] = {}
        self._transport: asyncio.Transport | None = None
        self._received_s = time.monotonic()
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    @property
    def is_silent(self) -> bool:
        waiting = next(iter(self._in_flight.values()), None)
        now = time.monotonic()
        return waiting is not None and now - max(waiting, self._received_s) > SILENT_S

    def send(self) -> None:
        if len(self._in_flight) >= IN_FLIGHT_MAX or self.gone.is_set():
            return
        assert self._transport is not None
        number = next(self._probe.numbers)
        properties = frames.key_properties(key_of(self._probe.options.prefix, number))
        ext = frames.send_ext(TOPIC, self._queue_id, properties, queues=QUEUES)
        self._in_flight[number] = time.monotonic()
        self._transport.write(frames.encode(frames.SEND_V2, ext, number, self._probe.body))

    def data_received(self, data: bytes) -> None:
        now = self._received_s = time.monotonic()
        acked = 0
        for reply in self._frames.feed(data):
            sent = self._in_flight.pop(reply.opaque, None)
            self._probe.codes[reply.code] += 1
            if sent is not None and reply.code == frames.OK:
                acked += 1
                ack = Ack(reply.opaque, self._number, self._broker, sent, now)
                self._probe.report(ack, reply.ext)
        if self._probe.options.full_load:
            for _ in range(2 * acked):  # up to the window
                self.send()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """`senders`: connections per broker. `body`: bytes. `full_load`: as much as is acknowledged."""

    brokers: list[str]
    prefix: str
    senders: int
    interval_s: float
    body: int
    full_load: bool


class Probe:
    """Writes to all brokers until it is cancelled. `acked`: a file for `acked_line`."""

    def __init__(self, options: ProbeOptions, acked: TextIO | None = None) -> None:
        self.options = options
        self.body = b"f" * options.body
        self.codes: Counter[int] = Counter()
        self.numbers = itertools.count(1)
        self.line_numbers = itertools.count(1)
        self._acked = acked
        self._lines: dict[tuple[int, int], _Line] = {}
        self._out: list[str] = []

    def report(self, ack: Ack, ext: Mapping[str, str]) -> None:
        if self._acked is not None:
            line = acked_line(self.options.prefix, ack, ext)
            self._acked.write(json.dumps(line) + "\n")
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(ack.text())

    def flush(self) -> None:
        sys.stdout.write("".join(self._out))
        sys.stdout.flush()
        self._out.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for broker in range(len(self.options.brokers)):
                for sender in range(self.options.senders):
                    tasks.create_task(self._keep(broker, sender))
            tasks.create_task(self._pace())

    async def _pace(self) -> None:
        interval_s = self.options.interval_s
        due = time.monotonic()
        for sender in itertools.cycle(range(self.options.senders)):
            for broker in range(len(self.options.brokers)):
                line = self._lines.get((broker, sender))
                if line is not None:
                    line.send()
            due = max(due + interval_s, time.monotonic() - 5 * interval_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _keep(self, broker: int, sender: int) -> None:
        """Keeps one connection to a broker, a new one whenever the old is gone or silent."""
        loop = asyncio.get_running_loop()
        host, port = frames.split_address(self.options.brokers[broker])
        folder = frames.tls_folder()
        tls = frames.tls_of(folder) if folder else None
        replaced: list[_Line] = []
        while True:
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, line = await loop.create_connection(
                        lambda: _Line(self, broker, sender), host, port, ssl=tls
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
            replaced = [one for one in replaced if not one.gone.is_set()]
            while len(replaced) >= REPLACED_MAX:
                replaced.pop(0).close()
            replaced.append(line)


def acked_line(prefix: str, ack: Ack, ext: Mapping[str, str]) -> dict[str, object]:
    """Where the reply to a send says that the message is. A producer is one connection, on which
    numbers grow in the order of sending."""
    return {
        "topic": TOPIC,
        "broker": frames.BROKER_NAME,
        "queue_id": int(ext["queueId"]),
        "queue_offset": int(ext["queueOffset"]),
        "unique_key": key_of(prefix, ack.number),
        "msg_id": ext["msgId"],
        "producer": f"{prefix}-{ack.line}",
        "number": ack.number,
    }


async def _run(probe: Probe) -> None:
    print(json.dumps(dict(probe.codes)), flush=True)
    writing = asyncio.create_task(probe.run())
    waiting = asyncio.create_task(input_ended().wait())
    await asyncio.wait({writing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if writing.done():
        writing.result()
    writing.cancel()
    probe.flush()
    print(json.dumps(dict(probe.codes)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.cluster.probe")
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--interval-ms", type=float, default=2.0)
    parser.add_argument("--body", type=int, default=128)
    parser.add_argument("--full-load", action="store_true", help="as much as is acknowledged")
    parser.add_argument(
        "--acked", type=Path, help="a file for the acknowledged writes, overwritten"
    )
    parser.add_argument("brokers", nargs="+")
    asked = parser.parse_args()
    options = ProbeOptions(
        asked.brokers, asked.prefix, asked.senders, asked.interval_ms / 1000, asked.body,
        asked.full_load,
    )  # fmt: skip
    with ExitStack() as files:
        acked = asked.acked and files.enter_context(asked.acked.open("w"))
        uvloop.run(_run(Probe(options, acked)))


if __name__ == "__main__":
    main()
