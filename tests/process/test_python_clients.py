"""Every kind of client of this project goes on through a kill -9 of the master."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from batonmq import (
    BatonError,
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeOptions,
    ConsumeStatus,
    LitePullConsumer,
    LitePullOptions,
    Message,
    MessageExt,
    MessageQueue,
    PopConsumer,
    Producer,
    PushConsumer,
    PushConsumerOptions,
)
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

TOPIC: Final = "PythonClients"
QUESTIONS: Final = "PythonQuestions"
LANES: Final = 4
PHASE: Final = 300
"""So many messages are acknowledged before the kill, and as many behind it."""
WANTED: Final = "digit > 6 AND digit <= 7"
LIMIT_S: Final = 90
FIRST: Final = ConsumeFromWhere.FIRST


@dataclass
class Story:
    """What was sent, and what each consumer got, in order."""

    acked: list[str] = field(default_factory=list)
    in_order: dict[int, list[int]] = field(default_factory=dict)
    inside: Counter[int] = field(default_factory=Counter)
    shared: list[str] = field(default_factory=list)
    suspended: list[str] = field(default_factory=list)
    pulled: list[str] = field(default_factory=list)
    filtered: list[str] = field(default_factory=list)
    popped: list[str] = field(default_factory=list)
    given_back: dict[str, int] = field(default_factory=dict)
    done_with: set[tuple[int, int]] = field(default_factory=set)
    again: list[str] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    is_killed: bool = False
    stops: bool = False

    async def until(self, what: str, found: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not found():  # noqa: ASYNC110  many clients, one condition
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"waited in vain for {what}: {self}") from None


async def send(story: Story, producer: Producer, lane: int) -> None:
    """Numbers in their order to one queue, each until it is acknowledged."""
    number = 0
    while not story.stops:
        key = f"{lane}-{number}"
        queue = MessageQueue(TOPIC, "broker-a", lane)
        with suppress(BatonError):
            message = Message.of(TOPIC, key, keys=[key])
            message.properties["digit"] = str(number % 10)
            if (await producer.send(message, queue=queue)).acknowledged:
                story.acked.append(key)
                number += 1
        await asyncio.sleep(0.01)


def in_order(story: Story) -> Callable[..., Awaitable[ConsumeStatus]]:
    """A listener. Of each 50 one fails the first time."""

    async def listen(messages: Sequence[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        lane = context.queue.queue_id
        story.inside[lane] += 1
        if story.inside[lane] > 1:
            story.shared.append(f"{context.queue}")
        await asyncio.sleep(0.001)
        story.inside[lane] -= 1
        for message in messages:
            if message.keys == "begin":
                continue
            if message.keys.endswith("20") and message.reconsume_times == 0:
                story.suspended.append(message.keys)
                return ConsumeStatus.RECONSUME_LATER
            story.in_order.setdefault(lane, []).append(int(message.keys.split("-")[1]))
        return ConsumeStatus.SUCCESS

    return listen


async def pull(story: Story, consumer: LitePullConsumer) -> None:
    async for message in consumer:
        story.pulled.append(message.keys)


def filtered(story: Story) -> Callable[..., Awaitable[None]]:
    async def listen(messages: Sequence[MessageExt], _: ConsumeContext) -> None:
        story.filtered += [message.keys for message in messages]

    return listen


async def pop(story: Story, consumer: PopConsumer) -> None:
    """Of each ten one is not acknowledged the first time."""
    while True:
        try:
            messages = await consumer.receive(TOPIC, invisible_ms=3000, timeout_ms=1000)
            for message in messages:
                place = (message.queue_id, message.queue_offset)
                if place in story.done_with and not message.reconsume_times:
                    story.again.append(message.keys)
                story.popped.append(message.keys)
                if message.keys.endswith("5") and not message.reconsume_times:
                    story.given_back.setdefault(message.keys, 0)
                    continue
                if message.keys in story.given_back:
                    story.given_back[message.keys] = message.reconsume_times
                await consumer.ack(message)
                if not story.is_killed:
                    story.done_with.add(place)
        except BatonError:
            await asyncio.sleep(0.02)


async def ask(story: Story, producer: Producer) -> None:
    number = 0
    while not story.stops:
        question = f"question {number}"
        try:
            reply = await producer.request(Message.of(QUESTIONS, question), timeout_ms=3000)
            story.answers.append((question, reply.body.decode()))
        except BatonError as error:
            story.unanswered.append(f"{question}: {error}")
        number += 1
        await asyncio.sleep(0.03)


async def play(cluster: ClusterProcess, story: Story) -> None:
    names = cluster.name_servers
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    def client(kind: Callable[..., Any], group: str, *more: object, **named: object) -> Any:
        options = ClientOptions(instance_name=f"{group}-{len(tasks)}")
        return kind(group, *more, name_servers=names, client_options=options, **named)

    async with AsyncExitStack() as stack:
        load = await stack.enter_async_context(client(Producer, "load"))
        asking = await stack.enter_async_context(client(Producer, "asking"))
        replying = await stack.enter_async_context(client(Producer, "replying"))
        for topic in (TOPIC, QUESTIONS):
            await load.send(Message.of(topic, "begin", keys="begin"))

        async def answer(messages: Sequence[MessageExt], _: ConsumeContext) -> None:
            for message in messages:
                if message.properties.get("REPLY_TO_CLIENT"):
                    with suppress(BatonError):
                        await replying.reply(message, b"answer to " + message.body)

        push = PushConsumerOptions(
            from_where=FIRST, persist_ms=200, consume=ConsumeOptions(batch=4, concurrency=4)
        )
        for group, listener, (topic, expression, kind), orderly in (
            ("orderly", in_order(story), (TOPIC, "*", "TAG"), True),
            ("orderly", in_order(story), (TOPIC, "*", "TAG"), True),
            ("filtered", filtered(story), (TOPIC, WANTED, "SQL92"), False),
            ("answers", answer, (QUESTIONS, "*", "TAG"), False),
        ):
            tasks.append(loop.create_task(asyncio.sleep(0)))
            consumer = client(PushConsumer, group, listener, orderly=orderly, options=push)
            consumer.subscribe(topic, expression, expression_type=kind)
            await stack.enter_async_context(consumer)
        lite = client(LitePullConsumer, "lite", options=LitePullOptions(FIRST, 200))
        lite.subscribe(TOPIC)
        await stack.enter_async_context(lite)
        popping = await stack.enter_async_context(client(PopConsumer, "pops"))
        await popping.subscribe(TOPIC)
        senders = [loop.create_task(send(story, load, lane)) for lane in range(LANES)]
        senders.append(loop.create_task(ask(story, asking)))
        readers = [loop.create_task(pull(story, lite)), loop.create_task(pop(story, popping))]
        await through_a_kill(cluster, story)
        story.stops = True
        await asyncio.gather(*senders)
        await story.until("every consumer", lambda: has_all(story))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def through_a_kill(cluster: ClusterProcess, story: Story) -> None:
    await story.until("the first messages", lambda: len(story.acked) >= PHASE)
    await story.until("answers", lambda: len(story.answers) >= 5)
    await story.until("POP", lambda: len(story.popped) >= PHASE // 2)
    assert story.unanswered == []
    story.is_killed = True
    killed = cluster.master()
    cluster.kill(killed)
    at_kill, answered = len(story.acked), len(story.answers)
    await story.until("acks behind the kill", lambda: len(story.acked) >= at_kill + PHASE)
    await story.until("answers behind the kill", lambda: len(story.answers) >= answered + 5)
    await asyncio.to_thread(cluster.restart, killed)


def is_wanted(key: str) -> bool:
    """What `WANTED` says of its message."""
    return int(key.split("-")[1]) % 10 == 7


def has_all(story: Story) -> bool:
    acked = set(story.acked)
    in_order = {f"{lane}-{number}" for lane, seen in story.in_order.items() for number in seen}
    given_back = all(story.given_back.values())
    return (
        acked <= in_order
        and acked <= set(story.pulled)
        and acked <= set(story.popped)
        and {key for key in acked if is_wanted(key)} <= set(story.filtered)
        and given_back
    )


def test_every_kind_of_client_goes_on_through_a_kill(tmp_path: Path) -> None:
    """1. Two members of a group consume in order, one by SQL92, one pulls (`async for`), one pops
    and leaves some messages unacknowledged, one asks questions that another answers; four lanes of
    sends.
    2. kill -9 of the master: the sends go on, answers come.
    3. Each consumer gets every acknowledged message. No queue was in two listeners at once, and
    none left a number out; what was acknowledged to POP before the kill did not come again.
    """
    story = Story()
    with ClusterProcess(tmp_path, controllers=1, replicas=2) as cluster:
        cluster.wait_in_sync(2)
        uvloop.run(play(cluster, story))
    assert story.shared == []
    for seen in story.in_order.values():
        assert seen[0] == 0
        assert all(after <= before + 1 for before, after in pairwise(seen))
    assert story.suspended, "some failed the first time"
    assert all(map(is_wanted, story.filtered))
    assert story.again == []
    assert story.given_back and min(story.given_back.values()) >= 1
    assert all(reply == f"answer to {question}" for question, reply in story.answers)
