"""R45: what finds no space waits, in its order, and says so until it has it."""

import asyncio
import errno
from pathlib import Path

import pytest

from batonmq.runtime import start_retry
from batonmq.runtime.start_retry import InOrder, StartRetry

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/lives")
MISSING = "/data/lives: No space left on device; make space on that disk"


async def test_r45_nothing_overtakes_what_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_retry, "SPACE_POLL_S", 0.001)
    room, done, failed = StartRetry(Path("/data")), [], []
    full, all_done = True, asyncio.Event()

    def do(thing: str) -> None:
        if thing == "b" and full:
            raise FULL
        done.append(thing)
        if thing == "d":
            all_done.set()

    order = InOrder(do, room, failed.append)
    order.add(["a", "b", "c"])
    order.add(["d"])
    assert (done, room.missing) == (["a"], MISSING)
    full = False
    await asyncio.wait_for(all_done.wait(), 10)
    assert (done, room.missing, failed) == (["a", "b", "c", "d"], "", [])


async def test_r40_another_error_of_the_disk_ends_it_and_drops_what_was_behind() -> None:
    broken = OSError(errno.EIO, "Input/output error")
    done, failed = [], []

    def do(thing: str) -> None:
        if thing == "b":
            raise broken
        done.append(thing)

    InOrder(do, StartRetry(Path("/data")), failed.append).add(["a", "b", "c"])
    assert (done, failed) == (["a"], [broken])


def test_r45_a_step_of_a_start_is_done_again_until_it_finds_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_retry, "SPACE_POLL_S", 0)
    room, missing, fails = StartRetry(Path("/data")), [], [FULL, FULL]

    async def step() -> str:
        missing.append(room.missing)
        if fails:
            raise fails.pop()
        return "done"

    assert asyncio.run(room.wait(step)) == "done"
    assert missing == ["", MISSING, MISSING]
    assert room.missing == ""
