"""Stock Java producer, consumer and mqadmin with rights on, through a kill of the master and a
rotation of the secret."""

import asyncio
from pathlib import Path

import pytest

from batonmq import ClientOptions
from batonmq.auth.signature import Credentials
from batonmq.client.admin.admin import Admin
from lab.cluster.cluster import GROUP
from lab.cluster.java import SMALL_JVM, WAIT_S, JavaProgram
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.java
TOPIC = "Orders"
AUTH = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "initAuthenticationUser": '{"username":"admin","password":"admin-secret"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"node","secretKey":"node-secret"}',
}


def jvm(user: str, secret: str = "") -> list[str]:
    return [*SMALL_JVM, f"-DaccessKey={user}", f"-DsecretKey={secret or f'{user}-secret'}"]


def rotate(name_servers: str, name: str, secret: str) -> None:
    """Both secrets of the user count from then on."""

    async def run() -> None:
        client = ClientOptions(
            credentials=Credentials(access_key="admin", secret_key="admin-secret")
        )
        async with Admin(name_servers, client_options=client) as admin:
            await admin.users.rotate(name, secret)

    asyncio.run(run())


def test_stock_programs_do_what_their_users_may(java_classpath: str, tmp_path: Path) -> None:
    """The consumer keeps the old secret of its user, the second producer has the new one."""
    cluster = ClusterProcess(tmp_path / "up", controllers=1, replicas=2, overrides={"auth": AUTH})
    with cluster:
        servers = cluster.name_servers
        with JavaProgram(java_classpath, tmp_path / "a", "MqAdmin", jvm=jvm("admin")) as admin:
            for line in (
                "createUser -u shop -p shop-secret",
                f"createAcl -s User:shop -r Topic:{TOPIC} -a Pub,Sub -d Allow",
                "createAcl -s User:shop -r Group:bar* -a Sub -d Allow",
                "listUser",
                "listAcl",
            ):
                done = admin.ask(
                    f"{line} -n {servers} -c DefaultCluster".replace(" ", "\t"), WAIT_S
                )
                assert not done["error"], done
                assert "Exception" not in done["output"], done
            assert f"Topic:{TOPIC}" in done["output"] and "shop-secret" not in done["output"]
        with (
            JavaProgram(
                java_classpath, tmp_path / "p", "Produce", servers, jvm=jvm("shop")
            ) as send,
            JavaProgram(
                java_classpath, tmp_path / "c", "Consume", servers, "baristas", TOPIC,
                jvm=jvm("shop"),
            ) as receive,
        ):  # fmt: skip
            send.send(f"{TOPIC} 20 sync")
            send.wait_for("sends", lambda: send.of("produced"))
            receive.wait_for("messages", lambda: len({x["key"] for x in receive.of("key")}) == 20)
            rotate(servers, "shop", "shop-new")
            old = cluster.master(GROUP)
            cluster.kill(old)
            cluster.wait_new_master(old["address"])
            with JavaProgram(
                java_classpath, tmp_path / "q", "Produce", servers, jvm=jvm("shop", "shop-new")
            ) as other:
                other.send(f"{TOPIC} 20 ordered")
                other.wait_for("sends to the heir", lambda: other.of("produced"))
            receive.wait_for("all", lambda: len({x["key"] for x in receive.of("key")}) == 40)
        with JavaProgram(java_classpath, tmp_path / "s", "MqAdmin", jvm=jvm("thief")) as stranger:
            refused = stranger.ask(f"topicList\t-n\t{servers}", WAIT_S)
            assert TOPIC not in refused["output"]
