"""Classic groups of a Java broker and one of ours, both ways, under writes and kill -9."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.cluster import frames
from lab.cluster.classic import ClassicGroup, in_sync
from lab.cluster.connection import BlockingConnection, ask, ha_status, takes_writes
from lab.cluster.java import SEGMENT
from lab.cluster.processes import free_base_port, wait_for
from lab.cluster.queues import first_messages
from lab.cluster.stores import log_bytes

pytestmark = pytest.mark.java

TOPIC = "Classic"


@pytest.fixture
def group(java_classpath: str, tmp_path: Path) -> Iterator[ClassicGroup]:
    with ClassicGroup(tmp_path, free_base_port(2)) as running:
        yield running


def wait_level(address: str) -> None:
    """Until the master at `address` has one slave with its whole log."""

    def is_level() -> bool:
        status = ha_status(address, timeout_s=1.0)
        return status is not None and status.is_level(1) and status.max_offset > 0

    wait_for(f"a slave of {address} with its whole log", is_level)


def send(address: str, first: int, count: int) -> list[bytes]:
    """Sends into queue 0 over one connection; the bodies, all acknowledged."""
    bodies = [b"%d " % number + b"x" * 6_000 for number in range(first, first + count)]
    with BlockingConnection(address) as connection:
        for body in bodies:
            # A Java broker on a busy machine refuses, unstored, what waited 200 ms for a thread.
            while (reply := connection.send(TOPIC, body)).code == frames.SYSTEM_BUSY:
                pass
            assert reply.code == frames.OK, reply
    return bodies


def serves_pulls(address: str) -> bool:
    """Whether that broker answers and is master: its endpoint listens before its store is open."""
    if ha_status(address, timeout_s=1.0) is None:
        return False
    with BlockingConnection(address) as connection:
        return connection.pull(TOPIC, 0).code == frames.OK


def bodies_at(address: str, count: int) -> list[bytes]:
    """What queue 0 holds at that broker."""
    return [message.body for message in first_messages(address, TOPIC, count)]


def test_a_java_slave_follows_our_master(group: ClassicGroup, tmp_path: Path) -> None:
    """SYNC_MASTER: each code 0 says that the Java slave has the message. It holds the same bytes,
    and goes on after a kill -9 and a new start of our master."""
    ours, java = tmp_path / "ours", tmp_path / "java"
    master = group.address(0)
    group.start_ours("master", group.settings(0, "SYNC_MASTER", ours))
    group.start_java("slave", group.settings(1, "SLAVE", java))
    wait_for("the slave", lambda: in_sync(master) == 1)
    send(master, 0, 20)
    group.kill("master")
    group.start_ours("master", group.settings(0, "SYNC_MASTER", ours))
    wait_for("the slave again", lambda: in_sync(master) == 1)
    send(master, 20, 200)  # into the next segment
    wait_level(master)
    end = ha_status(master).max_offset
    assert end > SEGMENT
    assert log_bytes(java, end) == log_bytes(ours, end)


def test_our_slave_follows_a_java_master(group: ClassicGroup, tmp_path: Path) -> None:
    """Java as SYNC_MASTER with inSyncReplicas 2 waits for our slave. After a kill -9 of the master
    our slave has every acknowledged message, tables included, and is promoted."""
    ours, java = tmp_path / "ours", tmp_path / "java"
    master = group.address(0)
    group.start_java("master", group.settings(0, "SYNC_MASTER", java))
    wait_for("the Java master", lambda: ha_status(master, timeout_s=1.0))
    group.start_ours("slave", group.settings(1, "SLAVE", ours))
    wait_for("our slave", lambda: len(ha_status(master).acked) == 1)
    sent = send(master, 0, 200)
    wait_level(master)
    end = ha_status(master).max_offset
    assert end > SEGMENT
    assert log_bytes(ours, end) == log_bytes(java, end)
    topics = ours / "config" / "topics.json"
    wait_for("the topic", lambda: topics.exists() and TOPIC in topics.read_text())
    group.kill("master")
    group.kill("slave")
    group.start_ours("promoted", group.settings(0, "ASYNC_MASTER", ours))
    wait_for("the promoted slave", lambda: serves_pulls(master))
    assert bodies_at(master, len(sent)) == sent
    assert send(master, 200, 1)


def test_a_store_is_swapped_cold_both_ways(group: ClassicGroup, tmp_path: Path) -> None:
    """A folder of ours under a Java broker, and back under ours: each serves what the other wrote,
    knows the offsets of groups, and writes on behind it."""
    address = group.address(0)
    settings = group.settings(0, "ASYNC_MASTER", tmp_path / "store")
    sent: list[bytes] = []
    for start in (group.start_ours, group.start_java, group.start_ours):
        start("swapped", settings)
        wait_for("the broker", lambda: takes_writes(address, "Other"))
        assert bodies_at(address, len(sent)) == sent
        assert committed(address) == len(sent)
        sent += send(address, len(sent), 100)
        commit(address, len(sent))
        group.kill("swapped", signal.SIGTERM)


def commit(address: str, offset: int) -> None:
    """Java takes no offsets of a group that it does not know."""
    known = ask(address, frames.UPDATE_GROUP, {}, b'{"groupName":"readers","consumeEnable":true}')
    assert known.code == frames.OK
    fields = {"consumerGroup": "readers", "topic": TOPIC, "queueId": 0, "commitOffset": offset}
    assert ask(address, frames.UPDATE_OFFSET, fields).code == frames.OK


def committed(address: str) -> int:
    """0 where the broker knows none."""
    fields = {"consumerGroup": "readers", "topic": TOPIC, "queueId": 0}
    return int(ask(address, frames.QUERY_OFFSET, fields).ext.get("offset", 0))
