"""A built-in load: how many messages a second a topic takes, and how long each waits."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from batonmq.mqctl.context import CommandContext
from batonmq.mqctl.output import WaitLine
from batonmq.mqctl.params import COUNT, SECONDS, command, complete
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message
from batonmq.runtime.clock import boot_s

if TYPE_CHECKING:
    from batonmq.client.producer.producer import Producer

GROUP = "mqctl_bench"
SHOWN_EVERY_S = 1.0
_COUNTS = re.compile(r" after \d+ attempts in \d+ ms")
PERCENTILES = (50, 90, 99, 99.9)


@command("bench", writes=True)
@click.argument("topic", shell_complete=complete("topics"))
@click.option("--seconds", type=SECONDS, default=10.0, show_default=True, help="How long.")
@click.option("--size", type=COUNT, default=1024, show_default=True, help="Bytes of a body.")
@click.option("--parallel", type=COUNT, default=16, show_default=True, help="Sends at a time.")
@click.option("--rate", type=COUNT, help="At most so many a second; default: as fast as it goes.")
async def bench(
    context: CommandContext, topic: str, seconds: float, size: int, parallel: int, rate: int | None
) -> None:
    """The messages stay in the topic: use one of its own. One process sends, so a group with more
    cores than that takes more. Ends with 1 if a send was not acknowledged.

    JSON: topic, seconds, sends, acknowledged, failed (error text to count), perSecond,
    bytesPerSecond, latencyMs ({"p50": ..., "max": ...})."""
    load = BenchLoad(topic, bytes(size), rate)
    async with context.producer(GROUP) as sender:
        await load.run(sender, parallel, seconds)
    _show(context, load.document())
    if load.failed:
        context.failed = True


class BenchLoad:
    """Sends that run at the same time, and what became of them. Times in seconds."""

    def __init__(self, topic: str, body: bytes, rate: int | None = None) -> None:
        self._topic, self._body, self._rate = topic, body, rate
        self._begun = 0
        self.waits: list[float] = []
        """Of each acknowledged send."""
        self.failed: Counter[str] = Counter()
        self.passed_s = 0.0

    async def run(self, sender: Producer, parallel: int, seconds: float) -> None:
        began = boot_s()
        lanes = [self._lane(sender, began, began + seconds) for _ in range(parallel)]
        work = asyncio.gather(*lanes)
        with WaitLine(f"sending for {seconds:g} s ...") as progress:
            while not work.done():
                await asyncio.wait([work], timeout=SHOWN_EVERY_S)
                counts = f"{len(self.waits)} acknowledged, {self.failed.total()} failed"
                progress.say(f"{boot_s() - began:.0f} of {seconds:g} s: {counts} ...")
        await work
        self.passed_s = boot_s() - began

    async def _lane(self, sender: Producer, began: float, end: float) -> None:
        while (now := boot_s()) < end:
            if self._rate is not None:
                due = began + self._begun / self._rate
                # Before the pause: the other lanes must not wait for the same moment.
                self._begun += 1
                if due > now:
                    await asyncio.sleep(due - now)
                    if due >= end:
                        return
            sent = boot_s()
            try:
                result = await sender.send(Message.of(self._topic, self._body))
            except BatonError as error:
                # Without counts and times: each send would be a failure of its own.
                self.failed[_COUNTS.sub("", str(error))] += 1
                continue
            if result.acknowledged:
                self.waits.append(boot_s() - sent)
            else:
                self.failed[str(result.status)] += 1

    def document(self) -> dict[str, Any]:
        waits = sorted(self.waits)
        latency = {f"p{p:g}": _ms(waits, p) for p in PERCENTILES} | {"max": _ms(waits, 100)}
        per_second = len(waits) / self.passed_s if self.passed_s else 0.0
        return {
            "topic": self._topic,
            "seconds": round(self.passed_s, 3),
            "sends": len(waits) + self.failed.total(),
            "acknowledged": len(waits),
            "failed": dict(self.failed),
            "perSecond": round(per_second, 1),
            "bytesPerSecond": round(per_second * len(self._body)),
            "latencyMs": latency,
        }


def _ms(waits: list[float], percentile: float) -> float | None:
    """The smallest time that so many percent did not exceed; None without any."""
    if not waits:
        return None
    at = max(0, -(-len(waits) * percentile // 100) - 1)
    return round(waits[min(int(at), len(waits) - 1)] * 1000, 3)


def _show(context: CommandContext, found: dict[str, Any]) -> None:
    if context.out.wrote_json(found):
        return
    rows = [
        ("Acknowledged", f"{found['acknowledged']} of {found['sends']} in {found['seconds']} s"),
        ("Rate", f"{found['perSecond']} a second, {found['bytesPerSecond'] / 1e6:.1f} MB a second"),
    ]
    latencies = found["latencyMs"].items()
    rows += [(f"Latency {name}", f"{ms} ms") for name, ms in latencies if ms is not None]
    context.out.fields(rows + [(f"Failed {count}", why) for why, count in found["failed"].items()])
