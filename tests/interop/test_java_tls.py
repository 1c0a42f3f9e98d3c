"""Stock Java producer, consumer and mqadmin over TLS, with the authority checked."""

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from lab.cluster.java import SMALL_JVM, WAIT_S, JavaProgram
from lab.cluster.queues import stored_keys
from lab.cluster.stock_load import StockLoad
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
    """A client that trusts another authority gets no answer."""
    cluster = ClusterProcess(tmp_path / "up", controllers=1, replicas=2)
    cluster.argv += ["--secure", "enforcing"]
    other = str(authority(tmp_path / "other").trust)
    with cluster:
        servers, trust = cluster.name_servers, cluster.document["tls"]["trust"]
        for name, trusted in (("a", trust), ("b", other)):
            with JavaProgram(java_classpath, tmp_path / name, "MqAdmin", jvm=jvm(trusted)) as admin:
                listed = admin.ask(f"clusterList\t-n\t{servers}", WAIT_S)["output"]
            shown = {one["address"] for one in cluster.brokers if one["address"] in listed}
            assert len(shown) == (2 if trusted == trust else 0), listed
        with (
            JavaProgram(java_classpath, tmp_path / "p", "Produce", servers, jvm=jvm(trust)) as send,
            JavaProgram(
                java_classpath, tmp_path / "c", "Consume", servers, "tls-group", TOPIC,
                jvm=jvm(trust),
            ) as receive,
        ):  # fmt: skip
            send.send(f"{TOPIC} 20 sync async")
            send.wait_for("sends", lambda: send.of("produced"))
            receive.wait_for("messages", lambda: len({x["key"] for x in receive.of("key")}) == 40)


@pytest.mark.skipif(os.environ.get("BATONMQ_SOAK") != "1", reason="80 s long: `make soak`")
def test_no_send_of_a_stock_client_fails_while_tls_is_turned_on_and_off(
    java_classpath: str, tmp_path: Path
) -> None:
    """Every setting of the clients at its default. 1. `secure enable` stops before it would refuse
    the plain ones. 2. Others dial with TLS, the plain ones end: the same command continues. 3. The
    way back in the other order."""
    settings: dict[str, dict[str, object]] = {"namesrv": {"replicaRoutes": True}}
    started = 0

    def start(name: str, *arguments: str, trust: str = "") -> JavaProgram:
        nonlocal started
        started += 1
        flags = jvm(trust) if trust else SMALL_JVM
        folder = tmp_path / f"java-{started}"
        return JavaProgram(java_classpath, folder, name, *arguments, jvm=flags)

    with ClusterProcess(tmp_path / "c", overrides=settings, respawn=True) as cluster:

        def change(action: str) -> tuple[int, list[str]]:
            ran = cluster.mqctl("secure", action, "--json", "--within", "60")
            assert ran.out, ran
            return ran.code, [stage["stage"] for stage in json.loads(ran.out)["stages"]]

        with ExitStack() as stack:
            servers = cluster.name_servers
            # Consumers of one group must subscribe to the same: only one load has them.
            plain = StockLoad(start, stack, servers, "JavaPlainBefore", consumers=())
            plain.go_on()
            assert change("enable") == (3, ["accept", "dial"])
            encrypted = partial(start, trust=cluster.document["tls"]["trust"])
            load = StockLoad(encrypted, stack, servers, "JavaEncrypted")
            for each in (load, plain):
                each.go_on()
            plain.finish()
            assert change("enable") == (0, ["enforcing"])
            load.go_on()
            assert change("disable") == (3, ["dial", "accept"])
            again = StockLoad(start, stack, servers, "JavaPlainAgain", consumers=())
            for each in (again, load):
                each.go_on()
            load.finish()
            assert change("disable") == (0, ["disabled"])
            again.go_on()
            again.finish()
        for each in (plain, load, again):
            print(len(each.acked("sync")), each.since(0))
            assert each.failed() == []
        for each, topic in ((plain, "JavaPlainBefore"), (again, "JavaPlainAgain")):
            acked = {line["acked"] for line in each.acked("sync")}
            assert acked <= stored_keys(servers, topic).keys()
