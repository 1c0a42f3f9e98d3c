"""Background tasks: what they raise is noticed, and a loop that failed begins again."""

import asyncio
from typing import Any

from batonmq.runtime import tasks as tasks_module
from batonmq.runtime.tasks import Tasks


def reports() -> list[tuple[str, BaseException]]:
    """What reaches the handler of the running loop from now on."""
    found: list[tuple[str, BaseException]] = []

    def note(_: object, context: dict[str, Any]) -> None:
        found.append((context["message"], context["exception"]))

    asyncio.get_running_loop().set_exception_handler(note)
    return found


async def test_what_a_task_raises_reaches_the_handler_of_the_loop():
    """Also while its owner holds the task, so that Python itself would say nothing."""
    found, error = reports(), AssertionError("a rule does not hold")

    async def fail() -> None:
        raise error

    tasks = Tasks()
    task = tasks.spawn(fail(), "a")
    await asyncio.wait([task])
    await tasks.close()
    assert found == [("task a failed", error)]


async def test_close_waits_for_the_end_of_each_task():
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("ended")

    tasks = Tasks()
    for _ in range(2):
        tasks.spawn(work())
    await asyncio.sleep(0)
    found = reports()
    await tasks.close()
    assert (ends, found) == (["ended", "ended"], [])


async def test_r54_a_loop_that_failed_begins_again(monkeypatch):
    monkeypatch.setattr(tasks_module, "AGAIN_S", 0)
    found, runs, again = reports(), [], asyncio.Event()

    async def loop() -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise ValueError("a bad answer")
        again.set()
        await asyncio.Event().wait()

    tasks = Tasks()
    tasks.keep(loop, "watch")
    await asyncio.wait_for(again.wait(), 10)
    await tasks.close()
    assert runs == [0, 1]
    assert [(message, str(error)) for message, error in found] == [
        ("task watch failed", "a bad answer")
    ]
