"""Waiting for a fact of which no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq.controller.gate import LeaderGate


async def until(reached: Callable[[], object]) -> None:
    """Lets the loop run until `reached()`; the test's own time limit ends a vain wait."""
    while not reached():  # noqa: ASYNC110  there is no event
        await asyncio.sleep(0)


async def opened(gate: LeaderGate) -> None:
    """Until a controller's gate is open, which may take an election of real time."""
    while not gate.controller_epoch:  # noqa: ASYNC110  there is no event
        await asyncio.sleep(0.001)
