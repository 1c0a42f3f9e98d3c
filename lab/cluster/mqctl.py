"""`mqctl` run in this process, which saves the start of an interpreter each time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from batonmq.mqctl.main import cli

HIDDEN = ("NAMESRV_ADDR", "CONTROLLER_ADDR", "BATONMQ_CONTEXT", "BATONMQ_DATA", "MQCTL_DEBUG")


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
