"""`mqctl up`: a running `batonmq up` gets and loses brokers under load; no send fails (R47)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from batonmq import Message, Producer
from lab.cluster.client_load import ClientLoad
from lab.cluster.mqctl import Ran, mqctl
from lab.cluster.queues import read_topic
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

TOPIC = "Changes"
SIZE_OPTIONS = ("--replicas", "--groups", "--controllers", "--base-port")


def numbers(cluster: ClusterProcess) -> list[tuple[str, str]]:
    """(folder, group) of each broker."""
    return [(Path(each["dataDir"]).name, each["name"]) for each in cluster.brokers]


def test_r47_replicas_and_groups_come_and_go_under_load(tmp_path: Path) -> None:
    """0. With minInSyncReplicas 2 of two no replica is removed. 1. A third is added. 2. The master
    is restarted, then removed: the others have everything. 3. Added again it has its old folder.
    4. A group comes and goes. 5. Without numbers the next start has the size of now. No send fails,
    and every acknowledged message is there once, in its order."""
    overrides = {"store": {"minInSyncReplicas": 2}}
    cluster = ClusterProcess(tmp_path, replicas=2, respawn=True, overrides=overrides)

    async def ask(*arguments: str) -> Ran:
        where = {"BATONMQ_DATA": str(cluster.data_dir)}
        return await asyncio.to_thread(mqctl, *arguments, home=tmp_path, env=where)

    async def change(*arguments: str) -> Ran:
        ran = await ask("up", *arguments, "--json")
        assert ran.code == 0, (ran.out, ran.err)
        return ran

    async def scenario() -> ClientLoad:
        async with Producer("changes", name_servers=cluster.name_servers) as producer:
            await producer.send(Message(TOPIC, b"0:first"))
            sends = ClientLoad(producer, TOPIC, tasks=2)
            async with asyncio.TaskGroup() as running:
                running.create_task(sends.run())
                try:
                    await changes(sends)
                finally:
                    sends.stop()
        return sends

    async def well() -> None:
        assert (await ask("health", "--watch", "--within", "20")).code == 0
        assert (await ask("health", "--json")).json["notes"] == []

    async def refusals() -> None:
        for broker in cluster.brokers:
            ran = await ask("up", "remove", broker["address"], "--yes")
            assert ran.code == 1 and "would keep 1 replica in sync, and needs 2" in ran.err
        assert "no group 'broker-z'" in (await ask("up", "add", "broker-z")).err
        whole = await ask("up", "remove", "broker-a", "--wholeGroup", "--yes")
        assert "only group" in whole.err
        for wrong, code in (
            (("remove", "127.0.0.1:1", "--yes"), 1),
            (("restart", "127.0.0.1:1"), 1),
            (("add",), 2),
            (("remove",), 2),
        ):
            assert (await ask("up", *wrong)).code == code, wrong
        assert len(cluster.brokers) == 2

    async def changes(sends: ClientLoad) -> None:
        await sends.until(20)
        await refusals()
        await change("add", "broker-a")
        assert len(cluster.brokers) == 3
        first = cluster.master()["address"]
        ran = await change("restart", first)
        assert ran.json["rolled"] == [f"broker {first}"]
        refused = await ask("up", "remove", cluster.master()["address"])
        assert refused.code == 1 and "give --yes" in refused.err
        gone = cluster.master()
        await change("remove", gone["address"], "--yes")
        await sends.until(20)
        await well()
        left = numbers(cluster)
        assert (Path(gone["dataDir"]).name, "broker-a") not in left and len(left) == 2
        await change("add", "broker-a")
        assert gone["address"] in [each["address"] for each in cluster.brokers]
        await change("add", "--newGroup", "--count", "2")
        assert numbers(cluster)[3:] == [("broker-3", "broker-b"), ("broker-4", "broker-b")]
        await change("remove", "broker-b", "--wholeGroup", "--yes")
        await sends.until(20)
        await well()

    with cluster:
        sends = uvloop.run(scenario())
        assert sends.failures == []
        size = numbers(cluster)
        assert size == [(f"broker-{n}", "broker-a") for n in range(3)]
        cluster.stop()
        for name in SIZE_OPTIONS:
            at = cluster.argv.index(name)
            del cluster.argv[at : at + 2]
        cluster.start()
        assert numbers(cluster) == size
        stored = read_topic(cluster.name_servers, TOPIC)
        for task, count in enumerate(sends.numbers):
            bodies = dict.fromkeys(m.body for m in stored[task] if m.body != b"0:first")
            assert list(bodies) == [b"%d:%d" % (task, number) for number in range(count)]
