"""`python -m lab.faults.aftermath` (`make demo-spark`): see the package.

Exit codes: 0 nothing acknowledged is missing and the history agrees with the record; 1 otherwise; 2
wrong usage, or Spark is missing; 130 and 143 stopped by ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

from batonmq.launcher.events import ClusterEvent, JsonReporter, LineReporter, Reporter
from batonmq.mqctl.commands.analysis import lacking
from lab.faults.aftermath import summary
from lab.faults.aftermath.fault_schedule import DOZEN, FEW
from lab.faults.aftermath.run import Aftermath, AftermathOptions
from lab.faults.aftermath.summary import AftermathResult

REPORTS = ("epoch_history", "topic_stats")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab.faults.aftermath",
        description="Mixed failovers of a cluster under load, then Spark jobs over what is left.",
    )
    parser.add_argument("--folder", type=Path, help="made or empty; default: a new temporary one")
    parser.add_argument("--few", action="store_true", help="four faults instead of fifteen")
    parser.add_argument("--seed", type=int, help="of pauses and choices; default: a random one")
    parser.add_argument("--master", default="local[2]", help="Spark master; default: local[2]")
    parser.add_argument(
        "--engine", default="auto", choices=("auto", "spark"),
        help="of the jobs over the files; default: auto, which does small ones without Spark",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON event a line, verdict last")
    return parser


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
    reporter: Reporter = JsonReporter(sys.stdout) if arguments.json else LineReporter(sys.stdout)
    options = AftermathOptions(
        folder.absolute(), seed, faults=FEW if arguments.few else DOZEN, master=arguments.master,
        engine=arguments.engine,
    )  # fmt: skip
    run = Aftermath(options, reporter)
    text = f"seed {seed}, everything in {options.folder}"
    reporter.report(ClusterEvent("folder", text, {"seed": seed, "folder": str(options.folder)}))
    try:
        verdict = run.run()
    except (KeyboardInterrupt, SystemExit) as stop:
        reporter.report(ClusterEvent("interrupted", "stopped before the verdict", bad=True))
        return 143 if isinstance(stop, SystemExit) else 130
    except (RuntimeError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        reporter.report(ClusterEvent("failed", text, {"error": text}, bad=True))
        return 1
    _report(run, verdict, reporter)
    return 0 if verdict.is_good else 1


def _report(run: Aftermath, verdict: AftermathResult, reporter: Reporter) -> None:
    reports = [run.paths.report(job).as_uri() for job in REPORTS]
    where = [f"report of {job}: {uri}" for job, uri in zip(REPORTS, reports, strict=True)]
    where.append(f"findings of message_audit: {run.paths.output('message_audit')}")
    where.append(f"cluster, logs and tables: {run.paths.folder}")
    text = "\n".join(["verdict", *summary.lines(verdict), *where])
    fields = {**summary.document(verdict), "reports": reports}
    reporter.report(ClusterEvent("verdict", text, fields, bad=not verdict.is_good))


if __name__ == "__main__":
    sys.exit(main())
