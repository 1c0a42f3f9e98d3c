"""One wheel and two installations of it for all tests of the folder."""

from pathlib import Path

import pytest

from tests.packaging.installation import ROOT, Installation, build, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """`pip install batonmq`."""
    return install(wheel, tmp_path_factory.mktemp("base") / "environment")


@pytest.fixture(scope="session")
def server(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """`pip install 'batonmq[server]'`."""
    return install(wheel, tmp_path_factory.mktemp("server") / "environment", extras=["server"])
