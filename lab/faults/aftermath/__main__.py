"""`python -m lab.faults.aftermath` (`make demo-spark`): see the package.

Exit codes: 0 nothing acknowledged is missing and the history agrees with the record; 1 otherwise; 2
wrong usage, or Spark is missing; 130 and 143 stopped by ctrl-C and SIGTERM.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import click

from batonmq.mqctl.commands.analysis import lacking
from lab.faults.aftermath import summary
from lab.faults.aftermath.run import Aftermath, AftermathOptions
from lab.faults.aftermath.summary import AftermathResult

REPORTS = ("epoch_history", "topic_stats")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.faults.aftermath",
        description="Mixed failovers of a cluster under load, then Spark jobs over what is left.",
    )
    parser.add_argument("--folder", type=Path, help="made or empty; default: a new temporary one")
    parser.add_argument("--seed", type=int, help="of pauses and choices; default: a random one")
    parser.add_argument(
        "--master", default="local[2]", help="Spark master of the stream; default: local[2]"
    )
    return parser


def _say(text: str, bad: bool) -> None:
    click.secho(f"{time.strftime('%H:%M:%S')}  {text}", fg="red" if bad else None)


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    why_not = lacking(os.environ)
    if why_not:
        parser.error(why_not)
    folder: Path = arguments.folder or Path(tempfile.mkdtemp(prefix="batonmq-demo-spark-"))
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--folder {folder}: not empty")
    # SIGTERM ends it as ctrl-C does: no process stays.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(32)
    run = Aftermath(AftermathOptions(folder.absolute(), seed, master=arguments.master), _say)
    _say(f"seed {seed}, everything in {folder.absolute()}", False)
    try:
        result = run.run()
    except (KeyboardInterrupt, SystemExit) as stop:
        _say("stopped before the result", True)
        return 143 if isinstance(stop, SystemExit) else 130
    except (RuntimeError, OSError) as error:
        _say(f"{type(error).__name__}: {error}", True)
        return 1
    _show(run, result)
    return 0 if result.is_good else 1


def _show(run: Aftermath, result: AftermathResult) -> None:
    where = [f"report of {job}: {run.paths.report(job).as_uri()}" for job in REPORTS]
    where.append(f"findings of message_audit: {run.paths.output('message_audit')}")
    where.append(f"cluster, logs and tables: {run.paths.folder}")
    _say("\n".join(["result", *summary.lines(result), *where]), not result.is_good)


if __name__ == "__main__":
    sys.exit(main())
