"""What happened, from files and from the history topic: the Spark jobs under mqctl's names.

Every argument goes to the job (`python -m batonmq.spark.jobs.NAME`), `--help` included. Files and
name servers default to those of the local cluster (the one that other commands find, running or
ended). The job takes the place of this process, so its exit code, its output and every signal are
its own; nothing of Spark is imported here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import click

from batonmq.auth.given import environment_of, tls_environment
from batonmq.mqctl.catalogue import SUMMARIES
from batonmq.mqctl.context import CommandContext
from batonmq.mqctl.output import Output, note
from batonmq.mqctl.target import Target, data_folder_here
from batonmq.runtime import extras
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.words import counted

ANALYSIS_FOLDER: Final = "analysis"
HELP: Final = ("--help", "-h")
_SMALL_WITHOUT_JVM: Final = frozenset({"epoch_history", "message_audit", "topic_stats"})
"""Jobs that do small inputs by themselves; for others they say what Spark lacks."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a cluster's data folder holds for a job: folders of histories and of stores."""

    folder: Path
    histories: tuple[Path, ...]
    stores: tuple[Path, ...]

    def of(self, option: str) -> tuple[Path, ...]:
        return self.histories if option == "--history" else self.stores


def kept_in(folder: Path) -> Kept:
    """Looks where `batonmq up` puts them."""
    return Kept(
        folder,
        tuple(
            sorted({file.parent for file in folder.glob("namesrv-*/controller/history-*.jsonl")})
        ),
        tuple(sorted(log.parent for log in folder.glob("broker-*/commitlog"))),
    )


def lacking(
    environ: Mapping[str, str],
    find: Callable[[str], object | None] = importlib.util.find_spec,
    *,
    jvm: bool = True,
) -> str:
    """What a job needs and this machine does not have, as one sentence; empty if all is there.
    `jvm`: it always runs on Spark."""
    missing = extras.lacking("spark", find)
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
    job: str,
    arguments: Sequence[str],
    options: Sequence[str],
    folder: Path | None,
    now_s: float,
    instead: Sequence[str] = (),
) -> list[str]:
    """`arguments`, and the local cluster's files where none of `options` and `instead` is there.

    Raises click.UsageError that says what to give if there is no such cluster, or nothing in it."""
    if any(is_given(option, arguments) for option in (*options, *instead)):
        return list(arguments)
    wanted = " and ".join(f"{option} PATHS" for option in options)
    if folder is None:
        raise click.UsageError(
            f"nothing to read: give {wanted}, set BATONMQ_DATA to the data folder of a local "
            "cluster, or start one with `batonmq up`"
        )
    kept = kept_in(folder)
    added: list[str] = []
    for option in options:
        paths = kept.of(option)
        if not paths:
            what = "controllers' history" if option == "--history" else "broker's store"
            raise click.UsageError(f"no {what} in {folder}: give {wanted}")
        added += [option, ",".join(map(str, paths))]
    note(f"of the cluster in {folder}: {_sentence(options, kept)}")
    if not is_given("--output", arguments):
        output = fresh_folder(folder / ANALYSIS_FOLDER, job, now_s)
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


def _sentence(options: Sequence[str], kept: Kept) -> str:
    nouns = {"--history": "history", "--stores": "store"}
    return ", ".join(counted(len(kept.of(option)), nouns[option]) for option in options)


CONTROLLERS = "--controllers"
NAME_SERVERS = "--name-servers"
_AS_ELSEWHERE: Final = {
    **dict.fromkeys(("-a", "--controllerAddress", "--controller-address"), CONTROLLERS),
    **dict.fromkeys(("-n", "--namesrvAddr", "--namesrv-addr"), NAME_SERVERS),
}
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}
"""Options, and --help among them, are the job's: only it knows them."""

Arguments = tuple[str, ...]


def _job(name: str) -> Callable[[Callable[[Arguments], None]], click.Command]:
    """A command that takes whatever it is given."""

    def wrap(function: Callable[[Arguments], None]) -> click.Command:
        given = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
        made: click.Command = click.command(
            name, help=f"{SUMMARIES[name]}.", context_settings=_PASSED_ON, add_help_option=False
        )(given(function))
        return made

    return wrap


@_job("epochHistory")
def epoch_history(arguments: Arguments) -> None:
    _on_files("epoch_history", arguments, ("--history", "--stores"), ("--history-parquet",))


@_job("messageAudit")
def message_audit(arguments: Arguments) -> None:
    _on_files("message_audit", arguments, ("--stores",))


@_job("topicStats")
def topic_stats(arguments: Arguments) -> None:
    _on_files("topic_stats", arguments, ("--stores",))


@_job("streamHistory")
def stream_history(arguments: Arguments) -> None:
    _on_cluster("stream_history", arguments, CONTROLLERS)


@_job("topicTable")
def topic_table(arguments: Arguments) -> None:
    _on_cluster("topic_table", arguments, NAME_SERVERS)


def _on_cluster(job: str, arguments: Arguments, option: str) -> None:
    """`option`: which addresses the job needs."""
    # To addresses that were given the job goes as they are: user and certificates of the target may
    # be of another cluster.
    wanted, target = with_our_name(arguments), None
    if not _asks_for_help(arguments) and not is_given(option, wanted):
        context = CommandContext(Output(as_json=False))
        addresses = context.controllers if option == CONTROLLERS else context.name_servers
        wanted += [option, ";".join(addresses)]
        target = context.target
    become(job, wanted, target)


def with_our_name(arguments: Sequence[str]) -> list[str]:
    """`-a`, `-n` and their long forms as the jobs call them, the rest as it is."""
    wanted: list[str] = []
    for each in arguments:
        name, equals, value = each.partition("=")
        wanted.append(f"{_AS_ELSEWHERE.get(name, name)}{equals}{value}")
    return wanted


def _on_files(
    job: str, arguments: Arguments, options: Sequence[str], instead: Sequence[str] = ()
) -> None:
    wanted = list(arguments)
    if not _asks_for_help(arguments):
        folder = data_folder_here()
        wanted = with_local_files(job, arguments, options, folder, wall_ms() / 1000, instead)
    become(job, wanted)


def _asks_for_help(arguments: Arguments) -> bool:
    return any(each in HELP for each in arguments)
