"""The planted defects: each still fits the code, and the runner tells found from not found.

Whether all of them are found says `make defects`; it takes a quarter of an hour.
"""

import contextlib
import importlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

from lab.sim.defects import hunt
from lab.sim.defects.__main__ import FOLDER, main
from lab.sim.defects.patches import Defect, PatchError, defects_in, noting, parse
from lab.sim.defects.runner import ROOT, CheckoutCopy, Runner, _seeds_for
from lab.sim.kinds import EXPIRY, NEVER_PLAIN, ROLLING, UNCLEAN, WEIGHTS
from lab.sim.life import LifeOutcome, plan_of
from lab.sim.settings import Settings

DEFECTS = defects_in(FOLDER)
EASY = "ack_before_replicate"
KINDS = {*WEIGHTS, *EXPIRY, *ROLLING, *UNCLEAN, *NEVER_PLAIN}

HARMLESS = """R1: nothing is wrong with it.
--- a/broker/write/pending_acks.py
+++ b/broker/write/pending_acks.py
@@ -14,3 +14,3 @@
 from bisect import bisect_left
-from collections import Counter, deque
+from collections import Counter, deque  # as before
 from collections.abc import Callable
"""


def planted(defect: Defect, folder: Path) -> dict[str, str]:
    """The files that it changes, by their paths."""
    for path in defect.files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    defect.apply(folder)
    return {path: (folder / path).read_text("utf-8") for path in defect.files}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_fits_the_code_and_its_result_runs(defect: Defect, tmp_path: Path) -> None:
    for path, text in planted(defect, tmp_path).items():
        assert text != (ROOT / path).read_text("utf-8")
        name = path.removesuffix(".py").replace("/", ".")
        name = name if name.startswith("batonmq.") else f"batonmq.{name}"
        module = types.ModuleType(name)
        module.__package__ = importlib.import_module(name).__package__
        exec(compile(text, path, "exec"), module.__dict__)


def test_no_defect_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """A life that ends with a NameError would say nothing of the checkers."""
    for defect in DEFECTS:
        planted(defect, tmp_path / defect.name)
    ruff = [sys.executable, "-m", "ruff", "check", "-q", "--isolated", "--no-cache"]
    done = subprocess.run(
        [*ruff, "--select", "F821,F811", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_defect_names_its_rule_and_is_small() -> None:
    for defect in DEFECTS:
        assert re.match(r"[RG]\d+(, [RG]\d+)*: .*\.$", defect.what), defect
        assert len(defect.what) <= 100, defect
        changed = re.findall(r"^(?:\+(?!\+\+)|-(?!--)).*", defect.text, re.MULTILINE)
        assert len(changed) <= 12, defect.name
        for each in defect.lives:
            number, _, name = each.partition(" ")
            assert name in KINDS if number.isdigit() else hasattr(Settings(), number), defect
    assert len(DEFECTS) > 100


def test_what_is_no_patch_is_named() -> None:
    with pytest.raises(PatchError, match="broken"):
        parse("broken", "R1: no hunk.\n")


def test_the_seed_that_found_it_is_noted_once() -> None:
    noted = noting(noting(HARMLESS, 3), 12)
    assert parse("noted", noted).seed == 12
    assert noted.replace("Found by seed 12\n", "") == HARMLESS


def test_lives_that_cannot_meet_a_defect_are_passed_over() -> None:
    wanted = ("2 pause", "sync_flush", "min_in_sync 2")
    seeds = list(itertools.islice(_seeds_for(Defect("one", "", None, wanted, "")), 3))
    assert seeds == sorted(seeds)
    for plan in map(plan_of, seeds):
        assert plan.settings.sync_flush and plan.settings.min_in_sync == 2
        assert sum(fault.kind == "pause" for fault in plan.faults) >= 2


def test_the_runner_tells_what_was_found_and_what_was_not(tmp_path: Path) -> None:
    """One that is easy to find, one that harms nothing, one that does not fit, one that breaks the
    code instead of a promise. The work tree stays as it is."""
    source = ROOT / "broker" / "write" / "pending_acks.py"
    before = source.read_bytes()
    folder = tmp_path / "defects"
    folder.mkdir()
    plans = [plan_of(seed) for seed in range(1, 60)]
    shortest = min(plans, key=lambda plan: (plan.seconds, len(plan.faults))).seed
    shutil.copy(FOLDER / f"{EASY}.patch", folder / "easy.patch")
    (folder / "harmless.patch").write_text(noting(HARMLESS, shortest))
    (folder / "misfit.patch").write_text(HARMLESS.replace("Counter, deque\n", "Counter, queue\n"))
    (folder / "nameless.patch").write_text(
        HARMLESS.replace("+14,3", "+14,4").replace("as before", "as before\n+no_such_name")
    )
    runner = Runner(lambda line: None, seeds_max=1)
    easy, harmless, misfit, broken = runner.run(defects_in(folder))
    assert easy.found and easy.violation.startswith("R1: "), easy
    assert (harmless.seed, harmless.error) == (None, "")
    assert "broker/write/pending_acks.py" in misfit.error
    assert broken.seed is None and "no_such_name" in broken.error
    assert source.read_bytes() == before


def _spin(seed: int, *, plain: bool) -> tuple[int, LifeOutcome]:
    while True:
        pass


def _lose_heart(seed: int, *, plain: bool) -> tuple[int, LifeOutcome]:
    os._exit(3)


@pytest.mark.parametrize("life, text", [(_spin, "1 s of processor time"), (_lose_heart, "code 3")])
def test_a_life_without_an_outcome_is_no_find(
    monkeypatch: pytest.MonkeyPatch, life: object, text: str
) -> None:
    monkeypatch.setattr(hunt, "run_numbered", life)
    with pytest.raises(hunt.LifeError, match=f"seed 7: .*{text}"):
        list(hunt.hunt([7], seconds_max=1))


def test_a_hunt_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    copy = CheckoutCopy(tmp_path)
    (tmp_path / "lab" / "sim" / "defects" / "hunt.py").write_text(
        "import os, time\nos.fork()\nos.write(1, b'[%d, null]\\n' % os.getpid())\ntime.sleep(600)\n"
    )
    lives = copy.lives([1, 2, 3])
    pids = [next(lives)[0], next(lives)[0]]
    lives.close()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(10)


def test_a_runner_that_is_ended_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lab.sim.defects", "--only", EASY, "--search"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as runner:
        process = psutil.Process(runner.pid)
        while not (hunts := process.children()):
            assert runner.poll() is None
        runner.terminate()
        assert runner.wait(30) == 128 + signal.SIGTERM
    psutil.wait_procs(hunts, 10)
    assert not any(each.is_running() for each in hunts)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "harmless.patch").write_text(HARMLESS)
    with pytest.raises(SystemExit, match="no defect other; there are harmless"):
        main(["--only", "other"], tmp_path)
