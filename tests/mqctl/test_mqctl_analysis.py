"""`mqctl epochHistory` and its sisters: what they hand over to the Spark jobs, when they refuse.

No Spark: the call that would replace this process by the job is only noted, or a stand-in takes the
place of the job's interpreter.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import click
import pytest

from batonmq.mqctl.commands.analysis import (
    fresh_folder,
    is_given,
    lacking,
    with_local_files,
    with_our_name,
)
from batonmq.runtime import extras
from batonmq.runtime.extras import PACKAGES
from lab.cluster.mqctl import Ran, mqctl
from tests.mqctl.conftest import CONTROLLERS, NS, write_cluster

JOBS = ("epoch_history", "message_audit", "topic_stats", "stream_history")
NAMES = ("epochHistory", "messageAudit", "topicStats", "streamHistory", "topicTable")


@dataclass
class Machine:
    """A machine with a JDK and Spark's packages, and a home of its own. `argv` and `environ`: of
    the process that the last job would have been."""

    folder: Path
    argv: list[str] = field(default_factory=list)
    environ: Mapping[str, str] = field(default_factory=dict)

    def execve(self, program: str, argv: list[str], environ: Mapping[str, str]) -> NoReturn:
        assert program == sys.executable
        self.argv, self.environ = argv, environ
        sys.exit(3)

    def run(self, *arguments: str, **more: str) -> Ran:
        java = {"PATH": str(self.folder / "bin"), "JAVA_HOME": None}
        return mqctl(*arguments, home=self.folder, env={**java, **more})

    def handed_over(self, *arguments: str, **more: str) -> list[str]:
        """The command line that the job got."""
        ran = self.run(*arguments, **more)
        assert ran.code == 3, ran.err
        assert self.environ["PYTHONSAFEPATH"] == "1"  # no folder `spark` there must be taken
        return self.argv[1:]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    folder = tmp_path / "machine"
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    machine = Machine(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "execve", machine.execve)
    monkeypatch.setattr(extras, "find_spec", lambda name: name)
    return machine


def data_of_a_cluster(folder: Path, *, pid: int = 0) -> Path:
    """What `batonmq up` leaves: two histories, three stores, and the file that tells of it."""
    for number in range(3):
        (folder / f"broker-{number}" / "commitlog").mkdir(parents=True)
        (folder / f"namesrv-{number}" / "controller").mkdir(parents=True)
    for number in range(2):
        (folder / f"namesrv-{number}" / "controller" / f"history-n{number}.jsonl").touch()
    write_cluster(folder / "cluster.json", pid)
    return folder


@pytest.mark.parametrize(("job", "name"), [*zip(JOBS, NAMES, strict=False)])
def test_every_argument_reaches_the_job_and_its_exit_code_comes_back(
    machine: Machine, job: str, name: str
) -> None:
    rest = ["--stores", "a,b", "--controllers=h:1", "--output", "o", "-q", "--conf", "a=b c"]
    assert machine.handed_over(name, *rest) == ["-m", f"batonmq.spark.jobs.{job}", *rest]


@pytest.mark.parametrize(
    ("name", "asked"), [*((name, "--help") for name in NAMES), ("epochHistory", "-h")]
)
def test_help_is_the_jobs_own_and_needs_no_cluster(machine: Machine, name: str, asked: str) -> None:
    assert machine.handed_over(name, asked)[2:] == [asked]


STAND_IN = """#!{python}
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print(os.getpid(), *sys.argv[1:], flush=True)
signal.pause()
"""
PROGRAM = "import sys; sys.executable = {!r}; from batonmq.mqctl.main import main; main()"


def test_the_job_has_our_pid_and_so_gets_ctrl_c_itself(machine: Machine) -> None:
    for name in PACKAGES["spark"]:
        (machine.folder / "lib" / name).mkdir(parents=True)
        # Nothing of Spark may be imported here.
        (machine.folder / "lib" / name / "__init__.py").write_text("raise RuntimeError('no')\n")
    python = machine.folder / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    argv = [sys.executable, "-c", PROGRAM.format(str(python)), "topicStats", "--stores", "s"]
    environ = {**os.environ, "PYTHONPATH": str(machine.folder / "lib")}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=environ, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        job = "-m batonmq.spark.jobs.topic_stats --stores s"
        assert process.stdout.readline() == f"{process.pid} {job}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


@pytest.mark.parametrize("name", ["streamHistory", "topicTable"])
def test_without_a_jdk_it_ends_with_2_and_a_sentence(machine: Machine, name: str) -> None:
    servers = ("--controllers", "h:1", "--name-servers", "h:1")
    ran = machine.run(name, "--stores", "s", *servers, JAVA_HOME="/nowhere")
    assert ran.code == 2 and "JDK 17" in ran.err and "/nowhere" in ran.err


def test_missing_packages_are_named_with_the_way_to_get_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {"PATH": str(machine.folder / "bin")}
    assert lacking(path) == ""
    assert "no `java` in PATH" in lacking({"PATH": "/nowhere"})
    assert lacking({"PATH": "/nowhere"}, jvm=False) == ""
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name == "pyarrow" else None)
    told = lacking(path)
    assert "plotly, pyspark" in told and "pyarrow" not in told and "make setup-spark" in told


@pytest.mark.parametrize("ended", [False, True])
def test_without_paths_the_local_clusters_files_are_taken_and_said(
    machine: Machine, ended: bool
) -> None:
    data = data_of_a_cluster(machine.folder / "batonmq-data", pid=0 if ended else os.getpid())
    ran = machine.run("epochHistory", "--json")
    told = machine.argv[3:]
    given = dict(zip(told[1::2], told[2::2], strict=True))
    assert told[0] == "--json"
    assert given["--history"] == ",".join(str(data / f"namesrv-{n}/controller") for n in range(2))
    assert given["--stores"] == ",".join(str(data / f"broker-{n}") for n in range(3))
    output = Path(given["--output"])
    assert output.parent == data / "analysis" and not output.exists()
    assert f"of the cluster in {data}: 2 histories, 3 stores" in ran.err
    assert f"--output {output}" in ran.err


@pytest.mark.parametrize("name", ["messageAudit", "topicStats"])
def test_jobs_of_stores_get_the_stores_only(machine: Machine, name: str) -> None:
    data_of_a_cluster(machine.folder / "elsewhere")
    told = machine.handed_over(name, "--acked", "list", "--output=o", BATONMQ_DATA="elsewhere")[2:]
    assert told[:4] == ["--acked", "list", "--output=o", "--stores"]
    assert len(told) == 5 and told[4].count(",") == 2


def test_the_cluster_started_last_is_found_after_its_end(machine: Machine) -> None:
    data = data_of_a_cluster(machine.folder / "last")
    hint = machine.folder / ".batonmq" / "current"
    hint.parent.mkdir()
    hint.write_text(f"{data / 'cluster.json'}\n")
    assert str(data / "broker-2") in machine.handed_over("topicStats")[3]


def test_one_path_given_takes_nothing_else(machine: Machine) -> None:
    data_of_a_cluster(machine.folder / "batonmq-data")
    for given in (["--history=h"], ["--stores", "s"], ["--history-parquet", "p"]):
        assert machine.handed_over("epochHistory", *given)[2:] == given


def test_nothing_to_read_is_wrong_usage(machine: Machine) -> None:
    ran = machine.run("epochHistory")
    assert ran.code == 2 and "--history PATHS and --stores PATHS" in ran.err
    (machine.folder / "empty").mkdir()
    (machine.folder / "empty" / "cluster.json").write_text("{}")
    ran = machine.run("messageAudit", BATONMQ_DATA="empty")
    assert ran.code == 2 and "no broker's store in" in ran.err


def test_the_stream_takes_the_controllers_as_every_command_does(machine: Machine) -> None:
    def told(*arguments: str, **more: str) -> list[str]:
        return machine.handed_over("streamHistory", *arguments, **more)[2:]

    data_of_a_cluster(machine.folder / "batonmq-data", pid=os.getpid())
    local = ["--controllers", ";".join(CONTROLLERS)]
    assert told("--output", "o") == ["--output", "o", *local]
    assert told(CONTROLLER_ADDR="h:1") == ["--controllers", "h:1"]
    for option in ("-a", "--controllerAddress", "--controller-address"):
        assert told(option, "x:2", CONTROLLER_ADDR="h:1") == ["--controllers", "x:2"]
    assert told("--controllers=y:3", CONTROLLER_ADDR="h:1") == ["--controllers=y:3"]


@pytest.mark.parametrize("command", [("streamHistory",), ("topicTable", "Orders", "--to=t")])
def test_the_user_of_a_context_signs_by_the_environment(
    machine: Machine, command: tuple[str, ...]
) -> None:
    file = machine.folder / "user.yml"
    file.write_text("accessKey: shop\nsecretKey: hidden\n")
    kept = {"namesrv": "h:1", "controller": "h:2", "credentials": str(file)}
    (machine.folder / ".batonmq").mkdir()
    (machine.folder / ".batonmq" / "contexts.json").write_text(json.dumps({"prod": kept}))
    told = machine.handed_over(*command, BATONMQ_CONTEXT="prod")
    assert machine.environ["BATONMQ_SECRET_KEY"] == "hidden" and "hidden" not in " ".join(told)


def test_a_topics_table_takes_the_name_servers_as_every_command_does(machine: Machine) -> None:
    def told(*arguments: str, **more: str) -> list[str]:
        return machine.handed_over("topicTable", "Orders", "--to=t", *arguments, **more)[4:]

    data_of_a_cluster(machine.folder / "batonmq-data", pid=os.getpid())
    assert told() == ["--name-servers", NS]
    for option in ("-n", "--namesrvAddr", "--name-servers"):
        assert told(option, "x:2", NAMESRV_ADDR="h:1") == ["--name-servers", "x:2"]


def test_without_a_cluster_the_stream_is_wrong_usage(machine: Machine) -> None:
    ran = machine.run("streamHistory", "--output", "o")
    assert ran.code == 2 and "no controller: give -a" in ran.err


def test_names_of_options_are_told_apart_from_values() -> None:
    assert is_given("--stores", ["--stores=a"]) and is_given("--stores", ["-q", "--stores", "a"])
    assert not is_given("--stores", ["--stores-too", "a"])
    assert with_our_name(["--controllerAddress=a:1", "--a"]) == ["--controllers=a:1", "--a"]


def test_a_fresh_folder_is_not_there_yet(tmp_path: Path) -> None:
    first = fresh_folder(tmp_path, "topic_stats", 0.0)
    assert first.name == "topic_stats-19700101-000000"
    first.mkdir()
    assert fresh_folder(tmp_path, "topic_stats", 0.0).name == f"{first.name}-2"


def test_an_output_given_is_left_alone(tmp_path: Path) -> None:
    data = data_of_a_cluster(tmp_path / "data")
    told = with_local_files("topic_stats", ["--output", "o"], ["--stores"], data)
    assert told.count("--output") == 1
    with pytest.raises(click.UsageError, match="nothing to read"):
        with_local_files("topic_stats", [], ["--stores"], None)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_started_by_hand_without_its_packages_says_so(job: str) -> None:
    root = Path(__file__).parents[2]
    # -S: an interpreter without installed packages.
    done = subprocess.run(
        [sys.executable, "-S", "-m", f"batonmq.spark.jobs.{job}", "--help"],
        cwd=root, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(
        "error: jobs run on Spark and need duckdb, jinja2, jpype1, numpy, plotly, pyarrow, pyspark:"
    )
    assert "make setup-spark" in done.stderr and done.stderr.count("\n") == 1
