"""`mqctl roll` over a cluster of `batonmq up` under load: no send fails, nothing is lost, between
this version and the one before it in both directions.

`BATONMQ_EARLIER` chooses that version (`lab/cluster/earlier_version.py`). Each test prints its
figures.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batonmq import Message, Producer, SendResult
from lab.cluster.earlier_version import NoEarlierVersionError, earlier_checkout
from lab.cluster.mqctl import HIDDEN
from lab.cluster.queues import read_topic
from lab.cluster.stores import check_logs_equal
from lab.cluster.up import ClusterProcess, rounds

pytestmark = pytest.mark.process

TOPIC = "Rolled"
PAUSE_S = 0.005


class Load:
    """Sends of our producer, one after the other; each is awaited to its acknowledgement."""

    def __init__(self, name_servers: str) -> None:
        self.acked: list[bytes] = []
        self.failed: list[str] = []
        self.at_s: list[float] = []
        self._name_servers = name_servers
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Load:
        self._task = asyncio.create_task(self._send())
        while not self.acked:
            assert not self._task.done(), self._task
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        async with Producer("rollers", name_servers=self._name_servers) as producer:
            while True:
                body = b"%d" % len(self.at_s)
                try:
                    result: SendResult = await producer.send(Message.of(TOPIC, body))
                    assert result.acknowledged, result
                    self.acked.append(body)
                except Exception as error:
                    self.failed.append(repr(error))
                self.at_s.append(loop.time())
                await asyncio.sleep(PAUSE_S)

    def longest_gap_ms(self) -> int:
        return round(1000 * max(later - earlier for earlier, later in pairwise(self.at_s)))


async def mqctl_roll(cluster: ClusterProcess, home: Path, *options: str) -> tuple[int, Any, str]:
    """Exit code, document and standard error of one run, as a program of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batonmq.mqctl.main", "roll", "--json", "--within", "30", *options,
        env={**dict.fromkeys(HIDDEN, ""), "PATH": "/usr/bin:/bin", "HOME": str(home),
             "BATONMQ_DATA": str(cluster.data_dir)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, json.loads(out), err.decode()


def check_rolled(cluster: ClusterProcess, ran: tuple[int, Any, str]) -> list[str]:
    """The processes that a roll restarted: it stopped at no doubt."""
    code, said, errors = ran
    # A text: pytest shortens anything else, and the doubt is what matters.
    assert (code, said["doubt"]) == (0, ""), f"{said}\n{errors}\n{cluster.diagnostics()}"
    rolled: list[str] = said["rolled"]
    return rolled


def pids(cluster: ClusterProcess) -> dict[str, int]:
    document = cluster.document
    return {e["address"]: e["pid"] for e in (*document["nameServers"], *document["brokers"])}


def check(load: Load, cluster: ClusterProcess, said: str) -> None:
    """Nothing failed, and each acknowledged body is there."""
    gap = load.longest_gap_ms()
    print(f"{said}: {len(load.acked)} acknowledged, {len(load.failed)} failed, gap {gap} ms")
    assert not load.failed, load.failed[:3]
    stored = {m.body for queue in read_topic(cluster.name_servers, TOPIC).values() for m in queue}
    assert set(load.acked) <= stored


def interpreter(folder: Path, checkout: Path) -> Path:
    """Runs that checkout's packages, as the interpreter of another installation would."""
    script = folder / "python-of-another-version"
    python = shlex.quote(sys.executable)
    script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(checkout))} exec {python} "$@"\n')
    script.chmod(0o755)
    return script


def runs(pid: int, text: str) -> bool:
    return text.encode() in Path(f"/proc/{pid}/environ").read_bytes()


def with_cluster(folder: Path, work: Callable[[ClusterProcess], Any], **settings: Any) -> None:
    with ClusterProcess(folder, respawn=True, **settings) as cluster:
        asyncio.run(work(cluster))
    check_logs_equal(cluster.data_folders)


def test_a_roll_restarts_every_process_and_no_send_fails(tmp_path: Path) -> None:
    async def work(cluster: ClusterProcess) -> None:
        async with Load(cluster.name_servers) as load:
            for number in range(rounds(1, 20)):
                before = pids(cluster)
                rolled = check_rolled(cluster, await mqctl_roll(cluster, tmp_path))
                assert len(rolled) == len(before) == 6
                after = pids(cluster)
                assert not set(before.values()) & set(after.values())
                print(f"roll {number + 1}: longest gap so far {load.longest_gap_ms()} ms")
        check(load, cluster, "rolls of one version")

    with_cluster(tmp_path, work)


def test_a_roll_goes_to_the_last_version_and_back(tmp_path: Path) -> None:
    try:
        checkout = earlier_checkout()
    except NoEarlierVersionError as error:
        pytest.skip(str(error))
    former = interpreter(tmp_path, checkout)

    async def work(cluster: ClusterProcess) -> None:
        async with Load(cluster.name_servers) as load:
            for number in range(rounds(1, 10)):
                for python in (former, Path(sys.executable)):
                    ran = await mqctl_roll(cluster, tmp_path, "--python", str(python))
                    assert len(check_rolled(cluster, ran)) == 6
                    are_former = {runs(pid, str(checkout)) for pid in pids(cluster).values()}
                    assert are_former == {python is former}
                    print(f"{number + 1}: {python.name}, gap so far {load.longest_gap_ms()} ms")
        check(load, cluster, "down and up")

    # The version before refuses a section of this one: a setting that it lacks is not written.
    with_cluster(tmp_path, work, overrides={"metrics": {"metricsExporterType": "DISABLE"}})


def test_a_version_that_does_not_start_stops_the_roll_and_the_former_comes_back(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)

    async def work(cluster: ClusterProcess) -> None:
        async with Load(cluster.name_servers) as load:
            code, said, _ = await mqctl_roll(
                cluster, tmp_path, "--python", str(broken), "--within", "4"
            )
            assert (code, said["rolled"], len(said["left"])) == (3, [], 6)
            assert said["doubt"]
            # The same roll continues with an interpreter that works.
            broken.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
            ran = await mqctl_roll(cluster, tmp_path, "--python", str(broken))
            assert len(check_rolled(cluster, ran)) + len(ran[1]["skipped"]) == 6
        check(load, cluster, "a version that does not start")

    with_cluster(tmp_path, work)
