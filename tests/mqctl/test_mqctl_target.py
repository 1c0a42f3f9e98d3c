"""Where the cluster is looked for, and what is said when it is nowhere."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batonmq.launcher import current
from batonmq.launcher.current import serves
from batonmq.mqctl.target import TargetError, data_folder, find_target
from tests.mqctl.conftest import DEAD_PID


def write_cluster(folder: Path, *, pid: int | None = None, port: int = 9876) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.json"
    document = {
        "supervisorPid": os.getpid() if pid is None else pid,
        "nameServers": [{"address": f"127.0.0.1:{port}"}],
        "controllers": [{"id": "n0", "address": f"127.0.0.1:{port + 2}"}],
        "brokers": [{"name": "broker-a", "address": f"127.0.0.1:{port + 1035}"}],
    }
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home and the working folder of a user who has named no cluster."""
    for name in ("NAMESRV_ADDR", "CONTROLLER_ADDR", "BATONMQ_DATA", "BATONMQ_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_options_come_before_the_environment_and_that_before_the_local_cluster(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster(here / "batonmq-data")
    found = find_target(None, None)
    assert found.name_servers == ("127.0.0.1:9876",)
    assert found.controllers == ("127.0.0.1:9878",)
    assert found.local is not None
    assert found.local.brokers == (("broker-a", "127.0.0.1:10911"),)
    monkeypatch.setenv("NAMESRV_ADDR", "ns:1;ns:2")
    monkeypatch.setenv("CONTROLLER_ADDR", "c:1")
    found = find_target(None, None)
    assert (found.name_servers, found.controllers) == (("ns:1", "ns:2"), ("c:1",))
    found = find_target("given:7", "con:8,con:9")
    assert (found.name_servers, found.controllers) == (("given:7",), ("con:8", "con:9"))


def test_data_variable_names_the_folder_and_the_hint_helps_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster(here / "mine", port=20000)
    current.announce(write_cluster(here / "other", port=30000))
    assert find_target(None, None).name_servers == ("127.0.0.1:30000",)
    monkeypatch.setenv("BATONMQ_DATA", str(here / "mine"))
    assert find_target(None, None).name_servers == ("127.0.0.1:20000",)


def test_no_other_cluster_answers_for_one_that_has_ended(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = write_cluster(here / "batonmq-data", pid=DEAD_PID)
    current.announce(write_cluster(here / "other", port=30000))
    for variable in ("", "batonmq-data"):
        monkeypatch.setenv("BATONMQ_DATA", variable)
        found = find_target(None, None)
        assert (found.name_servers, found.ended) == ((), ended)
        with pytest.raises(TargetError, match=r"-n host:port.*NAMESRV_ADDR.*batonmq up") as info:
            found.name_servers_or_advice()
        assert f"the cluster of {ended} has ended" in str(info.value)
    monkeypatch.delenv("BATONMQ_DATA")
    found = find_target("127.0.0.1:30000", None)
    assert found.controllers == ("127.0.0.1:30002",), "addresses by hand say which cluster"


def test_a_folder_without_a_cluster_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current.announce(write_cluster(here / "other", port=30000))
    monkeypatch.setenv("BATONMQ_DATA", "typo")
    with pytest.raises(TargetError, match=r"BATONMQ_DATA is .*typo, and no cluster is in"):
        find_target(None, None).controllers_or_advice()


def test_a_cluster_whose_supervisor_ended_runs_while_one_of_its_processes_does(here: Path) -> None:
    folder = here / "batonmq-data"
    write_cluster(folder, pid=DEAD_PID)
    pid_file = folder / "run" / "broker-0.pid"
    pid_file.parent.mkdir()
    waits = [sys.executable, "-c", "print(flush=True); input()", "--pid-file", str(pid_file)]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None and server.stdout is not None
        server.stdout.readline()  # it has its command line by now
        pid_file.write_text(f"{server.pid}\n")
        found = find_target(None, None)
        assert found.local is not None
        assert (found.local.running, found.local.supervised) == (True, False)
        server.stdin.write(b"\n")
    pid_file.write_text(f"{os.getpid()}\n")  # the number is another process's by now
    assert find_target(None, None).ended is not None


def test_what_changes_something_goes_to_no_cluster_that_was_only_the_last_one_started(
    mqctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Any
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("CONTROLLER_ADDR")
    mine = write_cluster(tmp_path / "elsewhere")
    current.announce(mine)
    ran = mqctl("topicList")
    assert (ran.code, ran.err) == (0, f"mqctl: cluster {mine.parent} (127.0.0.1:9876)\n")
    ran = mqctl("deleteTopic", "-t", "T", "-c", "C", "-y")
    assert (ran.code, ran.out) == (2, "")
    assert "set BATONMQ_DATA" in ran.err and not [c for c in fake.calls if c[0] == "delete_topic"]
    monkeypatch.setenv("BATONMQ_DATA", str(mine.parent))
    assert mqctl("deleteTopic", "-t", "T", "-c", "C", "-y").code == 0


def test_before_a_cluster_is_whole_its_plan_names_the_addresses(here: Path) -> None:
    folder = here / "batonmq-data"
    write_cluster(folder / "conf", port=20000)
    assert find_target(None, None).controllers == ("127.0.0.1:20002",)
    write_cluster(folder, port=30000)
    assert find_target(None, None).controllers == ("127.0.0.1:30002",), "whole: cluster.json itself"
    (folder / "cluster.json").unlink()
    write_cluster(folder / "conf", pid=DEAD_PID)
    found = find_target(None, None)
    assert (found.controllers, found.ended) == ((), folder / "cluster.json")


def test_name_servers_given_by_hand_never_get_the_controllers_of_another_cluster(
    here: Path,
) -> None:
    write_cluster(here / "batonmq-data")
    found = find_target("elsewhere:9876", None)
    assert found.controllers == ()
    with pytest.raises(TargetError, match=r"-a host:port.*name servers do not list"):
        found.controllers_or_advice()
    assert find_target("127.0.0.1:9876", None).controllers == ("127.0.0.1:9878",)
    assert find_target(None, "elsewhere:9878").name_servers == ()


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "host:70000"])
def test_an_address_that_is_none_is_refused_by_name(text: str, here: Path) -> None:
    with pytest.raises(TargetError, match=r"-n .*host:port is needed"):
        find_target(text, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nameServers": 3}', '{"nameServers": []}'])
def test_a_file_that_describes_no_cluster_is_as_good_as_none(text: str, here: Path) -> None:
    folder = here / "batonmq-data"
    folder.mkdir()
    (folder / "cluster.json").write_text(text)
    assert find_target(None, None).local is None


def test_a_planned_cluster_has_a_data_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is whole for the first time there is conf/cluster.json only."""
    assert data_folder() is None
    planned = here / "batonmq-data" / "conf" / "cluster.json"
    planned.parent.mkdir(parents=True)
    planned.write_text("{}")
    assert data_folder() == here / "batonmq-data"
    monkeypatch.setenv("BATONMQ_DATA", "elsewhere")
    assert data_folder() is None


def test_a_command_without_a_cluster_is_wrong_usage(
    mqctl: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("CONTROLLER_ADDR")
    for command, option in (("topicList", "-n"), ("timeline", "-a"), ("health", "-a")):
        ran = mqctl(command)
        assert (ran.code, ran.out) == (2, "")
        assert f"give {option} host:port" in ran.err


def test_the_hint_is_written_for_the_running_cluster_and_only_its_own_is_withdrawn(
    here: Path,
) -> None:
    mine, other = here / "a" / "cluster.json", here / "b" / "cluster.json"
    assert current.current_cluster_file() is None
    current.announce(mine)
    current.announce(other)
    current.withdraw(mine)
    assert current.current_cluster_file() == other
    current.withdraw(other)
    assert current.current_cluster_file() is None


def test_a_home_that_cannot_be_written_costs_only_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HOME", str(blocked))
    current.announce(tmp_path / "cluster.json")
    assert current.current_cluster_file() is None


def test_a_context_names_a_cluster_and_is_chosen_by_the_environment(
    mqctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fake: Any
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("CONTROLLER_ADDR")
    assert mqctl("contexts", "prod", "-n", "p:1;q:1", "-a", "p:3").code == 0
    assert mqctl("contexts", "--json").json == {"prod": {"namesrv": "p:1;q:1", "controller": "p:3"}}
    monkeypatch.setenv("BATONMQ_CONTEXT", "prod")
    assert mqctl("contexts").out.splitlines()[1].split() == ["*", "prod", "p:1;q:1", "p:3"]
    ran = mqctl("deleteTopic", "-t", "T", "-c", "C", "-y")
    assert (ran.code, ran.err.splitlines()[0]) == (0, "mqctl: cluster prod (p:1;q:1)")
    assert ("Admin", ("p:1", "q:1"), 5000) in fake.calls
    monkeypatch.setenv("BATONMQ_CONTEXT", "prd")
    ran = mqctl("topicList")
    assert ran.code == 2 and "BATONMQ_CONTEXT is 'prd'; `mqctl contexts` keeps prod" in ran.err
    assert mqctl("contexts", "x", "-n", "nonsense").code == 2
    assert mqctl("contexts", "--remove").code == 2
    assert mqctl("contexts", "nope", "--remove").code == 1
    assert mqctl("contexts", "prod", "--remove", "--json").json == {}


@pytest.mark.parametrize("named", ["absolute", "from its folder on", "forked"])
def test_a_server_is_known_by_its_pid_file_however_it_was_started(
    tmp_path: Path, named: str
) -> None:
    """A forked one has a title in place of its command line. One that was started by hand may name
    the file from its working folder on."""
    is_forked = named == "forked"
    pid_file = tmp_path / "a folder" / "broker-0.pid"
    pid_file.parent.mkdir()
    title = shlex.join(["python", "-m", "server", "--pid-file", str(pid_file)])
    code = "import setproctitle, sys\n"
    code += f"setproctitle.setproctitle({title!r})\n" if is_forked else ""
    code += "print(flush=True); sys.stdin.read()"
    name = str(pid_file) if named == "absolute" else "a folder/broker-0.pid"
    argv = [sys.executable, "-c", code, *([] if is_forked else ["--pid-file", name])]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline()
        pid_file.write_text(f"{process.pid}\n")
        assert serves(pid_file) == process.pid
        assert serves(tmp_path / "broker-1.pid") is None
        pid_file.with_name("broker-1.pid").write_text(f"{process.pid}\n")
        assert serves(pid_file.with_name("broker-1.pid")) is None, "another server has that pid"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "readlink", _refuse)
            assert serves(pid_file) == process.pid, "a server of another user"
            assert serves(pid_file.with_name("broker-1.pid")) is None
        process.communicate()
    assert serves(pid_file) is None


def _refuse(path: Path) -> Path:
    raise PermissionError(13, "Permission denied", str(path))
