"""Without controllers: a slave follows its master over TLS, set by RocketMQ's own keys."""

from pathlib import Path

import pytest

from lab.cluster.classic import ClassicGroup, in_sync
from lab.cluster.java import BROKER_NAME
from lab.cluster.processes import free_base_port, wait_for
from tests.shared.certificates import authority

pytestmark = pytest.mark.process


def test_a_classic_pair_replicates_over_tls(tmp_path: Path) -> None:
    """A slave of another authority never counts; one of the master's does."""
    made, other = authority(tmp_path / "tls"), authority(tmp_path / "other")

    def keys(of: object, broker_id: int) -> dict[str, object]:
        issuer = made if of is made else other
        name = f"broker/{BROKER_NAME}/{broker_id}"
        path = issuer.issue(f"b{broker_id}.pem", [name], ["127.0.0.1"]).path
        return {
            "tls.server.mode": "permissive",
            "nodeMode": "enforcing",
            "tls.server.certPath": path,
            "tls.server.keyPath": path,
            "tls.server.trustCertPath": issuer.trust,
        }

    with ClassicGroup(tmp_path, free_base_port(3)) as group:

        def start(broker_id: int, role: str, of: object, name: str) -> None:
            settings = group.settings(broker_id, role, tmp_path / name)
            ha_address = f"127.0.0.1:{int(group.address(0).rpartition(':')[2]) + 1}"
            more = {} if role == "ASYNC_MASTER" else {"haMasterAddress": ha_address}
            group.start_ours(name, settings | keys(of, broker_id) | more)

        def log_of(name: str) -> str:
            return (tmp_path / f"{name}.log").read_text()

        start(0, "ASYNC_MASTER", made, "master")
        start(1, "SLAVE", other, "stranger")
        wait_for("a refusal", lambda: log_of("stranger").count("ha_dial_failed") >= 3)
        assert in_sync(group.address(0)) == 0
        start(2, "SLAVE", made, "slave")
        group.wait_for("the slave", lambda: in_sync(group.address(0)) == 1)
