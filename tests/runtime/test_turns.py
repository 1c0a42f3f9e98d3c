"""Long work gives the loop its turns, and ends as a whole."""

import asyncio
import sys

import pytest

from batonmq.runtime.turns import (
    AT_ONCE,
    COPIES_MAX,
    KEYS_AT_ONCE,
    copy_of_keys,
    for_each,
    gather_apart,
    gather_some,
    in_turns,
    run_in_turns,
    to_the_end,
)

pytestmark = pytest.mark.counts_turns


async def turns_during(work: asyncio.Task[object]) -> int:
    """How often somebody else ran until `work` was done."""
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


async def test_behind_every_slice_the_loop_has_a_turn() -> None:
    async def through(count: int) -> int:
        return len([item async for item in in_turns(range(count))])

    for count in (1, 10 * AT_ONCE):
        work: asyncio.Task[object] = asyncio.create_task(through(count))
        assert await turns_during(work) == 1 + count // AT_ONCE
        assert work.result() == count


@pytest.mark.parametrize("changes", [0, 1, 2 * COPIES_MAX])
async def test_keys_are_copied_in_slices_also_of_a_table_that_changes(changes: int) -> None:
    """`changes`: how many turns add a key."""
    table = dict.fromkeys(range(3 * KEYS_AT_ONCE))
    work = asyncio.create_task(copy_of_keys(table, lambda: 0))
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        if turns < changes:
            table[-1 - turns] = None
        turns += 1
    assert set(range(3 * KEYS_AT_ONCE)) <= set(work.result()) <= set(table)
    assert turns > 3


async def test_no_key_is_passed_over_if_as_many_come_as_go() -> None:
    """A dict that is full moves its keys to the front when one more comes, and then Python raises
    no error if it has as many as before."""
    table = dict.fromkeys(range(KEYS_AT_ONCE))
    grown = 0
    while grown < 2:  # then the next key finds no room, as the last one did
        before = sys.getsizeof(table)
        table[len(table)] = None
        grown += sys.getsizeof(table) > before
    last, _ = table.popitem()
    table = dict.fromkeys(range(last))
    stay, removals = range(10, last), 0
    work = asyncio.create_task(copy_of_keys(table, lambda: removals))
    await asyncio.sleep(0)
    for key in range(10):
        del table[key]
    for key in range(10):
        table[-1 - key] = None
    removals += 10
    assert set(stay) <= set(await work)


async def test_what_fails_in_one_lot_ends_the_others() -> None:
    """No one waits for them any more: they would continue beside what is done next."""
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        await gather_apart([[waits()], [fails()]])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ended == [True]


async def test_results_come_in_order_and_so_many_run_at_once() -> None:
    running = most = 0

    async def one(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    assert await gather_some(map(one, range(10)), 4) == list(range(10))
    assert most == 4
    assert await gather_apart([[one(1), one(2)], [one(3)]]) == [1, 2, 3]


async def test_each_item_is_acted_on_once_in_slices_and_steps_end() -> None:
    seen: list[int] = []
    for_each(range(7), seen.append, at_once=3)
    for slices in (3, 6, 7, 7):
        assert seen == list(range(slices))
        await asyncio.sleep(0)
    steps = iter((True, True, False, True))
    run_in_turns(lambda: next(steps))
    for _ in range(4):
        await asyncio.sleep(0)
    assert next(steps)  # the fourth step was not called


async def test_a_caller_that_is_cancelled_waits_for_work_that_must_not_stop_half_way() -> None:
    going, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        going.set()
        await done.wait()

    caller = asyncio.create_task(to_the_end(work()))
    await going.wait()
    caller.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not caller.done()
    done.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
