"""Waiting for a fact of which no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(reached: Callable[[], object]) -> None:
    """Lets the loop run until `reached()`; the test's own time limit ends a vain wait."""
    while not reached():  # noqa: ASYNC110  there is no event
        await asyncio.sleep(0)
