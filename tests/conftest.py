"""What tests of several rooms share: time limits, hypothesis' profiles, `shared`, `--rewrite`."""

import asyncio
import contextlib
import functools
import gc
import inspect
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from batonmq.runtime import disk, sockets
from tests import running

sys.path.insert(0, str(Path(__file__).parent / "shared"))

SOAK = os.environ.get("BATONMQ_SOAK") == "1"
SLOW_MARKS = ("process", "java", "spark", "docker")
SLOW_TEST_S = 900
"""The first test of such a ring pays for what all of it uses: clusters, a JVM, images."""
SOAK_TEST_S = 4 * 3600

# `make test` draws the same examples every time; a find of a random search would end a run that
# changed nothing. `make soak` searches with new seeds, and prints with a find how to have it again.
settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search", settings.get_profile("same"), derandomize=False, print_blob=True, max_examples=2000
)
settings.load_profile("search" if SOAK else "same")


MEMORY = Path("/dev/shm")
MEMORY_LEAST = 4 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write outcomes into testdata/*.txt; read the diff",
    )
    parser.addoption(
        "--first", action="append", default=[], metavar="FILE", help="before all others, in turn"
    )


HELD_DESCRIPTORS = sockets.HELD_MAX


def pytest_configure(config: pytest.Config) -> None:
    running.show_stacks_on_demand()
    has_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_LEAST
    if has_memory and str(config.getoption("markexpr")).startswith("not process"):
        # Syncs need not wait for a disk. Clusters of processes would fill the memory.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    # A broker that a test kills in its own process would keep thousands of them for all others.
    setattr(sockets, "HELD_MAX", 0)  # noqa: B010  it is Final


@pytest.fixture
def disk_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost: a sync that succeeds need not wait for the disk."""
    monkeypatch.setattr(disk, "fsync", lambda fd: None)
    monkeypatch.setattr(disk, "fdatasync", lambda fd: None)


@pytest.fixture
def held_descriptors(monkeypatch: pytest.MonkeyPatch) -> int:
    """Brokers hold low descriptors while they dial, as in a process of their own; how many."""
    monkeypatch.setattr(sockets, "HELD_MAX", HELD_DESCRIPTORS)
    return HELD_DESCRIPTORS


def _in_a_loop(
    test: Callable[..., Coroutine[Any, Any, None]],
    loop: Callable[[Coroutine[Any, Any, None]], None],
) -> Callable[..., None]:
    async def opened(fixtures: dict[str, Any]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in fixtures.items():
                # Only what `asynccontextmanager` made: a lock has the same two methods.
                if isinstance(value, contextlib.AsyncContextDecorator) and isinstance(
                    value, contextlib.AbstractAsyncContextManager
                ):
                    fixtures[name] = await stack.enter_async_context(value)
            await test(**fixtures)

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        loop(opened(fixtures))

    return run


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The limit of pyproject.toml is for tests without processes. An `async def` runs in a loop of
    its own; a fixture that is an async context manager is open while it runs."""
    turns = {file: turn for turn, file in enumerate(config.getoption("--first"))}
    items.sort(key=lambda item: turns.get(item.nodeid.partition("::")[0], len(turns)))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            counts = item.get_closest_marker("counts_turns") is not None
            item.obj = _in_a_loop(item.obj, asyncio.run if counts else uvloop.run)
        if SOAK:
            item.add_marker(pytest.mark.timeout(SOAK_TEST_S))
        elif any(item.get_closest_marker(mark) for mark in SLOW_MARKS):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))


def pytest_collection_finish() -> None:
    # A full collection took a tenth of a second for what was imported, after each test of the
    # simulation and in the middle of many others.
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with running.noted(item.nodeid):
        return (yield)


class OutOfTime(KeyboardInterrupt):
    """A test is over its limit. An event loop lets an interrupt out, and swallows what else is
    raised in it, which is how pytest-timeout would end a test that waits in uvloop."""


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Iterator[Any]:
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    assert callable(fail), "pytest-timeout works by SIGALRM"

    def interrupt(number: int, frame: FrameType | None) -> None:
        try:
            fail(number, frame)
        except pytest.fail.Exception as failure:
            raise OutOfTime(f"{item.nodeid}: {failure}") from None

    signal.signal(signal.SIGALRM, interrupt)
    return result


@contextlib.contextmanager
def _late_is_failed() -> Iterator[None]:
    try:
        yield
    except OutOfTime as late:
        pytest.fail(str(late))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[Any]:
    with _late_is_failed():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[Any]:
    with _late_is_failed():
        return (yield)


@pytest.fixture
def check_script(request: pytest.FixtureRequest) -> Callable[[Path, object], None]:
    """Plays a script in an environment: its outcome is exactly what the file says."""
    from tests.shared.scripts import play

    def check(path: Path, env: object) -> None:
        text = path.read_text()
        played = play(text, env)
        if request.config.getoption("--rewrite"):
            path.write_text(played)
        assert played == path.read_text()

    return check
