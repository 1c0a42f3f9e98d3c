"""What the wheel and the source distribution hold: every room and nothing else."""

import hashlib
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from batonmq.runtime.extras import PACKAGES
from tests.packaging.installation import ROOT, build, unpack

#: Folders of the root that are installed, through a link of the same name in `batonmq/`.
LINKED = {
    "broker", "controller", "epoch", "proto",
    "replicas_manager", "spark",
}  # fmt: skip
OWN = {
    "auth",
    "client",
    "ha",
    "history",
    "launcher",
    "mqctl",
    "namesrv",
    "protocol",
    "remoting",
    "runtime",
    "store",
}
MODULES = {"__init__.py", "blocking.py", "otel.py", "public.py", "py.typed"}
INSTALLED = {".css", ".html", ".js", ".proto", ".py", ".pyi"}


def contents(wheel: Path) -> dict[str, str]:
    """Name -> digest of all files of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith("/")
        }


def files_of(folder: Path) -> dict[str, str]:
    """Path in the folder -> digest of what is installed from it."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_links_lead_to_the_rooms() -> None:
    links = {path.name: path for path in (ROOT / "batonmq").iterdir() if path.is_symlink()}
    assert links.keys() == LINKED
    for name, link in links.items():
        assert str(link.readlink()) == f"../{name}"
        assert (ROOT / name).is_dir() and not (ROOT / name).is_symlink()


def test_the_wheel_holds_every_room_whole_and_nothing_else(wheel: Path) -> None:
    found = contents(wheel)
    # PySpark looks for data sources in modules of that prefix; this one registers ours.
    beside = "pyspark_batonmq.py"
    assert {name.split("/")[0] for name in found if ".dist-info/" not in name} == {
        "batonmq",
        beside,
    }
    assert found[beside] == hashlib.sha256((ROOT / beside).read_bytes()).hexdigest()
    inside = {name.split("/")[1] for name in found if name.startswith("batonmq/")}
    assert inside == LINKED | OWN | MODULES
    for room in LINKED | OWN:
        source = ROOT / room if room in LINKED else ROOT / "batonmq" / room
        expected = {f"batonmq/{room}/{name}": digest for name, digest in files_of(source).items()}
        held = {name: it for name, it in found.items() if name.startswith(f"batonmq/{room}/")}
        assert held == expected
        assert f"batonmq/{room}/__init__.py" in held
        assert {Path(name).suffix for name in held} <= INSTALLED
    for name in MODULES:
        assert found[f"batonmq/{name}"] == files_of(ROOT / "batonmq")[name]


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = build("sdist", ROOT, tmp_path / "sdist")
    again = build("wheel", unpack(source, tmp_path / "unpacked"), tmp_path / "again")
    assert contents(again) == contents(wheel)
    assert again.name == wheel.name


def test_what_a_command_asks_for_is_what_the_extra_brings() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, packages in PACKAGES.items():
        brought = {Requirement(text).name for text in project["optional-dependencies"][extra]}
        assert {canonicalize_name(name) for name in brought} == set(packages.values())


def test_the_base_installation_is_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(text).name for text in project["dependencies"]}
    assert names == {"click", "grpcio", "msgspec", "protobuf", "rich", "uvloop"}
