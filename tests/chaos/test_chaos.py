"""What happens to machines, done to containers under a load of acknowledged writes.

Each test begins and ends with a whole cluster, and ends with the same questions: is every
acknowledged message where its acknowledgement named, is there exactly one master, does `mqctl
health` find no problem. The tests share one cluster.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from batonmq.protocol.errors import BatonError
from lab.cluster.client_writer import PAUSE_S, ClientWriter
from lab.cluster.cluster import GROUP
from lab.cluster.compose import BROKERS, NAME_SERVERS, ComposeCluster, first_ack
from lab.cluster.processes import wait_for
from lab.cluster.queues import check_writers
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.docker

MORE = 30
"""So many acknowledged writes of each writer count as going on."""
_names = itertools.count(1)


@dataclass
class Load:
    """Writers into one topic: two raw ones and the client's."""

    cluster: ComposeCluster
    topic: str
    writers: list[Writer | ClientWriter]

    @property
    def client(self) -> ClientWriter:
        (found,) = (writer for writer in self.writers if isinstance(writer, ClientWriter))
        return found

    def wait_more(self, seconds: float = 30.0) -> float:
        """Waits until every writer had `MORE` further acks; how long it took."""
        began = time.monotonic()
        wait_acks(self.writers, MORE, seconds)
        return time.monotonic() - began


@contextlib.contextmanager
def fault_under_load(cluster: ComposeCluster) -> Iterator[Load]:
    """A load on a whole cluster. A fault happens inside the block; after it the cluster must be
    healthy and every acknowledged message present.

    The load goes on until the cluster is whole again.
    """
    cluster.wait_healthy()
    topic = f"Chaos{next(_names)}"
    first_ack([cluster.broker_addresses[BROKERS.index(cluster.master())]], topic)
    writers: list[Writer | ClientWriter] = [
        Writer(cluster.broker_addresses, topic, 1, timeout_s=1.0, pause_s=PAUSE_S),
        Writer(cluster.broker_addresses, topic, 2, timeout_s=1.0, pause_s=PAUSE_S),
        ClientWriter(cluster.name_servers, topic, 3),
    ]
    load = Load(cluster, topic, writers)
    with contextlib.ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        load.wait_more()
        yield load
        load.wait_more()
        whole_s = cluster.wait_healthy()
        load.wait_more()
    acked = sum(len(writer.acks) for writer in writers)
    stored = _checked(cluster, topic, writers)
    gap = max(writer.longest_gap_s for writer in writers)
    print(f"acknowledged {acked}, stored {stored}, longest gap {gap:.2f} s, whole {whole_s:.1f} s")
    assert stored >= acked
    assert cluster.self_declared_masters() == [cluster.master()]
    last = load.client.acks[-1].number
    by_key = cluster.mqctl("queryMsgByKey", "-t", topic, "-k", f"k{last}", "--json")
    assert (by_key.code, len(by_key.json)) == (0, 1), by_key


def _checked(cluster: ComposeCluster, topic: str, writers: Iterable[Writer | ClientWriter]) -> int:
    """`check_writers`; a master lost while it reads, on a busy host, is waited for."""

    def read() -> int | None:
        try:
            return check_writers(cluster.name_servers, topic, writers)
        except BatonError:
            return None

    found: int = wait_for(f"the messages of {topic}", read)
    return found


def master_and_leader(cluster: ComposeCluster) -> list[str]:
    return [cluster.master(), cluster.leader()]


def test_up_to_the_first_acknowledged_write(containers: ComposeCluster) -> None:
    at = first_ack(containers.broker_addresses, "First")
    print(f"up to the first acknowledged write: {at - containers.up_began:.1f} s")
    assert containers.wait_healthy() >= 0
    assert len(containers.group()["inSyncReplicas"]) == 3


def test_an_operator_sees_and_steers_it_from_outside(containers: ComposeCluster) -> None:
    """A planned switch under load: no send of the client fails."""
    with fault_under_load(containers) as load:
        before = containers.group()
        other = next(
            replica["brokerId"]
            for replica in before["inSyncReplicas"]
            if replica["brokerId"] != before["masterBrokerId"]
        )
        elect = ("electMaster", "-bn", GROUP, "-c", "DefaultCluster", "-b")
        ran = containers.mqctl(*elect, str(other), "--json")
        assert (ran.code, ran.json["masterBrokerId"]) == (0, other), ran
        assert ran.json["masterEpoch"] > before["masterEpoch"]
        assert containers.mqctl(*elect, "99").code == 1
        assert containers.mqctl("health", "-n", "nonsense").code == 2
        load.wait_more()
        assert containers.group()["masterBrokerId"] == other
    assert not load.client.failures
    assert containers.mqctl("timeline").code == 0
    listed = containers.mqctl("clusterList", "--json").json["brokerAddrTable"][GROUP]
    assert sorted(listed["brokerAddrs"].values()) == containers.broker_addresses


def test_a_crashed_master_is_restarted_by_its_policy(containers: ComposeCluster) -> None:
    with fault_under_load(containers):
        victim = containers.master()
        containers.crash(victim)
        wait_for("another master", lambda: containers.group()["masterAddress"] != "" and
                 containers.master() != victim)  # fmt: skip


def test_after_a_clean_stop_any_two_brokers_go_on(containers: ComposeCluster) -> None:
    """Every process ends by itself with 0, and the set is still whole: it needs no last broker."""
    topic = "Stopped"
    containers.wait_healthy()
    steady = Writer(containers.broker_addresses, topic, 0, timeout_s=1.0, pause_s=PAUSE_S)
    with steady as writer:
        wait_acks(writer, MORE)
    master = containers.master()
    containers.compose("stop")
    assert {containers.exit_code(name) for name in (*BROKERS, *NAME_SERVERS)} == {0}
    containers.start(NAME_SERVERS)
    containers.start(name for name in BROKERS if name != master)
    first_ack(containers.broker_addresses, "Started")
    assert containers.master() != master
    containers.start([master])
    containers.wait_healthy()
    assert _checked(containers, topic, [writer]) >= len(writer.acks)


def test_master_and_leader_come_back_with_each_others_address(containers: ComposeCluster) -> None:
    """The last test: the engine gives these two their chosen addresses at later starts as well."""
    with fault_under_load(containers) as load:
        victims = master_and_leader(containers)
        addresses = [containers.address_inside(name) for name in victims]
        containers.cut_off(victims)
        load.wait_more()
        for name, address in zip(victims, reversed(addresses), strict=True):
            containers.reconnect([name], address)
