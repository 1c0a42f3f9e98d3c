"""`python -m lab.faults table|clients|soak|list`: see the package."""

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from lab.faults.catalogue import BY_NAME, FAULTS
from lab.faults.clients import (
    CLIENT_FAULTS,
    CLIENT_FAULTS_BY_NAME,
    ClientFault,
    ClientRun,
    run_clients,
    run_host_gone,
)
from lab.faults.soak import run_soak
from lab.faults.table import run_table


def _progress(text: str) -> None:
    print(text, flush=True)


def _client_names(text: str) -> list[ClientFault]:
    return [CLIENT_FAULTS_BY_NAME[name] for name in _known(text, CLIENT_FAULTS_BY_NAME)]


def _names(text: str) -> list[str]:
    return _known(text, BY_NAME)


def _known(text: str, allowed: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown fault {', '.join(unknown)}; allowed are {', '.join(allowed)}"
        )
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab.faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the names of all faults")
    table = commands.add_parser("table", help="measure every fault, print the table")
    table.add_argument("--trials", type=int, default=20)
    table.add_argument("--only", type=_names, help="NAME,NAME,…")
    clients = commands.add_parser("clients", help="what stock Java clients see of a fault")
    clients.add_argument("--trials", type=int, default=10)
    clients.add_argument("--only", type=_client_names, help="NAME,NAME,…")
    clients.add_argument("--no-replica-routes", action="store_true")
    clients.add_argument("--kinds", action="store_true", help="every kind of sender and consumer")
    clients.add_argument("--host-gone", action="store_true", help="only that row; needs root")
    clients.add_argument("--log", type=Path, help="folder for logs")
    soak = commands.add_parser("soak", help="random faults for a long time")
    soak.add_argument("--minutes", type=float, default=60.0)
    soak.add_argument(
        "--queues", type=int, default=0, help="write to so many queues in turn as well"
    )
    for one in (table, soak):
        one.add_argument("--seed", type=int, default=None)
        one.add_argument("--log", type=Path, help="folder for logs, and for what fails")
    return parser


def _folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.log or Path(tempfile.mkdtemp(prefix="batonmq-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_clients(arguments: argparse.Namespace) -> int:
    run = ClientRun(
        trials=arguments.trials,
        replica_routes=not arguments.no_replica_routes,
        kinds=arguments.kinds,
        folder=_folder(arguments),
        progress=_progress,
    )
    if arguments.host_gone:
        return run_host_gone(run)
    return run_clients(arguments.only or CLIENT_FAULTS, run)


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.command == "list":
        for fault in FAULTS:
            _progress(f"{fault.name:28} {fault.title}")
        return 0
    # SIGTERM ends it as ctrl-C does: processes and namespaces are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.command == "clients":
        return _run_clients(arguments)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(32)
    folder = _folder(arguments)
    if arguments.command == "soak":
        return run_soak(
            minutes=arguments.minutes,
            seed=seed,
            folder=folder,
            progress=_progress,
            queues=arguments.queues,
        )
    return run_table(
        [BY_NAME[name] for name in arguments.only or BY_NAME],
        trials=arguments.trials,
        seed=seed,
        folder=folder,
        progress=_progress,
    )


if __name__ == "__main__":
    sys.exit(main())
