"""A process with one Spark session, in which jobs run one after the other: `jobs` talks to it.

Each line on standard input is a request, `{"job": NAME, "arguments": [...]}`; each line on standard
output an answer, `{"code": N, "text": "..."}`, with what the job printed. Its progress goes to
FOLDER/NAME.log. A job that runs on ends with SIGINT, as for an operator. The end of the input ends
the process.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from batonmq.spark.session import open_session

# Short queries: the JVM's optimizing compiler costs more than it brings.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def run(name: str, arguments: list[str], folder: Path) -> tuple[int, str]:
    """(exit code, what was printed) of one job."""
    command = importlib.import_module(f"batonmq.spark.jobs.{name}").main
    printed = io.StringIO()
    with (folder / f"{name}.log").open("a", buffering=1) as log:
        try:
            with redirect_stdout(printed), redirect_stderr(log):
                command.main(args=arguments, prog_name=name)
        except SystemExit as ended:
            return int(ended.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    session = open_session("aftermath", master=given.master, settings=quiet)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            code, text = run(request["job"], request["arguments"], given.folder)
            print(json.dumps({"code": code, "text": text}), flush=True)
    finally:
        session.stop()


if __name__ == "__main__":
    main()
