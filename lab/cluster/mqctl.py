"""`mqctl`: run in this process, which saves the start of an interpreter, or as a program."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from batonmq.mqctl.main import cli

HIDDEN = ("NAMESRV_ADDR", "CONTROLLER_ADDR", "BATONMQ_CONTEXT", "BATONMQ_DATA", "MQCTL_DEBUG")


PROGRAM_S = 180.0


@dataclass(frozen=True)
class Ran:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def mqctl(*arguments: str, home: object, env: Mapping[str, str | None] | None = None) -> Ran:
    """Runs a command that finds its cluster by `home` and `env` alone."""
    environ = {**dict.fromkeys(HIDDEN), "HOME": str(home), **(env or {})}
    result = CliRunner().invoke(cli, arguments, prog_name="mqctl", env=environ)
    assert result.exception is None or isinstance(result.exception, SystemExit), result
    return Ran(result.exit_code, result.stdout, result.stderr)


def mqctl_program(*arguments: str, home: object, env: Mapping[str, str]) -> Ran:
    """The same as a program of its own. Fails if it shows a traceback."""
    done = begin_mqctl(*arguments, home=home, env=env)
    try:
        out, err = done.communicate(timeout=PROGRAM_S)
    except BaseException:
        done.kill()
        done.communicate()
        raise
    assert "Traceback" not in err, err
    return Ran(done.returncode, out, err)


def begin_mqctl(*arguments: str, home: object, env: Mapping[str, str]) -> subprocess.Popen[str]:
    """As `mqctl_program`, while it runs."""
    kept = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    return subprocess.Popen(
        [sys.executable, "-m", "batonmq.mqctl.main", *arguments],
        env={**kept, "HOME": str(home), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
