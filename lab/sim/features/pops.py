"""A group that pops: what is popped is acknowledged, or comes back.

The records of POP in the log say what is in flight. A queue is popped without a gap, and no message
of it twice. A message is revived only while it is in flight and its time is over, by the clock of
the broker that revives it. It ends when a client acknowledges it, or with a copy in the log that
has a higher count. An answered ack is in the confirmed log, so no failover reverts it. In order, a
queue waits until none of its messages is in flight, or the rest is due: then they come again, with
all behind the first of them. The same attempt gets them sooner. What is done before the first is
not popped again.
"""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batonmq.client.consumer.pop_consumer import PopConsumer
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageExt
from batonmq.protocol.pop import PopHandle, real_topic
from batonmq.protocol.properties import POP_CK
from batonmq.protocol.topic_name import POP_TOPIC, dlq_topic, pop_retry_topics
from batonmq.runtime.clock import boot_ms
from lab.sim.clients import CLIENT_OPTIONS, Client
from lab.sim.features.log import Checker, FeatureLog, some
from lab.sim.hosts import GROUP as BROKER_NAME
from lab.sim.hosts import NAME_SERVERS
from lab.sim.messages import Messages
from lab.sim.records import LogRecord

TOPIC = "TopicP"
GROUP = "GroupP"
MAX = 2
"""`retryMaxTimes` of the group."""
_WAITS_MS = 1_000
Place = tuple[str, int, int]
"""Topic, queue id, queue offset."""


@dataclass(slots=True)
class _Popped:
    """A message of the topic, or of the one for those that come back. In flight since `pop_time`
    until `due`, if `pop_time` is not 0. `clients`: who has asked to acknowledge it."""

    name: str
    count: int
    pop_time: int = 0
    due: int = 0
    is_done: bool = False
    is_acked: bool = False
    is_replaced: bool = False  # a later pop in order began before it: acks of this flight are void


class Pops(Checker):
    def __init__(self, log: FeatureLog, *, in_order: bool) -> None:
        super().__init__(log)
        self.in_order = in_order
        self._topics = (TOPIC, *pop_retry_topics(GROUP, TOPIC))
        self._messages: dict[Place, _Popped] = {}
        self._by_name: dict[tuple[str, int], list[_Popped]] = {}
        self._next: dict[tuple[str, int], int] = {}
        self._ordered: dict[tuple[str, int], tuple[str, list[_Popped]]] = {}
        """The last pop in order: its attempt, and what it gave."""

    def record(self, record: LogRecord, name: str) -> None:
        count = record.reconsumed
        if record.topic == POP_TOPIC:
            self._popped(json.loads(record.body), record.stored_ms)
        elif record.topic in self._topics:
            place = record.topic, record.queue_id, record.queue_offset
            one = self._messages[place] = _Popped(name, count)
            self._by_name.setdefault((name, count), []).append(one)
            if record.topic != TOPIC:
                self._comes_back(record, name)
        elif record.topic == dlq_topic(GROUP):
            self._comes_back(record, name)
            if count != MAX + 1:
                self.log.violate(f"pops: {name} is a dead letter with count {count}")

    def _comes_back(self, record: LogRecord, name: str) -> None:
        from_ = self._by_name.get((name, record.reconsumed - 1), [])
        in_flight = [one for one in from_ if one.pop_time and not one.is_done]
        if not in_flight:
            self.log.violate(
                f"pops: {name} comes back with count {record.reconsumed}, and is not in flight"
            )
        elif record.stored_ms < min(one.due for one in in_flight):
            self.log.violate(f"pops: {name} comes back before its time is over")

    def _popped(self, record: dict[str, list[dict[str, Any]]], now_ms: int) -> None:
        """`now_ms`: by the clock of the broker that wrote it."""
        for popped in record.get("popped", ()):
            if self.in_order:
                self._pop_in_order(popped, now_ms)
            else:
                self._pop(popped)
        for acked in record.get("acked", ()):
            for place in _places(acked):
                one = self._messages[place]
                if one.pop_time == acked["pop_time"] and not one.is_done:
                    self._done(one)
        for put_off in record.get("put_off", ()):
            _, topic, queue_id = put_off["key"]
            one = self._messages[topic, queue_id, put_off["offset"]]
            if one.pop_time == put_off["pop_time"]:
                one.due = put_off["visible"]

    def _pop(self, popped: dict[str, Any]) -> None:
        places = _places(popped)
        queue, goes_on = places[0][:2], popped.get("next", -1) != -1
        if goes_on:
            self._check_next(queue, popped)
        for place in places:
            one = self._messages[place]
            if one.is_done:
                self.log.violate(f"pops: {one.name} at {place} is popped, and done already")
            one.pop_time, one.due = popped["pop_time"], popped["due"]
        if goes_on:
            self._next[queue] = max(self._next.get(queue, 0), places[-1][2] + 1)

    def _pop_in_order(self, popped: dict[str, Any], now_ms: int) -> None:
        """A queue is popped again from the first that is not done; what is done behind it comes
        again, at once or, where fewer are asked for, with the next pop."""
        places = _places(popped)
        queue, attempt = places[0][:2], popped.get("attempt", "")
        next_ = self._next.get(queue, 0)
        while (one := self._messages.get((*queue, next_))) is not None and one.is_done:
            next_ += 1
        self._next[queue] = next_
        self._check_next(queue, popped)
        before, given = self._ordered.get(queue, ("", []))
        waits = [one.name for one in given if not one.is_done and one.due > now_ms]
        if waits and not (attempt and attempt == before):
            self.log.violate(f"pops: {queue} is popped while {some(waits)} are in flight: {popped}")
        given = [self._messages[place] for place in places]
        for one in given:
            one.pop_time, one.due = popped["pop_time"], popped["due"]
        for offset in itertools.count(next_):
            behind = self._messages.get((*queue, offset))
            if behind is None:
                break
            behind.is_done, behind.is_replaced = False, True
        for one in given:
            one.is_replaced = False
        self._ordered[queue] = attempt, given

    def _check_next(self, queue: tuple[str, int], popped: dict[str, Any]) -> None:
        first, next_ = popped["offsets"][0], self._next.get(queue, 0)
        if first != next_:
            self.log.violate(f"pops: {queue} is popped from {first} on, next is {next_}: {popped}")

    def _done(self, one: _Popped) -> None:
        one.is_done = True
        is_back = (one.name, one.count + 1) in self._by_name or one.count == MAX
        if not one.is_acked and not is_back:
            self.log.violate(f"pops: {one.name} is done, and neither acknowledged nor back")

    def got(self, place: Place) -> None:
        """A client has it."""
        self.log.read()
        if place not in self._messages or not self._messages[place].pop_time:
            self.log.violate(f"pops: {place} is given, and the confirmed log does not say so")

    def acks(self, place: Place) -> None:
        if place in self._messages:
            self._messages[place].is_acked = True

    def acked(self, place: Place, pop_time: int) -> None:
        """The ack of the message popped then was answered."""
        self.log.read()
        one = self._messages.get(place)
        is_in_flight = one is not None and one.pop_time == pop_time and not one.is_replaced
        if one is not None and is_in_flight and not one.is_done:
            self.log.violate(f"R30: the ack of {one.name} is answered, and not in the log")

    def pending(self) -> str:
        known = {one.name for one in self._messages.values()}
        lost = [n for n in self.log.acked if self.log.sent[n] == TOPIC and n not in known]
        left = [one.name for one in self._messages.values() if not one.is_done]
        return f"{GROUP} has not done with {some(lost + left)}" if lost or left else ""


def _places(entry: dict[str, Any]) -> list[Place]:
    _, topic, queue_id = entry["key"]
    return [(topic, queue_id, offset) for offset in entry["offsets"]]


class PopMember(Client):
    """Acknowledges what it gets, or forgets it, or wants it later."""

    def __init__(self, checker: Pops, messages: Messages, number: int) -> None:
        super().__init__(checker.log.cluster, messages, f"{GROUP} member {number}", number)
        self._checker = checker

    async def run(self) -> None:
        consumer = PopConsumer(GROUP, name_servers=NAME_SERVERS, client_options=CLIENT_OPTIONS)
        async with consumer:
            is_subscribed = False
            while True:
                try:
                    if not is_subscribed:
                        await consumer.subscribe(TOPIC)
                        is_subscribed = True
                    for message in await self._receive(consumer):
                        await self._consume(consumer, message)
                except BatonError as error:
                    self.world.tell(self.name, f"not popped: {error}")
                    await asyncio.sleep(0.1)

    async def _receive(self, consumer: PopConsumer) -> Sequence[MessageExt]:
        invisible_ms = self.rng.choice((700, 1_500))
        if not self._checker.in_order:
            return await consumer.receive(
                TOPIC, max_messages=4, invisible_ms=invisible_ms, timeout_ms=_WAITS_MS
            )
        fields = {"maxMsgNums": "4", "invisibleTime": str(invisible_ms), "order": "true"}
        subscription, now_ms = consumer._subscriptions[TOPIC], boot_ms()
        return await consumer._pop(subscription, BROKER_NAME, fields, _WAITS_MS, now_ms + _WAITS_MS)

    async def _consume(self, consumer: PopConsumer, message: MessageExt) -> None:
        _, fails, _ = message.body.split(b"|", 2)
        handle = PopHandle.decode(message.properties[POP_CK])
        topic = real_topic(handle.flag, TOPIC, GROUP)
        place = topic, handle.queue_id, handle.queue_offset
        self._checker.got(place)
        chance = self.rng.random()
        if int(fails) > MAX and not self._checker.in_order:
            chance /= 4  # a poisonous one is never acknowledged
        if self._checker.log.stopping and int(fails) <= MAX:
            chance = 1.0
        if chance < 0.12:
            return
        if chance < 0.25:
            await consumer.change_invisible_time(message, self.rng.randint(100, 900))
            if chance < 0.19 or int(fails) > MAX:
                return
            handle = PopHandle.decode(message.properties[POP_CK])
        elif chance < 0.4:
            await asyncio.sleep(self.rng.uniform(0.01, 0.3))
        self._checker.acks(place)
        await consumer.ack(message)
        self._checker.acked(place, handle.pop_time)
