"""A short search with a fixed seed for each target, and all that was ever found."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.engine import FOUND, INPUT_BYTES_MAX, limit, run_blind
from tests.fuzz.targets import TARGETS, Target, quiet

RUNS = 1500
RUNS_OF_TARGET = 500
"""`make soak` has 200,000."""
FINDS = sorted(path for path in FOUND.glob("*/*") if path.is_file())


@pytest.fixture(autouse=True)
def without_logs() -> Iterator[None]:
    quiet()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_broken_bytes_are_taken_or_refused_with_the_one_error(name: str) -> None:
    done, data, error = run_blind(TARGETS[name], RUNS_OF_TARGET, seed=1)
    if error is not None:
        raise AssertionError(f"input {done}: {data!r}") from error
    assert done == RUNS_OF_TARGET


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_good_inputs_to_begin_with(name: str) -> None:
    seeds = [each for each in TARGETS[name].seeds() if each]
    assert seeds and all(len(each) <= 4 * INPUT_BYTES_MAX for each in seeds)


@pytest.mark.parametrize("path", FINDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_once_is_mended(path: Path) -> None:
    with limit():
        TARGETS[path.parent.name].read(path.read_bytes())


def test_the_search_finds_what_escapes() -> None:
    """Else it could find nothing."""

    def reader(data: bytes) -> None:
        if data.count(0) > 3:
            raise KeyError("zeros")

    done, data, error = run_blind(Target(reader, lambda: [b"abcdefgh"]), RUNS, seed=1)
    assert isinstance(error, KeyError) and data is not None and data.count(0) > 3
    assert (done, data) == run_blind(Target(reader, lambda: [b"abcdefgh"]), RUNS, seed=1)[:2]
