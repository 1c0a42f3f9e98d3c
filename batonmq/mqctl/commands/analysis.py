"""What happened, from files and from the history topic: the Spark jobs under mqctl's names.

Every argument goes to the job (`python -m batonmq.spark.jobs.NAME`), `--help` included. Files and
name servers default to those of the local cluster (the one that other commands find, running or
ended). The job takes the place of this process, so its exit code, its output and every signal are
its own; nothing of Spark is imported here.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import click

from batonmq.auth.given import environment_of, tls_environment
from batonmq.mqctl.catalogue import SUMMARIES, kebab
from batonmq.mqctl.context import CommandContext
from batonmq.mqctl.output import Output, note
from batonmq.mqctl.target import Target, data_folder
from batonmq.runtime import extras
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.words import counted

ANALYSIS_FOLDER: Final = "analysis"
HELP: Final = ("--help", "-h")
_SMALL_WITHOUT_JVM: Final = frozenset({"epoch_history", "message_audit", "topic_stats"})
"""Jobs that do small inputs by themselves; for others they say what Spark lacks."""
HISTORY: Final = "--history"
STORES: Final = "--stores"
CONTROLLERS: Final = "--controllers"
NAME_SERVERS: Final = "--name-servers"
_AS_ELSEWHERE: Final = {
    **dict.fromkeys(("-a", "--controllerAddress", "--controller-address"), CONTROLLERS),
    **dict.fromkeys(("-n", "--namesrvAddr", "--namesrv-addr"), NAME_SERVERS),
}
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}
"""Options, and --help among them, are the job's: only it knows them."""

Arguments = tuple[str, ...]


def kept_in(folder: Path) -> dict[str, list[Path]]:
    """What a cluster's data folder holds for a job, where `batonmq up` puts it: the option that
    takes it -> folders of histories, or of stores."""
    histories = {file.parent for file in folder.glob("namesrv-*/controller/history-*.jsonl")}
    stores = {log.parent for log in folder.glob("broker-*/commitlog")}
    return {HISTORY: sorted(histories), STORES: sorted(stores)}


def lacking(environ: Mapping[str, str], *, jvm: bool = True) -> str:
    """What a job needs and this machine does not have, as one sentence; empty if all is there.
    `jvm`: it always runs on Spark."""
    missing = extras.lacking("spark")
    if missing:
        return f"this command runs on Spark and needs {missing} (in a clone: make setup-spark)"
    # As Spark's own scripts look for it: JAVA_HOME, if set, is the only place.
    home = environ.get("JAVA_HOME")
    path = f"{home}/bin" if home else environ.get("PATH", os.defpath)
    if jvm and shutil.which("java", path=path) is None:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        return f"this command runs on Spark and needs a JDK 17: there is no `java` in {where}"
    return ""


def is_given(option: str, arguments: Sequence[str]) -> bool:
    """Whether a command line has `--option VALUE` or `--option=VALUE`."""
    return any(each == option or each.startswith(f"{option}=") for each in arguments)


def with_local_files(
    job: str, arguments: Sequence[str], options: Sequence[str], folder: Path | None
) -> list[str]:
    """`arguments`, and the files in the local cluster's data folder for `options`.

    Raises click.UsageError that says what to give if there is no such cluster, or nothing in it."""
    wanted = " and ".join(f"{option} PATHS" for option in options)
    if folder is None:
        raise click.UsageError(
            f"nothing to read: give {wanted}, set BATONMQ_DATA to the data folder of a local "
            "cluster, or start one with `batonmq up`"
        )
    kept = kept_in(folder)
    added: list[str] = []
    for option in options:
        if not kept[option]:
            what = "controllers' history" if option == HISTORY else "broker's store"
            raise click.UsageError(f"no {what} in {folder}: give {wanted}")
        added += [option, ",".join(map(str, kept[option]))]
    nouns = {HISTORY: "history", STORES: "store"}
    found = ", ".join(counted(len(kept[option]), nouns[option]) for option in options)
    note(f"of the cluster in {folder}: {found}")
    if not is_given("--output", arguments):
        output = fresh_folder(folder / ANALYSIS_FOLDER, job, wall_ms() / 1000)
        note(f"--output {output}")
        added += ["--output", str(output)]
    return [*arguments, *added]


def fresh_folder(parent: Path, job: str, now_s: float) -> Path:
    """A name below `parent` that is not taken; nothing is made."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    first = parent / f"{job}-{stamp}"
    path, number = first, 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.name}-{number}")
    return path


def become(job: str, arguments: Sequence[str], target: Target | None = None) -> NoReturn:
    """Replaces this process by the job, which connects as `target` says. Exits with 2 and a
    sentence if something is missing."""
    why_not = lacking(os.environ, jvm=job not in _SMALL_WITHOUT_JVM)
    if why_not:
        raise click.UsageError(why_not)
    # What Python still holds would be lost with this process.
    sys.stdout.flush()
    sys.stderr.flush()
    # No module in the working folder may replace one of ours, in Spark's workers neither.
    environ = os.environ | {"PYTHONSAFEPATH": "1"}
    if target is not None and target.credentials is not None:
        environ |= environment_of(target.credentials)
    if target is not None and target.tls is not None:
        environ |= tls_environment(target.tls)
    argv = [sys.executable, "-m", f"batonmq.spark.jobs.{job}", *arguments]
    os.execve(sys.executable, argv, environ)


def with_our_name(arguments: Sequence[str]) -> list[str]:
    """`-a`, `-n` and their long forms as the jobs call them, the rest as it is."""
    wanted: list[str] = []
    for each in arguments:
        name, equals, value = each.partition("=")
        wanted.append(f"{_AS_ELSEWHERE.get(name, name)}{equals}{value}")
    return wanted


def _with_addresses(option: str, arguments: Arguments) -> tuple[list[str], Target | None]:
    """`arguments` with the addresses of `option`, and the cluster if they are from it."""
    # To addresses that were given the job goes as they are: user and certificates of the target may
    # be of another cluster.
    wanted = with_our_name(arguments)
    if is_given(option, wanted):
        return wanted, None
    context = CommandContext(Output(as_json=False))
    addresses = context.controllers if option == CONTROLLERS else context.name_servers
    return [*wanted, option, ";".join(addresses)], context.target


def _job(name: str, *options: str, instead: tuple[str, ...] = ()) -> click.Command:
    """A command that takes whatever it is given. `options`: what it needs of the cluster, addresses
    or files; files are looked for only if none of them is given, nor one of `instead`."""
    job = kebab(name).replace("-", "_")

    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: Arguments) -> None:
        wanted: Sequence[str] = arguments
        target = None
        if any(each in HELP for each in arguments):
            pass
        elif options[0] in (CONTROLLERS, NAME_SERVERS):
            wanted, target = _with_addresses(options[0], arguments)
        elif not any(is_given(option, arguments) for option in (*options, *instead)):
            wanted = with_local_files(job, arguments, options, data_folder())
        become(job, wanted, target)

    made: click.Command = click.command(
        name, help=f"{SUMMARIES[name]}.", context_settings=_PASSED_ON, add_help_option=False
    )(run)
    return made


epoch_history = _job("epochHistory", HISTORY, STORES, instead=("--history-parquet",))
message_audit = _job("messageAudit", STORES)
topic_stats = _job("topicStats", STORES)
stream_history = _job("streamHistory", CONTROLLERS)
topic_table = _job("topicTable", NAME_SERVERS)
