"""`mqctl roll` over a cluster of `batonmq up` under load: no send fails, nothing is lost, between
this version and the one before it in both directions.

`BATONMQ_EARLIER` chooses that version (`lab/cluster/earlier_version.py`). The test prints its
figures.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.client_writer import ClientWriter
from lab.cluster.earlier_version import NoEarlierVersionError, earlier_checkout, interpreter
from lab.cluster.mqctl import Ran
from lab.cluster.queues import check_writers
from lab.cluster.stores import check_logs_equal
from lab.cluster.up import ClusterProcess, rounds
from lab.cluster.writer import wait_acks

pytestmark = pytest.mark.process


def mqctl_roll(cluster: ClusterProcess, *options: str) -> Ran:
    """As a program of its own, which waits and is not in the way of the load."""
    return cluster.mqctl_program("roll", "--json", "--within", "30", *options)


def check_rolled(cluster: ClusterProcess, ran: Ran) -> list[str]:
    """The processes that a roll restarted: it stopped at no doubt."""
    # A text: pytest shortens anything else, and the doubt is what matters.
    assert (ran.code, ran.json["doubt"]) == (0, ""), f"{ran}\n{cluster.diagnostics()}"
    rolled: list[str] = ran.json["rolled"]
    return rolled


def runs(pid: int | None, text: str) -> bool:
    return text.encode() in Path(f"/proc/{pid}/environ").read_bytes()


@contextmanager
def rolled(folder: Path, **settings: Any) -> Iterator[tuple[ClusterProcess, ClientWriter]]:
    """A cluster under load. No send may fail, and at the end each acknowledged message is there."""
    with ClusterProcess(folder, respawn=True, **settings) as cluster:
        with ClientWriter(cluster.name_servers, "Rolled") as load:
            wait_acks(load, 1)
            yield cluster, load
        gap = load.longest_gap_s
        print(f"{len(load.acks)} acknowledged, {len(load.failures)} failed, gap {gap:.3f} s")
        assert not load.failures, load.failures[:3]
        check_writers(cluster.name_servers, "Rolled", [load])
    check_logs_equal(cluster.data_folders)


def test_a_roll_stops_at_a_doubt_continues_to_the_last_version_and_goes_back(
    tmp_path: Path,
) -> None:
    """1. The other interpreter does not start: the roll stops, and the former process comes back.
    2. The last version is in its place: the same roll continues. 3. Another one goes back."""
    try:
        checkout = earlier_checkout()
    except NoEarlierVersionError as error:
        pytest.skip(str(error))
    former = interpreter(tmp_path, checkout)
    works = former.read_text()
    former.write_text("#!/bin/sh\nexit 1\n")
    # The version before refuses a section of this one: a setting that it lacks is not written.
    settings = {"metrics": {"metricsExporterType": "DISABLE"}}
    with rolled(tmp_path, replicas=rounds(2, 3), overrides=settings) as (cluster, load):
        before = cluster.pids()
        stopped = mqctl_roll(cluster, "--python", str(former), "--within", "4")
        said = stopped.json
        assert (stopped.code, said["rolled"], len(said["left"])) == (3, [], len(before))
        assert said["doubt"]
        former.write_text(works)
        for number in range(rounds(1, 10)):
            for python in (former, Path(sys.executable)):
                ran = mqctl_roll(cluster, "--python", str(python))
                assert len(check_rolled(cluster, ran)) + len(ran.json["skipped"]) == len(before)
                are_former = {runs(pid, str(checkout)) for pid in cluster.pids().values()}
                assert are_former == {python is former}
                print(f"{number + 1}: {python.name}, gap so far {load.longest_gap_s:.3f} s")
        assert not set(before.values()) & set(cluster.pids().values())
        for number in range(rounds(0, 20)):
            assert len(check_rolled(cluster, mqctl_roll(cluster))) == len(before)
            print(f"roll {number + 1}: longest gap so far {load.longest_gap_s:.3f} s")
