"""What a route offers, and hints at newer masters."""

import pytest

from batonmq.client.instance.topic_route import (
    HINT_MS,
    MasterHints,
    TopicRoute,
    moved_masters,
    route_for_new_topic,
    topic_route,
)
from batonmq.protocol.bodies import BrokerData, QueueData, TopicRouteData
from batonmq.protocol.message import MessageQueue

OLD, NEW, THIRD = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.3:10911"


def route_data(addresses: dict[int, str], perm: int = 6) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=[BrokerData(broker_name="a", cluster="C", broker_addrs=addresses)],
        queue_datas=[QueueData(broker_name="a", perm=perm, read_queue_nums=4, write_queue_nums=2)],
    )


def test_without_a_master_nothing_is_published_but_reading_stays_assigned() -> None:
    route = topic_route("T", route_data({2: "h:2"}))
    assert route.publish_queues == ()
    assert len(route.subscribe_queues) == 4
    assert route.master_address("a") is None


@pytest.mark.parametrize(("perm", "publish", "subscribe"), [(6, 2, 4), (4, 0, 4), (2, 2, 0)])
def test_permissions_decide_the_queues(perm: int, publish: int, subscribe: int) -> None:
    route = topic_route("T", route_data({0: "h:1"}, perm))
    assert (len(route.publish_queues), len(route.subscribe_queues)) == (publish, subscribe)


def test_a_new_topic_gets_the_smaller_number_of_queues() -> None:
    route = route_for_new_topic("N", route_data({0: "h:1"}), 1)
    assert route.publish_queues == (MessageQueue("N", "a", 0),)


def test_moved_masters_are_those_with_a_new_address() -> None:
    old = topic_route("T", route_data({0: "h:1", 2: "h:2"}))
    new = topic_route("T", route_data({0: "h:2"}))
    assert moved_masters({}, old) == moved_masters({"a": None}, old) == {"a": "h:1"}
    assert moved_masters({"a": "h:1"}, old) == {}
    assert moved_masters({"a": "h:1"}, new) == {"a": "h:2"}
    assert moved_masters({"a": "h:1"}, topic_route("T", route_data({2: "h:2"}))) == {}


def route(master: str, slave: str) -> TopicRoute:
    return TopicRoute("T", (), (), {"b": {0: master, 2: slave}}, {"b": "C"})


def ext(address: str, epoch: int) -> dict[str, str]:
    return {"batonMasterAddress": address, "batonMasterEpoch": str(epoch)}


def test_a_hint_goes_before_a_name_server_that_lags() -> None:
    hints = MasterHints()
    assert hints.note("b", ext(NEW, 8), 0) == NEW
    assert hints.applied_to(route(OLD, NEW), 10).brokers == {"b": {0: NEW}}
    agreed = route(NEW, OLD)
    assert hints.applied_to(agreed, 10) is agreed


def test_a_hint_ends_with_time_or_when_nobody_answers_there() -> None:
    hints = MasterHints()
    hints.note("b", ext(NEW, 8), 0)
    assert hints.applied_to(route(OLD, NEW), HINT_MS).master_address("b") == OLD
    hints.note("b", ext(NEW, 8), 0)
    hints.unreachable(OLD)
    assert hints.applied_to(route(OLD, NEW), 1).master_address("b") == NEW
    hints.unreachable(NEW)
    assert hints.applied_to(route(OLD, NEW), 1).master_address("b") == OLD


def test_news_of_a_lower_epoch_is_old_news() -> None:
    """The new master, which does not know it yet, still names the old one."""
    hints = MasterHints()
    hints.note("b", ext(NEW, 8), 0)
    assert hints.note("b", ext(OLD, 7), 1) is None
    assert hints.applied_to(route(OLD, NEW), 2).master_address("b") == NEW
    assert hints.note("b", ext(THIRD, 9), 3) == THIRD


def test_what_is_no_hint_is_none() -> None:
    hints = MasterHints()
    for odd in (
        {},
        {"batonMasterAddress": NEW},
        ext("", 8),
        {**ext(NEW, 8), "batonMasterEpoch": "x"},
    ):
        assert hints.note("b", odd, 0) is None
    other = TopicRoute("T", (), (), {"c": {0: OLD}, "d": {2: THIRD}}, {})
    hints.note("d", ext(NEW, 1), 0)
    assert hints.applied_to(other, 1) is other  # a group without a master has no queues to write to


def test_a_hint_that_is_given_again_counts_anew() -> None:
    """Each refusal of the old master names the new one: as long as the name servers lag."""
    hints = MasterHints()
    hints.note("b", ext(NEW, 8), 0)
    assert hints.note("b", ext(NEW, 8), HINT_MS - 1) == NEW
    assert hints.applied_to(route(OLD, NEW), HINT_MS).master_address("b") == NEW
