"""Ports for servers that a test starts at a known port, and may start again at the same one."""

import functools
import random

from lab.cluster.processes import claims, is_free

BETWEEN = range(29_000, 32_600)
"""Above those of `lab.cluster.processes` and below the range from which the kernel takes the source
ports of connections: a port that was free stays so while its server is started again."""
SLICE = 100
"""Ports that one process of tests has for itself, also between the look at a port and its use. The
first of them stays bound as long as that process lives."""
_choice = random.SystemRandom()
_next_port: list[int] = []
"""Where the next look begins: what was just given may not be in use yet."""


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row. None is given again before all others were."""
    own = _own_ports()
    while True:
        first = _next_port[0] if _next_port else own.start
        if first + count > own.stop:
            first = own.start
        _next_port[:] = [first + count]
        if all(map(is_free, range(first, first + count))):
            return first


@functools.cache
def _own_ports() -> range:
    for first in _choice.sample(BETWEEN[::SLICE], len(BETWEEN) // SLICE):
        if claims(first):
            return range(first + 1, first + SLICE)
    raise RuntimeError(f"every {SLICE} ports of {BETWEEN} have a process of tests")
