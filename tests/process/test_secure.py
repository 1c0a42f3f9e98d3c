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
from unittest.mock import ANY, patch

import pytest
import yaml

from batonmq import ClientOptions, ClientTls, Message, Producer
from batonmq.auth.signature import Credentials, Signer
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import boot_ms
from lab.cluster.queues import read_topic
from lab.cluster.up import ClusterProcess, rounds
from tests.shared.waiting import until

pytestmark = pytest.mark.process
TOPIC = "Secured"


class SecureCluster(ClusterProcess):
    def __init__(self, folder: Path, mode: str, **more: Any) -> None:
        super().__init__(folder, **more)
        if mode:
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
            timeout=180,
            check=False,
        )

    def ports(self, code: int = 0) -> list[dict[str, Any]]:
        found = self.mqctl("secure", "status", "--json")
        assert found.returncode == code, found
        ports: list[dict[str, Any]] = json.loads(found.stdout)
        return ports

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.data_dir.glob("*/process.log"))


class Sends:
    """Sends one message after the other until `stop`, and keeps what was acknowledged."""

    def __init__(
        self, cluster: SecureCluster, client: ClientOptions | None = None, name: str = ""
    ) -> None:
        self.acked: list[bytes] = []
        self.failed: list[BaseException] = []
        self.longest_ms = 0
        self._cluster = cluster
        self._client = cluster.client if client is None else client
        self._name = name
        self._stopped = False

    async def run(self) -> None:
        async with Producer(
            "secured", name_servers=self._cluster.name_servers, client_options=self._client
        ) as producer:
            while not self._stopped:
                body = b"%s%d" % (self._name.encode(), len(self.acked))
                began_ms = boot_ms()
                try:
                    await producer.send(Message.of(TOPIC, body), timeout_ms=20_000)
                    self.acked.append(body)
                except Exception as error:
                    self.failed.append(error)
                self.longest_ms = max(self.longest_ms, boot_ms() - began_ms)
                await asyncio.sleep(0.005)

    async def more(self, count: int) -> None:
        wanted = len(self.acked) + count
        async with asyncio.timeout(60):
            await until(lambda: len(self.acked) >= wanted)

    @property
    def running(self) -> bool:
        return not self._stopped

    def stop(self) -> None:
        self._stopped = True


def test_nothing_is_lost_by_a_kill_nor_refused_by_new_certificates(tmp_path: Path) -> None:
    """1. All ports take TLS only. 2. The authority changes under load, and with it all
    certificates: no send fails, there is no election. 3. The master is killed: sends continue. 4.
    Everything acknowledged is there."""
    with SecureCluster(tmp_path, "enforcing", respawn=True, replicas=2) as cluster:
        before = cluster.ports()
        assert {port["port"] for port in before} == {"remoting", "grpc", "raft", "ha"}
        assert all(port["verified"] and not port["plain"] for port in before), before

        async def scenario() -> Sends:
            sends = Sends(cluster)
            running = asyncio.create_task(sends.run())
            await sends.more(50)
            master = cluster.master()
            epoch = await asyncio.to_thread(master_epoch, cluster)
            for step in ("trusted", "renewed", "dropped"):
                words = ("secure", "rotate", "--authority", "--days", "100", "--json")
                rotated = await asyncio.to_thread(cluster.mqctl, *words)
                assert rotated.returncode == 0, rotated
                assert json.loads(rotated.stdout)["step"] == step
                await sends.more(20)
            assert not sends.failed and cluster.master() == master
            assert await asyncio.to_thread(master_epoch, cluster) == epoch
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


def test_tls_is_turned_on_under_load_and_no_send_fails(tmp_path: Path) -> None:
    """1. A cluster without TLS, and a producer: `secure enable` stops before it would refuse that
    one, and names it. 2. Another producer dials with TLS, the first one ends: the same command
    continues. Under `make soak` the way back as well, with the two in the other order."""

    async def scenario(cluster: SecureCluster) -> None:
        plain = Sends(cluster, ClientOptions(), "plain-")
        before = asyncio.create_task(plain.run())
        await plain.more(1)
        code, said = await change(cluster, "enable")
        assert (code, [stage["stage"] for stage in said["stages"]]) == (3, ["accept", "dial"]), said
        assert "without TLS: at " in said["doubt"] and "127.0.0.1:" in said["doubt"]
        assert any(port["plainClients"] for port in cluster.ports(3))
        # The trust is in cluster.json from now on.
        encrypted = Sends(cluster, name="tls-")
        after = asyncio.create_task(encrypted.run())
        await encrypted.more(1)
        plain.stop()
        await before
        code, said = await change(cluster, "enable")
        assert (code, said["doubt"]) == (0, ""), f"{said}\n{cluster.diagnostics()}"
        assert [stage["stage"] for stage in said["stages"]] == ["enforcing"]
        assert all(port["verified"] and not port["plain"] for port in cluster.ports())
        both = [plain, encrypted]
        if rounds(0, 1):
            code, said = await change(cluster, "disable")
            assert (code, [s["stage"] for s in said["stages"]]) == (3, ["dial", "accept"]), said
            plain = Sends(cluster, ClientOptions(), "again-")
            both.append(plain)
            before = asyncio.create_task(plain.run())
            await plain.more(1)
            encrypted.stop()
            await after
            done = [{"stage": "disabled", "restarted": ANY}]
            code, said = await change(cluster, "disable")
            assert (code, said) == (0, {"stages": done, "doubt": "", "nextStep": ""})
        await asyncio.gather(*(sends.more(20) for sends in both if sends.running))
        for sends in both:
            sends.stop()
        await asyncio.gather(before, after)
        for sends in both:
            text = f"{len(sends.acked)} acknowledged, {len(sends.failed)} failed"
            print(f"{text}, longest {sends.longest_ms} ms")
            assert not sends.failed, sends.failed[:3]
        stored = await _stored(cluster, ClientOptions() if rounds(0, 1) else cluster.client)
        assert {body for sends in both for body in sends.acked} <= stored

    with SecureCluster(tmp_path, "", respawn=True, replicas=2) as cluster:
        asyncio.run(scenario(cluster))


def test_the_secrets_of_the_nodes_change_under_load(tmp_path: Path) -> None:
    """The password of Raft and the secret with which nodes sign, twice: no send fails, no
    connection between nodes ends, there is no election, and in the end only the new ones count."""
    node = tmp_path / "node.json"
    old = {"accessKey": "node", "secretKey": "the-former-secret"}
    node.write_text(json.dumps(old))
    node.chmod(0o600)
    auth = {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "initAuthenticationUser": json.dumps({"username": "admin", "password": "secret-a"}),
        "innerClientAuthenticationCredentialsFile": str(node),
    }
    admin = Credentials(access_key="admin", secret_key="secret-a")

    async def whoami(cluster: SecureCluster, secret: str) -> int:
        user = Credentials(access_key="node", secret_key=secret)
        client = RemotingClient(sign=Signer(user))
        try:
            request = RemotingCommand.request(RequestCode.BATON_WHO_AM_I)
            address = cluster.master()["address"]
            return (await client.invoke(address, request, 5_000)).code
        finally:
            await client.close()

    async def scenario(cluster: SecureCluster) -> Sends:
        sends = Sends(cluster, ClientOptions(credentials=admin))
        running = asyncio.create_task(sends.run())
        await sends.more(50)
        master, epoch = cluster.master(), await asyncio.to_thread(master_epoch, cluster)
        broken = breaks(cluster)
        raft = cluster.data_dir / "conf" / "raft-password"
        for _ in range(2):
            before = node.read_text(), raft.read_text()
            done = await asyncio.to_thread(cluster.mqctl, "secure", "rotate", "--secrets", "--json")
            assert done.returncode == 0, done
            steps = [each["step"] for each in json.loads(done.stdout)]
            assert steps == ["next", "former", "done"] * 2
            assert node.read_text() != before[0] and raft.read_text() != before[1]
            await sends.more(50)
        secret = json.loads(node.read_text())["secretKey"]
        assert await whoami(cluster, secret) == 0
        assert await whoami(cluster, old["secretKey"]) == ResponseCode.NO_PERMISSION
        assert cluster.master() == master
        assert await asyncio.to_thread(master_epoch, cluster) == epoch
        assert breaks(cluster) == broken
        # With the new secret the master changes its set, and a replica registers and comes back.
        (slave,) = cluster.slaves()
        cluster.kill(slave)
        await asyncio.to_thread(cluster.wait_for, "a set of one", lambda: in_sync(cluster) == 1)
        cluster.restart(slave)
        await asyncio.to_thread(cluster.wait_for, "a set of two", lambda: in_sync(cluster) == 2)
        sends.stop()
        await running
        return sends

    def breaks(cluster: SecureCluster) -> int:
        """How often a connection between nodes ended, or was refused, by their logs."""
        ends = ("ha_slave_lost", "ha_master_lost", "session_dropped", "raft_problem", "_refused ")
        return sum(map(cluster.logs().count, (*ends, "raft_leader_gone")))

    os_environ = {"BATONMQ_ACCESS_KEY": "admin", "BATONMQ_SECRET_KEY": "secret-a"}
    with (
        patch.dict(os.environ, os_environ),
        SecureCluster(tmp_path, "", replicas=2, overrides={"auth": auth}) as cluster,
    ):
        sends = asyncio.run(scenario(cluster))
        assert not sends.failed, sends.failed[:3]
        for secret in (old["secretKey"], json.loads(node.read_text())["secretKey"]):
            assert secret not in cluster.logs()


def group_state(cluster: SecureCluster) -> dict[str, Any]:
    found = cluster.mqctl("getSyncStateSet", "-b", "broker-a", "--json")
    assert found.returncode == 0, found
    state: dict[str, Any] = json.loads(found.stdout)["replicasInfoTable"]["broker-a"]
    return state


def master_epoch(cluster: SecureCluster) -> int:
    return int(group_state(cluster)["masterEpoch"])


def in_sync(cluster: SecureCluster) -> int:
    return len(group_state(cluster)["inSyncReplicas"])


async def change(cluster: SecureCluster, action: str) -> tuple[int, Any]:
    """Exit code and document of `mqctl secure enable` or `disable`."""
    ran = await asyncio.to_thread(cluster.mqctl, "secure", action, "--json", "--within", "30")
    assert ran.stdout, ran
    return ran.returncode, json.loads(ran.stdout)


async def _stored(cluster: SecureCluster, client: ClientOptions | None = None) -> set[bytes]:
    from batonmq import PullConsumer

    async with PullConsumer(
        "reader", name_servers=cluster.name_servers, client_options=client or cluster.client
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
