"""R36 and the controllers' own deaths: what goes on without them, and what waits."""

from __future__ import annotations

import time

import pytest

from batonmq.blocking import BlockingProducer
from batonmq.protocol.message import Message
from lab.cluster.connection import BlockingConnection
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.process


def test_r36_a_healthy_group_goes_on_without_any_controller(cluster: ClusterProcess) -> None:
    """1. Writers run: one of raw frames, one with the client's cached routes.
    2. kill -9 of all three name servers with their controllers. Both writers go on: every write
       is acknowledged by the whole set, no lease is needed for that.
    3. A slave is killed. A shrink needs a controller, so it waits: nothing is acknowledged any
       more, and soon each send is answered 14 at once instead of waiting.
    """
    master = cluster.master()
    with (
        Writer([master["address"]], "Orphaned", 0) as writer,
        BlockingProducer("orphan", name_servers=cluster.name_servers) as producer,
    ):
        wait_acks(writer, 30)
        assert producer.send(Message("Orphaned", b"before")).msg_id
        for server in cluster.document["nameServers"]:
            cluster.kill(server)
        wait_for(
            "the lease to be over, and writes beyond it",
            lambda: len(writer.acks) > 30 and writer.acks[-1].at > killed_at(cluster) + 1.5,
        )
        for number in range(10):
            result = producer.send(Message("Orphaned", b"after %d" % number))
            assert result.msg_id
        assert writer.refusals == []

        slave = cluster.slaves()[0]
        cluster.kill(slave)
        dead_at = time.monotonic()
        wait_for("a refusal with 14", lambda: any(code == 14 for _, _, code, _ in writer.refusals))
        first = next(at for at, _, code, _ in writer.refusals if code == 14)
        wait_for("refusals at once", lambda: quick_refusals(writer, first) >= 20)
        late = [ack for ack in writer.acks if ack.at > dead_at + 1.0]
        assert not late, "acknowledged although a member of the set was gone"
        assert {code for _, _, code, _ in writer.refusals} <= {12, 14}
        remark = writer.refusals[-1][3]
        assert "lease" in remark and "replicas" in remark
    with BlockingConnection(master["address"]) as probe:
        assert probe.send("Orphaned", b"no").code == 14


def killed_at(cluster: ClusterProcess) -> float:
    """When the last name server was seen dead, by this process's clock."""
    ended = [
        event["time"]
        for event in cluster.events
        if event["event"] == "process_ended" and event["name"].startswith("namesrv")
    ]
    if len(ended) < 3:
        return float("inf")
    return time.monotonic() - (time.time() - max(ended) / 1000)


def quick_refusals(writer: Writer, since: float) -> int:
    return sum(at > since and code == 14 for at, _, code, _ in list(writer.refusals))
