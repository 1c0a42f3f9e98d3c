"""A Java broker and one of ours in one group under our controller: each leads, each follows.

The tests share one group and one load, and go on where the one before ended. Java has its defaults
but for `allAckInSyncStateSet`, by which it acknowledges what every replica of the set has, a
shorter heartbeat on its HA connection, which is how long it waits before it asks for log, and small
files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import frames
from lab.connection import Connection, ask
from lab.mixed import GROUP, SEGMENT, MixedGroup
from lab.mixed_checks import logs_equal, nothing_lost, steady_load, wait_master
from lab.mqctl import mqctl
from lab.writer import Writer

pytestmark = pytest.mark.java

OURS, JAVA = 0, 1
TOPIC = "Mixed"
READERS = "readers"


@pytest.fixture(scope="module")
def group(java_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedGroup]:
    """Ours as master, which has data, and a Java broker that joined."""
    with MixedGroup(tmp_path_factory.mktemp("mixed")) as running:
        running.start_ours(OURS)
        running.start_java(JAVA, haSendHeartbeatInterval=1000)
        running.wait_for("our master", lambda: running.master() == OURS and running.is_open(OURS))
        yield running


@pytest.fixture(scope="module")
def load(group: MixedGroup) -> Iterator[Writer]:
    with steady_load(group, TOPIC, OURS, JAVA) as writer:
        yield writer


def make_readers(group: MixedGroup, place: int) -> None:
    """The consumer group: Java takes no offsets of one that it does not know."""
    body = json.dumps({"groupName": READERS, "consumeEnable": True, "retryMaxTimes": 5}).encode()
    made = ask(group.address(place), frames.UPDATE_GROUP, {}, body)
    assert made.code == frames.OK, made


def commit(group: MixedGroup, place: int, offset: int) -> None:
    """As a consumer of that master does."""
    fields = {"consumerGroup": READERS, "topic": TOPIC, "queueId": 0, "commitOffset": offset}
    done = ask(group.address(place), frames.UPDATE_OFFSET, fields)
    assert done.code == frames.OK, done


def committed(group: MixedGroup, place: int) -> int:
    fields = {"consumerGroup": READERS, "topic": TOPIC, "queueId": 0}
    return int(ask(group.address(place), frames.QUERY_OFFSET, fields).ext["offset"])


def wait_table(group: MixedGroup, place: int, file: str, text: str) -> None:
    """Until a table of that slave, which it has from its master, shows the text. The two kinds
    write their JSON with other quotes and spaces."""
    path = group.store(place) / "config" / file

    def is_shown() -> bool:
        return path.exists() and text in re.sub(r'[\s"]', "", path.read_text())

    group.wait_for(f"{text} in {path}", is_shown)


def test_java_takes_over_from_our_killed_master(group: MixedGroup, load: Writer) -> None:
    """Ours is killed with kill -9, and comes back as the slave of a Java master."""
    make_readers(group, OURS)
    commit(group, OURS, 7)
    wait_table(group, JAVA, "consumerOffset.json", f"{TOPIC}@{READERS}:{{0:7")
    wait_table(group, JAVA, "subscriptionGroup.json", READERS)
    wait_table(group, JAVA, "topics.json", TOPIC)
    group.kill(OURS)
    wait_master(group, load, JAVA)
    nothing_lost(group, load)
    assert committed(group, JAVA) == 7
    group.start_ours(OURS)
    group.wait_in_sync(OURS, JAVA)


def test_ours_takes_over_from_a_killed_java_master(group: MixedGroup, load: Writer) -> None:
    """What Java's master was told meanwhile is there; it comes back as our slave."""
    commit(group, JAVA, 11)
    with Connection(group.address(JAVA)) as connection:
        assert connection.send("MadeAtJava", b"first").code == frames.OK
    wait_table(group, OURS, "consumerOffset.json", f"{TOPIC}@{READERS}:{{0:11")
    wait_table(group, OURS, "topics.json", "MadeAtJava")
    group.kill(JAVA)
    wait_master(group, load, OURS)
    nothing_lost(group, load)
    assert committed(group, OURS) == 11
    with Connection(group.address(OURS)) as connection:
        assert connection.pull("MadeAtJava", 0).code == frames.OK
    group.start_java(JAVA, haSendHeartbeatInterval=1000)
    group.wait_in_sync(OURS, JAVA)


def test_planned_switches_over_the_border(group: MixedGroup, load: Writer, tmp_path: Path) -> None:
    where = {"CONTROLLER_ADDR": group.controller}
    for place in (JAVA, OURS, JAVA, OURS):
        broker_id = str(group.broker_id(place))
        done = mqctl("electMaster", "-bn", GROUP, "-b", broker_id, home=tmp_path, env=where)
        assert done.code == 0, done
        wait_master(group, load, place)
        group.wait_in_sync(OURS, JAVA)
    nothing_lost(group, load)


def test_both_logs_are_equal(group: MixedGroup, load: Writer) -> None:
    """Byte for byte, epochs included, over more than one segment."""
    load.stop()
    group.wait_in_sync(OURS, JAVA)
    assert logs_equal(group, OURS, JAVA) > SEGMENT
