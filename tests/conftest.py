"""What tests of several rooms share: `shared` is importable, and `--rewrite` writes scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "shared"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write outcomes into testdata/*.txt; read the diff",
    )


@pytest.fixture
def check_script(request: pytest.FixtureRequest) -> Callable[[Path, object], None]:
    """Plays a script in an environment: its outcome is exactly what the file says."""
    from scripts import play

    def check(path: Path, env: object) -> None:
        text = path.read_text()
        played = play(text, env)
        if request.config.getoption("--rewrite"):
            path.write_text(played)
        assert played == path.read_text()

    return check
