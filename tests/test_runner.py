"""`tests.run`: a hang is named, and what a machine lacks leaves out one ring only."""

import contextlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.cluster.processes import wait_for
from tests.rings import RINGS, Ring
from tests.run import RETRIED_MAX, ROOT, Outcome, Run, retried, run_all

SPARKS = ("jinja2", "plotly", "pyarrow", "pyspark")


@pytest.mark.timeout(600)  # on a busy machine tests are collected slowly
def test_without_the_spark_packages_only_the_spark_ring_is_left_out() -> None:
    """Of the others those are collected that name Spark."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({SPARKS}))\n"
        "import pytest; sys.exit(pytest.main(['--collect-only', '-q', 'tests', *sys.argv[1:]]))"
    )
    naming, others = set(), []
    for path in (ROOT / "tests").rglob("test_*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if name.startswith("tests/spark/"):
            continue
        if "spark" in text.lower():
            naming.add(name)
        else:
            others.append(f"--ignore={name}")
    listed = subprocess.run(
        [sys.executable, "-c", code, *others], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stdout[-2000:]
    shown = {line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line}
    assert shown == naming


@pytest.mark.timeout(600)  # on a busy machine pytest itself starts late
@pytest.mark.parametrize("workers", [1, 2])
def test_a_ring_that_hangs_names_its_tests_and_shows_where_they_stand(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    names = [f"test_{number}.py" for number in range(workers)]
    reached = [tmp_path / f"{name} waits" for name in names]
    for name, file in zip(names, reached, strict=True):
        (tmp_path / name).write_text(
            "import pathlib, threading\n"
            "def test_waits():\n"
            f"    pathlib.Path({str(file)!r}).touch(); threading.Event().wait()\n"
        )
    command = ("-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))
    shared = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
    command += ("--rootdir", str(tmp_path), *shared, str(tmp_path))
    run = Run(
        Ring("stuck", "tests that wait", "", 600, command=command), "1/1", strict=True, soak=False
    )
    try:
        wait_for("the tests", lambda: all(file.exists() for file in reached), 300.0)
        run._limit_s = 0
        outcome = wait_for("its end", run.look)
        run.show()
    finally:
        run.stop()
    assert outcome.state == "failed"
    assert set(outcome.why.removeprefix("longer than 0 s, in ").split(" and ")) == {
        f"{name}::test_waits" for name in names
    }
    shown = capfd.readouterr().out
    assert f"stuck: {outcome.why}" in shown
    for name in names:
        assert f'{name}", line 3 in test_waits' in shown


@pytest.mark.timeout(600)
def test_rings_run_beside_each_other_but_for_those_that_come_after_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the first is prepared, and while it runs, it waits for the last; the second, shown
    before that, finds what the first left."""
    begin = f"import pathlib, time; folder = pathlib.Path({str(tmp_path)!r})\n"
    codes = {
        "first": (
            "while not (folder / 'beside').exists(): time.sleep(0.01)\n(folder / 'first').touch()"
        ),
        "after": "assert (folder / 'first').exists()",
        "beside": "(folder / 'beside').touch()",
    }
    rings = [Ring(name, "", "", 300, command=("-c", begin + codes[name])) for name in codes]
    last = tmp_path / "beside"
    rings[0] = replace(rings[0], prepare=lambda: wait_for("the last ring", last.exists, 300.0))
    rings[1] = replace(rings[1], after=("first", "left out"))
    outcomes = run_all(rings, strict=True, soak=False)
    assert [(each.ring.name, each.state) for each in outcomes] == [(n, "passed") for n in codes]
    shown = re.findall(r"=== (\S+ \w+)", capfd.readouterr().out)
    assert shown == ["1/3 first", "2/3 after", "3/3 beside"]


def test_failed_tests_run_once_more_alone_and_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_busy.py"
    file.write_text(
        "import pathlib, pytest\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_busy(n):\n"
        f"    mark = pathlib.Path({str(tmp_path)!r}, str(n))\n"
        "    assert mark.exists(), mark.touch()\n"
    )
    folders = (str(tmp_path),)
    ring = Ring("busy", "tests that fail", "not none", 600, folders=folders, workers=2)
    (outcome,) = run_all([ring], strict=True, soak=False)
    assert (outcome.state, len(outcome.failed)) == ("failed", 2)
    # Outside its root pytest names a file by a part of its path: which part depends on the root.
    tests = (name.partition("::")[2] for name in outcome.failed)
    outcome = retried(replace(outcome, failed=tuple(f"{file}::{test}" for test in tests)))
    assert outcome.state == "passed" and outcome.why.startswith("only alone: ")
    assert outcome.why.count("test_busy.py::test_busy") == 2


def test_what_fails_alone_too_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_broken.py"
    file.write_text("def test_broken(): assert False")
    outcome = retried(Outcome(RINGS[0], "failed", 1.0, failed=(f"{file}::test_broken",)))
    assert outcome.state == "failed" and outcome.why.startswith("also alone: ")


def test_the_first_files_of_a_ring_come_first(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text("def test(): pass\n")
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--collect-only", "-q"]
    argv += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    argv += ["--first=test_c.py", "--first=test_b.py"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line]
    assert found == ["test_c.py", "test_b.py", "test_a.py"]


def test_each_first_file_of_a_ring_exists() -> None:
    assert [file for ring in RINGS for file in ring.first if not (ROOT / file).exists()] == []


def test_many_failed_tests_are_not_tried_again() -> None:
    outcome = Outcome(RINGS[0], "failed", 1.0, failed=("test",) * (RETRIED_MAX + 1))
    assert retried(outcome) == outcome


def test_a_test_that_never_ends_fails_in_any_loop(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import asyncio, pytest, uvloop\n"
        "async def wait(): await asyncio.Event().wait()\n"
        "@pytest.mark.parametrize('loop', [asyncio, uvloop])\n"
        "def test_waits(loop): loop.run(wait())\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--timeout=1"]
    argv += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "2 failed" in ended.stdout, ended.stdout[-2000:]
    assert "test_waits.py::test_waits[uvloop]: Timeout" in ended.stdout


def test_every_test_and_every_ring_has_a_limit(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert float(pytestconfig.getini("timeout")) > 0
    assert all(ring.limit_s > 0 for ring in RINGS)


def test_every_marked_test_is_in_the_folders_of_its_ring() -> None:
    """What is marked in `tests/spark` runs in Spark's ring, whatever else its mark is."""
    for ring in RINGS:
        mark = ring.marks.partition(" ")[0]
        if mark in ("process", "java", "spark", "docker"):
            marked = re.compile(rf"pytest\.mark\.{mark}\b")
            folders = [ROOT / folder for folder in (*ring.folders, "tests/spark")]
            for file in (ROOT / "tests").rglob("test_*.py"):
                if marked.search(file.read_text()):
                    assert any(folder in file.parents for folder in folders), (ring.name, file)


def test_processes_of_tests_are_given_ports_of_their_own() -> None:
    """Two workers were given the same port between the look at it and its use."""
    code = (
        "import sys\n"
        "from tests.shared.ports import free_ports\n"
        "print(*(free_ports(3) + i for _ in range(200) for i in range(3)), flush=True)\n"
        "sys.stdin.read()"
    )
    with contextlib.ExitStack() as running:
        workers = [
            running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(3)
        ]
        lines = [worker.stdout.readline() for worker in workers if worker.stdout]
    first, second, third = (set(map(int, line.split())) for line in lines)
    assert first and second and third
    assert not (first & second or second & third or first & third)
