"""What happened, from files and from the history topic: the Spark jobs under mqctl's names.

Every argument goes to the job (`python -m spark.jobs.NAME`), `--help` included; exit codes are the
job's. Files and name servers default to those of the local cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import click

from mqctl.output import Output
from mqctl.session import Session
from mqctl.spark_jobs import HELP, become, is_given, with_local_files
from mqctl.target import data_folder_here

NAME_SERVERS = "--name-servers"
_SAME_AS_ELSEWHERE = ("-n", "--namesrvAddr", "--namesrv-addr")
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}

Arguments = tuple[str, ...]


def _job(name: str) -> Callable[[Callable[[Arguments], None]], click.Command]:
    """A command that takes whatever it is given."""

    def wrap(function: Callable[[Arguments], None]) -> click.Command:
        given = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
        made: click.Command = click.command(
            name, context_settings=_PASSED_ON, add_help_option=False
        )(given(function))
        return made

    return wrap


@_job("epochHistory")
def epoch_history(arguments: Arguments) -> None:
    """Masterships, failovers, unavailability: tables and report."""
    _on_files("epoch_history", arguments, ("--history", "--stores"), ("--history-parquet",))


@_job("messageAudit")
def message_audit(arguments: Arguments) -> None:
    """Replicas' stores against each other and an acknowledged list."""
    _on_files("message_audit", arguments, ("--stores",))


@_job("topicStats")
def topic_stats(arguments: Arguments) -> None:
    """Volume, rates, delays, hot queues, slow consumers: tables and report."""
    _on_files("topic_stats", arguments, ("--stores",))


@_job("streamHistory")
def stream_history(arguments: Arguments) -> None:
    """Stream the history topic of a running cluster to Parquet."""
    wanted = with_our_name(arguments)
    if not _asks_for_help(arguments) and not is_given(NAME_SERVERS, wanted):
        found = Session(Output(as_json=False)).name_servers
        wanted += [NAME_SERVERS, ";".join(found)]
    become("stream_history", wanted)


def with_our_name(arguments: Sequence[str]) -> list[str]:
    """`-n` and `--namesrvAddr` as the job calls them, the rest as it is."""
    wanted: list[str] = []
    for each in arguments:
        name, equals, value = each.partition("=")
        if name in _SAME_AS_ELSEWHERE:
            each = f"{NAME_SERVERS}{equals}{value}"
        wanted.append(each)
    return wanted


def _on_files(
    job: str, arguments: Arguments, options: Sequence[str], instead: Sequence[str] = ()
) -> None:
    wanted = list(arguments)
    if not _asks_for_help(arguments):
        folder = data_folder_here()
        wanted = with_local_files(job, arguments, options, folder, time.time(), instead)
    become(job, wanted)


def _asks_for_help(arguments: Arguments) -> bool:
    return any(each in HELP for each in arguments)
