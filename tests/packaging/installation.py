"""Environments with nothing in them but the wheel and what it declares; made without a network.

The packages that it declares are linked from the environment that runs the tests, so one that is
used and not declared is missing.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
#: Variables that would lead an interpreter or mqctl out of the environment.
_LEFT_OUT = re.compile(r"PYTHON|VIRTUAL_ENV|NAMESRV_ADDR|CONTROLLER_ADDR|BATONMQ_")


def build(kind: str, source: Path, folder: Path) -> Path:
    """A `wheel` or `sdist` of the project in `source`."""
    argv = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(argv, cwd=source, check=True, capture_output=True, timeout=120)
    (made,) = folder.iterdir()
    return made


@dataclass(frozen=True)
class Installation:
    """A virtual environment, and a home of its own."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _LEFT_OUT.match(name)}
        return {**kept, "HOME": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def argv(self, command: str, *arguments: str | Path) -> list[str]:
        """`command`: a name in the environment's bin, as `mqctl` or `python`."""
        return [str(self.folder / "bin" / command), *map(str, arguments)]

    def run(
        self, command: str, *arguments: str | Path, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(command, *arguments), cwd=cwd or self.folder, env=self.environ,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


def install(wheel: Path, folder: Path, *, extras: Iterable[str] = ()) -> Installation:
    """A new environment of this interpreter's version."""
    made = empty_environment(Path(sys.executable), folder)
    install_wheel(wheel, made)
    for name in declared(wheel, extras):
        for entry in _top_entries(name):
            target = made.site_packages / entry.name
            if not target.exists():
                target.symlink_to(entry)
    return made


def empty_environment(python: Path, folder: Path) -> Installation:
    argv = [str(python), "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    return Installation(folder)


def install_wheel(wheel: Path, made: Installation) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(made.python), "install"]
    argv = [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)


def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(name).decode())
    return [Requirement(text) for text in headers.get_all("Requires-Dist", [])]


def declared(wheel: Path, extras: Iterable[str]) -> set[str]:
    """Names of the packages that pip would install with the wheel."""
    wanted = ["", *extras]
    found: set[str] = set()
    waiting = requirements(wheel)
    first = True
    while waiting:
        named = set()
        for requirement in waiting:
            chosen = wanted if first else [""]
            if requirement.marker and not any(
                requirement.marker.evaluate({"extra": extra}) for extra in chosen
            ):
                continue
            named.add(canonicalize_name(requirement.name))
        first = False
        new, found = named - found, found | named
        waiting = [Requirement(text) for name in new for text in metadata.requires(name) or ()]
    return found


def _top_entries(name: str) -> set[Path]:
    """The files and folders directly in site-packages that a package consists of."""
    distribution = metadata.distribution(name)
    site = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    return {site / top for top in tops if (site / top).exists() and top != "__pycache__"}


def unpack(archive: Path, folder: Path) -> Path:
    """The one folder that a source distribution holds."""
    shutil.unpack_archive(archive, folder, filter="data")
    (found,) = folder.iterdir()
    return found
