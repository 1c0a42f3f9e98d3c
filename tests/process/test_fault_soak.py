"""Some random faults; `make soak` does it for an hour."""

import os
import random
from pathlib import Path

import pytest

from lab.faults.soak import run_soak

pytestmark = pytest.mark.process

MINUTES = float(os.environ.get("BATONMQ_FAULTS_MINUTES", "0.2"))
QUEUES = 200


def test_g1_g2_g3_random_faults_break_no_promise(tmp_path: Path) -> None:
    """Faults of the table at random, some with a kill on top, under load. Everything acknowledged
    is read back after each, and the logs are compared at the end. A failure names the seed that
    does the same again (`python -m lab.faults soak --seed`), and keeps log and data."""
    seed = random.SystemRandom().getrandbits(32)
    lines: list[str] = []
    code = run_soak(
        minutes=MINUTES, seed=seed, folder=tmp_path, progress=lines.append, queues=QUEUES
    )
    assert code == 0, f"seed {seed}, see {tmp_path}\n" + "\n".join(lines[-40:])
