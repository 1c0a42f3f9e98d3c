"""kill -9 of masters under load: nothing acknowledged is lost, order and offsets hold (G1-G4)."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from batonmq.blocking import BlockingPullConsumer
from lab.cluster.connection import BlockingConnection
from lab.cluster.frames import FLAG_ONEWAY, RUNTIME_INFO, SEND_V2, send_ext
from lab.cluster.processes import wait_for
from lab.cluster.queues import check_writers, read_topic
from lab.cluster.stores import check_logs_equal
from lab.cluster.up import ClusterProcess, rounds
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.process


def acked(writers: Sequence[Writer]) -> int:
    return sum(len(writer.acks) for writer in writers)


class Reader(threading.Thread):
    """Polls a topic while its masters die, and keeps what it was shown: (queue, offset) -> body."""

    def __init__(self, name_servers: str, topic: str) -> None:
        super().__init__(name="reader")
        self.seen: dict[tuple[int, int], bytes] = {}
        self.error: BaseException | None = None
        self._name_servers = name_servers
        self._topic = topic
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            with BlockingPullConsumer("live-reader", name_servers=self._name_servers) as consumer:
                consumer.assign(consumer.fetch_queues(self._topic))
                while not self._stopped.is_set():
                    for message in consumer.poll(200):
                        place = (message.queue_id, message.queue_offset)
                        before = self.seen.setdefault(place, message.body)
                        assert before == message.body, f"{place} changed its content"
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Reader:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self.join(30)
        if self.error is not None:
            raise self.error


def test_g1_g3_g4_masters_killed_under_load(cluster: ClusterProcess) -> None:
    """1. Four writers, a queue each, one unacknowledged write at a time; a reader follows.
    2. kill -9 of the master; the writers find the new one; the dead one is started again and
       comes back into the set. Repeated.
    3. Every acknowledged message is at the offset its ack named, offsets run without gap or
       double, numbers in order (G1, G2). What the reader saw is what is stored (G4).
    4. After the stop the three logs are byte-identical up to the smaller confirmOffset (G3).
    """
    topic = "UnderLoad"
    addresses = cluster.addresses()
    with BlockingConnection(cluster.master()["address"]) as probe:
        assert probe.send(topic, b"0 0 ", queue_id=0).code == 0
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(cluster.name_servers, topic))
        writers = [Writer(addresses, topic, queue_id) for queue_id in range(4)]
        for writer in writers:
            stack.enter_context(writer)
        for _ in range(rounds(3, 30)):
            wait_acks(writers, 30)
            master = cluster.master()
            cluster.kill(master)
            wait_acks(writers, 30)
            cluster.restart(master)
            cluster.wait_in_sync(3)
            wait_for("cluster.json to be level", lambda: len(cluster.slaves()) == 2)
    check_writers(cluster.name_servers, topic, writers)
    stored = read_topic(cluster.name_servers, topic)
    for (queue_id, offset), body in reader.seen.items():
        assert stored[queue_id][offset].body == body, "a consumer saw what is no longer there"
    assert cluster.stop() == 0
    confirmed = check_logs_equal(cluster.data_folders)
    assert confirmed > acked(writers) * 200


PATIENT = {
    # Hung slaves stay in the set, and little of the tail fits on its way to them.
    "controller": {"brokerSessionTimeoutMs": 20_000},
    "replicas": {"brokerSessionTimeoutMs": 20_000},
    "ha": {
        "haSlaveSilentTime": 20_000,
        "haTransferBatchSize": 65_536,
        "haTransferWindowSize": 65_536,
    },
}


def log_end(probe: BlockingConnection) -> int:
    return int(probe.request(RUNTIME_INFO).json["table"]["commitLogMaxOffset"])


def truncation(log: str) -> tuple[int, int]:
    """(from, to) of the last truncation that a broker logged."""
    found = re.findall(r"log_truncated from_offset=(\d+) to_offset=(\d+)", log)
    return int(found[-1][0]), int(found[-1][1])


def test_r21_r22_a_diverged_old_master_truncates(tmp_path: Path) -> None:
    """1. Messages are acknowledged by all three. Both slaves are stopped (SIGSTOP).
    2. The master takes 60 more that cannot be acknowledged: a tail that only it has.
    3. It is killed, the slaves go on; one is elected and acknowledges other messages.
    4. The old master comes back: it truncates its tail and follows. None of what was
       acknowledged, before or after, is among the cut; the logs are equal (G1, G3).
    """
    topic = "Diverged"
    with ClusterProcess(tmp_path, overrides=PATIENT) as cluster:
        master, slaves = cluster.master(), cluster.slaves()
        with Writer([master["address"]], topic, 0) as before:
            wait_acks(before, 40)
        for slave in slaves:
            cluster.kill(slave, signal.SIGSTOP)
        with BlockingConnection(master["address"]) as probe:
            tail = [b"tail %d " % number + b"t" * 10_000 for number in range(60)]
            for body in tail:
                probe.post(SEND_V2, send_ext(topic, 2), body, FLAG_ONEWAY)
            wait_for(
                "the tail in the master's log",
                lambda: log_end(probe) > len(tail) * 10_000,
            )
            end_of_tail = log_end(probe)
            cluster.kill(master)
        for slave in slaves:
            cluster.kill(slave, signal.SIGCONT)
        with Writer([slave["address"] for slave in slaves], topic, 1) as after:
            wait_acks(after, 40)
            cluster.restart(master)
            cluster.wait_in_sync(3)

        assert "log_truncated" in cluster.broker_log(master), cluster.diagnostics()
        cut_from, cut_to = truncation(cluster.broker_log(master))
        assert cut_from == end_of_tail and cut_to < cut_from
        check_writers(cluster.name_servers, topic, [before, after])
        stored = read_topic(cluster.name_servers, topic)
        left = [m.body for m in stored[2]]
        assert left == tail[: len(left)] and len(left) < len(tail), "the end of the tail is gone"
        assert cluster.stop() == 0
        check_logs_equal(cluster.data_folders)
