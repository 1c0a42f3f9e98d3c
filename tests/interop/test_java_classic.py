"""Classic groups of a Java broker and one of ours, both ways, under writes and kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from batonmq.protocol.record import decode_records
from lab import frames
from lab.connection import Connection, ha_status
from lab.java import BROKER_MAIN, start_server
from lab.processes import HOST, free_base_port, spawn, wait_for

pytestmark = pytest.mark.java

SEGMENT = 1 << 20
HEAP = ("-Xms256m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC")
TOPIC = "Classic"


class Group:
    """A name server of ours, and the brokers of one classic group."""

    def __init__(self, folder: Path, base: int) -> None:
        self.folder = folder
        self.name_server = f"{HOST}:{base}"
        self._base = base
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        config = folder / "namesrv.properties"
        config.write_text(f"listenPort={base}\nbindAddress={HOST}\n")
        argv = [sys.executable, "-m", "batonmq.namesrv.main", "-c", str(config)]
        self._processes["namesrv"] = spawn(argv, folder / "namesrv.log", cwd=folder)

    def address(self, broker_id: int) -> str:
        return f"{HOST}:{self._port(broker_id)}"

    def _port(self, broker_id: int) -> int:
        return self._base + 1035 + 100 * broker_id

    def settings(self, broker_id: int, role: str, store: Path) -> dict[str, object]:
        """RocketMQ's keys; both kinds of broker take them."""
        port = self._port(broker_id)
        return {
            "brokerClusterName": "DefaultCluster",
            "brokerName": frames.BROKER_NAME,
            "brokerId": broker_id,
            "brokerRole": role,
            "inSyncReplicas": 2,
            "listenPort": port,
            "haListenPort": port + 1,
            "namesrvAddr": self.name_server,
            "brokerIP1": HOST,
            "brokerIP2": HOST,
            "storePathRootDir": store,
            "storePathCommitLog": store / "commitlog",
            "mappedFileSizeCommitLog": SEGMENT,
            "mappedFileSizeConsumeQueue": 20_000,
            "maxHashSlotNum": 1000,
            "maxIndexNum": 4000,
            "deleteWhen": "04",
            "fileReservedTime": 48,
            "flushDiskType": "ASYNC_FLUSH",
            "diskMaxUsedSpaceRatio": 95,
        }

    def start_ours(self, name: str, settings: Mapping[str, object]) -> None:
        config = self.folder / f"{name}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        argv = [sys.executable, "-m", "batonmq.broker.main", "-c", str(config)]
        self._processes[name] = spawn(argv, self.folder / f"{name}.log", cwd=self.folder)

    def start_java(self, name: str, settings: Mapping[str, object]) -> None:
        more = {"transferMsgByHeap": "true", "warmMapedFileEnable": "false"}
        process = start_server(BROKER_MAIN, {**settings, **more}, self.folder / name, HEAP)
        self._processes[name] = process

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """By kill -9: a Java broker takes its time with SIGTERM."""
        for name in list(self._processes):
            self.kill(name)


@pytest.fixture
def group(java_classpath: str, tmp_path: Path) -> Iterator[Group]:
    running = Group(tmp_path, free_base_port(2))
    try:
        yield running
    finally:
        running.close()


def wait_level(address: str) -> None:
    """Until the master at `address` has one slave with its whole log."""

    def is_level() -> bool:
        status = ha_status(address, timeout_s=1.0)
        return status is not None and status.is_level(1) and status.max_offset > 0

    wait_for(f"a slave of {address} with its whole log", is_level)


def send(address: str, first: int, count: int) -> list[bytes]:
    """Sends into queue 0 over one connection; the bodies, all acknowledged."""
    bodies = [b"%d " % number + b"x" * 6_000 for number in range(first, first + count)]
    with Connection(address) as connection:
        for body in bodies:
            reply = connection.send(TOPIC, body)
            assert reply.code == frames.OK, reply
    return bodies


def serves_pulls(address: str) -> bool:
    """Whether that broker answers and is master: its endpoint listens before its store is open."""
    if ha_status(address, timeout_s=1.0) is None:
        return False
    with Connection(address) as connection:
        return connection.pull(TOPIC, 0).code == frames.OK


def bodies_at(address: str, count: int) -> list[bytes]:
    """What queue 0 holds at that broker, read by offset."""
    found: list[bytes] = []
    with Connection(address) as connection:
        while len(found) < count:
            reply = connection.pull(TOPIC, len(found))
            assert reply.code == frames.OK, reply
            found += [message.body for message in decode_records(reply.body)]
    return found


def log_of(store: Path, size: int) -> bytes:
    files = sorted((store / "commitlog").glob("0*"))
    return b"".join(file.read_bytes() for file in files)[:size]


def test_a_java_slave_follows_our_master(group: Group, tmp_path: Path) -> None:
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
    assert log_of(java, end) == log_of(ours, end)


def test_our_slave_follows_a_java_master(group: Group, tmp_path: Path) -> None:
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
    assert log_of(ours, end) == log_of(java, end)
    topics = ours / "config" / "topics.json"
    wait_for("the topic", lambda: topics.exists() and TOPIC in topics.read_text())
    group.kill("master")
    group.kill("slave")
    group.start_ours("promoted", group.settings(0, "ASYNC_MASTER", ours))
    wait_for("the promoted slave", lambda: serves_pulls(master))
    assert bodies_at(master, len(sent)) == sent
    assert send(master, 200, 1)


def in_sync(address: str) -> int:
    status = ha_status(address, timeout_s=1.0)
    return 0 if status is None else status.in_sync_slaves
