"""ConsumerManager: membership changes reach every member, silence and closed channels leave."""

import pytest
from heartbeats import heartbeat

from batonmq.broker.consume import consumer_manager
from batonmq.broker.consume.consumer_manager import CLIENT_EXPIRED_MS, ConsumerManager, GroupChanged
from batonmq.protocol.bodies import HeartbeatData, ProducerData
from tests.shared.turns import counted_turns


def beat(manager: ConsumerManager, client: str, channel: str, *topics: str, now: int = 0):
    return manager.heartbeat(heartbeat(client, *topics), channel, 0, 479, now)


@pytest.fixture
def manager() -> ConsumerManager:
    return ConsumerManager()


def test_only_a_new_member_causes_notices(manager):
    assert beat(manager, "c1", "ch1", "T") == [GroupChanged("g", ("ch1",))]
    assert beat(manager, "c2", "ch2", "T") == [GroupChanged("g", ("ch1", "ch2"))]
    assert beat(manager, "c1", "ch1", "T") == []
    assert manager.client_ids("g") == ["c1", "c2"]


def test_a_changed_subscription_is_a_change_and_a_dropped_topic_too(manager):
    beat(manager, "c1", "ch1", "T")
    assert beat(manager, "c1", "ch1", "T", "U")
    assert beat(manager, "c1", "ch1", "T")
    assert manager.subscription("g", "U") is None


def test_a_heartbeat_without_subscriptions_keeps_them(manager):
    beat(manager, "c1", "ch1", "T")
    data = heartbeat("c1")
    data = HeartbeatData(client_id="c1", consumer_data_set=data.consumer_data_set, without_sub=True)
    assert manager.heartbeat(data, "ch1", 0, 479, 1) == []
    assert manager.subscription("g", "T") is not None


def test_leaving_closing_and_silence(manager):
    for number in (1, 2, 3):
        beat(manager, f"c{number}", f"ch{number}", "T", now=number)
    assert manager.unregister("ch1", "p", "g") == [GroupChanged("g", ("ch2", "ch3"), "c1", 1)]
    assert manager.channel_closed("ch2") == [GroupChanged("g", ("ch3",), "c2", 2)]
    assert manager.channel_closed("ch2") == []
    assert manager.expire(CLIENT_EXPIRED_MS) == []
    assert manager.expire(CLIENT_EXPIRED_MS + 4) == [GroupChanged("g", (), "c3", 3)]
    assert manager.groups == {} and manager.producers == {}


def test_of_many_clients_only_those_that_leave_are_looked_at(manager):
    """1,000 groups of ten members. 1 a hundred connections close. 2 all the rest fall silent."""
    for number in range(10_000):
        beat = heartbeat(f"c{number}", "T", group=f"g{number % 1000}")
        manager.heartbeat(beat, f"ch{number}", 0, 479, number)
    for number in range(10_000):  # the first ones are heard again
        if number < 200:
            beat = heartbeat(f"c{number}", "T", group=f"g{number % 1000}")
            assert manager.heartbeat(beat, f"ch{number}", 0, 479, 20_000) == []
    with counted_turns() as turns:
        turns.run(lambda: [manager.channel_closed(f"ch{number}") for number in range(100)])
        turns.run(lambda: manager.expire(CLIENT_EXPIRED_MS + 15_000))
    assert turns.lines < 6000
    while manager.expire(CLIENT_EXPIRED_MS + 15_000):
        pass
    left = {ident for name in manager.groups for ident in manager.client_ids(name)}
    assert left == {f"c{number}" for number in range(100, 200)}
    while manager.expire(CLIENT_EXPIRED_MS + 20_001):
        pass
    assert not manager.groups and not manager.producers


def test_r58_who_stays_in_a_group_is_listed_once_however_many_leave_it_at_once(manager):
    class Counted(dict):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    for number in range(200):
        beat(manager, f"c{number}", f"ch{number}", "T", now=number)
    group = manager.groups["g"]
    group.members = Counted(group.members)
    assert len(manager.expire(CLIENT_EXPIRED_MS + 100)) == 64
    assert Counted.walks == 1


def test_the_members_of_a_group_are_sorted_once_for_all_who_ask(manager):
    beat(manager, "c2", "ch2", "T")
    beat(manager, "c1", "ch1", "T")
    asked = manager.client_ids("g")
    assert asked == ["c1", "c2"] and manager.client_ids("g") is asked
    beat(manager, "c0", "ch1", "T")
    assert manager.client_ids("g") == ["c0", "c2"]
    manager.channel_closed("ch2")
    assert manager.client_ids("g") == ["c0"]


def test_a_late_heartbeat_brings_no_older_subscription_back(manager):
    for version in (5, 3):
        manager.heartbeat(heartbeat("c1", "T", version=version), "ch1", 0, 479, version)
    known = manager.subscription("g", "T")
    assert known is not None and known.sub_version == 5


def test_r58_a_flood_of_groups_displaces_itself(monkeypatch):
    """Any client may name any number of groups, in one heartbeat after the other."""
    monkeypatch.setattr(consumer_manager, "SEATS_MAX", 10)
    manager = ConsumerManager()
    beat(manager, "c1", "ch1", "T")
    for number in range(100):
        flood = HeartbeatData(
            client_id="flood", producer_data_set=[ProducerData(group_name=f"p{number}")]
        )
        manager.heartbeat(flood, "ch2", 0, 479, 1)
    assert manager.client_ids("g") == ["c1"]
    assert len(manager.producers) <= 11
    beat(manager, "c2", "ch3", "T")
    assert manager.client_ids("g") == ["c1", "c2"]
