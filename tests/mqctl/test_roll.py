"""Which process a rolling restart takes next, and what makes it stop."""

import asyncio
import json
import shlex
import sys
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from batonmq.client.admin.types import ControllerMetadata
from batonmq.mqctl.commands import roll as roll_command
from batonmq.mqctl.health import BrokerAnswer, Findings
from batonmq.mqctl.roll import (
    Doubt,
    RollFile,
    RollNode,
    check_may_restart,
    check_whole,
    is_newer,
    next_node,
    nodes_of,
)
from batonmq.mqctl.roll_backends import (
    SYSTEMD,
    SYSTEMD_BY_SSH,
    CommandBackend,
    UpBackend,
    compose_backend,
)
from batonmq.protocol.bodies import (
    BrokerData,
    BrokerReplicasInfo,
    ClusterInfo,
    ReplicaIdentity,
    ReplicasInfo,
)
from tests.mqctl.conftest import Run

SERVERS = tuple(f"10.0.0.{i}:9876" for i in (1, 2, 3))
CONTROLLERS = tuple(f"10.0.0.{i}:9878" for i in (1, 2, 3))
BROKERS = tuple(f"10.0.0.{i}:10911" for i in (1, 2, 3))
LEADER, MASTER = CONTROLLERS[0], BROKERS[0]


def findings(
    in_sync: tuple[str, ...] = BROKERS,
    *,
    away: tuple[str, ...] = (),
    controllers: tuple[str, ...] = CONTROLLERS,
    master: str = MASTER,
) -> Findings:
    """Of a cluster in which all is well, but for what is named."""

    def replica(address: str) -> ReplicaIdentity:
        return ReplicaIdentity(
            broker_name="a",
            broker_id=1 + BROKERS.index(address),
            broker_address=address,
            alive=address not in away,
        )

    info = ReplicasInfo(
        master_broker_id=1 + BROKERS.index(master),
        master_address=master,
        master_epoch=3,
        sync_state_set_epoch=4,
        in_sync_replicas=[replica(a) for a in in_sync],
        not_in_sync_replicas=[replica(a) for a in BROKERS if a not in in_sync],
    )
    leading = {
        address: ControllerMetadata(address, "g", "n0", LEADER, address == LEADER, "")
        for address in controllers
    }
    return Findings(
        dict.fromkeys(SERVERS),
        leading,
        {a: BrokerAnswer("does not answer" if a in away else None) for a in BROKERS},
        ClusterInfo(broker_addr_table={"a": BrokerData({0: master}, "a", "c")}),
        BrokerReplicasInfo(replicas_info_table={"a": info}),
    )


def nodes(found: Findings, controllers: tuple[str, ...] = CONTROLLERS) -> list[RollNode]:
    return nodes_of(found, SERVERS[: len(controllers)], controllers, embedded=True)


def order(found: Findings) -> list[str]:
    done: list[str] = []
    while (node := next_node(found, nodes(found), done)) is not None:
        done.append(node.name)
    return done


def test_slaves_come_first_and_the_leading_controller_last() -> None:
    assert order(findings()) == [
        "broker 10.0.0.2:10911",
        "broker 10.0.0.3:10911",
        "broker 10.0.0.1:10911",
        "namesrv 10.0.0.2:9876",
        "namesrv 10.0.0.3:9876",
        "namesrv 10.0.0.1:9876",
    ]


def test_after_the_master_moved_the_former_one_is_a_slave() -> None:
    moved = findings(master=BROKERS[1])
    node = next_node(moved, nodes(moved), [f"broker {BROKERS[1]}"])
    assert node is not None and node.address == BROKERS[0]


def test_whoever_may_restart_leaves_a_copy_and_a_majority() -> None:
    for node in nodes(findings()):
        check_may_restart(findings(), nodes(findings()), node)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (findings(BROKERS[:2]), "2 of 3 replicas in sync"),
        (findings(away=(BROKERS[2],)), "does not answer"),
    ],
)
def test_nothing_is_restarted_while_something_is_wrong(found: Findings, says: str) -> None:
    for node in nodes(findings()):
        with pytest.raises(Doubt, match=says):
            check_may_restart(found, nodes(findings()), node)


def test_the_last_copy_is_not_restarted() -> None:
    found = findings((MASTER,))
    alone = ReplicasInfo(
        master_broker_id=1,
        master_address=MASTER,
        in_sync_replicas=found.replicas.replicas_info_table["a"].in_sync_replicas,
    )
    found.replicas.replicas_info_table["a"] = alone
    node = RollNode("broker", MASTER, group="a")
    with pytest.raises(Doubt, match="last copy in sync"):
        check_may_restart(found, [node], node)


def test_the_only_controller_and_one_of_two_are_not_restarted() -> None:
    for count in (1, 2):
        found = findings(controllers=CONTROLLERS[:count])
        every = nodes(found, CONTROLLERS[:count])
        with pytest.raises(Doubt, match=r"majority|last name server"):
            check_may_restart(found, every, every[-1])


def test_controllers_and_name_servers_are_paired_by_host() -> None:
    with pytest.raises(Doubt, match="same hosts"):
        nodes_of(findings(), SERVERS, CONTROLLERS[::-1], embedded=True)
    apart = nodes_of(findings(), SERVERS, CONTROLLERS, embedded=False)
    assert [node.kind for node in apart].count("controller") == 3


def test_a_whole_cluster_raises_no_doubt() -> None:
    check_whole(findings())


def test_a_roll_is_resumed_and_another_one_is_refused(tmp_path: Path) -> None:
    file = RollFile(tmp_path / "roll.json")
    roll = file.begin("up", 100)
    roll.done.append("broker x")
    file.store(roll)
    again = file.begin("up", 200)
    assert (again.done, again.started_ms) == (["broker x"], 100)
    with pytest.raises(Doubt, match="not finished"):
        file.begin("up /other/python", 200)
    file.end()
    assert file.begin("up", 300).done == []


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"how":1}', b"[]"])
def test_a_damaged_roll_is_a_doubt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "roll.json").write_bytes(content)
    with pytest.raises(Doubt, match="is no roll"):
        RollFile(tmp_path / "roll.json").begin("up", 1)


def test_a_broker_that_started_since_is_done() -> None:
    assert is_newer({"bootTimestamp": "101"}, 100)
    assert not is_newer({"bootTimestamp": "100"}, 100)
    assert not is_newer({}, 100)
    assert not is_newer({"bootTimestamp": "soon"}, 100)


def test_commands_name_the_process() -> None:
    broker = RollNode("broker", "10.0.0.1:10911", group="a")
    assert CommandBackend(SYSTEMD, 1).describe(broker) == "systemctl restart batonmq@broker"
    by_ssh = CommandBackend(SYSTEMD_BY_SSH, 1).describe(
        RollNode("namesrv", "mq-2:9876", "mq-2:9878")
    )
    assert by_ssh == "ssh mq-2 systemctl restart batonmq@namesrv"


@pytest.mark.parametrize("address", ["-oProxyCommand=x:1", "a;b:1", "a b:1", "$(x):1", "a:", ":1"])
def test_an_address_that_a_command_must_not_hold_is_refused(address: str) -> None:
    with pytest.raises(Doubt, match="is no address"):
        CommandBackend(SYSTEMD_BY_SSH, 1).describe(RollNode("broker", address))


@pytest.mark.parametrize("template", ["x {unknown}", "x {0}", "x {host", "x {host.a}", "x 'y"])
def test_a_template_that_makes_no_command_is_refused(template: str) -> None:
    with pytest.raises(Doubt, match="is no command"):
        CommandBackend(template, 1).describe(RollNode("broker", BROKERS[0]))


def test_a_command_that_fails_or_hangs_is_a_doubt(tmp_path: Path) -> None:
    node = RollNode("broker", BROKERS[0])
    python = shlex.quote(sys.executable)
    for template, says in (
        (f"{python} -c 'import sys; sys.exit(\"no such unit\")'", "no such unit"),
        (f"{python} -c 'import time; time.sleep(60)'", "no end within"),
        (str(tmp_path / "missing"), "No such file"),
    ):
        with pytest.raises(Doubt, match=says):
            asyncio.run(CommandBackend(template, 0.3).restart(node))


def test_compose_services_are_found_by_their_port(tmp_path: Path) -> None:
    project = {
        "services": {
            "broker-1": {"ports": [{"published": "10911", "target": 10911}]},
            "namesrv-1": {"ports": ["10.0.0.1:9876:9876", "10.0.0.1:9878:9878"]},
            "grafana": {},
        }
    }
    script = tmp_path / "compose"
    script.write_text(f"#!/bin/sh\ncat <<'EOF'\n{json.dumps(project)}\nEOF\n")
    script.chmod(0o755)
    backend = asyncio.run(compose_backend(str(script), 10))
    up = f"{script} up --detach --no-deps --force-recreate"
    assert backend.describe(RollNode("broker", "10.0.0.1:10911")) == f"{up} broker-1"
    assert backend.describe(RollNode("namesrv", "10.0.0.1:9876", "c")) == f"{up} namesrv-1"
    with pytest.raises(Doubt, match="service"):
        backend.describe(RollNode("broker", "10.0.0.1:10921"))


def test_a_process_that_went_back_to_its_former_version_is_not_done(tmp_path: Path) -> None:
    """It was started since the roll began, so the roll ended without it."""
    entry = {"address": BROKERS[0], "pid": 1, "argv": [], "config": str(tmp_path / "c.yaml")}
    file, node = tmp_path / "cluster.json", RollNode("broker", BROKERS[0])
    file.write_text(json.dumps({"nameServers": [], "brokers": [entry]}))
    backend = UpBackend(file, Path("/new/python"), 0.1)
    assert not backend.is_chosen(node)
    (tmp_path / "c.python").write_text("/new/python\n")
    assert backend.is_chosen(node)
    backend.undo(node)
    assert not backend.is_chosen(node)


def test_a_process_that_up_does_not_start_again_is_a_doubt(tmp_path: Path) -> None:
    entry = {"address": BROKERS[0], "pid": None, "argv": ["python", "x y"], "config": "c.yaml"}
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"nameServers": [], "brokers": [entry]}))
    with pytest.raises(Doubt, match="does not run") as stopped:
        asyncio.run(UpBackend(file, None, 0.1).restart(RollNode("broker", BROKERS[0])))
    assert stopped.value.next_step == "python 'x y'"
    with pytest.raises(Doubt, match="has no process"):
        UpBackend(file, None, 0.1).describe(RollNode("broker", BROKERS[1]))


def test_a_dry_run_restarts_nothing(mqctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {name: AsyncMock() for name in ("load_nodes", "show_order", "roll")}
    monkeypatch.setattr(roll_command, "_backend", AsyncMock())
    for name, step in steps.items():
        monkeypatch.setattr(roll_command.RollWork, name, step)
    monkeypatch.setattr(roll_command.RollWork, "show", Mock())
    assert mqctl("roll", "--dry-run").code == 0
    assert steps["show_order"].await_count == 1 and not steps["roll"].await_count
