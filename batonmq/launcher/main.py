"""The command `batonmq`: `up`, `demo`, and the three servers one at a time.

Imports are kept inside the commands: `--help` loads click and nothing of the cluster.
Exit codes: 0 done, 1 it could not be done, 2 wrong usage, ports that others hold, or the extra
`server` is not installed.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # `python -m` puts the working folder there: its files must not replace ours

import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from batonmq.launcher.layout import DEFAULT_BASE_PORT, DEFAULT_WATCHDOG_S, LEAST_WATCHDOG_S
from batonmq.runtime.extras import need_server

if TYPE_CHECKING:
    from batonmq.launcher.forks import ForkServer
    from batonmq.launcher.preparation import StartError
    from batonmq.runtime.tls import Mode

SERVERS = {
    "controller": "batonmq.controller.main",
    "namesrv": "batonmq.namesrv.main",
    "broker": "batonmq.broker.main",
}

AS_JSON: Final = "batonmq.json"
"""In the context's `meta`: whether `--json` was given."""


def _need_server_extra() -> None:
    need_server(click.get_current_context().command_path)


def _begin_to_load() -> ForkServer:
    """The servers' code is loaded on another core, beside ours."""
    from batonmq.launcher.forks import ForkServer

    fork_server = ForkServer()
    fork_server.load()
    click.get_current_context().call_on_close(fork_server.close)
    return fork_server


def _failed(command: str, error: StartError | OSError) -> int:
    """Says why it ended; gives the exit code."""
    from batonmq.runtime import disk

    why, code = disk.described(error), getattr(error, "exit_code", 1)
    click.echo(f"batonmq {command}: {why}", err=True)
    _report_failed(why, code)
    return code


def _report_failed(why: str, exit_code: int) -> None:
    """To a reader of events, by the last one."""
    from batonmq.launcher.events import ClusterEvent, report_json

    if click.get_current_context().meta[AS_JSON]:
        fields = {"error": why, "exitCode": exit_code}
        report_json(ClusterEvent("failed", why, fields))


class _Commands(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # By its words: a usage error ends a command before it could say so itself.
        ctx.meta[AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            _report_failed(error.format_message(), error.exit_code)
            raise


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="batonmq")
def main() -> None:
    """Run a BatonMQ cluster, or one of its processes."""


@main.command()
@click.option("--controllers", type=int, help="Name servers with controllers.  [3]")
@click.option("--replicas", type=int, help="Brokers in each group.  [3]")
@click.option("--groups", type=int, help="Broker groups.  [1]")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("batonmq-data"),
    show_default=True,
    help="Folder of the cluster; an existing one is resumed.",
)
@click.option("--base-port", type=int, metavar="P", help=f"The lowest port.  [{DEFAULT_BASE_PORT}]")
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="YAML laid over every process's configuration (sections namesrv, controller, broker, …);"
    " later starts keep it, and an empty file drops it.",
)
@click.option(
    "--respawn/--no-respawn",
    default=True,
    show_default=True,
    help="Start a process again when it dies.",
)
@click.option(
    "--watchdog",
    default=DEFAULT_WATCHDOG_S,
    show_default=True,
    metavar="SECONDS",
    help="End a process whose loop stands still for so long, at least 1; 0: never."
    " Only with --respawn.",
)
@click.option(
    "--secure",
    is_flag=False,
    flag_value="enforcing",
    type=click.Choice(["disabled", "permissive", "enforcing"]),
    help="TLS, with certificates that are made in DIR/conf/tls: between nodes always, for clients"
    " permissive (plain as well) or enforcing (alone: enforcing). Default: as at the last start.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON event a line.")
def up(
    controllers: int | None,
    replicas: int | None,
    groups: int | None,
    data: Path,
    base_port: int | None,
    config: Path | None,
    respawn: bool,
    watchdog: float,
    secure: Mode | None,
    as_json: bool,
) -> None:
    """Run a local cluster until ctrl-C or SIGTERM.

    A folder keeps its size, ports and settings; a new one has those in []. `mqctl up` changes it
    while it runs. DIR/cluster.json has addresses, pids and roles for scripts."""
    _need_server_extra()
    # First: it loads beside the imports below.
    fork_server = _begin_to_load()
    import uvloop

    from batonmq.launcher import preparation
    from batonmq.launcher.layout import LayoutError, plan
    from batonmq.launcher.up import run_up

    if watchdog != 0 and not LEAST_WATCHDOG_S <= watchdog < math.inf:
        raise click.UsageError(
            f"--watchdog is {watchdog:g}, allowed are 0 or at least {LEAST_WATCHDOG_S:g} s"
        )
    watchdog_s = watchdog if respawn else 0.0  # nothing else starts a hung process again
    try:
        layout = plan(
            data,
            controllers=controllers,
            replicas=replicas,
            groups=groups,
            base_port=base_port,
            overrides=preparation.settings_of(data, config),
            owners=preparation.folder_owners(data),
            last=preparation.last_plan(data),
            secure=secure or preparation.secured(data),
        )
        work = run_up(layout, fork_server, respawn=respawn, watchdog_s=watchdog_s, as_json=as_json)
        sys.exit(uvloop.run(work))
    except LayoutError as exc:
        raise click.UsageError(str(exc)) from exc
    except (preparation.StartError, OSError) as exc:
        sys.exit(_failed("up", exc))


@main.command()
@click.option("--kills", default=3, show_default=True, help="How often the master is killed.")
@click.option("--replicas", default=3, show_default=True)
@click.option("--base-port", default=0, metavar="P", help="0: the first free range.")
@click.option("--rate", default=400, show_default=True, help="Sends per second while it runs.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the cluster's folder here instead of a temporary one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON event a line, verdict last.")
def demo(
    kills: int, replicas: int, base_port: int, rate: int, keep: Path | None, as_json: bool
) -> None:
    """Kill the master under load, and count what was lost."""
    _need_server_extra()
    fork_server = _begin_to_load()
    import uvloop

    from batonmq.launcher.demo import run_demo
    from batonmq.launcher.preparation import StartError

    if kills < 1 or replicas < 2:
        raise click.UsageError("at least one kill and two replicas are needed")
    try:
        with tempfile.TemporaryDirectory(prefix="batonmq-demo-") as folder:
            work = run_demo(
                fork_server,
                keep or Path(folder),
                kills=kills,
                replicas=replicas,
                base_port=base_port,
                rate=rate,
                as_json=as_json,
            )
            code = uvloop.run(work)
    except (StartError, OSError) as exc:
        code = _failed("demo", exc)
    sys.exit(code)


@main.command("raftPassword")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def raft_password(file: Path) -> None:
    """Make a password for the controllers' Raft ports.

    It is written to FILE, which its owner alone may read.
    Every controller of the group needs a copy of it, named by raftPasswordFile in its section
    `controller`. An existing FILE is never overwritten. `batonmq up` makes one by itself."""
    from batonmq.runtime.secret_file import make_password

    try:
        make_password(file)
    except OSError as exc:
        click.echo(f"batonmq raftPassword: {file}: {exc.strerror or exc}", err=True)
        sys.exit(1)
    click.echo(f"{file}: copy it to every controller and set raftPasswordFile to it")


@main.command("moveAside")
@click.argument(
    "store", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False)
)
def move_aside(store: Path) -> None:
    """Move a broker's data folder aside, so that it starts as a new replica.

    The folder gets a name with the time beside the old one; nothing is deleted. It is refused while
    the broker runs."""
    import errno
    import time

    from batonmq.runtime.lock_file import FolderLock, FolderLockedError

    store = store.absolute()
    if not (store / "commitlog").is_dir():
        raise click.UsageError(f"{store}: no store of a broker, commitlog/ is not in it")
    aside = store.with_name(f"{store.name}.aside-{time.strftime('%Y%m%d-%H%M%S')}")
    # The lock moves with the folder, and its broker takes it at each start: held until the rename
    # is done, none can start on a folder that is just being moved.
    lock = FolderLock(store / "lock")
    try:
        lock.acquire()
        store.rename(aside)
    except FolderLockedError as exc:
        click.echo(f"batonmq moveAside: {exc}: stop its broker first", err=True)
        sys.exit(1)
    except OSError as exc:
        why = exc.strerror
        # Usual in containers; "Device or resource busy" would lead nowhere.
        if exc.errno == errno.EBUSY:
            why = "it is a mount point: mount the new disk in its place, then start the broker"
        click.echo(f"batonmq moveAside: {store}: {why}", err=True)
        sys.exit(1)
    finally:
        lock.release()
    click.echo(f"{store} is {aside} now; its broker starts as a new replica")


def _server_command(name: str, module: str) -> click.Command:
    @click.command(name, help=f"Run one {name} process with the configuration in FILE.")
    @click.option(
        "-c",
        "--config",
        required=True,
        metavar="FILE",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
    )
    @click.option("--pid-file", type=click.Path(path_type=Path, dir_okay=False))
    def command(config: Path, pid_file: Path | None) -> None:
        _need_server_extra()
        # In our place, not as a child: signals of systemd or a shell reach the server itself. With
        # -P no file of the working folder replaces a module.
        argv = [sys.executable, "-P", "-m", module, "-c", str(config)]
        if pid_file is not None:
            argv += ["--pid-file", str(pid_file)]
        os.execv(sys.executable, argv)

    return command


for _name, _module in SERVERS.items():
    main.add_command(_server_command(_name, _module))


if __name__ == "__main__":
    main()
