"""The features that one life uses: their clients, and the checkers together."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from batonmq.client.admin.admin import Admin
from batonmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from batonmq.client.consumer.options import ConsumeOptions
from batonmq.client.consumer.push_consumer import PushConsumer
from batonmq.client.producer.producer import Producer
from batonmq.protocol.bodies import SubscriptionGroupConfig
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message, MessageExt
from batonmq.remoting.command import RemotingCommand
from lab.sim.clients import CLIENT_OPTIONS, Client, SimConsumer, Topics, producer_of
from lab.sim.cluster import SimCluster
from lab.sim.features import delays, filters, orderly, pops, questions, retries, transactions
from lab.sim.features.log import FeatureLog
from lab.sim.hosts import CLUSTER, DELAY_LEVELS_S, NAME_SERVERS
from lab.sim.messages import Messages

GROUP = "GroupF"
_QUEUES = 2
_RECALLED = 0.3
_FAILS = (0, 0, 0, 0, 0, 1, 1, 2, 99)
"""How often a message fails; 99: for good."""


class Features:
    """`clients` run from the start; `killable` are those of them that faults may meet."""

    def __init__(self, cluster: SimCluster, messages: Messages) -> None:
        settings = cluster.settings
        self.log = log = FeatureLog(cluster)
        self.clients: list[Client] = []
        self.killable: list[Client] = []
        self._topics: list[str] = []
        wishes = delays.Wishes()
        if settings.delays or settings.retries:
            delays.Delays(log, GROUP, wishes)
        of_retries = retries.Retries(log, GROUP)
        if settings.transactions:
            ends = transactions.Transactions(log, GROUP)
            self._add(transactions.TransactionSender(ends, messages, 12))
        names = {delays.TOPIC: settings.delays, retries.TOPIC: settings.retries}
        sent = [topic for topic, is_on in names.items() if is_on]
        read = [*sent, *([transactions.TOPIC] if settings.transactions else [])]
        if read:
            self._add(FailingReader(of_retries, messages, 13, read))
        if settings.orderly:
            sent.append(orderly.TOPIC)
            locks = orderly.Locks(log)
            for number in (15, 16):
                self._add(orderly.OrderlyReader(locks, messages, number), settings.locks_expire)
        if settings.pops:
            sent.append(pops.TOPIC)
            of_pops = pops.Pops(log, in_order=settings.pops_in_order)
            for number in (17, 18):
                self._add(pops.PopMember(of_pops, messages, number))
        of_filters = None
        if settings.filters:
            sent.append(filters.TOPIC)
            of_filters = filters.Filters(log, random.Random(cluster.rng.getrandbits(64)))
            self._add(filters.FilteringReader(of_filters, messages, 19))
        if settings.questions:
            read.append(questions.TOPIC)
            of_questions = questions.AnswerChecker(log)
            self._add(questions.Asker(of_questions, messages, 20))
            self._add(questions.Replier(of_questions, messages, 21))
        if sent:
            self._add(FeatureSender(log, messages, 11, sent, wishes, of_filters))
        self._topics = sorted({*sent, *read})
        self.setup = Setup(cluster, messages, 10, dict.fromkeys(self._topics, _QUEUES))

    def _add(self, client: Client, is_killable: bool = True) -> None:
        client.rng = random.Random(f"{client.name} {self.log.cluster.rng.getrandbits(64)}")
        self.clients.append(client)
        if is_killable:
            self.killable.append(client)

    def check(self) -> None:
        self.log.read()
        for checker in self.log.checkers:
            checker.check()

    def stop(self) -> None:
        """Nothing new is sent; what a wrong clock put off for long is due by now."""
        clocks = self.log.cluster.clocks
        self.log.stopping = True
        clocks.passed_s += clocks.farthest_s

    def pending(self) -> str:
        """What is not done yet, empty if everything is."""
        if self.log.stands_down:
            return ""
        self.log.read()
        return "; ".join(filter(None, (checker.pending() for checker in self.log.checkers)))


class Setup(Topics):
    """Makes the topics, and the group that pops."""

    async def run(self) -> None:
        await super().run()
        self.done = False
        config = SubscriptionGroupConfig(group_name=pops.GROUP, retry_max_times=pops.MAX)
        async with Admin(NAME_SERVERS, client_options=CLIENT_OPTIONS) as admin:
            while not self.done:
                try:
                    self.done = bool(await admin.consumer_groups.update(config, cluster=CLUSTER))
                except BatonError as error:
                    self.world.tell(self.name, f"{pops.GROUP} not created: {error}")
                    await asyncio.sleep(0.1)


class FeatureSender(Client):
    """Sends to all `topics`, delayed to that of delays: as noted in `wishes` before, and with
    properties to that of `of_filters`."""

    def __init__(
        self,
        log: FeatureLog,
        messages: Messages,
        number: int,
        topics: Sequence[str],
        wishes: delays.Wishes,
        of_filters: filters.Filters | None,
    ) -> None:
        super().__init__(log.cluster, messages, "producer of features", number)
        self._log = log
        self._topics = topics
        self._wishes = wishes
        self._filters = of_filters

    async def run(self) -> None:
        async with producer_of("FeatureProducers") as producer:
            while not self._log.stopping:
                await asyncio.sleep(self.rng.uniform(0.02, 0.3 / len(self._topics)))
                try:
                    await self._send(producer, self.rng.choice(self._topics))
                except BatonError as error:
                    self.world.tell(self.name, f"not sent: {error}")

    async def _send(self, producer: Producer, topic: str) -> None:
        name = self.new_name()
        fails = 0 if topic == delays.TOPIC else self.rng.choice(_FAILS)
        if topic == orderly.TOPIC:
            fails = min(fails, 1)
        message = Message.of(topic, f"{name}|{fails}|".encode() + b"." * 40, keys=name)
        if topic == filters.TOPIC and self._filters is not None:
            self._filters.mark(name, message, self.rng)
        self._log.sent[name] = topic
        timed = self._delayed(name, message) if topic == delays.TOPIC else {}
        result = await producer.send(message, **timed)
        if result.acknowledged:
            self._log.acked.add(name)
        if result.recall_handle and self.rng.random() < _RECALLED:
            await self._recall(producer, name, result.recall_handle)

    async def _recall(self, producer: Producer, name: str, handle: str) -> None:
        """One that is refused was not recalled, but for what an earlier try may have done."""
        self._wishes.recalls[name] = None
        await producer.recall(delays.TOPIC, handle)
        hosts = self._log.cluster.brokers.values()
        services = [host.service for host in hosts if host.service is not None]
        end = max((service.store.max_phy_offset for service in services), default=0)
        self._wishes.recalls[name] = end

    def _delayed(self, name: str, message: Message) -> dict[str, Any]:
        """The arguments of `send`; a level is set here."""
        kind = self.rng.randrange(3)
        if kind == 0:
            level = message.delay_level = self.rng.randint(1, len(DELAY_LEVELS_S))
            self._wishes.of[name] = delays.Wish(1000 * DELAY_LEVELS_S[level - 1])
            return {}
        ms = int(1000 * self.rng.uniform(0.1, 2.0))
        if kind == 1:
            self._wishes.of[name] = delays.Wish(ms)
            return {"delay": ms / 1000}
        at_ms = int(1000 * self._log.cluster.clocks.wall_s()) + ms
        self._wishes.of[name] = delays.Wish(at_ms, is_time=True)
        return {"deliver_at": at_ms / 1000}


class FailingReader(SimConsumer):
    """One member of the group that gets what was delayed, committed, and what it fails."""

    def __init__(
        self, checker: retries.Retries, messages: Messages, number: int, topics: Sequence[str]
    ) -> None:
        super().__init__(checker.log.cluster, messages, number, GROUP, topics)
        self._checker = checker

    def _consumer(self, *_: object, **__: object) -> PushConsumer:
        options = ConsumeOptions(concurrency=4, close_wait_ms=500, max_reconsume_times=retries.MAX)
        consumer = super()._consumer(options)
        calls = consumer._client.masters
        once = calls.invoke_once

        async def invoke_once(
            topic: str,
            broker_name: str,
            address: str,
            request: RemotingCommand,
            timeout_ms: int,
            *,
            held_check_ms: int | None = None,
        ) -> RemotingCommand:
            is_back = request.code == RequestCode.CONSUMER_SEND_MSG_BACK
            what = self._checker.sends_back(int(request.ext["offset"])) if is_back else None
            reply = await once(
                topic, broker_name, address, request, timeout_ms, held_check_ms=held_check_ms
            )
            if what is not None and reply.code == ResponseCode.SUCCESS:
                self._checker.sent_back(what)
            return reply

        calls.invoke_once = invoke_once  # type: ignore[method-assign]
        return consumer

    async def _consume(self, messages: Sequence[MessageExt], context: ConsumeContext) -> Any:
        (message,) = messages
        name, fails, _ = message.body.split(b"|", 2)
        self._checker.log.got.add((GROUP, name.decode()))
        if message.reconsume_times < int(fails):
            if message.reconsume_times % 2:
                raise ValueError(f"{name.decode()} fails")
            return ConsumeStatus.RECONSUME_LATER
        self._checker.consumed.add(name.decode())
        return ConsumeStatus.SUCCESS
