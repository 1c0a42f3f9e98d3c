"""What the tests of deploy/ share."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"


def says(tool: str, *words: object) -> str:
    """What a program of this machine says of a file that it takes. Skips the test without it."""
    program = shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed")
    argv = [program, *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout or done.stderr
