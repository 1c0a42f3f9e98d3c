"""Fixtures of the simulation's tests."""

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Clusters that are killed all the time log too much."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.collect()  # a store that was killed keeps its maps, each with a descriptor
