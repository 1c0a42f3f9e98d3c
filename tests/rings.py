"""The rings of tests: what each marks, needs, and bears beside it. `tests.run` runs them."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.cluster import compose
from lab.cluster.java import JavaError, is_fetched, missing_tools, prepared_classpath


@dataclass(frozen=True)
class Ring:
    """Tests that need the same things. `prepare` raises Unprepared if they cannot run.

    `marks` chooses tests of pytest in `folders`, whose files are shared out to so many `workers`:
    the long ones are `first`, so that none begins when all others are done. `command`, if there is
    one, is what Python runs instead.
    `limit_s`: longer than that is a hang. `in_test`, `soaks`: part of `make test`, of `make soak`.
    `missing_for_some`: what only some of them need; those are skipped, the others run.
    `after`: rings that must be over before it begins; it runs beside all others, and its
    `niceness` says who gets the processor then.
    """

    name: str
    title: str
    marks: str
    limit_s: float
    missing: Callable[[], list[str]] = list
    missing_for_some: Callable[[], list[str]] = list
    prepare: Callable[[], None] = lambda: None
    after: tuple[str, ...] = ()
    niceness: int = 0
    folders: tuple[str, ...] = ("tests",)
    first: tuple[str, ...] = ()
    workers: int = 1
    command: tuple[str, ...] = ()
    in_test: bool = True
    soaks: bool = False

    @property
    def argv(self) -> list[str]:
        if self.command:
            return [sys.executable, *self.command]
        pytest = ["-m", "pytest", "-q", "-m", self.marks, "--durations=5", *self.folders]
        pytest += [f"--first={file}" for file in self.first]
        if self.workers > 1:
            # In their order: else files of one test, however long it takes, would come last.
            pytest += ["-n", str(self.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        return [sys.executable, *pytest]

    def cached_in(self, folder: Path) -> list[str]:
        """Options by which pytest keeps there which tests failed: rings run beside each other."""
        return [] if self.command else ["-o", f"cache_dir={folder}"]


class Unprepared(Exception):
    """A ring's needs could not be met."""


def _prepare_java() -> None:
    if not is_fetched():
        print("    Maven fetches the stock Java client once, about a minute …", flush=True)
    try:
        prepared_classpath()
    except JavaError as exc:
        raise Unprepared(str(exc)) from exc


def _missing_for_spark() -> list[str]:
    packages = (
        "deltalake", "jinja2", "jpype", "moto", "numpy", "plotly", "pyarrow", "pyiceberg", "pyspark"
    )  # fmt: skip
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    java = ["a JDK 17 (`java`)"] if shutil.which("java") is None else []
    return java + ([f"{', '.join(lacking)} (`make setup-spark`)"] if lacking else [])


def _missing_for_reports_and_recipes() -> list[str]:
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    packages = ("selenium", "grpc_status", "pandas", "polars", "zstandard")
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    return programs + ([f"{', '.join(lacking)} (`make setup-spark`)"] if lacking else [])


def _missing_for_alerts() -> list[str]:
    return ["promtool (Debian: prometheus)"] if shutil.which("promtool") is None else []


def _prepare_docker() -> None:
    print("    the image of this work tree is built …", flush=True)
    try:
        compose.build_image()
    except subprocess.CalledProcessError as exc:
        raise Unprepared(f"{exc.stdout}{exc.stderr}") from exc


# The tests of process, docker and java wait for answers in time, so they get the processor first.
# What they leave of two cores is for rings that compute. Stock clients come last: beside more than
# one such ring they run into their time-outs, and they take no local address while an interface of
# a container disappears.
RINGS = (
    Ring(
        "fast",
        "cores, codecs, stores, in one process",
        "not process and not java and not spark and not docker",
        1800,
        # At 10 a long test runs into its time limit; the longest are last, when process is over.
        niceness=7,
        workers=3,  # a quarter of the time each waits: for a disk, or a time-out
    ),
    Ring(
        "java",
        "the stock Java client and mqadmin",
        "java",
        1800,
        missing_tools,
        prepare=_prepare_java,
        after=("fast", "process", "docker"),
        folders=("tests/interop",),
        first=(
            "tests/interop/test_java_controllers.py",
            "tests/interop/test_java_switch.py",
            "tests/interop/test_java_acting.py",
        ),
        workers=2,
        soaks=True,
    ),
    Ring(
        "spark",
        "stores and histories as Spark data frames",
        "spark",
        5400,
        _missing_for_spark,
        _missing_for_reports_and_recipes,
        folders=("tests/spark",),
        niceness=5,
        soaks=True,
    ),
    Ring(
        "process",
        "real clusters: kill -9, hangs, bad days",
        "process and not spark",
        1800,
        missing_for_some=_missing_for_alerts,
        first=(
            "tests/process/test_fault_trials.py",
            "tests/process/test_secure.py",
            "tests/process/test_roll.py",
        ),
        folders=(
            "tests/process",
            "tests/packaging",
            "tests/examples",
            "tests/controller",
            "tests/namesrv",
            "tests/store",
        ),
        workers=2,
        soaks=True,
    ),
    Ring(
        "sim",
        "simulated lives of a whole cluster",
        "",
        5400,
        after=("spark",),
        niceness=19,  # it takes what the others leave
        # As many lives as pay: they find three of four planted defects, 300 find most of the others
        # in seven times the time. With each change a seed is another life; `make sim` runs 300.
        command=("-m", "lab.sim", "--seeds", "40", "--known", "--jobs", "2"),
    ),
    Ring(
        "docker",
        "the compose project: crashes, restarts, changed addresses",
        "docker",
        1800,
        compose.missing_tools,
        prepare=_prepare_docker,
        folders=("tests/chaos",),
    ),
    Ring(
        "search",
        "property tests and odd requests, thousands of examples with new seeds",
        "hypothesis or request_fuzz",
        1800,
        after=("process",),
        workers=2,
        in_test=False,
        soaks=True,
    ),
    Ring(
        "fuzz",
        "broken input for every reader",
        "",
        1800,
        after=("process",),
        command=("-m", "tests.fuzz", "--runs", "200000"),
        in_test=False,
        soaks=True,
    ),
)
