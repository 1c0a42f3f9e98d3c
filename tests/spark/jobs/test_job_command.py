"""What every job does alike: exit codes, errors as sentences, results on standard output only."""

import json
import signal
import threading

import click
import pytest
from click.testing import CliRunner
from pyspark.errors import AnalysisException, PySparkRuntimeError

from batonmq.spark.jobs import command
from batonmq.spark.jobs.command import Job, JobCommand, job_options, what_failed
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.read.damage import DamagedFile
from batonmq.spark.read.store_facts import StoreError

WORKER_TRACE = """
An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/x/worker.py", line 12, in main
    process()
  File "/x/batonmq/spark/read/log_range.py", line 7, in read
batonmq.spark.read.damage.DamagedFile: commitlog/0: offset 4096: wrong CRC: 12 bytes

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException
"""
UNTRACED = """[STREAM_FAILED] Query terminated: [SOURCE] Failed when Python streaming data source \
perform initialOffset: batonmq.spark.live.cluster.ClusterError: no controller answers
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
"""


def run(body, *args):
    @click.command(cls=JobCommand)
    @job_options
    @click.option("--number", type=int, default=0)
    def made(job: Job, number: int) -> None:
        body(job, number)

    return CliRunner().invoke(made, args)


def test_a_result_goes_to_standard_output_for_people_or_for_scripts():
    def body(job, number):
        with job.progress.step("counting"):
            pass
        job.result({"number": number}, [f"number {number}"])

    plain = run(body, "--number", "3")
    assert (plain.exit_code, plain.stdout) == (0, "number 3\n")
    assert "counting ..." in plain.stderr and "counting: 0.0 s" in plain.stderr
    scripted = run(body, "--json", "--quiet")
    assert json.loads(scripted.stdout) == {"number": 0}
    assert scripted.stderr == ""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("--bucket '0s': it must be a span of at least 1s"), 2, "--bucket '0s'"),
        (FileNotFoundError("/nowhere: nothing matches"), 2, "/nowhere: nothing matches"),
        (StoreError("/x is no store"), 2, "/x is no store"),
        (PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={}), 2, "JDK 17"),
        (AnalysisException("[X] no such table"), 3, "no such table"),
        (ClusterError("no name server answers"), 3, "no name server answers"),
        (DamagedFile("commitlog/0: offset 4096: wrong CRC"), 3, "offset 4096"),
        (DamagedFile("two lines\n  are one"), 3, "error: two lines are one\n"),
        (AnalysisException("[X] ModuleNotFoundError: No module named 'batonmq'"), 2, "PYSPARK_PYT"),
    ],
)
def test_an_error_is_a_sentence_and_its_kind_an_exit_code(error, code, says):
    def body(job, number):
        raise error

    result = run(body)
    assert result.exit_code == code
    assert result.stderr.startswith("error: ") and says in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_a_setting_without_a_value_is_refused():
    result = run(lambda job, number: None, "--conf", "spark.executor.memory")
    assert result.exit_code == 2
    assert "it must be KEY=VALUE" in result.stderr


def test_a_step_that_fails_says_no_time():
    def body(job, number):
        with job.progress.step("reading"):
            raise ValueError("damaged")

    result = run(body)
    assert "reading ..." in result.stderr and "reading: " not in result.stderr


def test_long_work_has_a_line_now_and_then(monkeypatch):
    reported = threading.Event()

    def note(self, text):
        if text.endswith(" s so far"):
            reported.set()

    def body(job, number):
        with job.progress.step("reading"):
            assert reported.wait(30)

    monkeypatch.setattr(command, "_REPORT_S", 0.001)
    monkeypatch.setattr(command.JobSteps, "line", note)
    assert run(body).exit_code == 0


def test_control_c_is_no_finding():
    def body(job, number):
        raise KeyboardInterrupt

    result = run(body)
    assert (result.exit_code, result.stderr) == (130, "stopped\n")


@pytest.mark.parametrize("starts", [True, False])
def test_control_c_waits_until_spark_has_started(monkeypatch, starts):
    """A JVM that was left in the middle of its start would stay."""
    done = []

    def start(*_, **__):
        signal.raise_signal(signal.SIGINT)
        done.append("started")
        if not starts:
            raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})
        return Session()

    class Session:
        def __init__(self):
            self.sparkContext = self

        def setLogLevel(self, _):
            done.append("set")

        def stop(self):
            done.append("stopped")

    class Sessions:
        @staticmethod
        def getActiveSession():
            return Session() if "set" in done else None

    def body(job, number):
        with job.session("x"):
            done.append("worked")

    monkeypatch.setattr("batonmq.spark.session.open_session", start)
    monkeypatch.setattr("pyspark.sql.SparkSession", Sessions)
    before = signal.getsignal(signal.SIGINT)
    result = run(body)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping as soon as Spark has started" in result.stderr
    if starts:
        assert (result.exit_code, done) == (130, ["started", "set", "stopped"])
        assert result.stderr.endswith("stopped\n")
    else:
        assert (result.exit_code, done) == (2, ["started"])


def test_a_bug_is_neither_bad_input_nor_a_finding():
    def body(job, number):
        raise AssertionError("a bug")

    result = run(body)
    assert result.exit_code == 3
    assert "Traceback" in result.stderr and "a bug" in result.stderr


def test_a_commands_own_usage_error_stays_one():
    def body(job, number):
        raise click.BadParameter("--bucket '0s': at least 1s")

    result = run(body)
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")


def test_the_error_of_a_task_is_found_in_sparks_report():
    said = what_failed("Job aborted due to stage failure" + WORKER_TRACE)
    assert said == "commitlog/0: offset 4096: wrong CRC: 12 bytes"
    assert what_failed(UNTRACED) == "no controller answers"
    assert what_failed("[PATH_NOT_FOUND] no\n\ndetails") == "[PATH_NOT_FOUND] no"
    assert what_failed("") == "unknown"
