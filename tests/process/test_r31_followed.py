"""R31: what a topic and its readers need is on the new master, too."""

from __future__ import annotations

import pytest

from batonmq.client.errors import NoRouteError
from batonmq.protocol.message import MessageExt
from lab.cluster.connection import BlockingConnection
from lab.cluster.frames import QUERY_OFFSET, UPDATE_OFFSET
from lab.cluster.processes import wait_for
from lab.cluster.queues import read_topic
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process


def test_r31_a_topic_made_by_its_first_message_survives_kill_9(cluster: ClusterProcess) -> None:
    """1. The first message to a topic creates it; the message is acknowledged.
    2. kill -9 of the master at once, nothing else was sent.
    3. The message is read from the new master, by way of the route. Five times, five topics.
    """
    for number in range(5):
        master = cluster.master()
        with BlockingConnection(master["address"]) as probe:
            reply = probe.send(f"Fresh{number}", b"only one", queue_id=number % 4)
            cluster.kill(master)
        assert reply.code == 0, reply
        new = cluster.wait_new_master(master["address"])
        assert new["address"] != master["address"]
        found = wait_for(
            "the message",  # a new master shows it once its slaves follow (R28)
            lambda number=number: messages(cluster, f"Fresh{number}"),
        )
        assert [(m.body, m.queue_id) for m in found] == [(b"only one", number % 4)]
        cluster.restart(master)
        cluster.wait_in_sync(3)


def messages(cluster: ClusterProcess, topic: str) -> list[MessageExt]:
    """What readers see of a topic; nothing while no name server knows it."""
    try:
        stored = read_topic(cluster.name_servers, topic)
    except NoRouteError:
        return []
    return [message for queue in stored.values() for message in queue]


def known_offset(probe: BlockingConnection, group: dict[str, object]) -> int | None:
    reply = probe.request(QUERY_OFFSET, {**group, "setZeroIfNotFound": "false"})
    return int(reply.ext["offset"]) if reply.code == 0 else None


def test_r31_consumer_offsets_follow(cluster: ClusterProcess) -> None:
    """1. A group commits its offset on the master.
    2. Every slave knows it soon (it asks twice a second).
    3. kill -9 of the master: the new one answers with the committed offset.
    """
    group: dict[str, object] = {"consumerGroup": "follows", "topic": "Offsets", "queueId": 0}
    master = cluster.master()
    with BlockingConnection(master["address"]) as probe:
        for number in range(10):
            assert probe.send("Offsets", b"%d" % number).code == 0
        assert probe.request(UPDATE_OFFSET, {**group, "commitOffset": 7}).code == 0
    for slave in cluster.slaves():
        with BlockingConnection(slave["address"]) as probe:
            wait_for("the offset on a slave", lambda probe=probe: known_offset(probe, group) == 7)
    cluster.kill(master)
    new = cluster.wait_new_master(master["address"])
    with BlockingConnection(new["address"]) as probe:
        reply = probe.request(QUERY_OFFSET, group)
    assert (reply.code, reply.ext.get("offset")) == (0, "7")
