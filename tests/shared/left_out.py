"""Tests that a machine cannot run: skipped by name, a failure where everything must run."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import pytest

from lab.cluster.network import Namespaces, why_not

ONLY_SOAK = pytest.mark.skipif(os.environ.get("BATONMQ_SOAK") != "1", reason="long: `make soak`")


def leave_out(why: str) -> NoReturn:
    """Skips the test that runs; with BATONMQ_CI=1 it fails."""
    if os.environ.get("BATONMQ_CI") == "1":
        pytest.fail(f"left out: {why}")
    pytest.skip(f"left out: {why}")


@contextmanager
def namespaces(hosts: Sequence[str]) -> Iterator[Namespaces]:
    """Network namespaces of these hosts, while it is open; leaves out what has no right to them."""
    if missing := why_not():
        leave_out(missing)
    made = Namespaces(hosts)
    made.open()
    try:
        yield made
    finally:
        made.close()
