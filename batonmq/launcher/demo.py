"""`batonmq demo`: a cluster under load, its master killed with kill -9, and the result.

Everything is real: processes, a producer, a consumer, SIGKILL. A message counts as lost only if its
acknowledgement was received and it is in no queue of the cluster at the end; every queue is read
from its first to its last offset for that. The time lines come from the controllers' history.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from batonmq.client.consumer.listener import ConsumeContext
from batonmq.client.consumer.options import ConsumeFromWhere, PushConsumerOptions
from batonmq.client.consumer.pull_consumer import PullConsumer
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.producer.producer import Producer, ProducerOptions
from batonmq.history.fold import failovers
from batonmq.history.story import Story
from batonmq.history.story_text import document, lines
from batonmq.launcher.cluster import LocalCluster, stop_event
from batonmq.launcher.events import ClusterEvent, Report, report_json, report_line
from batonmq.launcher.forks import ForkServer
from batonmq.launcher.layout import HOST, plan
from batonmq.launcher.preparation import StartError
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt
from batonmq.runtime.clock import boot_s, wall_ms
from batonmq.runtime.sockets import is_port_free

TOPIC: Final = "DemoTopic"
WHOLE_S: Final = 30.0
FULL_SET_S: Final = 30.0
DRAIN_S: Final = 20.0
SENDERS: Final = 4


@dataclass(slots=True)
class Tally:
    """What was sent, acknowledged and consumed, by the messages' keys."""

    sent: int = 0
    acked: dict[str, float] = field(default_factory=dict)
    failed: int = 0
    last_ack: float = 0.0
    longest_gap_ms: float = 0.0
    consumed: dict[str, int] = field(default_factory=dict)

    def ack(self, key: str, now: float) -> None:
        if self.last_ack:
            self.longest_gap_ms = max(self.longest_gap_ms, (now - self.last_ack) * 1000)
        self.acked[key] = self.last_ack = now

    @property
    def duplicates(self) -> int:
        return sum(count - 1 for count in self.consumed.values())


def free_base_port(replicas: int) -> int:
    """The first free port range, from the usual one on.

    All below 32768: the kernel gives ports above it to connections, even one of a stopped broker.
    """
    for base in range(9876, 30_000, 1500):
        layout = plan(Path("/nowhere"), replicas=replicas, base_port=base)
        if all(is_port_free(HOST, port) for node in layout.nodes for port in node.ports):
            return base
    raise StartError("no free range of ports was found: name one with --base-port")


async def run_demo(
    fork_server: ForkServer,
    data_dir: Path,
    *,
    kills: int,
    replicas: int,
    base_port: int,
    rate: int,
    as_json: bool,
) -> int:
    """Runs it; 0 if nothing was lost, 1 otherwise. `rate` in sends per second, `base_port` 0: any
    free range. Raises StartError."""
    report = report_json if as_json else report_line
    base_port = base_port or free_base_port(replicas)
    layout = plan(data_dir, replicas=replicas, base_port=base_port)
    text = f"3 controllers and {replicas} brokers on ports from {base_port}, data in {data_dir}"
    where = {"basePort": base_port, "dataDir": str(data_dir)}
    report(ClusterEvent("demo_begins", text, where))
    stop = asyncio.create_task(stop_event().wait(), name="stop")
    cluster = LocalCluster(layout, report, fork_server)
    try:
        await cluster.start()
        await cluster.wait_whole(WHOLE_S)
        play = asyncio.create_task(Demo(cluster, report, kills, rate).play(), name="play")
        await asyncio.wait({stop, play}, return_when=asyncio.FIRST_COMPLETED)
        if play.done():
            return play.result()
        play.cancel()
        # Its clients are closed while there is a cluster.
        await asyncio.gather(play, return_exceptions=True)
        report(ClusterEvent("interrupted", "stopped before the verdict", bad=True))
        return 1
    finally:
        stop.cancel()
        await cluster.stop()


class Demo:
    def __init__(self, cluster: LocalCluster, report: Report, kills: int, rate: int) -> None:
        self._cluster = cluster
        self._layout = cluster.layout
        self._report_event = report
        self._kills = kills
        self._rate = rate
        self._tally = Tally()
        self._group = cluster.layout.groups[0]

    async def play(self) -> int:
        names = self._layout.name_server_addresses
        producer = Producer("demo_producer", name_servers=names, options=ProducerOptions(10_000))
        consumer = PushConsumer(
            "demo_consumer",
            self._consume,
            name_servers=names,
            options=PushConsumerOptions(from_where=ConsumeFromWhere.FIRST),
        )
        consumer.subscribe(TOPIC)
        async with producer:
            # The topic exists before the first kill, so no gap is the time to create it.
            await producer.send(Message.of(TOPIC, b"warm-up", keys="warm-up"))
            async with consumer:
                senders = [
                    asyncio.create_task(self._send(producer, number), name=f"sender-{number}")
                    for number in range(SENDERS)
                ]
                for number in range(1, self._kills + 1):
                    await self._kill_once(number)
                await asyncio.sleep(1.0)
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)
                await self._drain()
        return await self._verdict(names)

    async def _send(self, producer: Producer, number: int) -> None:
        pause = SENDERS / self._rate
        while True:
            key = f"{number}-{self._tally.sent}"
            self._tally.sent += 1
            message = Message.of(TOPIC, b"baton " * 170 + key.encode(), keys=key)
            try:
                result = await producer.send(message)
            except BatonError:
                self._tally.failed += 1
            else:
                if result.acknowledged:
                    self._tally.ack(key, boot_s())
                else:
                    self._tally.failed += 1
            await asyncio.sleep(pause)

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        for message in messages:
            self._tally.consumed[message.keys] = self._tally.consumed.get(message.keys, 0) + 1

    async def _kill_once(self, number: int) -> None:
        await asyncio.sleep(1.0)
        address = self._cluster.view.groups[self._group].master_address
        node = self._cluster.broker_at(address)
        pid = self._cluster.children.by_name[node.name].pid
        assert pid is not None, "the recorded master has no process"
        killed_ms = wall_ms()
        killed_at = boot_s()
        self._report(
            "kill",
            f"kill -9 number {number}: the master {node.name} at {address} (pid {pid})",
            number=number,
            address=address,
            pid=pid,
        )
        os.kill(pid, signal.SIGKILL)
        await self._await_failover(number, address, killed_ms, killed_at)
        await self._restart(node.name, killed_ms)

    async def _await_failover(
        self, number: int, old_master: str, killed_ms: int, killed_at: float
    ) -> None:
        await self._until(
            # An acknowledgement that was on its way at the kill shows no new master.
            lambda: self._tally.last_ack > killed_at + 0.001,
            30.0,
            "a write is acked",
        )
        gap_ms = (self._tally.last_ack - killed_at) * 1000
        await self._until(
            lambda: self._cluster.view.groups[self._group].master_address != old_master,
            10.0,
            "a new master is recorded",
        )
        story = await self._story(killed_ms, lambda found: found.first_ack_ms > 0)
        text = f"first acknowledged write {gap_ms:.0f} ms after the kill"
        if story is not None:
            text += "\n" + "\n".join(f"          {line}" for line in lines(story))
        timeline = document(story) if story else None
        self._report("failover", text, number=number, gapMs=round(gap_ms, 1), timeline=timeline)

    async def _restart(self, name: str, killed_ms: int) -> None:
        await self._cluster.children.start(name)
        await self._until(
            lambda: self._cluster.view.is_whole(self._layout), FULL_SET_S, "the set is full again"
        )
        rejoin = await self._story(killed_ms, lambda found: True)
        cut = rejoin.truncated_bytes if rejoin else 0
        text = f"{name} is back in the set; it truncated {cut} unacknowledged bytes and caught up"
        self._report("rejoined", text, name=name, truncatedBytes=cut)

    async def _story(self, since_ms: int, complete: Callable[[Story], bool]) -> Story | None:
        """The latest election since `since_ms`; waits a moment for reports still under way."""
        story = None
        for _ in range(40):
            events = await self._cluster.controller.history(self._group)
            found = [
                failover for failover in failovers(events) if failover.elected_ms >= since_ms - 5
            ]
            story = found[-1] if found else None
            if story is not None and complete(story):
                break
            await asyncio.sleep(0.05)
        return story

    def _report(self, kind: str, text: str, *, bad: bool = False, **fields: object) -> None:
        self._report_event(ClusterEvent(kind, text, fields, bad=bad))

    async def _until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = boot_s() + seconds
        while not done():
            if boot_s() > deadline:
                raise StartError(f"{what}: not within {seconds:.0f} s")
            await asyncio.sleep(0.005)

    async def _drain(self) -> None:
        deadline = boot_s() + DRAIN_S
        while boot_s() < deadline:
            if self._tally.acked.keys() <= self._tally.consumed.keys():
                return
            await asyncio.sleep(0.05)

    async def _verdict(self, names: str) -> int:
        stored = await stored_keys(names, TOPIC)
        tally = self._tally
        lost = sorted(tally.acked.keys() - stored)
        unread = len(tally.acked.keys() - tally.consumed.keys())
        fields = {
            "sent": tally.sent,
            "acknowledged": len(tally.acked),
            "lost": len(lost),
            "notConsumed": unread,
            "duplicates": tally.duplicates,
            "longestGapMs": round(tally.longest_gap_ms, 1),
            "kills": self._kills,
        }
        text = (
            f"sent {tally.sent:,}, acknowledged {len(tally.acked):,}, lost {len(lost)},"
            f" duplicates {tally.duplicates}, longest gap {tally.longest_gap_ms:.0f} ms"
        )
        if lost:
            text += f"\nlost: {', '.join(lost[:10])}"
        if unread:
            text += f"\nnot consumed in time: {unread}"
        bad = bool(lost or unread)
        self._report("verdict", text, bad=bad, **fields)
        return 1 if bad else 0


async def stored_keys(names: str, topic: str) -> set[str]:
    """The keys of all messages of a topic, read queue by queue from first to last."""
    keys: set[str] = set()
    async with PullConsumer("demo_audit", name_servers=names) as consumer:
        for queue in await consumer.fetch_queues(topic):
            offset = await consumer.min_offset(queue)
            end = await consumer.max_offset(queue)
            while offset < end:
                result = await consumer.pull(queue, offset, max_messages=32)
                keys.update(message.keys for message in result.messages)
                offset = result.next_begin_offset
    return keys
