"""`batonmq up --secure`: TLS on every port, through kills and a change of certificates."""

import asyncio
import json
import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import ANY, patch

import pytest

from batonmq import ClientOptions, ClientTls, Message, Producer
from batonmq.auth.signature import Credentials, Signer
from batonmq.ha.wire import SlaveHandshake, encode_ack, encode_slave_handshake
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from lab.cluster.client_writer import ClientWriter
from lab.cluster.queues import check_writers, read_topic
from lab.cluster.up import ClusterProcess, rounds
from lab.cluster.writer import wait_acks

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

    def ports(self, code: int = 0) -> list[dict[str, Any]]:
        found = self.mqctl_program("secure", "status", "--json")
        assert found.code == code, found
        ports: list[dict[str, Any]] = found.json
        return ports

    def texts(self) -> str:
        return "".join(path.read_text() for path in self.data_dir.glob("*/process.log"))


def writer(
    cluster: SecureCluster, options: ClientOptions | None = None, queue_id: int = 0
) -> ClientWriter:
    names = cluster.name_servers
    return ClientWriter(names, TOPIC, queue_id, options or cluster.client, timeout_ms=20_000)


def test_nothing_is_lost_by_a_kill_nor_refused_by_new_certificates(tmp_path: Path) -> None:
    """1. All ports take TLS only. 2. The authority changes under load, and with it all
    certificates: no send fails, there is no election. 3. The master is killed: sends continue. 4.
    Everything acknowledged is there."""
    with SecureCluster(tmp_path, "enforcing", respawn=True, replicas=2) as cluster:
        before = cluster.ports()
        assert {port["port"] for port in before} == {"remoting", "grpc", "raft", "ha"}
        assert all(port["verified"] and not port["plain"] for port in before), before

        with writer(cluster) as load:
            wait_acks(load, 50)
            master, epoch = cluster.master(), master_epoch(cluster)
            for step in ("trusted", "renewed", "dropped"):
                words = ("secure", "rotate", "--authority", "--days", "100", "--json")
                rotated = cluster.mqctl(*words)
                assert rotated.code == 0, rotated
                assert rotated.json["step"] == step
                wait_acks(load, 20)
            assert not load.failures and cluster.master() == master
            assert master_epoch(cluster) == epoch
            os.kill(master["pid"], signal.SIGKILL)
            wait_acks(load, 200)
        assert not load.failures
        cluster.wait_whole()
        after = cluster.ports()
        assert all(port["notAfter"] < before[0]["notAfter"] for port in after), "the renewed ones"
        assert "PRIVATE KEY" not in cluster.texts()
        check_writers(cluster.name_servers, TOPIC, [load], cluster.client)


def test_tls_is_turned_on_under_load_and_no_send_fails(tmp_path: Path) -> None:
    """1. A cluster without TLS, and a producer: `secure enable` stops before it would refuse that
    one, and names it. 2. Another producer dials with TLS, the first one ends: the same command
    continues. Under `make soak` the way back as well, with the two in the other order."""

    soak = bool(rounds(0, 1))
    with SecureCluster(tmp_path, "", respawn=True, replicas=2) as cluster:
        with ExitStack() as plain_clients, ExitStack() as tls_clients:
            plain = plain_clients.enter_context(writer(cluster, ClientOptions()))
            loads = [plain]
            wait_acks(plain, 1)
            code, said = change(cluster, "enable")
            assert (code, [s["stage"] for s in said["stages"]]) == (3, ["accept", "dial"]), said
            assert "without TLS: at " in said["doubt"] and "127.0.0.1:" in said["doubt"]
            assert any(port["plainClients"] for port in cluster.ports(3))
            # The trust is in cluster.json from now on.
            encrypted = tls_clients.enter_context(writer(cluster, queue_id=1))
            loads.append(encrypted)
            wait_acks(encrypted, 1)
            plain_clients.close()
            code, said = change(cluster, "enable")
            assert (code, said["doubt"]) == (0, ""), f"{said}\n{cluster.diagnostics()}"
            assert [stage["stage"] for stage in said["stages"]] == ["enforcing"]
            assert all(port["verified"] and not port["plain"] for port in cluster.ports())
            if soak:
                code, said = change(cluster, "disable")
                assert (code, [s["stage"] for s in said["stages"]]) == (3, ["dial", "accept"]), said
                again = plain_clients.enter_context(writer(cluster, ClientOptions(), 2))
                loads.append(again)
                wait_acks(again, 1)
                tls_clients.close()
                done = [{"stage": "disabled", "restarted": ANY}]
                code, said = change(cluster, "disable")
                assert (code, said) == (0, {"stages": done, "doubt": "", "nextStep": ""})
            wait_acks(loads[-1], 20)
        for load in loads:
            print(f"{len(load.acks)} acknowledged, longest gap {load.longest_gap_s:.1f} s")
            assert not load.failures, load.failures[:3]
        options = ClientOptions() if soak else cluster.client
        check_writers(cluster.name_servers, TOPIC, loads, options)


def test_the_secrets_of_the_nodes_change_under_load(tmp_path: Path) -> None:
    """The password of Raft and the secret with which nodes sign, under `make soak` twice: no send
    fails, no connection between nodes ends, there is no election, and in the end only the new ones
    count."""
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

    def rotate(cluster: SecureCluster, load: ClientWriter) -> None:
        wait_acks(load, 50)
        master, epoch, broken = cluster.master(), master_epoch(cluster), breaks(cluster)
        raft = cluster.data_dir / "conf" / "raft-password"
        for _ in range(rounds(1, soak=2)):
            before = node.read_text(), raft.read_text()
            done = cluster.mqctl("secure", "rotate", "--secrets", "--json")
            assert done.code == 0, done
            steps = [each["step"] for each in done.json]
            assert steps == ["next", "former", "done"] * 2
            assert node.read_text() != before[0] and raft.read_text() != before[1]
            wait_acks(load, 50)
        secret = json.loads(node.read_text())["secretKey"]
        assert asyncio.run(whoami(cluster, secret)) == 0
        refused = asyncio.run(whoami(cluster, old["secretKey"]))
        assert refused == ResponseCode.NO_PERMISSION
        assert cluster.master() == master
        assert master_epoch(cluster) == epoch
        assert breaks(cluster) == broken
        # With the new secret the master changes its set, and a replica registers and comes back.
        (slave,) = cluster.slaves()
        cluster.kill(slave)
        cluster.wait_for("a set of one", lambda: in_sync(cluster) == 1)
        cluster.restart(slave)
        cluster.wait_for("a set of two", lambda: in_sync(cluster) == 2)
        ha_peers_prove_themselves(cluster)

    def breaks(cluster: SecureCluster) -> int:
        """How often a connection between nodes ended, or was refused, by their logs."""
        ends = ("ha_slave_lost", "ha_master_lost", "session_dropped", "raft_problem", "_refused ")
        return sum(map(cluster.texts().count, (*ends, "raft_leader_gone")))

    os_environ = {"BATONMQ_ACCESS_KEY": "admin", "BATONMQ_SECRET_KEY": "secret-a"}
    with (
        patch.dict(os.environ, os_environ),
        SecureCluster(tmp_path, "", replicas=2, overrides={"auth": auth}) as cluster,
    ):
        with writer(cluster, ClientOptions(credentials=admin)) as load:
            rotate(cluster, load)
        assert not load.failures, load.failures[:3]
        for secret in (old["secretKey"], json.loads(node.read_text())["secretKey"]):
            assert secret not in cluster.texts()


def ha_peers_prove_themselves(cluster: SecureCluster) -> None:
    """Nobody was refused; a stranger is, gets no byte, and stands in status and audit log."""

    def at_ha_ports() -> list[tuple[str, int]]:
        ports = [port for port in cluster.ports(3) if port["port"] == "ha"]
        return sorted((port["proof"], port["unproven"]) for port in ports)

    assert at_ha_ports() == [("required", 0)] * 2
    port = int(cluster.master()["address"].rpartition(":")[2]) + 1
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        stranger.sendall(encode_slave_handshake(SlaveHandshake(2)) + encode_ack(0))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert at_ha_ports() == [("required", 0), ("required", 1)]
    audits = "".join(path.read_text() for path in cluster.data_dir.glob("*/**/audit.log"))
    assert '"request": "HA"' in audits and "offers no proof" in audits


def group_state(cluster: SecureCluster) -> dict[str, Any]:
    found = cluster.mqctl("getSyncStateSet", "-b", "broker-a", "--json")
    assert found.code == 0, found
    state: dict[str, Any] = found.json["replicasInfoTable"]["broker-a"]
    return state


def master_epoch(cluster: SecureCluster) -> int:
    return int(group_state(cluster)["masterEpoch"])


def in_sync(cluster: SecureCluster) -> int:
    return len(group_state(cluster)["inSyncReplicas"])


def change(cluster: SecureCluster, action: str) -> tuple[int, Any]:
    """Exit code and document of `mqctl secure enable` or `disable`."""
    ran = cluster.mqctl_program("secure", action, "--json", "--within", "30")
    assert ran.out, ran
    return ran.code, ran.json


def test_a_permissive_cluster_serves_plain_clients(tmp_path: Path) -> None:
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
