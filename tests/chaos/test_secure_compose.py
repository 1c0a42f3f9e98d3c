"""The compose project with TLS on every port and users, as deploy/secure.sh sets it up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batonmq import ClientOptions, Message
from batonmq.blocking import BlockingProducer
from batonmq.protocol.errors import BatonError
from lab.cluster.client_writer import ClientWriter
from lab.cluster.compose import BROKERS, NAME_SERVERS, ComposeCluster
from lab.cluster.processes import wait_for
from lab.cluster.queues import check_writers
from lab.cluster.writer import wait_acks

pytestmark = pytest.mark.docker
TOPIC = "Secured"
MORE = 30


@pytest.fixture
def secured(image: None, tmp_path: Path) -> Iterator[ComposeCluster]:
    with ComposeCluster(tmp_path, name="batonmq-secured", subnet=94, secured=True) as cluster:
        yield cluster


def ports(cluster: ComposeCluster) -> list[dict[str, Any]]:
    """Those that are published."""
    found: list[dict[str, Any]] = cluster.mqctl("secure", "status", "--json").json
    return [port for port in found if port["port"] in ("remoting", "grpc")]


def test_a_killed_master_new_certificates_and_a_new_secret_cost_no_send(
    secured: ComposeCluster,
) -> None:
    """1. Every published port takes TLS only, and only signed requests. 2. The master is killed and
    all certificates are replaced under load, then the secret of the nodes: no send fails, and each
    container is healthy. 3. What was acknowledged is there."""
    secured.wait_healthy()
    options, servers = secured.client_options, secured.name_servers
    before = ports(secured)
    assert before and all(port["verified"] and not port["plain"] for port in before), before
    for refused in (ClientOptions(), ClientOptions(tls=options.tls)):
        with pytest.raises(BatonError):
            send_once(servers, refused)
    with ClientWriter(servers, TOPIC, 0, options) as writer:
        wait_acks(writer, MORE)
        master = secured.master()
        secured.kill([master])
        wait_acks(writer, MORE)
        secured.start([master])
        secured.secure()
        wait_for("the new certificates at every port", lambda: all(
            port["notAfter"] > before[0]["notAfter"] for port in ports(secured)
        ))  # fmt: skip
        secured.wait_healthy()
        for step in (1, 2, 3):
            secured.secure("secrets")
            wait_for(f"step {step} of the secret in each container", lambda step=step: all(
                reloads(secured, name) == step for name in (*BROKERS, *NAME_SERVERS)
            ))  # fmt: skip
        wait_acks(writer, MORE)
        secured.wait_healthy()
    assert not writer.failures, writer.failures[:3]
    assert check_writers(servers, TOPIC, [writer], options) >= len(writer.acks)


def reloads(cluster: ComposeCluster, name: str) -> int:
    """How often that service has taken a new secret of the nodes, since it was made."""
    [log] = [each for each in cluster.logs() if each.stem == name]
    return log.read_text().count("files_reloaded name=innerClientAuthenticationCredentialsFile")


def send_once(name_servers: str, options: ClientOptions) -> None:
    with BlockingProducer(
        "stranger", name_servers=name_servers, client_options=options
    ) as producer:
        producer.send(Message(TOPIC, b"x"), timeout_ms=1_000)
