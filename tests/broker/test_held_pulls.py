"""Pulls that wait for one queue, more of them than a turn looks at."""

import asyncio
import contextlib
from unittest.mock import Mock

from lone_broker import run_with_broker, until

from batonmq.broker.consume.pull_processor import _SLICE

MANY = _SLICE + 12


@contextlib.asynccontextmanager
async def held(rig):
    """MANY of them, at the end of a queue of one message."""
    await rig.send()
    pull = rig.service.pull
    waits = [
        asyncio.ensure_future(rig.pull(offset=1, suspend_ms=15_000, group=f"g{number}"))
        for number in range(MANY)
    ]
    await until(lambda: pull.held == MANY)
    pull._answer_or_hold = looked = Mock(side_effect=pull._answer_or_hold)
    yield waits, looked
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def test_a_reset_looks_at_each_pull_of_the_queue_once(tmp_path):
    """Those of the other groups are held again, at an offset that the reset still reaches."""

    async def play(rig):
        async with held(rig) as (_, looked):
            pull = rig.service.pull
            pull.reset("another", "T", 0, 0)
            pull.reset("another", "T", 0, 0)  # while the first one goes on
            for _ in range(20):
                await asyncio.sleep(0)
            assert (looked.call_count, pull.held, pull._waking) == (2 * MANY, MANY, {})

    run_with_broker(tmp_path, play)


def test_a_pull_that_fails_keeps_no_other_one_waiting(tmp_path):
    async def play(rig):
        async with held(rig) as (waits, looked):
            answer = looked.side_effect

            def fail(pull, *args):
                if pull.group.group_name in ("g3", f"g{_SLICE}"):
                    raise ValueError("a test")
                answer(pull, *args)

            looked.side_effect = fail
            await rig.send()
            replies = await asyncio.gather(*waits)
            assert sorted(reply.code for reply in replies) == [0] * (MANY - 2) + [1, 1]
            assert rig.service.pull._waking == {}

    run_with_broker(tmp_path, play)
