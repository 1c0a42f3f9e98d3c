"""Of the cluster in containers what needs no engine."""

from __future__ import annotations

from typing import Any

import pytest
from docker.errors import APIError

from lab.cluster import compose
from lab.cluster.processes import NotInTime


class Frozen:
    """A container that the engine can freeze at the last of `tries`."""

    name = "broker-1"
    status = "running"

    def __init__(self, tries: int) -> None:
        self.tries = tries

    def pause(self) -> None:
        self.tries -= 1
        if self.tries:
            raise APIError("OCI runtime pause failed: unable to freeze")

    def reload(self) -> None:
        pass


def test_a_container_that_cannot_be_frozen_at_once_is_tried_again() -> None:
    container: Any = Frozen(3)
    compose.pause(container)
    assert container.tries == 0


def test_a_container_that_is_never_frozen_fails_with_the_engines_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compose, "PAUSED_S", 0.05)
    container: Any = Frozen(-1)
    with pytest.raises(NotInTime, match=r"(?s)broker-1 to be paused.*unable to freeze"):
        compose.pause(container)
