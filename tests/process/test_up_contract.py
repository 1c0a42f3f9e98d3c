"""`batonmq up` as the contract for outside scripts: ports, cluster.json, events, exit codes.

The tests of `whole` share one cluster and leave it whole.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from batonmq.launcher.children import LIVED_MS
from batonmq.launcher.main import main
from lab.cluster import frames
from lab.cluster.connection import ask
from lab.cluster.processes import ROOT, free_base_port, is_running, wait_for
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

NAME_SERVER_FIELDS = {"address": str, "pid": int, "argv": list, "config": str}
CONTROLLER_FIELDS = {"id": str, "address": str, "grpc": str, "pid": int}
BROKER_FIELDS = {
    "cluster": str,
    "name": str,
    "id": str,
    "role": str,
    "address": str,
    "haAddress": str,
    "pid": int,
    "argv": list,
    "config": str,
    "dataDir": str,
}
DOCUMENT_FIELDS = {
    "supervisorPid": int,
    "startedAt": int,
    "cluster": str,
    "nameServers": list,
    "controllers": list,
    "brokers": list,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """Three controllers, two groups of two replicas."""
    folder = tmp_path_factory.mktemp("contract")
    with ClusterProcess(folder, replicas=2, groups=2) as running:
        yield running
    # gRPC's C core has lines of its own, which no reader of the log expects.
    for log in folder.rglob("process.log"):
        assert not re.search(r"^[IWE]\d{4} .*", log.read_text(), re.MULTILINE), log


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_port_rule(whole: ClusterProcess) -> None:
    """Name server i: P + 100·i, its controller on +2, +3, +4. Broker j of all groups: P + 1035 +
    100·j, HA +1, the same handlers on -2. Each of these ports is served."""
    base, document = whole.base_port, whole.document
    for i, (server, controller) in enumerate(
        zip(document["nameServers"], document["controllers"], strict=True)
    ):
        port = base + 100 * i
        assert server["address"] == f"127.0.0.1:{port}"
        assert controller["address"] == f"127.0.0.1:{port + 2}"
        assert controller["grpc"] == f"127.0.0.1:{port + 3}"
        assert all(accepts(port + step) for step in (0, 2, 3, 4))
    for j, broker in enumerate(document["brokers"]):
        port = base + 1035 + 100 * j
        assert broker["address"] == f"127.0.0.1:{port}"
        assert broker["haAddress"] == f"127.0.0.1:{port + 1}"
        assert all(accepts(port + step) for step in (-2, 0, 1))
    groups = [broker["name"] for broker in document["brokers"]]
    assert groups == ["broker-a", "broker-a", "broker-b", "broker-b"]


def test_cluster_json_has_exactly_the_fields_of_the_contract(whole: ClusterProcess) -> None:
    """Ids and addresses are strings, pids are those of the serving processes, `argv` their own."""
    document = whole.document

    def check(record: dict[str, Any], fields: dict[str, type]) -> None:
        assert list(record) == list(fields)
        assert {name: type(value) for name, value in record.items()} == fields

    check(document, DOCUMENT_FIELDS)
    assert document["cluster"] == "DefaultCluster"
    assert whole.process is not None
    assert document["supervisorPid"] == whole.process.pid
    for server, controller in zip(document["nameServers"], document["controllers"], strict=True):
        check(server, NAME_SERVER_FIELDS)
        check(controller, CONTROLLER_FIELDS)
        assert server["pid"] == controller["pid"]
    assert [controller["id"] for controller in document["controllers"]] == ["n0", "n1", "n2"]
    for broker in document["brokers"]:
        check(broker, BROKER_FIELDS)
        assert broker["cluster"] == "DefaultCluster" and broker["id"].isdigit()
    for group in ("broker-a", "broker-b"):
        members = [broker for broker in document["brokers"] if broker["name"] == group]
        assert sorted(broker["role"] for broker in members) == ["MASTER", "SLAVE"]
        assert sorted(broker["id"] for broker in members) == ["1", "2"]
    for record in whole.servers:
        running = Path(f"/proc/{record['pid']}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert shlex.split(running) == record["argv"]
        assert Path(record["config"]).is_file()


def test_events_are_json_objects_one_a_line(whole: ClusterProcess) -> None:
    """`--json`: every line is an event with time and name; the start is reported in full."""
    lines = whole.log_path.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert all(isinstance(event["time"], int) and event["event"] for event in events)
    started = [event["name"] for event in events if event["event"] == "process_started"]
    assert {"namesrv-0", "namesrv-1", "namesrv-2", "broker-a-0", "broker-b-3"} <= set(started)
    assert any(event["event"] == "cluster_ready" for event in events)


def test_a_dead_slave_is_reported_and_taken_back(whole: ClusterProcess) -> None:
    """kill -9 of a slave: cluster.json gives it no pid, an event has how it ended, the cluster
    lives on. Started again by its `argv` it has its new pid there and is in the set."""
    slave = whole.slaves()[0]
    whole.kill(slave)
    wait_for("pid null", lambda: whole.node_at(slave["address"])["pid"] is None)
    ended = [event for event in whole.events if event["event"] == "process_ended"]
    assert ended[-1]["how"] == "SIGKILL" and ended[-1]["pid"] is None
    whole.wait_in_sync(1)

    child = whole.restart(slave)
    wait_for("the new pid", lambda: whole.node_at(slave["address"])["pid"] == child.pid)
    whole.wait_in_sync(2)
    assert whole.node_at(slave["address"])["id"] == slave["id"], "it kept its identity"


def test_a_role_change_is_in_cluster_json(whole: ClusterProcess) -> None:
    """kill -9 of a master: the document names the other replica master; the other group stays."""
    before, other = whole.master("broker-b"), whole.master("broker-a")
    whole.kill(before)
    after = whole.wait_new_master(before["address"], "broker-b")
    assert after["name"] == "broker-b"
    whole.restart(before)
    whole.wait_in_sync(2, "broker-b")

    def settled() -> bool:
        return whole.node_at(before["address"])["role"] == "SLAVE"

    wait_for("the old master as a slave", settled)
    assert whole.master("broker-a")["address"] == other["address"]
    changes = [event for event in whole.events if event["event"] == "master_changed"]
    assert changes[-1]["group"] == "broker-b" and changes[-1]["master"] == after["address"]


def test_respawn_and_the_end_of_a_killed_supervisor(tmp_path: Path) -> None:
    """`--respawn`: a killed broker comes back by itself, also after the death of the process that
    forks servers, which no server notices. So does a master that hangs: it is ended first. A killed
    broker that had lived a while refuses nobody: its socket is held. Then the supervisor itself is
    killed with -9: every child ends too."""
    with ClusterProcess(tmp_path, controllers=1, replicas=2, respawn=True) as running:
        slave = running.slaves()[0]
        before = set(running.pids().values())
        os.kill(fork_server_of(running.document["supervisorPid"]), signal.SIGKILL)
        running.kill(slave)

        def back() -> bool:
            pid = running.node_at(slave["address"])["pid"]
            return pid not in (None, slave["pid"])

        wait_for("the broker to come back", back)
        running.wait_in_sync(2)
        assert set(running.pids().values()) - before == {running.node_at(slave["address"])["pid"]}
        assert before - set(running.pids().values()) == {slave["pid"]}
        master = running.master()
        running.kill(master, signal.SIGSTOP)
        running.wait_new_master(master["address"])
        running.wait_in_sync(2)
        ends = [event["how"] for event in running.events if event["event"] == "process_ended"]
        assert ends == ["SIGKILL", "SIGKILL, its loop stood still for 2 s"]

        master = running.master()
        (started,) = (event for event in running.events if event.get("pid") == master["pid"])
        lived_ms = started["time"] + LIVED_MS + 100
        wait_for("it to have lived a while", lambda: time.time() * 1000 > lived_ms)
        running.kill(master)
        assert ask(master["address"], frames.RUNTIME_INFO, timeout_s=10).code == frames.OK
        running.wait_new_master(master["address"])
        wait_for("its new pid", lambda: None not in set(running.pids().values()))
        pids = set(running.pids().values())
        assert all(map(is_running, pids))
        os.kill(running.document["supervisorPid"], signal.SIGKILL)
        wait_for("the end of all children", lambda: not any(map(is_running, pids)))


def fork_server_of(supervisor: int) -> int:
    for child in psutil.Process(supervisor).children():
        if "batonmq.runtime.fork_server" in child.cmdline():
            return child.pid
    raise AssertionError("no process forks servers")


def run_up(data: Path, base: int) -> Result:
    """In this process: it ends before it starts any."""
    words = ["up", "--data", str(data), "--base-port", str(base)]
    return CliRunner().invoke(main, words)


def test_every_taken_port_is_named_with_its_holder_and_exit_2(tmp_path: Path) -> None:
    """Somebody listens on two ports, on one of them for all addresses; nothing was started."""
    base, data = free_base_port(3), tmp_path / "data"
    with (
        socket.create_server(("", base + 102)),
        socket.create_server(("127.0.0.1", base + 1135)),
    ):
        done = run_up(data, base)
    assert (done.exit_code, done.stdout) == (2, "")
    said = [line.strip() for line in done.stderr.splitlines()]
    assert said[0] == "batonmq up: 2 ports are not free:"
    assert said[1].startswith(f"{base + 102} of namesrv-1: process {os.getpid()} (")
    assert said[2].startswith(f"{base + 1135} of broker-a-1: process {os.getpid()} (")
    assert "--base-port" in said[3] and len(said) == 4
    assert not list(data.glob("*/process.log"))


def test_a_second_cluster_on_the_ports_of_a_running_one_is_refused(
    whole: ClusterProcess, tmp_path: Path
) -> None:
    servers, brokers = whole.document["nameServers"], whole.document["brokers"][:3]
    pids = [whole.pid_of(one) for one in (*servers, *brokers)]
    demo = CliRunner().invoke(main, ["demo", "--base-port", str(whole.base_port)])
    for done in (run_up(tmp_path / "data", whole.base_port), demo):
        assert done.exit_code == 2, done.stderr
        assert f"{4 * 3 + 3 * 3} ports are not free" in done.stderr
        assert all(f": process {pid} (" in done.stderr for pid in pids)
    assert all(map(is_running, pids))


def test_who_takes_a_port_after_the_check_is_named_and_never_asked(tmp_path: Path) -> None:
    """1 `batonmq up` finds all ports free and starts its processes. 2 Somebody takes one before
    they listen. 3 It ends with 2, names who has it, and never sent a byte there."""
    ended = filter(None, (end_of_up_beside_a_thief(tmp_path / str(each)) for each in range(9)))
    code, said, port = next(ended)
    assert code == 2, said
    assert f"{port} of namesrv-1: process {os.getpid()} (" in said


def end_of_up_beside_a_thief(data: Path) -> tuple[int, str, int] | None:
    """Exit code, what was said, and the port; None if the processes were faster than the thief."""
    base = free_base_port(3)
    argv = [*ClusterProcess.COMMAND, "--data", str(data), "--base-port", str(base)]
    port = base + 102
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as up:
        wait_for("the end of the check", (data / "conf" / "cluster.json").exists)
        try:
            taken = socket.create_server(("127.0.0.1", port))
        except OSError:
            up.terminate()
            up.communicate(timeout=60)
            return None
        with taken:
            try:
                _, said = up.communicate(timeout=60)
            finally:
                up.terminate()  # else a failure would wait for it for ever
            taken.setblocking(False)
            with pytest.raises(BlockingIOError):
                taken.accept()
    return up.returncode, said, port


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "data"


def without_right(folder: Path) -> Path:
    if os.geteuid() == 0:
        return Path("/sys/batonmq-data")  # even root makes no folder there
    folder.chmod(0o555)
    return folder / "data"


@pytest.mark.parametrize("place", [below_a_file, without_right])
def test_a_folder_that_cannot_be_made_is_one_line_and_exit_1(
    place: Callable[[Path], Path], tmp_path: Path
) -> None:
    """A missing right, or a file in the way: the folder and the reason in one line, exit 1."""
    data = place(tmp_path)
    done = run_up(data, free_base_port(3))
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert str(data) in line
