"""A Java broker and one of ours in one group under our controller: each leads, each follows.

The tests share one group. Each has its own load and begins by naming its master, so they run in any
order, and alone. Java has its defaults but for `allAckInSyncStateSet`, by which it acknowledges
what every replica of the set has, a shorter heartbeat on its HA connection, which is how long it
waits before it asks for log, and small files.
"""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonmq.protocol.records.codec import decode_records
from lab.cluster import frames
from lab.cluster.cluster import GROUP
from lab.cluster.connection import BlockingConnection, ask, ha_status
from lab.cluster.java import SEGMENT
from lab.cluster.mixed import MixedGroup, logs_equal, nothing_lost, steady_load, wait_master
from lab.cluster.mqctl import mqctl
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.java

OURS, JAVA = 0, 1
TOPIC = "Mixed"
READERS = "readers"
LATER, HALVES = "Later", "Halves"
PREPARED, COMMIT = 4, 8


@pytest.fixture(scope="module")
def group(java_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedGroup]:
    """Ours as master, which has data, and a Java broker that joined."""
    with MixedGroup(tmp_path_factory.mktemp("mixed")) as running:
        running.start_ours(OURS)
        running.start_java(JAVA, haSendHeartbeatInterval=1000)
        running.wait_for("our master", lambda: running.master() == OURS and running.is_open(OURS))
        make_readers(running, OURS)
        with BlockingConnection(running.address(OURS)) as connection:
            for topic in (TOPIC, LATER, HALVES):
                assert connection.send(topic, b"makes the topic").code == frames.OK
        yield running


@pytest.fixture
def load(group: MixedGroup, request: pytest.FixtureRequest) -> Iterator[Writer]:
    with steady_load(group, f"{TOPIC}-{request.node.name}", OURS, JAVA) as writer:
        yield writer


def lead(group: MixedGroup, load: Writer, place: int) -> None:
    """Makes that broker master, with the other in the set."""
    if group.master() != place:
        group.elect(group.address(place))
    wait_master(group, load, place)
    group.wait_in_sync(OURS, JAVA)


def set_all_ack(group: MixedGroup, value: str) -> None:
    """At the Java broker, while it runs."""
    body = f"allAckInSyncStateSet={value}".encode()
    changed = ask(group.address(JAVA), frames.UPDATE_CONFIG, {}, body)
    assert changed.code == frames.OK, changed


def make_readers(group: MixedGroup, place: int) -> None:
    """The consumer group: Java takes no offsets of one that it does not know."""
    body = json.dumps({"groupName": READERS, "consumeEnable": True, "retryMaxTimes": 5}).encode()
    made = ask(group.address(place), frames.UPDATE_GROUP, {}, body)
    assert made.code == frames.OK, made


def end_of(group: MixedGroup, place: int) -> int:
    """Of its log."""
    status = ha_status(group.address(place))
    return status.max_offset if status is not None else 0


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


def bodies_of(group: MixedGroup, place: int, topic: str) -> list[bytes]:
    """Of the first messages in queue 0 there."""
    with BlockingConnection(group.address(place)) as connection:
        reply = connection.pull(topic, 0)
    return [message.body for message in decode_records(reply.body)] if reply.body else []


def send_later(group: MixedGroup, place: int) -> set[bytes]:
    """Two messages that are due in 10 s, by level and by timer; their bodies."""
    wishes = {"level": "DELAY\x013\x02", "timer": "TIMER_DELAY_SEC\x0110\x02"}
    sent = {f"{place} by {kind}".encode(): wish for kind, wish in wishes.items()}
    with BlockingConnection(group.address(place)) as connection:
        for body, wish in sent.items():
            assert connection.send(LATER, body, properties=wish).code == frames.OK
    assert not sent.keys() & set(bodies_of(group, place, LATER))
    return set(sent)


def wait_delivered(group: MixedGroup, place: int, bodies: set[bytes]) -> None:
    group.wait_for("what is due", lambda: bodies <= set(bodies_of(group, place, LATER)))


def send_half(group: MixedGroup, place: int) -> dict[str, object]:
    """A half message; the fields that commit it (37)."""
    key = f"HALF{place}"
    wish = f"TRAN_MSG\x01true\x02PGROUP\x01halves\x02UNIQ_KEY\x01{key}\x02"
    fields = {**frames.send_ext(HALVES, 0, wish), "f": PREPARED}
    reply = ask(group.address(place), frames.SEND_V2, fields, key.encode())
    assert reply.code == frames.OK, reply
    return {
        "producerGroup": "halves",
        "tranStateTableOffset": reply.ext["queueOffset"],
        "commitLogOffset": int(reply.ext["msgId"][-16:], 16),
        "commitOrRollback": COMMIT,
        "fromTransactionCheck": "false",
        "msgId": key,
        "transactionId": key,
    }


def commit_half(group: MixedGroup, place: int, fields: dict[str, object]) -> None:
    """At that broker, which is master now."""
    done = ask(group.address(place), frames.END_TRANSACTION, fields)
    assert done.code == frames.OK, done
    key = str(fields["msgId"]).encode()
    group.wait_for("the message", lambda: key in bodies_of(group, place, HALVES))


def test_java_takes_over_from_our_killed_master(group: MixedGroup, load: Writer) -> None:
    """Ours is killed with kill -9, and comes back as the slave of a Java master."""
    lead(group, load, OURS)
    commit(group, OURS, 7)
    wait_table(group, JAVA, "consumerOffset.json", f"{TOPIC}@{READERS}:{{0:7")
    wait_table(group, JAVA, "subscriptionGroup.json", READERS)
    wait_table(group, JAVA, "topics.json", HALVES)
    later, half = send_later(group, OURS), send_half(group, OURS)
    group.kill(OURS)
    wait_master(group, load, JAVA)
    nothing_lost(group, load)
    assert committed(group, JAVA) == 7
    commit_half(group, JAVA, half)
    wait_delivered(group, JAVA, later)
    group.start_ours(OURS)
    group.wait_in_sync(OURS, JAVA)


def test_our_controllers_restart_under_a_java_master(group: MixedGroup, load: Writer) -> None:
    """By kill -9: the master goes on, and is the one that they know."""
    lead(group, load, JAVA)
    epoch = (group.group_state() or {})["masterEpoch"]
    group.restart_controllers()
    wait_acks(load, 50)
    group.wait_in_sync(OURS, JAVA)
    wait_acks(load, 50)
    assert group.master() == JAVA
    assert (group.group_state() or {})["masterEpoch"] == epoch
    nothing_lost(group, load)


def test_ours_takes_over_from_a_killed_java_master(group: MixedGroup, load: Writer) -> None:
    """What Java's master was told meanwhile is there; it comes back as our slave."""
    lead(group, load, JAVA)
    commit(group, JAVA, 11)
    with BlockingConnection(group.address(JAVA)) as connection:
        assert connection.send("MadeAtJava", b"first").code == frames.OK
    wait_table(group, OURS, "consumerOffset.json", f"{TOPIC}@{READERS}:{{0:11")
    wait_table(group, OURS, "topics.json", "MadeAtJava")
    later, half = send_later(group, JAVA), send_half(group, JAVA)
    group.kill(JAVA)
    wait_master(group, load, OURS)
    nothing_lost(group, load)
    assert committed(group, OURS) == 11
    commit_half(group, OURS, half)
    wait_delivered(group, OURS, later)
    with BlockingConnection(group.address(OURS)) as connection:
        assert connection.pull("MadeAtJava", 0).code == frames.OK
    group.start_java(JAVA, haSendHeartbeatInterval=1000)
    group.wait_in_sync(OURS, JAVA)


def test_all_ack_is_switched_on_at_run_time(group: MixedGroup, load: Writer) -> None:
    """Before it a Java master's code 0 says that the master has the message, and no more."""
    lead(group, load, JAVA)
    set_all_ack(group, "false")
    group.signal(OURS, signal.SIGSTOP)
    try:
        with BlockingConnection(group.address(JAVA)) as connection:
            assert connection.send("AllAck", b"Java has it").code == frames.OK
            set_all_ack(group, "true")
            assert connection.send("AllAck", b"do both have it?").code != frames.OK
    finally:
        group.signal(OURS, signal.SIGCONT)
    group.wait_in_sync(OURS, JAVA)
    nothing_lost(group, load)


def test_planned_switches_over_the_border(group: MixedGroup, load: Writer, tmp_path: Path) -> None:
    lead(group, load, OURS)
    where = {"CONTROLLER_ADDR": group.controller}
    for place in (JAVA, OURS):
        broker_id = str(group.broker_id(place))
        done = mqctl("electMaster", "-bn", GROUP, "-b", broker_id, home=tmp_path, env=where)
        assert done.code == 0, done
        wait_master(group, load, place)
        group.wait_in_sync(OURS, JAVA)
    nothing_lost(group, load)


def test_both_logs_are_equal(group: MixedGroup, load: Writer) -> None:
    """Byte for byte, epochs included, over more than one segment."""
    lead(group, load, OURS)
    group.wait_for("a second segment", lambda: end_of(group, OURS) > SEGMENT)
    load.stop()
    group.wait_in_sync(OURS, JAVA)
    assert logs_equal(group, OURS, JAVA) > SEGMENT
