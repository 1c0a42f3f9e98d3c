"""Servers that tests get started, and that are closed at their end."""

import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules here

from lone_broker import Clock, Rig, lone_broker


@pytest.fixture
def rig(tmp_path: Path) -> AbstractAsyncContextManager[Rig]:
    """A broker outside controller mode. A file whose brokers have settings replaces it."""
    return lone_broker(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
