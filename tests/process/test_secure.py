"""`batonmq up --secure`: TLS on every port, through kills and a change of certificates."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from batonmq import ClientOptions, ClientTls, Message, Producer
from lab.cluster.queues import read_topic
from lab.cluster.up import ClusterProcess
from tests.shared.waiting import until

pytestmark = pytest.mark.process
TOPIC = "Secured"


class SecureCluster(ClusterProcess):
    def __init__(self, folder: Path, mode: str, **more: Any) -> None:
        super().__init__(folder, **more)
        self.argv += ["--secure", mode]

    @property
    def client(self) -> ClientOptions:
        return ClientOptions(tls=ClientTls(trust_cert_path=self.document["tls"]["trust"]))

    def mqctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "batonmq.mqctl.main", *words],
            env=os.environ | {"BATONMQ_DATA": str(self.data_dir)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def ports(self) -> list[dict[str, Any]]:
        found = self.mqctl("secure", "status", "--json")
        assert found.returncode == 0, found
        ports: list[dict[str, Any]] = json.loads(found.stdout)
        return ports

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.data_dir.glob("*/process.log"))


class Sends:
    """Sends one message after the other until `stop`, and keeps what was acknowledged."""

    def __init__(self, cluster: SecureCluster) -> None:
        self.acked: list[bytes] = []
        self.failed: list[BaseException] = []
        self._cluster = cluster
        self._stopped = False

    async def run(self) -> None:
        async with Producer(
            "secured", name_servers=self._cluster.name_servers, client_options=self._cluster.client
        ) as producer:
            while not self._stopped:
                body = b"%d" % len(self.acked)
                try:
                    await producer.send(Message.of(TOPIC, body), timeout_ms=20_000)
                    self.acked.append(body)
                except Exception as error:
                    self.failed.append(error)

    async def more(self, count: int) -> None:
        wanted = len(self.acked) + count
        async with asyncio.timeout(60):
            await until(lambda: len(self.acked) >= wanted)

    def stop(self) -> None:
        self._stopped = True


def test_nothing_is_lost_by_a_kill_nor_refused_by_new_certificates(tmp_path: Path) -> None:
    """1. All ports take TLS only. 2. Certificates change under load: no send fails, no mastership
    changes. 3. The master is killed: sends continue. 4. Everything acknowledged is there."""
    with SecureCluster(tmp_path, "enforcing", respawn=True) as cluster:
        before = cluster.ports()
        assert {port["port"] for port in before} == {"remoting", "grpc", "raft", "ha"}
        assert all(port["verified"] and not port["plain"] for port in before), before

        async def scenario() -> Sends:
            sends = Sends(cluster)
            running = asyncio.create_task(sends.run())
            await sends.more(50)
            master = cluster.master()
            rotated = await asyncio.to_thread(cluster.mqctl, "secure", "rotate", "--days", "100")
            assert rotated.returncode == 0, rotated
            async with asyncio.timeout(30):
                while cluster.logs().count("tls_reloaded") < 6:
                    await sends.more(20)
            assert not sends.failed and cluster.master() == master
            os.kill(master["pid"], signal.SIGKILL)
            await sends.more(200)
            sends.stop()
            await running
            return sends

        sends = asyncio.run(scenario())
        assert not sends.failed
        cluster.wait_whole()
        after = cluster.ports()
        assert all(port["notAfter"] < before[0]["notAfter"] for port in after), "the renewed ones"
        assert "PRIVATE KEY" not in cluster.logs()
        stored = asyncio.run(_stored(cluster))
        assert set(sends.acked) <= stored


async def _stored(cluster: SecureCluster) -> set[bytes]:
    from batonmq import PullConsumer

    async with PullConsumer(
        "reader", name_servers=cluster.name_servers, client_options=cluster.client
    ) as consumer:
        await consumer.assign(await consumer.fetch_queues(TOPIC))
        found: set[bytes] = set()
        while page := await consumer.poll(2_000):
            found |= {message.body for message in page}
        return found


def test_a_permissive_cluster_serves_plain_clients_and_keeps_its_mode(tmp_path: Path) -> None:
    with SecureCluster(tmp_path, "permissive", controllers=1, replicas=1) as cluster:
        ports = cluster.ports()
        assert all(port["verified"] for port in ports)
        assert {port["port"] for port in ports if port["plain"]} == {"remoting"}

        async def send(options: ClientOptions) -> None:
            async with Producer(
                "both", name_servers=cluster.name_servers, client_options=options
            ) as producer:
                await producer.send(Message.of(TOPIC, b"x"), timeout_ms=20_000)

        asyncio.run(send(ClientOptions()))
        asyncio.run(send(cluster.client))
        assert sum(map(len, read_topic(cluster.name_servers, TOPIC).values())) == 2
    cluster.argv = cluster.argv[:-2]
    with cluster:
        config = yaml.safe_load((cluster.data_dir / "conf" / "broker-0.yaml").read_text())
        assert config["tls"]["serverMode"] == "permissive"
