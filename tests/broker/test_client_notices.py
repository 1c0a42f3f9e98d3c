"""The notice 40: at once in a usual group, but later to who changed it; once for all changes, and
in slices, in a large one.
A good-bye while a heartbeat is taken in slices."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from heartbeats import heartbeat

from batonmq.broker.config import BrokerConfig
from batonmq.broker.consume import consumer_manager
from batonmq.broker.consume.client_processor import OWN_NOTICE_MS, ClientProcessor
from batonmq.broker.consume.consumer_manager import ConsumerManager, ConsumerSightings, GroupChanged
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager
from batonmq.broker.filter.subscription_filter import compiled
from batonmq.protocol.bodies import SQL92, HeartbeatData, ProducerData
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import RemotingCommand


class _Channel:
    def __init__(self) -> None:
        self.closed = False
        self.noticed = 0

    def oneway(self, command: Any) -> None:
        self.noticed += 1

    def keep(self) -> None:
        """It is a client of a group."""


def test_the_members_of_a_large_group_hear_of_many_changes_once_and_in_slices():
    nothing = cast(Any, SimpleNamespace(gate=None, clock_ms=None, groups={}))
    clients = ClientProcessor(ConsumerManager(), nothing, nothing, nothing, nothing, BrokerConfig())
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


def test_a_new_member_gets_its_notice_after_its_first_heartbeat():
    """A stock consumer announces itself to one broker after the other, then rebalances. A notice in
    between makes it pull with a subscription that it cannot announce: it starves for 30 s."""
    now_ms = 0
    path = Mock(clock_ms=lambda: now_ms, gate=Mock(refusal=None))
    known = ConsumerManager()
    clients = ClientProcessor(
        known, Mock(groups={}), path, Mock(), ConsumerSightings(known), BrokerConfig()
    )
    first, second = _Channel(), _Channel()
    for name, channel in (("one", first), ("two", second)):
        beat = RemotingCommand.request(RequestCode.HEART_BEAT, body=heartbeat(name).encode())
        clients.heartbeat(beat, cast(Any, channel))
    assert not clients.tick() and (first.noticed, second.noticed) == (1, 0)
    now_ms = OWN_NOTICE_MS
    assert not clients.tick() and (first.noticed, second.noticed) == (2, 1)
    clients.disconnected(cast(Any, second))
    assert not clients.tick() and (first.noticed, second.noticed) == (3, 1)


async def test_a_good_bye_between_the_slices_of_a_heartbeat_counts():
    """Of many groups: its client leaves one that a later slice names."""
    topics = Mock(groups={})
    path = Mock(clock_ms=lambda: 0, gate=Mock(refusal=None))
    known = ConsumerManager()
    clients = ClientProcessor(known, topics, path, Mock(), ConsumerSightings(known), BrokerConfig())
    channel = cast(Any, _Channel())
    beat = HeartbeatData(
        client_id="c",
        consumer_data_set=[heartbeat("c", group=f"g{n}").consumer_data_set[0] for n in range(40)],
        producer_data_set=[ProducerData(group_name=f"g{n}") for n in range(40)],
    )
    request = RemotingCommand.request(RequestCode.HEART_BEAT, body=beat.encode())
    goodbye = RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, {"consumerGroup": "g39"})
    answer = asyncio.ensure_future(cast(Any, clients.heartbeat(request, channel)))
    await asyncio.sleep(0)
    clients.unregister(goodbye, channel)
    await answer
    assert set(known.groups) == {f"g{number}" for number in range(39)}
    assert len(known.producers) == 40 and not clients._left_since
    await cast(Any, clients.heartbeat(request, channel))
    assert len(known.groups) == 40, "it joins again"


def test_r58_a_heartbeat_that_makes_place_keeps_the_filters_of_a_group_that_it_joins_again(
    tmp_path, monkeypatch
):
    """The client loses its oldest places, and the same heartbeat takes one of them again."""
    monkeypatch.setattr(consumer_manager, "SEATS_MAX", 2)
    known, path = ConsumerManager(), Mock(clock_ms=lambda: 0, gate=Mock(refusal=None))
    filters = ConsumerFilterManager(tmp_path / "consumerFilter.json")
    sightings = ConsumerSightings(known)
    clients = ClientProcessor(known, Mock(groups={}), path, filters, sightings, BrokerConfig())
    channel = cast(Any, _Channel())
    beat = heartbeat("c", "T")
    [subscription] = beat.consumer_data_set[0].subscription_data_set
    subscription.expression_type, subscription.sub_string = SQL92, "a = 1"
    compiled(subscription.sub_string)  # so that the heartbeat need not
    request = RemotingCommand.request(RequestCode.HEART_BEAT, body=beat.encode())
    for _ in range(2):
        clients.heartbeat(request, channel)
        data = filters.get("g", "T")
        assert data is not None and not data.dead
    known.unregister(channel, None, "g")
    clients.notify([GroupChanged("g", ())])
    gone = filters.get("g", "T")
    assert gone is not None and gone.dead
