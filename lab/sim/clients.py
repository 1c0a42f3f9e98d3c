"""Client processes: producers and consumers of `batonmq.client`, as applications use them."""

import asyncio
import itertools
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.client.consumer.listener import ConsumeContext
from batonmq.client.consumer.options import (
    ConsumeFromWhere,
    ConsumeOptions,
    PullOptions,
    PushConsumerOptions,
)
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.errors import ClientError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.connections import ClientOptions
from batonmq.client.producer.producer import Producer, ProducerOptions
from batonmq.protocol.bodies import TopicConfig
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt, MessageQueue
from batonmq.protocol.properties import WAIT
from lab.sim.hosts import CLUSTER, CONTROLLER_ADDRESSES, GROUP, NAME_SERVERS
from lab.sim.loop import SimProcess
from lab.sim.messages import Messages, SentMessage, read_body
from lab.sim.world import World

CLIENT_OPTIONS = ClientOptions(route_poll_ms=3_000, heartbeat_ms=3_000)
SEND_MS = 3_000
_KEYS = 3
_RARELY = 0.03
_CONSUME = ConsumeOptions(concurrency=4, close_wait_ms=500)


class Client:
    """A process on a host of its own. `run` is its program."""

    def __init__(self, world: World, messages: Messages, name: str, number: int) -> None:
        self.world = world
        self.messages = messages
        self.name = name
        self.address = f"10.0.2.{number}"
        self.rng = random.Random(world.rng.getrandbits(64))
        self.process: SimProcess | None = None
        self.starts = 0
        self._names = itertools.count(1)

    def new_name(self) -> str:
        """Of a message: no other client, and no other start of this one, gives it."""
        return f"{self.address}-{self.starts}-{next(self._names)}"

    def start(self) -> None:
        if self.process is None:
            self.starts += 1
            self.process = SimProcess(self.world.loop, self.address)
            self.process.on_kill.append(self._ended)
            self.process.spawn(self._main())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _ended(self) -> None:
        self.process = None

    async def _main(self) -> None:
        process = self.process
        await self.run()
        if process is not None:
            process.kill()

    async def run(self) -> None:
        raise NotImplementedError


def producer_of(group: str) -> Producer:
    """With the times of the simulation."""
    return Producer(
        group,
        name_servers=NAME_SERVERS,
        options=ProducerOptions(send_timeout_ms=SEND_MS),
        client_options=CLIENT_OPTIONS,
    )


class Topics(Client):
    """Creates topics, and is tried again until it could."""

    def __init__(
        self, world: World, messages: Messages, number: int, topics: dict[str, int]
    ) -> None:
        super().__init__(world, messages, "admin", number)
        self._topics = topics
        self.done = False

    async def run(self) -> None:
        async with Admin(NAME_SERVERS, client_options=CLIENT_OPTIONS) as admin:
            for topic, queues in self._topics.items():
                await self._create(admin, topic, queues)
        self.done = True

    async def _create(self, admin: Admin, topic: str, queues: int) -> None:
        config = TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues)
        while True:
            try:
                if await admin.topics.create_or_update(config, cluster=CLUSTER):
                    self.messages.note_created(topic)
                    return
            except BatonError as error:
                self.world.tell(self.name, f"{topic} not created: {error}")
            await asyncio.sleep(0.1)


class Operator:
    """Commands of the admin client, each a process of its own."""

    def __init__(self, world: World) -> None:
        self.world = world

    def elect(self, broker_id: int, *, unclean: bool = False, cut: bool = False) -> None:
        """Names the next master. `cut`: with what others still acknowledge."""
        self._do(
            "not elected",
            lambda controllers: controllers.elect_master(
                CLUSTER, GROUP, broker_id, unclean=unclean, cut_later_acks=cut
            ),
        )

    def clean(self, broker_id: int) -> None:
        """Makes the controllers forget that replica."""
        self._do(
            "not cleaned",
            lambda controllers: controllers.clean_broker_data(CLUSTER, GROUP, (broker_id,)),
        )

    def _do(self, failed: str, work: Callable[[ControllerAdmin], Awaitable[object]]) -> None:
        SimProcess(self.world.loop, "10.0.2.99").spawn(self._ask(failed, work))

    async def _ask(self, failed: str, work: Callable[[ControllerAdmin], Awaitable[object]]) -> None:
        try:
            async with Admin(
                NAME_SERVERS, client_options=CLIENT_OPTIONS, timeout_ms=1_000
            ) as admin:
                await work(admin.controller(CONTROLLER_ADDRESSES))
        except BatonError as error:
            self.world.tell("operator", f"{failed}: {error}")


class Sender(Client):
    """Sends single messages, batches, and messages of keys, each to its topic."""

    def __init__(
        self,
        world: World,
        messages: Messages,
        number: int,
        topics: dict[str, int],
        rare: Sequence[str],
    ) -> None:
        """To the `rare` ones of `topics` a message is sent once in a while."""
        super().__init__(world, messages, f"producer {number}", number)
        self._topics = topics
        self._often = [topic for topic in topics if topic not in rare]
        self._rare = rare
        self._keys: dict[str, int] = {}
        self.stopping = False

    async def run(self) -> None:
        async with producer_of("Producers") as producer:
            await asyncio.gather(*(self._send_forever(producer) for _ in range(2)))

    async def _send_forever(self, producer: Producer) -> None:
        rng = self.rng
        while not self.stopping:
            await asyncio.sleep(rng.uniform(0.02, 0.15))
            topic = rng.choice(self._often)
            if self._rare and rng.random() < _RARELY:
                topic = rng.choice(self._rare)
            try:
                match rng.randrange(4):
                    case 0:
                        await self._send_batch(producer, topic)
                    case 1:
                        await self._send_keyed(producer, topic)
                    case _:
                        await self._send_one(producer, self._new(topic))
            except BatonError as error:
                self.messages.sends_failed += 1
                self.world.tell(self.name, f"not sent: {error}")

    def _new(self, topic: str, key: str = "", n: int = 0) -> SentMessage:
        return SentMessage(self.new_name(), topic, key, n)

    def _message(self, sent: SentMessage) -> Message:
        message = Message.of(sent.topic, sent.body(self.rng.choice((20, 60, 400))), keys=sent.name)
        if zlib.crc32(sent.name.encode()) % 4 == 0:
            message.properties[WAIT] = "false"  # R29
        return message

    async def _send_one(
        self, producer: Producer, sent: SentMessage, queue: MessageQueue | None = None
    ) -> bool:
        result = await producer.send(self._message(sent), queue=queue)
        if result.acknowledged:
            where = (sent.topic, result.queue.queue_id, result.queue_offset)
            self.messages.note_acked(sent, where)
        return result.acknowledged

    async def _send_keyed(self, producer: Producer, topic: str) -> None:
        """The next of a key; no other client sends of it meanwhile."""
        number = self.rng.randrange(_KEYS)
        key = f"{self.address}-{self.starts}-{topic}-{number}"
        n = self._keys.get(key, 1)
        if not n:
            return  # one is under way
        self._keys[key] = 0
        try:
            queue = MessageQueue(topic, GROUP, number % self._topics[topic])
            await self._send_one(producer, self._new(topic, key, n), queue)
        finally:
            self._keys[key] = n + 1

    async def _send_batch(self, producer: Producer, topic: str) -> None:
        queue = MessageQueue(topic, GROUP, self.rng.randrange(self._topics[topic]))
        batch = [self._new(topic) for _ in range(self.rng.randint(2, 4))]
        result = await producer.send_batch([self._message(sent) for sent in batch], queue=queue)
        if result.acknowledged:
            for index, sent in enumerate(batch):
                where = (topic, result.queue.queue_id, result.queue_offset + index)
                self.messages.note_acked(sent, where)


class SimConsumer(Client):
    """One member of a consumer group."""

    def __init__(
        self, world: World, messages: Messages, number: int, group: str, topics: Sequence[str]
    ) -> None:
        super().__init__(world, messages, f"{group} member {number}", number)
        self.group = group
        self._topics = topics
        self._leave: asyncio.Event | None = None
        messages.join(group, frozenset(topics))

    async def run(self) -> None:
        self._leave = asyncio.Event()
        consumer = self._consumer()
        self._subscribe(consumer)
        while True:
            try:
                await consumer.start()
                break
            except BatonError as error:
                self.world.tell(self.name, f"not started: {error}")
            await asyncio.sleep(0.2)
        await self._leave.wait()
        await consumer.close()

    def _subscribe(self, consumer: PushConsumer) -> None:
        for topic in self._topics:
            consumer.subscribe(topic)

    def _consumer(
        self, consume: ConsumeOptions = _CONSUME, *, orderly: bool = False
    ) -> PushConsumer:
        return PushConsumer(
            self.group,
            self._consume,
            orderly=orderly,
            name_servers=NAME_SERVERS,
            client_options=CLIENT_OPTIONS,
            options=PushConsumerOptions(
                from_where=ConsumeFromWhere.FIRST,
                rebalance_ms=2_000,
                persist_ms=700,
                pull=PullOptions(suspend_ms=3_000, timeout_ms=6_000, held_check_ms=500),
                consume=consume,
            ),
        )

    def leave(self) -> None:
        """Closes its consumer, which commits what it consumed."""
        if self.process is not None and self._leave is not None:
            self.process.run(self._leave.set)

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> Any:
        for message in messages:
            try:
                sent = read_body(message.topic, message.body)
            except ValueError as error:
                self.world.violate(str(error))
                return
            place = (message.topic, message.queue_id, message.queue_offset)
            self.messages.note_delivered(self.group, sent, place)
        chance = self.rng.random()
        if chance < 0.2:
            await asyncio.sleep(self.rng.uniform(0.2, 2.5) if chance < 0.03 else 0.02 * chance)


class Recreator(Client):
    """Sends to a topic of its own, deletes it, and creates it again under its name.

    Its `reader` is away meanwhile: one that reads on where it was in memory skips what comes to the
    new topic below that offset.
    """

    TOPIC = "TopicC"
    GROUP = "GroupC"
    PROGRESS = f"{TOPIC}@{GROUP}"
    """Its key in tables of offsets."""

    def __init__(self, world: World, messages: Messages, number: int, reader: SimConsumer) -> None:
        super().__init__(world, messages, "recreator", number)
        self._reader = reader
        self.stopping = False
        self.settled = True  # the topic is there

    async def run(self) -> None:
        options = ProducerOptions(send_timeout_ms=SEND_MS)
        client = ClientInstance(NAME_SERVERS, CLIENT_OPTIONS)
        await client.start()
        producer = Producer("Recreators", options=options, client=client)
        admin = Admin(client=client)
        await producer.start()
        while not self.settled or not self.stopping:
            await self._recreate(admin)
            sends = self.rng.randint(3, 12)
            joins_after = self.rng.randint(0, sends)  # it may find messages, or come before them
            for n in range(sends + 1):
                if n == joins_after:
                    self._reader.start()
                await asyncio.sleep(self.rng.uniform(0.01, 0.2))
                await self._send(producer)
        self._reader.start()
        await producer.close()
        await client.close()

    async def _recreate(self, admin: Admin) -> None:
        """Deletes it if it is there. Only what is sent from its next life on is promised."""
        self.settled = False
        self._reader.leave()
        while self._reader.process is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        config = TopicConfig(topic_name=self.TOPIC, read_queue_nums=2, write_queue_nums=2)
        self.messages.begin_deletion(self.TOPIC)
        await self._until_done(lambda: self._delete(admin))
        self.messages.deleted(self.TOPIC)
        await self._until_done(lambda: admin.topics.create_or_update(config, cluster=CLUSTER))
        self.messages.note_created(self.TOPIC)
        self.settled = True

    async def _delete(self, admin: Admin) -> bool:
        try:
            return bool(await admin.topics.delete(self.TOPIC, CLUSTER))
        except ClientError as error:
            # Not there: no life before, or an earlier attempt deleted it and its answer was lost.
            if "nothing was deleted" in str(error):
                return True
            raise

    async def _until_done(self, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                if await work():
                    return
            except BatonError as error:
                self.world.tell(self.name, f"not yet: {error}")
            await asyncio.sleep(0.1)

    async def _send(self, producer: Producer) -> None:
        life = self.messages.lives[self.TOPIC]
        name = self.new_name()
        sent = SentMessage(name, self.TOPIC, life=life)
        try:
            result = await producer.send(Message.of(self.TOPIC, sent.body(40), keys=name))
        except BatonError as error:
            self.messages.sends_failed += 1
            self.world.tell(self.name, f"not sent: {error}")
            return
        if result.acknowledged:
            place = (self.TOPIC, result.queue.queue_id, result.queue_offset)
            self.messages.note_acked(sent, place)
