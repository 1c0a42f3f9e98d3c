"""The volumes of an earlier cluster of the same names: what an old disk holds that comes back.

Before a life that meets one, another cluster lives for a moment on the same addresses, with the
settings of that life. Its names, ids, epoch numbers and topics are those of the later cluster; its
messages are not.
"""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lab.sim.clients import Sender, Topics
from lab.sim.cluster import MEMORY, SimCluster, cluster_of
from lab.sim.messages import Messages
from lab.sim.settings import NOT_PLAIN, Settings

PRODUCER = 41
"""Its messages are named by its address, which no client of the later cluster has."""
_START_S = 10.0
_STEP_S = 0.1
_LIVES_S = (0.05, 0.3, 1.0)
_WITHOUT_MASTER_S = 1.5
_BEGUN = 0.4
"""So many of these clusters end when their topics are made. A log of that ends where a record of
the later cluster's ends, and could be continued unless its bytes are compared."""


@contextlib.contextmanager
def old_volumes(
    seed: int, settings: Settings, topics: dict[str, int]
) -> Iterator[tuple[Path, ...]]:
    """The disks of the earlier cluster's brokers, by their ids, until the context ends."""
    kept = Path(tempfile.mkdtemp(prefix="batonmq-sim-kept-", dir=MEMORY))
    plain = replace(settings, **dict.fromkeys(NOT_PLAIN, False), recreates=False)
    rng = random.Random(f"earlier {seed}")
    has_begun = random.Random(f"begun {seed}").random() < _BEGUN
    try:
        with cluster_of(rng.getrandbits(32), plain) as cluster:
            _live(cluster, rng, topics, has_begun)
            kept_of = []
            for host in cluster.brokers.values():
                broker_id = host.broker_id
                host.kill()
                kept_of.append((broker_id, host.disk.copy_to(kept / host.name)))
        yield tuple(path for _, path in sorted(kept_of))
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def _live(cluster: SimCluster, rng: random.Random, topics: dict[str, int], has_begun: bool) -> None:
    """Until it has acknowledged something (`has_begun`: its topics), and maybe for some epochs
    more."""
    messages = Messages(cluster.violate)
    setup = Topics(cluster, messages, PRODUCER + 1, topics)
    sender = Sender(cluster, messages, PRODUCER, topics, ())
    for host in cluster.hosts:
        host.start()
    setup.start()
    what = "the earlier cluster does not start"
    cluster.until(lambda: setup.done, _START_S, what, _STEP_S)
    if has_begun:
        return
    sender.start()
    cluster.until(lambda: bool(messages.acked), _START_S, what, _STEP_S)
    for _ in range(rng.randrange(3)):
        cluster.run(rng.choice(_LIVES_S))
        for host in cluster.brokers.values():
            if host.is_open:
                host.kill()
                cluster.run(_WITHOUT_MASTER_S)
                host.start()
    cluster.run(rng.choice(_LIVES_S))
