"""Hands over to a Spark job: what it needs, which files it reads if none are named, and exec.

The job takes the place of this process, so its exit code, its output and every signal are its own;
nothing of Spark is imported here. What a job reads by default is what the local cluster (the one
that other commands find, running or ended) keeps in its data folder.
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

PACKAGES: Final = ("plotly", "pyarrow", "pyspark")
ANALYSIS_FOLDER: Final = "analysis"
HELP: Final = ("--help", "-h")


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
) -> str:
    """What a job needs and this machine does not have, as one sentence; empty if all is there."""
    missing = [name for name in PACKAGES if find(name) is None]
    if missing:
        return (
            f"this command runs on Spark and needs {', '.join(missing)}: "
            "`make setup-spark`, or pip install 'batonmq[spark]'"
        )
    home = environ.get("JAVA_HOME")
    path = f"{home}/bin" if home else environ.get("PATH", os.defpath)
    if shutil.which("java", path=path) is None:
        where = f"JAVA_HOME ({home})" if home else "PATH"
        return f"this command runs on Spark and needs a JDK 17: there is no `java` in {where}"
    return ""


def is_given(option: str, arguments: Sequence[str]) -> bool:
    """Whether `--option VALUE` or `--option=VALUE` stands in a command line."""
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

    Raises click.UsageError that says what to give if there is no such cluster, or nothing in it.
    """
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
    click.echo(f"mqctl: of the cluster in {folder}: {_sentence(options, kept)}", err=True)
    if not is_given("--output", arguments):
        output = fresh_folder(folder / ANALYSIS_FOLDER, job, now_s)
        click.echo(f"mqctl: --output {output}", err=True)
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


def become(job: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the job. Exits with 2 and a sentence if something is missing."""
    why_not = lacking(os.environ)
    if why_not:
        raise click.UsageError(why_not)
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing in the working folder may stand in for our packages, in Spark's workers neither.
    environ = os.environ | {"PYTHONSAFEPATH": "1"}
    argv = [sys.executable, "-m", f"spark.jobs.{job}", *arguments]
    os.execve(sys.executable, argv, environ)


def _sentence(options: Sequence[str], kept: Kept) -> str:
    names = {"--history": ("history", "histories"), "--stores": ("store", "stores")}
    counts = [(len(kept.of(option)), names[option]) for option in options]
    return ", ".join(f"{count} {one if count == 1 else many}" for count, (one, many) in counts)
