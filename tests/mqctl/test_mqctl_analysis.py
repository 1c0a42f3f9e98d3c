"""`mqctl epochHistory` and its sisters: what they hand over to the Spark jobs, when they refuse.

No Spark: a stand-in takes the place of the interpreter that would run the job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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

JOBS = ("epoch_history", "message_audit", "topic_stats", "stream_history")
NAMES = ("epochHistory", "messageAudit", "topicStats", "streamHistory", "topicTable")

STAND_IN = """#!{python}
import json, os, signal, sys
print(json.dumps({{"argv": sys.argv[1:], "pid": os.getpid(),
                  "safe": os.environ.get("PYTHONSAFEPATH"),
                  "secret": os.environ.get("BATONMQ_SECRET_KEY")}}), flush=True)
if "--wait" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    print("waiting", flush=True)
    signal.pause()
sys.exit(3)
"""
PROGRAM = "import sys; sys.executable = {!r}; from batonmq.mqctl.main import main; main()"


@dataclass(frozen=True)
class Machine:
    """A machine with a JDK and Spark's packages, all of them stand-ins, and a home of its own."""

    folder: Path

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM.format(str(self.folder / "python")), *arguments]

    def environ(self, **more: str) -> dict[str, str]:
        hidden = ("NAMESRV_ADDR", "BATONMQ_DATA", "JAVA_HOME")
        kept = {key: value for key, value in os.environ.items() if key not in hidden}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        ours = {"HOME": str(self.folder), "PYTHONPATH": str(self.folder / "lib"), "PATH": path}
        return kept | ours | more

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*arguments), env=self.environ(**more), cwd=self.folder,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done

    def handed_over(self, *arguments: str, **more: str) -> list[str]:
        """The command line that the job got."""
        done = self.run(*arguments, **more)
        assert done.returncode == 3, done.stderr
        told: list[str] = json.loads(done.stdout)["argv"]
        return told


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    folder = tmp_path / "machine"
    for name in PACKAGES["spark"]:
        (folder / "lib" / name).mkdir(parents=True)
        # Nothing of Spark may be imported here.
        (folder / "lib" / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "bin").mkdir()
    for path, text in (
        (folder / "python", STAND_IN.format(python=sys.executable)),
        (folder / "bin" / "java", "#!/bin/sh\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    return Machine(folder)


def data_of_a_cluster(folder: Path, *, pid: int = 0) -> Path:
    """What `batonmq up` leaves: two histories, three stores, and the file that tells of it."""
    for number in range(3):
        (folder / f"broker-{number}" / "commitlog").mkdir(parents=True)
        (folder / f"namesrv-{number}" / "controller").mkdir(parents=True)
    for number in range(2):
        (folder / f"namesrv-{number}" / "controller" / f"history-n{number}.jsonl").touch()
    (folder / "cluster.json").write_text(
        json.dumps(
            {
                "supervisorPid": pid,
                "nameServers": [{"address": "127.0.0.1:9876"}, {"address": "127.0.0.1:9976"}],
                "controllers": [{"address": "127.0.0.1:9878"}, {"address": "127.0.0.1:9978"}],
                "brokers": [{"name": "broker-a", "address": "127.0.0.1:10911"}],
            }
        )
    )
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


def test_the_job_has_our_pid_and_so_gets_ctrl_c_itself(machine: Machine) -> None:
    with subprocess.Popen(
        machine.argv("topicStats", "--stores", "s", "--wait"),
        env=machine.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        told = json.loads(process.stdout.readline())
        assert told["pid"] == process.pid
        assert told["safe"] == "1"  # a folder `spark` in the working folder must not be taken
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


@pytest.mark.parametrize("name", ["streamHistory", "topicTable"])
def test_without_a_jdk_it_ends_with_2_and_a_sentence(machine: Machine, name: str) -> None:
    servers = ("--controllers", "h:1", "--name-servers", "h:1")
    done = machine.run(name, "--stores", "s", *servers, JAVA_HOME="/nowhere")
    assert done.returncode == 2
    assert "JDK 17" in done.stderr and "/nowhere" in done.stderr


def test_missing_packages_are_named_with_the_way_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name == "pyarrow" else None)
    told = lacking({"PATH": str(tmp_path)})
    assert "plotly, pyspark" in told and "pyarrow" not in told and "make setup-spark" in told
    monkeypatch.setattr(extras, "find_spec", lambda name: name)
    assert lacking({"PATH": str(tmp_path)}) == ""
    assert "no `java` in PATH" in lacking({"PATH": "/nowhere"})
    assert lacking({"PATH": "/nowhere"}, jvm=False) == ""


@pytest.mark.parametrize("ended", [False, True])
def test_without_paths_the_local_clusters_files_are_taken_and_said(
    machine: Machine, ended: bool
) -> None:
    data = data_of_a_cluster(machine.folder / "batonmq-data", pid=0 if ended else os.getpid())
    done = machine.run("epochHistory", "--json")
    told = json.loads(done.stdout)["argv"][2:]
    given = dict(zip(told[1::2], told[2::2], strict=True))
    assert told[0] == "--json"
    assert given["--history"] == ",".join(str(data / f"namesrv-{n}/controller") for n in range(2))
    assert given["--stores"] == ",".join(str(data / f"broker-{n}") for n in range(3))
    output = Path(given["--output"])
    assert output.parent == data / "analysis" and not output.exists()
    assert f"of the cluster in {data}: 2 histories, 3 stores" in done.stderr
    assert f"--output {output}" in done.stderr


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
    done = machine.run("epochHistory")
    assert done.returncode == 2
    assert "--history PATHS and --stores PATHS" in done.stderr
    (machine.folder / "empty").mkdir()
    (machine.folder / "empty" / "cluster.json").write_text("{}")
    done = machine.run("messageAudit", BATONMQ_DATA="empty")
    assert done.returncode == 2
    assert "no broker's store in" in done.stderr


def test_the_stream_takes_the_controllers_as_every_command_does(machine: Machine) -> None:
    def told(*arguments: str, **more: str) -> list[str]:
        return machine.handed_over("streamHistory", *arguments, **more)[2:]

    data_of_a_cluster(machine.folder / "batonmq-data", pid=os.getpid())
    local = ["--controllers", "127.0.0.1:9878;127.0.0.1:9978"]
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
    told = json.loads(machine.run(*command, BATONMQ_CONTEXT="prod").stdout)
    assert told["secret"] == "hidden" and "hidden" not in " ".join(told["argv"])


def test_a_topics_table_takes_the_name_servers_as_every_command_does(machine: Machine) -> None:
    def told(*arguments: str, **more: str) -> list[str]:
        return machine.handed_over("topicTable", "Orders", "--to=t", *arguments, **more)[4:]

    data_of_a_cluster(machine.folder / "batonmq-data", pid=os.getpid())
    assert told()[0] == "--name-servers" and "127.0.0.1:" in told()[1]
    for option in ("-n", "--namesrvAddr", "--name-servers"):
        assert told(option, "x:2", NAMESRV_ADDR="h:1") == ["--name-servers", "x:2"]


def test_without_a_cluster_the_stream_is_wrong_usage(machine: Machine) -> None:
    done = machine.run("streamHistory", "--output", "o")
    assert done.returncode == 2
    assert "no controller: give -a" in done.stderr


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
