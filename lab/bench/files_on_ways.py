"""`python -m lab.bench.files_on_ways [CHECKOUT]`: the files that run in a send and in a failover.

It starts a cluster of that checkout (default: this one). Between two signals its processes record
the functions that are called. A function counts for a send if it ran in every one of some sends,
and for a failover if it ran in every failover; not if it runs all the time, also while the cluster
is idle. Its file counts with it. A send: from the request to its acknowledgement, at master and
slave. A failover: from kill -9 of the master to the first acknowledged write, at the leading
controller, the new master and the slave.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lab.cluster import frames
from lab.cluster.connection import BlockingConnection, ask, takes_writes
from lab.cluster.processes import ROOT, wait_for
from lab.cluster.up import ClusterProcess

TOPIC = "FilesOnWays"
SENDS = 30
FAILOVERS = 8
IDLE_TIMES = 3
IDLE_S = 2.0  # longer than whatever a cluster does all the time
NOT_PRODUCT = ("tests", "lab", ".venv")
# Threads that run already cannot be given a profiler by another one, so all get it when they start.
RECORDER = """
import os, signal, sys, threading
armed, seen, folder = False, set(), os.environ["FILES_ON_WAYS"]

def profile(frame, event, argument):
    if armed:
        seen.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

def arm(*_):
    global armed
    seen.clear()
    armed = True
    sys.setprofile(profile)
    open(f"{folder}/{os.getpid()}.armed", "w").close()

def disarm(*_):
    global armed
    sys.setprofile(None)
    armed = False
    with open(f"{folder}/{os.getpid()}.new", "w") as file:
        file.write("\\n".join(seen.copy()))
    os.replace(file.name, f"{folder}/{os.getpid()}.seen")

threading.setprofile(profile)
signal.signal(signal.SIGUSR1, arm)
signal.signal(signal.SIGUSR2, disarm)
"""


class RecordedCluster(ClusterProcess):
    """`batonmq up` of a checkout, whose processes record between `arm` and `disarm`."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        super().__init__(folder)
        self.checkout = checkout
        self._folder = folder / "recorded"
        self._folder.mkdir()
        (self._folder / "sitecustomize.py").write_text(RECORDER)
        self.argv[0] = str(checkout / ".venv" / "bin" / "python")
        os.environ |= {"PYTHONPATH": str(self._folder), "FILES_ON_WAYS": str(self._folder)}

    def arm(self, pids: Iterable[int]) -> None:
        for pid in pids:
            for old in self._folder.glob(f"{pid}.*"):
                old.unlink()
            os.kill(pid, signal.SIGUSR1)
        for pid in pids:
            wait_for("the recorder", (self._folder / f"{pid}.armed").exists)

    def disarm(self, roles: Mapping[str, int]) -> dict[str, set[str]]:
        """`file:function` of what ran since `arm`, by role; paths below the checkout."""
        for pid in roles.values():
            os.kill(pid, signal.SIGUSR2)
        return {role: self._seen(pid) for role, pid in roles.items()}

    def _seen(self, pid: int) -> set[str]:
        file = self._folder / f"{pid}.seen"
        wait_for("the recorded files", file.exists)
        found = set()
        for name in file.read_text().splitlines():
            file_name, _, function = name.partition(":")
            path = Path(file_name).resolve()
            if name.startswith("/") and path.is_relative_to(self.checkout):
                found.add(f"{path.relative_to(self.checkout)}:{function}")
        return {name for name in found if not name.startswith(NOT_PRODUCT)}

    def leader_pid(self) -> int:
        for node in self.document["controllers"]:
            if ask(node["address"], frames.METADATA).ext.get("isLeader") == "true":
                return self.pid_of(node)
        raise RuntimeError("no controller leads")


def while_idle(cluster: RecordedCluster) -> set[str]:
    """What the processes of the way do of themselves, all the time. What happened to run once, as a
    registration, would else be taken out of the ways that it is part of."""
    roles = {node["address"]: cluster.pid_of(node) for node in cluster.document["brokers"]}
    roles["controller"] = cluster.leader_pid()
    watched = []
    for _ in range(IDLE_TIMES):
        cluster.arm(roles.values())
        time.sleep(IDLE_S)
        watched.append(set().union(*cluster.disarm(roles).values()))
    return set.intersection(*watched)


def one_send(cluster: RecordedCluster, connection: BlockingConnection) -> dict[str, set[str]]:
    """With a topic that exists and a connection that is open."""
    roles = {"master": cluster.pid_of(cluster.master())}
    roles |= {f"slave {number}": cluster.pid_of(s) for number, s in enumerate(cluster.slaves())}
    cluster.arm(roles.values())
    assert connection.send(TOPIC, b"one").code == frames.OK
    found = cluster.disarm(roles)
    return {"master": found["master"], "slave": found["slave 0"]}


def one_failover(cluster: RecordedCluster) -> dict[str, set[str]]:
    old, slaves = cluster.master(), cluster.slaves()
    pids = {slave["address"]: cluster.pid_of(slave) for slave in slaves}
    roles = {"controller": cluster.leader_pid(), **pids}
    cluster.arm(roles.values())
    cluster.kill(old)
    new = wait_for(
        "an acknowledged write",
        lambda: next((each for each in pids if takes_writes(each, TOPIC)), None),
    )
    found = cluster.disarm(roles)
    (slave,) = set(pids) - {new}
    cluster.restart(old)
    cluster.wait_in_sync(3)
    cluster.wait_for("three processes", lambda: len(cluster.slaves()) == 2)
    return {"controller": found["controller"], "new master": found[new], "slave": found[slave]}


def files(runs: list[dict[str, set[str]]], idle: set[str]) -> dict[str, set[str]]:
    """By role, the files of the functions that ran in all runs and in no idle cluster."""
    in_all = {role: set.intersection(*(run[role] for run in runs)) for role in runs[0]}
    return {role: {name.partition(":")[0] for name in ran - idle} for role, ran in in_all.items()}


def show(what: str, by_role: Mapping[str, set[str]]) -> None:
    everything = set().union(*by_role.values())
    counts = ", ".join(f"{role} {len(files)}" for role, files in by_role.items())
    print(f"\n{what}: {len(everything)} files ({counts})")
    for name in sorted(everything):
        print(f"  {name:44} {', '.join(role for role, files in by_role.items() if name in files)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.bench.files_on_ways", description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", default=ROOT)
    checkout = parser.parse_args().checkout.resolve()
    with (
        tempfile.TemporaryDirectory(prefix="files-on-ways-") as folder,
        RecordedCluster(Path(folder), checkout) as cluster,
    ):
        cluster.wait_in_sync(3)
        cluster.wait_for("two slaves", lambda: len(cluster.slaves()) == 2)
        with BlockingConnection(cluster.master()["address"]) as connection:
            assert connection.send(TOPIC, b"first").code == frames.OK
            time.sleep(1.0)  # the creation of the topic is over
            idle = while_idle(cluster)
            sends = [one_send(cluster, connection) for _ in range(SENDS)]
        failovers = [one_failover(cluster) for _ in range(FAILOVERS)]
    print(checkout)
    show("one acknowledged send", files(sends, idle))
    show("one failover", files(failovers, idle))


if __name__ == "__main__":
    main()
