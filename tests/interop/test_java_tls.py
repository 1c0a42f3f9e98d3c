"""Stock Java producer, consumer and mqadmin over TLS, with the authority checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.cluster.java import SMALL_JVM, WAIT_S, JavaProgram
from lab.cluster.up import ClusterProcess
from tests.shared.certificates import authority

pytestmark = pytest.mark.java
TOPIC = "JavaOverTls"


def jvm(trust: str) -> list[str]:
    return [
        *SMALL_JVM,
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        "-Dtls.client.authServer=true",
        f"-Dtls.client.trustCertPath={trust}",
    ]


def test_stock_programs_work_at_ports_that_take_tls_only(
    java_classpath: str, tmp_path: Path
) -> None:
    cluster = ClusterProcess(tmp_path / "up", controllers=1, replicas=2)
    cluster.argv += ["--secure", "enforcing"]
    with cluster:
        servers, trust = cluster.name_servers, cluster.document["tls"]["trust"]
        with JavaProgram(java_classpath, tmp_path / "a", "MqAdmin", jvm=jvm(trust)) as admin:
            listed = admin.ask(f"clusterList\t-n\t{servers}", WAIT_S)
            assert all(one["address"] in listed["output"] for one in cluster.brokers), listed
        with (
            JavaProgram(java_classpath, tmp_path / "p", "Produce", servers, jvm=jvm(trust)) as send,
            JavaProgram(
                java_classpath, tmp_path / "c", "Consume", servers, "tls-group", TOPIC, "*",
                "CLUSTERING", "one", jvm=jvm(trust),
            ) as receive,
        ):  # fmt: skip
            send.send(f"{TOPIC} 20 sync async")
            send.wait_for("sends", lambda: send.of("produced"))
            receive.wait_for("messages", lambda: len({x["key"] for x in receive.of("key")}) == 40)


def test_a_stock_client_that_checks_refuses_another_authority(
    java_classpath: str, tmp_path: Path
) -> None:
    other = str(authority(tmp_path / "other").trust)
    cluster = ClusterProcess(tmp_path / "up", controllers=1, replicas=1)
    cluster.argv += ["--secure", "enforcing"]
    with cluster, JavaProgram(java_classpath, tmp_path, "MqAdmin", jvm=jvm(other)) as admin:
        listed = admin.ask(f"clusterList\t-n\t{cluster.name_servers}", WAIT_S)
        assert "broker-a" not in listed["output"]
