"""A slave of one kind acts for a killed master of the other kind, and gives the offsets back.

`enableSlaveActingMaster` on every broker, a name server of either kind, and stock consumers.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.cluster import frames
from lab.cluster.classic import ClassicGroup, in_sync
from lab.cluster.connection import BlockingConnection, ask, takes_writes
from lab.cluster.java import JavaProgram
from lab.cluster.processes import free_base_port
from tests.interop.conftest import RunJava

pytestmark = pytest.mark.java

TOPIC, READERS = "Acting", "readers"
MASTER, SLAVE = 0, 1
COUNT = 10
MEMBERS = 38
ACTING = {"enableSlaveActingMaster": "true", "inSyncReplicas": 1}
JAVA = {**ACTING, "totalReplicas": 2, "slaveReadEnable": "true"}
LIMIT_S = 180.0
"""A Java slave fetches tables each minute, and a slow machine takes its time besides."""


NAMESRV = {"supportActingMaster": "true", "notifyMinBrokerIdChanged": "true"}


@pytest.fixture(params=["ours"])
def group(
    java_classpath: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[ClassicGroup]:
    """With that kind of name server."""
    is_java, base = request.param == "java", free_base_port(2)
    with ClassicGroup(tmp_path, base, namesrv=NAMESRV, java_namesrv=is_java) as running:
        yield running


def send(address: str, first: int) -> set[str]:
    """COUNT messages into queue 0; their keys, all acknowledged."""
    keys = [str(number) for number in range(first, first + COUNT)]
    with BlockingConnection(address) as connection:
        for key in keys:
            reply = connection.send(TOPIC, b"x", properties=f"KEYS\x01{key}\x02")
            assert reply.code == frames.OK, reply
    return set(keys)


def committed(address: str) -> int:
    """Of the readers in queue 0; -1 where the broker knows none, or is away."""
    fields = {"consumerGroup": READERS, "topic": TOPIC, "queueId": 0, "setZeroIfNotFound": "false"}
    try:
        reply = ask(address, frames.QUERY_OFFSET, fields, timeout_s=1.0)
    except OSError:
        return -1
    return int(reply.ext["offset"]) if reply.code == frames.OK else -1


def routed(group: ClassicGroup) -> dict[str, str]:
    """Id -> address, as the name server routes; an acting master is 0."""
    route = ask(group.name_server, frames.ROUTE, {"topic": TOPIC, "acceptStandardJsonOnly": "true"})
    return route.json["brokerDatas"][0]["brokerAddrs"] if route.code == frames.OK else {}


def read(program: JavaProgram, name: str, keys: set[str]) -> None:
    """A new member of the readers gets these messages."""
    program.ask(f"push {name} {READERS} {TOPIC} CLUSTERING TAG *", LIMIT_S)

    def has_all() -> bool:
        return keys <= {line["key"] for line in program.of("key") if line["by"] == name}

    program.wait_for(f"{len(keys)} messages", has_all, LIMIT_S)


def leave(program: JavaProgram, name: str) -> None:
    program.send(f"leave {name}")


def play(group: ClassicGroup, run_java: RunJava, start_master: Callable[[], None]) -> None:
    """Both brokers run, and the slave is level. The master is killed and comes back."""
    master, slave = group.address(MASTER), group.address(SLAVE)
    with run_java("Consumers", group.name_server) as program:
        read(program, "before", send(master, 0))
        # Who leaves commits what it has returned, and the last message may not be among that.
        group.wait_for("the offset", lambda: committed(master) == max_offset(master))
        leave(program, "before")
        members = {"consumerGroup": READERS}
        group.wait_for("its end", lambda: not ask(master, MEMBERS, members).body)
        more = send(master, COUNT)
        end = max_offset(master)
        group.wait_for("the slave", lambda: max_offset(slave) == end)
        group.kill("master")
        group.wait_for("an acting master", lambda: routed(group) == {"0": slave})
        assert not takes_writes(slave, TOPIC)
        read(program, "meanwhile", more)
        group.wait_for("the offset at the acting master", lambda: committed(slave) == end)
        leave(program, "meanwhile")
        start_master()
        group.wait_for("the master", lambda: routed(group).get("0") == master)
        assert committed(master) == end
        read(program, "after", send(master, 2 * COUNT))


def max_offset(address: str) -> int:
    return int(ask(address, frames.MAX_OFFSET, {"topic": TOPIC, "queueId": 0}).ext["offset"])


@pytest.mark.parametrize("group", ["java"], indirect=True)
def test_our_slave_acts_for_a_java_master(
    group: ClassicGroup, run_java: RunJava, tmp_path: Path
) -> None:
    master = {**group.settings(MASTER, "ASYNC_MASTER", tmp_path / "java"), **JAVA}
    group.start_java("master", master)
    group.wait_for("the Java master", lambda: takes_writes(group.address(MASTER), TOPIC))
    slave = {**group.settings(SLAVE, "SLAVE", tmp_path / "ours"), **ACTING}
    group.start_ours("slave", slave)
    group.wait_for("our slave", lambda: in_sync(group.address(MASTER)) == 1)
    play(group, run_java, lambda: group.start_java("master", master))


def test_a_java_slave_acts_for_our_master(
    group: ClassicGroup, run_java: RunJava, tmp_path: Path
) -> None:
    master = {**group.settings(MASTER, "SYNC_MASTER", tmp_path / "ours"), **ACTING}
    group.start_ours("master", master)
    group.wait_for("our master", lambda: takes_writes(group.address(MASTER), TOPIC))
    # A Java slave has no topics in its first minute.
    theirs, ours = tmp_path / "java" / "config", tmp_path / "ours" / "config" / "topics.json"
    group.wait_for("the topic", lambda: ours.exists() and TOPIC in ours.read_text())
    theirs.mkdir(parents=True)
    shutil.copy(ours, theirs)
    group.start_java("slave", {**group.settings(SLAVE, "SLAVE", tmp_path / "java"), **JAVA})
    group.wait_for("the Java slave", lambda: in_sync(group.address(MASTER)) == 1)
    play(group, run_java, lambda: group.start_ours("master", master))
