"""ConsumerManager: membership changes reach every member, silence and closed channels leave."""

from __future__ import annotations

from batonmq.broker.consumer_manager import CLIENT_EXPIRED_MS, ConsumerManager, GroupChanged
from batonmq.protocol.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData


def heartbeat(client: str, *topics: str, group: str = "g", version: int = 1) -> HeartbeatData:
    return HeartbeatData(
        client_id=client,
        consumer_data_set=[
            ConsumerData(
                group_name=group,
                consume_type="CONSUME_PASSIVELY",
                message_model="CLUSTERING",
                consume_from_where="CONSUME_FROM_LAST_OFFSET",
                subscription_data_set=[
                    SubscriptionData(topic=topic, sub_string="*", sub_version=version)
                    for topic in topics
                ],
            )
        ],
        producer_data_set=[ProducerData(group_name="p")],
    )


def beat(manager: ConsumerManager, client: str, channel: str, *topics: str, now: int = 0):
    return manager.heartbeat(heartbeat(client, *topics), channel, 0, 479, now)


def test_a_new_member_notifies_all_a_known_one_nobody() -> None:
    manager = ConsumerManager()
    assert beat(manager, "c1", "ch1", "T") == [GroupChanged("g", ("ch1",))]
    assert beat(manager, "c2", "ch2", "T") == [GroupChanged("g", ("ch1", "ch2"))]
    assert beat(manager, "c1", "ch1", "T") == []
    assert manager.client_ids("g") == ["c1", "c2"]


def test_a_changed_subscription_is_a_change_and_a_dropped_topic_too() -> None:
    manager = ConsumerManager()
    beat(manager, "c1", "ch1", "T")
    assert beat(manager, "c1", "ch1", "T", "U")
    assert beat(manager, "c1", "ch1", "T")
    assert manager.subscription("g", "U") is None


def test_a_heartbeat_without_subscriptions_keeps_them() -> None:
    manager = ConsumerManager()
    beat(manager, "c1", "ch1", "T")
    data = heartbeat("c1")
    data = HeartbeatData(client_id="c1", consumer_data_set=data.consumer_data_set, without_sub=True)
    assert manager.heartbeat(data, "ch1", 0, 479, 1) == []
    assert manager.subscription("g", "T") is not None


def test_leaving_closing_and_silence() -> None:
    manager = ConsumerManager()
    for number in (1, 2, 3):
        beat(manager, f"c{number}", f"ch{number}", "T", now=number)
    assert manager.unregister("ch1", "p", "g") == [GroupChanged("g", ("ch2", "ch3"))]
    assert manager.channel_closed("ch2") == [GroupChanged("g", ("ch3",))]
    assert manager.channel_closed("ch2") == []
    assert manager.expire(CLIENT_EXPIRED_MS) == []
    assert manager.expire(CLIENT_EXPIRED_MS + 4) == []
    assert manager.groups == {} and manager.producers == {}
