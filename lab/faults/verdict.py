"""Folders that clusters left, and what `mqctl verdict` says of them.

A verdict on an incident (`verdict_files`, `verdict_live`) is right if it names that and its place
first. It must never say "safe" if a write that the probe saw acknowledged is in no store.
"""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.cluster.cluster import Sections
from lab.cluster.held import HOSTS, HeldCluster
from lab.cluster.load import Load
from lab.cluster.mqctl import mqctl
from lab.cluster.network import Network
from lab.cluster.node_process import kill_all
from lab.cluster.processes import wait_for
from lab.cluster.stores import copy_sparsely
from lab.faults.verdict_files import recorded_end
from lab.faults.verdict_live import LiveVerdict

SEGMENT: Final = 256 << 10
SETTINGS: Final[Sections] = {"store": {"mappedFileSizeCommitLog": SEGMENT}}
LOAD: Final = ("--interval-ms", "4", "--body", "900")
ACKED_LIMIT_S: Final = 120.0
ACKS: Final = 1_300
"""About five segments: incidents remove one in the middle, or many records at the end."""


@dataclass(slots=True)
class Base:
    """The folder of a stopped cluster, and each acknowledged write: (offset, bytes)."""

    name: str
    folder: Path
    acked: list[tuple[int, bytes]]

    @property
    def data(self) -> Path:
        return self.folder / "data"


def names(said: tuple[str, str], expected: tuple[str, str]) -> bool:
    """Whether a verdict names that incident; an expected subject "*" is any."""
    return said[0] == expected[0] and expected[1] in ("*", said[1])


def ask_verdict(*arguments: str, home: Path, env: dict[str, str] | None = None) -> Any:
    ran = mqctl("verdict", "--json", *arguments, home=home, env=env)
    assert ran.code in (0, 1, 3) and ran.out, ran
    return ran.json


def ask_live(live: LiveVerdict) -> Any:
    """The verdict on a cluster that runs."""
    return ask_verdict(home=live.folder, env={"BATONMQ_DATA": str(live.folder / "data")})


def first(document: Any) -> tuple[str, str]:
    """(incident, node or group) that a verdict names first."""
    found = document["incidents"]
    return (found[0]["incident"], Path(found[0]["subject"]).name) if found else ("none", "")


def safe(document: Any) -> str:
    """The worst that a verdict says of any group: lost, unknown, or safe."""
    states = {group["state"] for group in document["groups"]}
    return next((each for each in ("lost", "unknown", "safe") if each in states), "unknown")


def lost(acked: list[tuple[int, bytes]], data: Path) -> int:
    """How many acknowledged writes are in no store: their bytes are not at their offset."""
    logs = _logs(data)
    return sum(
        not any(log.read(offset, len(record)) == record for log in logs) for offset, record in acked
    )


class _Log:
    """The segments of one store."""

    def __init__(self, store: Path) -> None:
        self._files = {
            int(path.name): path.read_bytes()
            for path in (store / "commitlog").glob("*")
            if re.fullmatch(r"\d{20}", path.name)
        }

    def read(self, offset: int, size: int) -> bytes:
        """Fewer bytes where the log has no more of that segment."""
        base = offset - offset % SEGMENT
        return self._files.get(base, b"")[offset - base : offset - base + size]

    def record_at(self, offset: int) -> bytes:
        """Empty if none is there."""
        return self.read(offset, int.from_bytes(self.read(offset, 4), "big"))


def _logs(data: Path) -> list[_Log]:
    return [_Log(store) for store in sorted(data.glob("broker-*"))]


# Folders of a stopped cluster.


def make_bases(folder: Path) -> list[Base]:
    """The folders of one cluster: after all processes were killed under load, after the same with a
    set of one member, and after a clean stop."""
    (folder / "cluster").mkdir(parents=True)
    cluster = HeldCluster(folder / "cluster", Network(HOSTS), SETTINGS)
    try:
        _live_and_die(cluster)
    finally:
        kill_all(cluster.processes)
    places = {name: folder / f"base-{name}" for name in ("killed", "alone", "stopped")}
    return [Base(name, place, list(_acked(place))) for name, place in places.items()]


def _live_and_die(cluster: HeldCluster) -> None:
    cluster.start()
    slave = next(i for i in range(3) if i != cluster.wait_whole().master)
    with _load(cluster) as load:
        _wait_acked(load, ACKS // 2)
        cluster.brokers[slave].kill()
        backup = cluster.folder / "backup"
        copy_sparsely(cluster.data_folders[slave], backup)
        (backup / "index-of").write_text(str(slave))
        cluster.launch(cluster.brokers[slave])
        cluster.wait_whole()
        _wait_acked(load, ACKS)
        _wait_recorded(cluster)
        kill_all(cluster.processes)
    _keep(cluster, "killed")
    cluster.launch_dead()
    cluster.wait_whole()
    with _load(cluster) as load:
        _make_alone(cluster)
        _wait_acked(load, len(load.acks) + ACKS // 3)
        kill_all(cluster.processes)
    _keep(cluster, "alone")
    cluster.launch_dead()
    cluster.wait_whole()
    cluster.stop()
    _keep(cluster, "stopped")


@contextmanager
def _load(cluster: HeldCluster) -> Iterator[Load]:
    """A load whose acknowledged writes are kept beside those of the loads before it."""
    acked = cluster.folder / "acked.jsonl"
    before = acked.read_text() if acked.exists() else ""
    part = cluster.folder / "acked.part"
    options = (*LOAD, "--acked", str(part))
    log = cluster.folder / "probe.log"
    with Load(cluster.addresses, prefix="verdict", log=log, options=options) as load:
        load.wait_started()
        load.first_ack(sent_after=time.monotonic(), limit_s=ACKED_LIMIT_S)
        yield load
        load.stop()
    acked.write_text(before + part.read_text())


def _keep(cluster: HeldCluster, name: str) -> None:
    copy_sparsely(cluster.folder, cluster.folder.parent / f"base-{name}")


def _wait_acked(load: Load, count: int) -> None:
    wait_for(f"{count} acknowledged writes", lambda: len(load.acks) >= count, ACKED_LIMIT_S)


def _wait_recorded(cluster: HeldCluster) -> None:
    """Until the consume queues of every replica reach beyond its first segment."""

    def is_recorded() -> bool:
        return all(recorded_end(store) > SEGMENT for store in cluster.data_folders)

    wait_for("consume queues on the disks", is_recorded, ACKED_LIMIT_S)


def _make_alone(cluster: HeldCluster) -> None:
    """Kills both slaves, and waits until the set is the master alone."""
    group = cluster.wait_whole()
    for index in range(3):
        if index != group.master:
            cluster.brokers[index].kill()

    def is_alone() -> bool:
        found = cluster.group()
        return found is not None and len(found.in_sync) == 1

    cluster.wait_for("the set of one", is_alone)


def _acked(place: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each acknowledged write, from any store of the base."""
    logs = _logs(place / "data")
    for line in (place / "acked.jsonl").read_text().splitlines():
        offset = int(json.loads(line)["msg_id"][-16:], 16)
        record = next(filter(None, (log.record_at(offset) for log in logs)), b"")
        assert record, f"{place}: the cluster itself lost the write at {offset}"
        yield offset, record
