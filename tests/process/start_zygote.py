"""Servers as forks of a process that has imported everything: `python -m
tests.process.start_zygote`.

Reads a JSON line `{"server", "config", "log", "environ"}` for each start and answers with the pid;
`{"reap": pid}` is answered with the status when that process has ended. Ends with its input, and so
do they.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

import batonmq.broker.service  # noqa: F401  a broker loads it after its endpoint listens
from batonmq.broker.main import SECTIONS as BROKER_SECTIONS
from batonmq.broker.main import serve as serve_broker
from batonmq.controller.config import ControllerConfig
from batonmq.controller.main import serve as serve_controller
from batonmq.namesrv.main import SECTIONS as NAMESRV_SECTIONS
from batonmq.namesrv.main import serve as serve_namesrv
from batonmq.runtime.server_main import run_server

SERVERS: dict[str, tuple[Any, Any]] = {
    "broker": (BROKER_SECTIONS, serve_broker),
    "controller": ({"controller": ControllerConfig}, serve_controller),
    "namesrv": (NAMESRV_SECTIONS, serve_namesrv),
}
PR_SET_PDEATHSIG = 1


def serve(asked: dict[str, Any]) -> None:
    """The rest of the child's life."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(asked["environ"])
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    sys.argv = [asked["server"], "-c", asked["config"]]
    os._exit(run_server(asked["server"], *SERVERS[asked["server"]]))


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "reap" in asked:
            answer = os.waitpid(asked["reap"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                serve(asked)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
