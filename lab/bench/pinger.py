"""Sends a trivial request every few milliseconds, until its standard input ends:
`python -m lab.bench.pinger ADDRESS`. Then it prints how long the slowest answer took.

A long turn of the server's loop delays every answer. Delays of the machine are included.
"""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab.cluster.connection import BlockingConnection
from lab.cluster.processes import Helper

PAUSE_S: Final = 0.005
NO_SUCH_REQUEST: Final = 99_999
"""Refused without a look at anything."""


class Pinged:
    """`longest_ms` is known once the `with` block has ended."""

    longest_ms = 0.0


@contextlib.contextmanager
def pinging(address: str, log: Path) -> Iterator[Pinged]:
    """A process of its own asks that server while the block runs."""
    helper = Helper("lab.bench.pinger", address, log=log)
    seen = Pinged()
    try:
        helper.wait_ready()
        yield seen
        seen.longest_ms = float(helper.finish()["longestMs"])
    finally:
        helper.kill()


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
                print("ready", flush=True)
    print(json.dumps({"longestMs": longest_s * 1000}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
