"""The notice 40: at once in a usual group, but later to who changed it; once for all changes, and
in slices, in a large one.
A good-bye while a heartbeat is taken in slices."""

import asyncio
from typing import Any, cast
from unittest.mock import Mock

import pytest
from heartbeats import heartbeat

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume import consumer_manager
from batonmq.broker.consume.client_processor import OWN_NOTICE_MS, ClientProcessor
from batonmq.broker.consume.consumer_manager import ConsumerManager, ConsumerSightings, GroupChanged
from batonmq.broker.filter import consumer_filter
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager
from batonmq.broker.filter.subscription_filter import compiled
from batonmq.protocol.bodies import SQL92, HeartbeatData, ProducerData, SubscriptionData
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand


class _Channel:
    def __init__(self) -> None:
        self.closed = False
        self.noticed = 0

    def oneway(self, command: Any) -> None:
        self.noticed += 1

    def keep(self) -> None:
        """It is a client of a group."""


class Clients:
    """A ClientProcessor with what it knows, at the time `now_ms`."""

    def __init__(self, filters: Any = None) -> None:
        self.now_ms = 0
        self.known = ConsumerManager()
        path = Mock(clock_ms=lambda: self.now_ms, gate=Mock(refusal=None))
        sightings = ConsumerSightings(self.known)
        self.processor = ClientProcessor(
            self.known, Mock(groups={}), path, filters or Mock(), sightings, BrokerConfig()
        )

    def beat(self, data: HeartbeatData, channel: Any) -> Any:
        request = RemotingCommand.request(RequestCode.HEART_BEAT, body=data.encode())
        return self.processor.heartbeat(request, channel)


def test_the_members_of_a_large_group_hear_of_many_changes_once_and_in_slices():
    clients = Clients().processor
    small = tuple(_Channel() for _ in range(10))
    clients.notify([GroupChanged("small", small)])
    assert [channel.noticed for channel in small] == [1] * 10 and not clients.tick()
    large = [_Channel() for _ in range(1000)]
    for count in range(500, 1001):
        clients.notify([GroupChanged("large", tuple(large[:count]))])
    assert not any(channel.noticed for channel in large)
    slices = 1
    before = 0
    while clients.tick():
        noticed = sum(channel.noticed for channel in large)
        assert 0 < noticed - before <= 128
        before, slices = noticed, slices + 1
    assert [channel.noticed for channel in large] == [1] * 1000 and slices == 8


def test_r58_a_change_of_many_groups_sends_a_turns_notices_and_the_others_later():
    scene = Clients()
    clients = scene.processor
    sender, *others = members = tuple(_Channel() for _ in range(100))
    changes = [GroupChanged(f"g{number}", members) for number in range(3)]
    clients.notify(changes, cast(Any, sender))
    assert {channel.noticed for channel in others} == {1}
    while clients.tick():
        pass
    assert {channel.noticed for channel in others} == {3} and not sender.noticed
    scene.now_ms = OWN_NOTICE_MS
    clients.tick()
    assert sender.noticed == 3


def test_a_new_member_gets_its_notice_after_its_first_heartbeat():
    """A stock consumer announces itself to one broker after the other, then rebalances. A notice in
    between makes it pull with a subscription that it cannot announce: it starves for 30 s."""
    scene = Clients()
    clients = scene.processor
    first, second = _Channel(), _Channel()
    for name, channel in (("one", first), ("two", second)):
        scene.beat(heartbeat(name), channel)
    assert not clients.tick() and (first.noticed, second.noticed) == (1, 0)
    scene.now_ms = OWN_NOTICE_MS
    assert not clients.tick() and (first.noticed, second.noticed) == (2, 1)
    clients.disconnected(cast(Any, second))
    assert not clients.tick() and (first.noticed, second.noticed) == (3, 1)


async def test_a_good_bye_between_the_slices_of_a_heartbeat_counts():
    """Of many groups: its client leaves one that a later slice names."""
    scene = Clients()
    clients, known = scene.processor, scene.known
    channel = cast(Any, _Channel())
    beat = HeartbeatData(
        client_id="c",
        consumer_data_set=[heartbeat("c", group=f"g{n}").consumer_data_set[0] for n in range(40)],
        producer_data_set=[ProducerData(group_name=f"g{n}") for n in range(40)],
    )
    goodbye = RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, {"consumerGroup": "g39"})
    answer = asyncio.ensure_future(scene.beat(beat, channel))
    await asyncio.sleep(0)
    clients.unregister(goodbye, channel)
    await answer
    assert set(known.groups) == {f"g{number}" for number in range(39)}
    assert len(known.producers) == 40 and not clients._left_since
    await scene.beat(beat, channel)
    assert len(known.groups) == 40, "it joins again"


def test_r58_a_heartbeat_that_makes_place_keeps_the_filters_of_a_group_that_it_joins_again(
    tmp_path, monkeypatch
):
    """The client loses its oldest places, and the same heartbeat takes one of them again."""
    monkeypatch.setattr(consumer_manager, "SEATS_MAX", 2)
    filters = ConsumerFilterManager(tmp_path / "consumerFilter.json")
    scene = Clients(filters)
    channel = cast(Any, _Channel())
    beat = heartbeat("c", "T")
    [subscription] = beat.consumer_data_set[0].subscription_data_set
    subscription.expression_type, subscription.sub_string = SQL92, "a = 1"
    compiled(subscription.sub_string)  # so that the heartbeat need not
    for _ in range(2):
        scene.beat(beat, channel)
        data = filters.get("g", "T")
        assert data is not None and not data.dead
    scene.known.unregister(channel, None, "g")
    scene.processor.notify([GroupChanged("g", ())])
    gone = filters.get("g", "T")
    assert gone is not None and gone.dead


def _subscribed(client: str, group: str, tag: str, version: int = 1) -> HeartbeatData:
    beat = heartbeat(client, "T", group=group, version=version)
    beat.consumer_data_set[0].subscription_data_set[0].tags_set.append(tag)
    return beat


def test_r58_subscriptions_of_a_flood_of_groups_have_a_limit(monkeypatch):
    """Each heartbeat of up to 4 MiB may name a new group. Who was there before stays, and may come
    back with other tags. The answer says what was left out."""
    monkeypatch.setattr(consumer_manager, "SUBSCRIPTION_BYTES_MAX", 10_000)
    scene = Clients()
    known, flood, usual = scene.known, cast(Any, _Channel()), cast(Any, _Channel())
    scene.beat(_subscribed("usual", "g", "a"), usual)
    remarks = [
        scene.beat(_subscribed("flood", f"f{n}", "x" * 3000), flood).remark for n in range(100)
    ]
    assert len(known.groups) == 4 and remarks[:3] == [""] * 3
    assert all("consumer group 'f" in remark and "memory" in remark for remark in remarks[3:])
    assert not scene.beat(_subscribed("usual", "g", "b", version=2), usual).remark
    subscription = known.subscription("g", "T")
    assert subscription is not None and "b" in subscription.tags_set
    scene.processor.disconnected(flood)
    assert not scene.beat(_subscribed("usual", "h", "x" * 3000), usual).remark
    assert set(known.groups) == {"g", "h"}


def test_r58_filters_of_groups_that_left_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(consumer_filter, "DEAD_KEPT_MAX", 10)
    filters = ConsumerFilterManager(tmp_path / "consumerFilter.json")
    compiled("a = 1")
    for number in range(100):
        topics = [
            SubscriptionData(topic=topic, expression_type=SQL92, sub_string="a = 1", sub_version=1)
            for topic in ("T", "U")
        ]
        filters.register(f"g{number}", topics)
        filters.unregister(f"g{number}")
    kept = [number for number in range(100) if filters.get(f"g{number}", "U") is not None]
    assert kept == [95, 96, 97, 98, 99]


def test_r58_a_heartbeat_leaves_no_long_texts_behind():
    scene, beat = Clients(), heartbeat("c", "T")
    [odd] = heartbeat("c", group="g2").consumer_data_set
    odd.consume_type = "x" * 1024
    beat.consumer_data_set.append(odd)
    beat.producer_data_set.append(ProducerData(group_name="p" * 1025))
    assert scene.beat(beat, _Channel()).remark.count("allowed are 1024") == 2
    assert (set(scene.known.groups), set(scene.known.producers)) == ({"g"}, {"p"})
    beat.client_id = "c" * 1025
    with pytest.raises(BrokerRefusal, match="clientID: 1025 characters, allowed are 1024"):
        scene.beat(beat, _Channel())
    large = SubscriptionData(topic="t" * 5000, expression_type="e" * 5000)
    assert consumer_manager._bytes_of([large]) > 10_000
