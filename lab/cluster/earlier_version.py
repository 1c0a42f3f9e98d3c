"""A checkout of an earlier version of this project, to run its servers beside those of this one."""

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Final

from lab.cluster.processes import ROOT

VARIABLE: Final = "BATONMQ_EARLIER"
LAST_VERSION: Final = "7120554025525660177c31a5a8aac26a0671964d"
"""The commit of the version before this one; a release moves it. BATONMQ_EARLIER names another
commit, or a folder with a checkout."""
FOLDER: Final = ROOT / "build" / "earlier"


class NoEarlierVersionError(RuntimeError):
    """This checkout cannot give it; the text says why and what helps."""


def earlier_checkout() -> Path:
    """A folder with that version, made from this repository's history once. It needs no
    installation: its packages are found by PYTHONPATH. Raises NoEarlierVersionError."""
    wanted = os.environ.get(VARIABLE, LAST_VERSION)
    if Path(wanted).is_dir():
        return Path(wanted).absolute()
    folder = FOLDER / wanted
    if not folder.exists():
        _unpack(wanted, folder)
    return folder


def interpreter(folder: Path, checkout: Path) -> Path:
    """A program in `folder` that runs that checkout's packages, as the interpreter of another
    installation would."""
    script = folder / "python-of-another-version"
    python = shlex.quote(sys.executable)
    script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(checkout))} exec {python} "$@"\n')
    script.chmod(0o755)
    return script


def _unpack(commit: str, folder: Path) -> None:
    argv = ["git", "-C", str(ROOT), "archive", commit]
    try:
        done = subprocess.run(argv, capture_output=True, check=False)
    except OSError as error:
        raise NoEarlierVersionError(f"git does not run: {error}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()
        raise NoEarlierVersionError(
            f"this checkout has no commit {commit} ({why}); a clone without its history gets it "
            f"by `git fetch --unshallow`, and {VARIABLE} names another commit or a folder"
        )
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(partial, filter="tar")
    partial.rename(folder)
