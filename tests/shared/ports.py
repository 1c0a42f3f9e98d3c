"""Ports for servers that a test starts at a known port, and may start again at the same one."""

import random
import socket

BETWEEN = range(29_000, 32_600)
"""Above those of `lab.processes` and below the range from which the kernel takes the source ports
of connections: a port that was free stays so while its server is started again."""
_choice = random.SystemRandom()


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    while True:
        first = _choice.randrange(BETWEEN.start, BETWEEN.stop - count)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
