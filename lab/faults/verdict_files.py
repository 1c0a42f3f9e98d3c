"""Incidents that are done to the folders of a cluster that does not run. Each gives the incident
and the node that a verdict must name first."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from batonmq.protocol.layout import CHECKPOINT, CHECKPOINT_OURS_AT, FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.records.codec import scan_record
from batonmq.protocol.records.faults import CorruptRecord
from batonmq.runtime.durable_file import BACKUP_SUFFIX
from lab.cluster.cluster import GROUP
from lab.cluster.probe import TOPIC
from lab.cluster.processes import wait_for
from lab.cluster.stores import put_back, wipe

Expected = tuple[str, str]
STARTS: Final = 5
START_S: Final = 20.0
STARTED: Final = " server_started "


@dataclass(slots=True)
class Copy:
    """A copy of a base's data folder. `base`: the folder of the base."""

    data: Path
    base: Path
    rng: random.Random

    def broker(self) -> Path:
        return self.rng.choice(sorted(self.data.glob("broker-*")))

    def controller(self) -> Path:
        return self.rng.choice(sorted(self.data.glob("namesrv-*")))

    def records(self, store: Path) -> list[tuple[Path, int, int]]:
        """(file, position, size) of each record of a log."""
        found = []
        for path in sorted((store / "commitlog").glob("0*")):
            data, at = path.read_bytes(), 0
            while at < len(data):
                try:
                    head = scan_record(data, at)
                except CorruptRecord:
                    break
                if head is None or head.kind == "blank":
                    break
                found.append((path, at, head.size))
                at += head.size
        return found

    def flip(self, path: Path, position: int, size: int) -> None:
        with path.open("r+b") as file:
            file.seek(position)
            old = file.read(size)
            file.seek(position)
            file.write(bytes(each ^ 0x5A for each in old))

    def flip_any(self, path: Path) -> None:
        self.flip(path, self.rng.randrange(max(1, path.stat().st_size - 4)), 4)

    def start(self, name: str, *, kill: bool = False) -> None:
        """Starts one process of the copy, and waits for its end, or kills it once it has begun."""
        config = self.data / "conf" / f"{name}.yaml"
        what = "broker" if name.startswith("broker") else "namesrv"
        path = self.data / name / "process.log"
        begun = path.read_text().count(STARTED)
        with path.open("ab") as log:
            child = subprocess.Popen(
                [*PYTHON, f"batonmq.{what}.main", "-c", str(config)], stdout=log, stderr=log
            )
        try:
            if kill:
                wait_for("its start", lambda: path.read_text().count(STARTED) > begun)
            else:
                child.wait(START_S)
        finally:
            child.kill()
            child.wait()

    def settings(self, name: str) -> dict[str, dict[str, object]]:
        """The node's settings, with the folders of this copy."""
        path = self.data / "conf" / f"{name}.yaml"
        found: dict[str, dict[str, object]] = yaml.safe_load(
            path.read_text().replace(str(self.base.parent / "cluster" / "data"), str(self.data))
        )
        return found

    def write_settings(self, name: str, settings: dict[str, dict[str, object]]) -> None:
        (self.data / "conf" / f"{name}.yaml").write_text(yaml.safe_dump(settings))


PYTHON: Final = (sys.executable, "-P", "-m")


def log_middle(copy: Copy) -> Expected:
    store = copy.broker()
    path, at, size = copy.rng.choice(copy.records(store)[5:-5])
    copy.flip(path, at + copy.rng.randrange(size - 8), 8)
    return "log-middle-damaged", store.name


def log_tail(copy: Copy) -> Expected:
    store = copy.broker()
    path, at, size = copy.records(store)[-1]
    copy.flip(path, at + copy.rng.randrange(20, size - 8), 4)
    return "log-tail-damaged", store.name


def log_tail_missing(copy: Copy) -> Expected:
    """A cut above what the store's other files have recorded would be no incident: the end of a
    killed process's log looks like that."""
    store = copy.broker()
    end = recorded_end(store)
    records = [(path, at) for path, at, _ in copy.records(store) if int(path.name) + at < end]
    path, at = records[-copy.rng.randrange(50, 100)]
    for each in sorted((store / "commitlog").glob("0*")):
        if each.name > path.name:
            each.unlink()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(path.stat().st_size - at))
    return "log-tail-missing", store.name


def recorded_end(store: Path) -> int:
    """Up to where the consume queues name records. They are written at times, not at each one."""
    ends = [0]
    for file in store.glob("consumequeue/*/*/0*"):
        units = file.read_bytes()
        units = units[: len(units) // UNIT_SIZE * UNIT_SIZE]
        known = UNIT.struct.iter_unpack(units)
        ends += (offset + size for offset, size, _ in known if 0 < size < FILLER_SIZE)
    return max(ends)


def log_part(copy: Copy) -> Expected:
    store = copy.broker()
    segments = sorted((store / "commitlog").glob("0*"))
    copy.rng.choice(segments[1:-2]).unlink()  # the last one may be made ahead
    return "log-part-damaged", store.name


def same_damage_everywhere(copy: Copy) -> Expected:
    """No replica has that record any more."""
    stores = sorted(copy.data.glob("broker-*"))
    place = copy.rng.choice(copy.records(stores[0])[5:200])
    for store in stores:
        copy.flip(store / "commitlog" / place[0].name, place[1] + 30, 8)
    return "log-middle-damaged", "*"


def consume_queue(copy: Copy) -> Expected:
    store = copy.broker()
    queues = [f for f in sorted(store.glob("consumequeue/*/*/0*")) if any(f.read_bytes()[:200])]
    copy.flip(copy.rng.choice(queues), 20 * copy.rng.randrange(1, 5), 8)
    return "consume-queue-damaged", store.name


def index(copy: Copy) -> Expected:
    store = copy.broker()
    copy.flip(copy.rng.choice(sorted(store.glob("index/*"))), 0, 40)
    return "index-damaged", store.name


def _whole_file(name: str, incident: str, *, backup: bool) -> Callable[[Copy], Expected]:
    def damage(copy: Copy) -> Expected:
        store = copy.broker()
        for path in (store / name, store / f"{name}{BACKUP_SUFFIX}"):
            if path == store / name or (backup and path.exists()):
                copy.flip(path, 0, max(8, path.stat().st_size // 2))
        return incident, store.name

    return damage


def epoch_file_copy(copy: Copy) -> Expected:
    store = copy.broker()
    copy.flip_any(store / "epochFileCheckpoint")
    return "epoch-file-copy-damaged", store.name


def checkpoint(copy: Copy) -> Expected:
    store = copy.broker()
    used = [*range(CHECKPOINT.size - 3), *range(CHECKPOINT_OURS_AT, CHECKPOINT_OURS_AT + 16)]
    copy.flip(store / "checkpoint", copy.rng.choice(used), 3)
    return "checkpoint-damaged", store.name


def topic_missing(copy: Copy) -> Expected:
    """Its messages are there, and the tables of all replicas lost it."""
    found = []
    for path in copy.data.glob("broker-*/config/topics.json*"):
        table = json.loads(path.read_text())
        found.append(table["topicConfigTable"].pop(TOPIC, None))  # a copy may be older
        path.write_text(json.dumps(table))
    assert any(found), f"no table has {TOPIC}"
    return "topic-missing", TOPIC


def raft_journal(copy: Copy) -> Expected:
    node = copy.controller()
    path = node / "controller" / "raft" / "journal"
    copy.flip(path, copy.rng.randrange(16, path.stat().st_size // 2), 4)
    return "raft-journal-damaged", node.name


def raft_vote(copy: Copy) -> Expected:
    node = copy.controller()
    copy.flip_any(node / "controller" / "raft" / "meta")
    return "raft-vote-damaged", node.name


def controller_lost(copy: Copy) -> Expected:
    node = copy.controller()
    shutil.rmtree(node / "controller")
    return "controller-lost", node.name


def members_changed(copy: Copy) -> Expected:
    node = copy.controller()
    path = node / "controller" / "raft" / "members"
    path.write_text(path.read_text().replace('"n1"', '"n7"'))
    return "members-changed", node.name


def store_lost(copy: Copy) -> Expected:
    store = copy.broker()
    if copy.rng.random() < 0.5:
        wipe(store)
    else:
        shutil.rmtree(store)
    return "store-lost", store.name


def all_stores_lost(copy: Copy) -> Expected:
    stores = sorted(copy.data.glob("broker-*"))
    for store in stores:
        wipe(store)
    return "store-lost", "*"


def store_old(copy: Copy) -> Expected:
    backup = copy.base / "backup"
    store = copy.data / f"broker-{(backup / 'index-of').read_text()}"
    put_back(store, backup)
    return "store-old", store.name


def foreign_group(copy: Copy) -> Expected:
    store = copy.broker()
    path = store / "brokerIdentity"
    path.write_text(path.read_text().replace(GROUP, "broker-b"))
    return "foreign-group", store.name


def foreign_lineage(copy: Copy) -> Expected:
    store = copy.broker()
    for name in ("lineage", "log_id"):
        (store / "commitlog" / ".baton" / name).write_text(f"{copy.rng.getrandbits(128):032x}")
    return "foreign-lineage", store.name


def power_lost(copy: Copy) -> Expected:
    """As the next start finds it after the host lost power."""
    store = copy.broker()
    (store / "abort").write_text("7\n00000000-0000-0000-0000-000000000000\ncached\n")
    return "power-lost", store.name


def config_wrong(copy: Copy) -> Expected:
    name = copy.broker().name
    settings = copy.settings(name)
    section, key = copy.rng.choice([("store", "flushDiskTyp"), ("broker", "listenPrt")])
    settings[section][key] = "SYNC_FLUSH"
    copy.write_settings(name, settings)
    copy.start(name)
    return "config-wrong", name


def port_taken(copy: Copy) -> Expected:
    name = copy.broker().name
    settings = copy.settings(name)
    with contextlib.closing(socket.socket()) as taken:
        taken.bind((str(settings["broker"]["brokerIP1"]), 0))
        taken.listen()
        settings["broker"]["listenPort"] = taken.getsockname()[1]
        settings["metrics"] = {}
        copy.write_settings(name, settings)
        copy.start(name)
    return "port-taken", name


def crash_loop(copy: Copy) -> Expected:
    name = copy.broker().name
    copy.write_settings(name, copy.settings(name))
    for _ in range(STARTS):
        copy.start(name, kill=True)
    return "crash-loop", name


def nothing(copy: Copy) -> Expected:
    is_stopped = copy.base.name == "base-stopped"
    return ("cluster-stopped" if is_stopped else "cluster-killed"), copy.data.name


FILE_INCIDENTS: Final[dict[str, Callable[[Copy], Expected]]] = {
    "log-middle": log_middle,
    "log-tail": log_tail,
    "log-tail-missing": log_tail_missing,
    "log-part": log_part,
    "same-damage-everywhere": same_damage_everywhere,
    "consume-queue": consume_queue,
    "index": index,
    "checkpoint": checkpoint,
    "epoch-file": _whole_file("epochFileCheckpoint", "epoch-file-damaged", backup=True),
    "epoch-file-copy": epoch_file_copy,
    "role-file": _whole_file("masterEpoch", "role-file-damaged", backup=False),
    "identity-file": _whole_file("brokerIdentity", "identity-file-damaged", backup=False),
    "tables": _whole_file("config/topics.json", "tables-damaged", backup=True),
    "queue-positions": _whole_file("queuePositions", "queue-positions-damaged", backup=False),
    "topic-missing": topic_missing,
    "raft-journal": raft_journal,
    "raft-vote": raft_vote,
    "controller-lost": controller_lost,
    "members-changed": members_changed,
    "store-lost": store_lost,
    "all-stores-lost": all_stores_lost,
    "store-old": store_old,
    "foreign-group": foreign_group,
    "foreign-lineage": foreign_lineage,
    "power-lost": power_lost,
    "config-wrong": config_wrong,
    "port-taken": port_taken,
    "crash-loop": crash_loop,
    "nothing": nothing,
}
