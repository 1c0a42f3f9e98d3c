"""A master that hangs (SIGSTOP) is replaced; resumed, it acknowledges nothing and follows."""

from __future__ import annotations

import signal

import pytest

from lab.cluster.connection import BlockingConnection
from lab.cluster.frames import SEND_V2, send_ext
from lab.cluster.queues import check_writers
from lab.cluster.stores import check_logs_equal
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.process


def test_r1_r4_a_woken_master_acknowledges_nothing_of_its_old_epoch(
    cluster: ClusterProcess,
) -> None:
    """1. Under load the master is stopped with SIGSTOP; sends lie in its socket unanswered.
    2. Its sessions fall silent, another replica is elected and acknowledges.
    3. SIGCONT: the old master finds those sends. It holds no lease and its required set does not
       follow it any more (R1): none of them gets code 0 (R4), each gets an answer.
    4. It follows the new master and is in the set again; logs are equal, nothing is lost.
    """
    topic = "Hanging"
    master = cluster.master()
    with Writer(cluster.addresses(), topic, 0, timeout_s=1.0) as writer:
        wait_acks(writer, 50)
        with BlockingConnection(master["address"], timeout_s=30.0) as stuck:
            assert stuck.send(topic, b"9 0 warm", queue_id=3).code == 0
            cluster.kill(master, signal.SIGSTOP)
            waiting = {
                stuck.post(SEND_V2, send_ext(topic, 2), b"2 %d unacknowledged" % number)
                for number in range(20)
            }
            new = cluster.wait_new_master(master["address"])
            wait_acks(writer, 50)

            cluster.kill(master, signal.SIGCONT)
            answers: dict[int, int] = {}
            while len(answers) < len(waiting):
                reply = stuck.take()
                answers[reply.opaque] = reply.code
            assert set(answers) == waiting
            assert 0 not in answers.values(), answers
            assert set(answers.values()) <= {2, 12, 14}
        cluster.wait_in_sync(3)
        assert cluster.master()["address"] == new["address"]
        wait_acks(writer, 20)
    check_writers(cluster.name_servers, topic, [writer])
    assert cluster.stop() == 0
    check_logs_equal(cluster.data_folders)
