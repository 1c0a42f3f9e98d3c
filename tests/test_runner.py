"""`tests.run`: a hang is named, and what a machine lacks leaves out one ring only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.processes import wait_for
from tests.rings import RINGS, Ring
from tests.run import ROOT, Run

SPARKS = ("jinja2", "plotly", "pyarrow", "pyspark")


def test_without_the_spark_packages_only_the_spark_ring_is_left_out() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({SPARKS}))\n"
        "import pytest; sys.exit(pytest.main(['--collect-only', '-q', 'tests']))"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stdout[-2000:]
    assert "tests/store/" in listed.stdout and "tests/process/" in listed.stdout
    assert "tests/spark/" not in listed.stdout


def test_a_ring_that_hangs_names_its_test_and_shows_where_it_stands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "test_stuck.py"
    reached = tmp_path / "reached"
    module.write_text(
        "import pathlib, threading\n"
        "def test_waits():\n"
        f"    pathlib.Path({str(reached)!r}).touch(); threading.Event().wait()\n"
    )
    command = ("-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))
    command += ("--rootdir", str(tmp_path), str(module))
    run = Run(
        Ring("stuck", "one test that waits", "", 600, command=command),
        "1/1",
        strict=True,
        soak=False,
        quiet=True,
    )
    try:
        wait_for("the test", reached.exists)
        run._limit_s = 0
        outcome = run.finish()
    finally:
        run.stop()
    assert (outcome.state, outcome.why) == (
        "failed",
        "longer than 0 s, in test_stuck.py::test_waits",
    )
    shown = capfd.readouterr().out
    assert "stuck: longer than 0 s" in shown
    assert 'test_stuck.py", line 3 in test_waits' in shown


def test_a_test_that_waits_for_ever_fails_in_any_loop(tmp_path: Path) -> None:
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
