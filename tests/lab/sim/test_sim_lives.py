"""Lives of the whole cluster, as `python -m lab.sim` runs them: the real servers and clients.

The lives themselves are a ring of their own (`tests.rings`), also those in which a promise was
broken once (`lab.sim.known_lives`). Here: a seed is the same life everywhere.
"""

import asyncio
import gc
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from batonmq.broker.service import BrokerService
from batonmq.store.message_store import MessageStore
from lab.sim.cluster import SimCluster
from lab.sim.given_up import GivenUp, UncleanElection
from lab.sim.hosts import BrokerHost
from lab.sim.known_lives import KNOWN
from lab.sim.life import LifeOutcome, LifePlan, Statistics, plan_of, run
from lab.sim.loop import SimLoop, SimProcess
from lab.sim.shrink import shrink
from lab.sim.threads import Lock, Thread, current_thread

ROOT = Path(__file__).resolve().parents[3]
RUNS = """import sys; from lab.sim.life import run
for seed in sys.argv[1:]: print(run(int(seed)).statistics.digest)"""


def _open_files() -> Counter[str]:
    """What the descriptors of this process lead to."""
    own = Path("/proc/self/fd")
    return Counter(os.readlink(each) for each in own.iterdir() if each.is_symlink())


def _stores_and_brokers() -> Counter[type]:
    gc.collect()
    kinds = (SimCluster, BrokerService, MessageStore)
    return Counter(type(each) for each in gc.get_objects() if type(each) in kinds)


SEEDS = (10281, 5)
"""In the one many processes are killed, while they load numpy, too, and a slave has offsets that
its master lacks. In the other disks are full: controllers keep what brokers tell of that."""


def test_a_life_leaves_nothing_behind_and_is_the_same_in_every_process() -> None:
    """Killed processes release their stores: each map of a segment keeps a descriptor. A seed is
    the same life behind any other, and whatever order the hashes of strings put sets into."""
    first = run(SEEDS[0])  # what is loaded once is there
    assert first.violation is None, first.error
    assert first.statistics.acked and first.statistics.delivered
    objects, files = _stores_and_brokers(), _open_files()
    second = run(SEEDS[1])
    assert _stores_and_brokers() <= objects
    assert _open_files() == files
    backwards = subprocess.run(
        [sys.executable, "-c", RUNS, *map(str, reversed(SEEDS))],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert backwards.stdout.split() == [second.statistics.digest, first.statistics.digest]


def test_each_known_life_has_what_no_other_life_of_make_test_has() -> None:
    pairs = {seed: _pairs(plan_of(seed)) for seed in (*range(1, 41), *KNOWN)}
    times = Counter(pair for of_seed in pairs.values() for pair in of_seed)
    for seed in KNOWN:
        assert any(times[pair] == 1 for pair in pairs[seed]), seed


def _pairs(plan: LifePlan) -> set[tuple[str, str]]:
    """What comes together in a life: settings, and kinds of faults."""
    settings = {f"{name} {value}" for name, value in asdict(plan.settings).items() if value}
    return set(itertools.combinations(sorted(settings | {f.kind for f in plan.faults}), 2))


def test_what_an_operator_gave_up_may_take_a_second_election_to_be_given_up() -> None:
    """Named in epoch 2, dead before it opened: the controllers elect it again, without asking."""
    named, other = (cast(BrokerHost, SimpleNamespace(incarnation=name, boot=1)) for name in "ab")
    violations: list[str] = []
    for opens, found in ((named, 0), (other, 1)):
        given_up = GivenUp(violations.append)
        given_up.elected(UncleanElection(2, True, True, 50, named, 1))
        again = UncleanElection(4, False, False, 50, opens, 2)
        given_up.elected(again)
        given_up.completed(again, 50, opens, [50, 80])
        assert len(violations) == found, violations


def test_shrinking_leaves_the_faults_that_matter() -> None:
    """A life that fails if two of its faults come together."""
    plan = max((plan_of(seed) for seed in range(1, 40)), key=lambda plan: len(plan.faults))
    needed = {plan.faults[3], plan.faults[-2]}

    def live(tried: LifePlan) -> LifeOutcome:
        return LifeOutcome("lost" if needed <= set(tried.faults) else None, Statistics())

    smaller, violation = shrink(plan, lambda line: None, live)
    assert violation == "lost" and set(smaller.faults) == needed
    assert shrink(replace(plan, faults=()), lambda line: None, live)[1] is None


def test_a_thread_that_is_waited_for_may_wait_for_a_lock_of_another() -> None:
    """As at the end of a store whose two flushes meet on a slow disk."""
    loop = SimLoop(random.Random(1))
    ended: list[str] = []

    async def close() -> None:
        lock = Lock()

        def work(name: str) -> None:
            with lock:
                thread = current_thread()
                assert thread is not None
                thread.pause(1.0)
                ended.append(name)

        holder, waits = (Thread(target=work, args=(name,)) for name in ("holder", "waits"))
        holder.start()
        waits.start()
        await asyncio.sleep(0.01)
        waits.join()

    process = SimProcess(loop, "10.0.0.1")
    try:
        loop.run_until_complete(process.spawn(close()))
    finally:
        loop.close()
    assert ended == ["holder", "waits"]
