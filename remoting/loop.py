"""The one event loop of a process: uvloop."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a fresh uvloop to its end, as `asyncio.run` does, and returns its result."""
    return uvloop.run(main)


__all__ = ["run"]
