"""Asks a server every few milliseconds for next to nothing, until its standard input ends:
`python -m lab.bench.pinger ADDRESS`. Then it prints how long the slowest answer took, in ms.

A turn of the server's loop delays every answer by its length, so this is what a long turn costs
others; the machine's own delays are in it, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab.cluster.connection import BlockingConnection
from lab.cluster.processes import spawn_talking

PAUSE_S: Final = 0.005
NO_SUCH_REQUEST: Final = 99_999
"""Refused without a look at anything."""


class Pinged:
    """`longest_ms` is known once the `with` block has ended."""

    longest_ms = 0.0


@contextlib.contextmanager
def pinging(address: str, log: Path) -> Iterator[Pinged]:
    """A process of its own asks that server while the block runs."""
    process = spawn_talking([sys.executable, "-m", "lab.bench.pinger", address], log)
    assert process.stdin is not None and process.stdout is not None
    seen = Pinged()
    try:
        process.stdout.readline()  # it asks
        yield seen
        process.stdin.close()
        seen.longest_ms = float(process.stdout.readline() or "nan")
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main(address: str) -> None:
    longest_s, is_connected = 0.0, False
    with BlockingConnection(address, timeout_s=60) as connection:
        while not select.select([0], [], [], PAUSE_S)[0] or os.read(0, 1):
            began = time.monotonic()
            connection.request(NO_SUCH_REQUEST)
            if is_connected:  # the first one also connects
                longest_s = max(longest_s, time.monotonic() - began)
            else:
                is_connected = True
                print("asking", flush=True)
    print(f"{longest_s * 1000:.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
