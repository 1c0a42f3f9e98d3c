"""Gathers evidence: from the folders of a cluster or of single stores, and from what answers.

Every source has its part of the time, and one that is absent is noted, never an error.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from batonmq.history.event import HistoryEvent
from batonmq.history.fold import stories
from batonmq.history.merge import in_order, merged
from batonmq.history.reader import read_histories
from batonmq.launcher.current import UNFINISHED, serves
from batonmq.mqctl.verdict.evidence import (
    BROKER,
    NAME_SERVER,
    AbsentSource,
    ConsumersEvidence,
    Evidence,
    GroupEvidence,
    NodeEvidence,
    NodeKind,
    ProcessFacts,
    StoreEvidence,
)
from batonmq.mqctl.verdict.files import (
    controller_facts,
    json_of,
    log_tail,
    process_facts,
    read_derived,
    read_log,
    store_facts,
)
from batonmq.protocol.topic_name import is_system_group
from batonmq.runtime.clock import wall_ms


def from_folders(folders: Iterable[Path], until: Callable[[], bool]) -> Evidence:
    """The evidence of data folders of `batonmq up`, of brokers, of controllers, in any mix."""
    nodes: list[NodeEvidence] = []
    absent: list[AbsentSource] = []
    cluster = start = ""
    is_orphaned = False
    for folder in (each.absolute() for each in folders):
        # The second one is there before the cluster is whole.
        document = _document(folder / "cluster.json") or _document(folder / "conf/cluster.json")
        if document is not None:
            found, supervised = _nodes_of(folder, document)
            nodes += found
            cluster = str(folder)
            if not supervised and not any(n.has_process for n in found):
                start = f"batonmq up --data {folder}"
                is_orphaned = os.path.exists(folder / "run" / UNFINISHED)
        elif any(os.path.exists(folder / name) for name in ("commitlog", "brokerIdentity")):
            store = store_facts(folder)
            node = _node(folder, str(folder), BROKER, "")
            nodes.append(replace(node, group=store.group, store=store))
        elif os.path.exists(folder / "raft") or _histories(folder):
            name = next((p.name[8:-6] for p in _histories(folder)), folder.name)
            facts = controller_facts(folder, name, ())
            nodes.append(
                NodeEvidence(str(folder), NAME_SERVER, "", folder=str(folder), controller=facts)
            )
        else:
            absent.append(AbsentSource(str(folder), "neither a cluster nor a store is in it"))
    events, problems = _history(nodes)
    absent += [AbsentSource("history", problem) for problem in problems]
    nodes = _with_logs(nodes, absent, until)
    return Evidence(
        wall_ms(),
        cluster,
        start,
        is_orphaned,
        nodes=tuple(nodes),
        groups=groups_of(events, _all_are_read(nodes, events)),
        stories=stories(events),
        consumers=_consumers(nodes),
        absent=tuple(absent),
    )


def _histories(folder: Path) -> list[Path]:
    with suppress(OSError):  # a folder that the disk cannot read costs only what is in it
        return sorted(folder.glob("history-*.jsonl"))
    return []


def _document(path: Path) -> dict[str, Any] | None:
    document = json_of(path)
    return document if isinstance(document, dict) and "brokers" in document else None


def _nodes_of(folder: Path, document: dict[str, Any]) -> tuple[list[NodeEvidence], bool]:
    """The processes of a local cluster, and whether `batonmq up` watches them. A copied folder has
    its files at another place than its documents say."""
    supervised = Path(f"/proc/{document.get('supervisorPid', 0)}").exists()
    controllers = {
        str(each.get("address", "")).rpartition(":")[2]: str(each.get("id", ""))
        for each in document.get("controllers", ())
    }
    ids = tuple(sorted(filter(None, controllers.values())))
    nodes = []
    for entry in document.get("nameServers", ()):
        config = folder / "conf" / Path(str(entry.get("config", ""))).name
        name = config.stem
        address = str(entry.get("address", ""))
        port = address.rpartition(":")[2]
        node_id = controllers.get(str(int(port) + 2), "") if port.isdigit() else ""
        node = _local_node(folder, name, NAME_SERVER, address, supervised)
        if node_id:
            facts = controller_facts(folder / name / "controller", node_id, ids)
            node = replace(node, controller=facts)
        nodes.append(node)
    for entry in document.get("brokers", ()):
        name = Path(str(entry.get("config", ""))).stem
        node = _local_node(folder, name, BROKER, str(entry.get("address", "")), supervised)
        store = store_facts(folder / name)
        nodes.append(replace(node, group=str(entry.get("name", "")), store=store))
    return nodes, supervised


def _local_node(
    folder: Path, name: str, kind: NodeKind, address: str, supervised: bool
) -> NodeEvidence:
    """A process of the cluster in `folder`."""
    pid_file = folder / "run" / f"{name}.pid"
    pid = serves(pid_file)
    what = "broker" if kind == BROKER else "namesrv"
    start = f"batonmq {what} -c {folder}/conf/{name}.yaml --pid-file {pid_file}"
    return replace(
        _node(folder / name, name, kind, address),
        # While it runs its folder is locked, and another one could not start.
        start=f"mqctl up restart {address}" if pid and supervised else start,
        process=process_facts(pid) if pid else ProcessFacts(),
    )


def _node(folder: Path, name: str, kind: NodeKind, address: str) -> NodeEvidence:
    """A node with the end of its log and the state of its disk."""
    free, size, read_only = _disk(folder)
    return NodeEvidence(
        name,
        kind,
        address,
        folder=str(folder),
        log=log_tail(folder / "process.log"),
        free_bytes=free,
        disk_bytes=size,
        read_only=read_only,
    )


def _disk(folder: Path) -> tuple[int, int, bool]:
    """(free bytes, all bytes, whether it is read-only) of a folder's file system."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return -1, 0, False
    return (
        space.f_bavail * space.f_frsize,
        space.f_blocks * space.f_frsize,
        bool(space.f_flag & os.ST_RDONLY),
    )


def _history(nodes: Iterable[NodeEvidence]) -> tuple[Sequence[HistoryEvent], list[str]]:
    folders = [Path(n.controller.folder) for n in nodes if n.controller is not None]
    folders = [folder for folder in folders if _histories(folder)]
    if not folders:
        return (), ["no history of the controllers is here"]
    try:
        sources, problems = read_histories(folders)
    except OSError as error:
        return (), [f"cannot be read: {error}"]
    found = merged(sources)
    return found.events, [*problems, *found.problems]


def _all_are_read(nodes: Iterable[NodeEvidence], events: Sequence[HistoryEvent]) -> bool:
    """Whether nothing newer than `events` can be recorded: the last leader's own history is here.
    It writes an event before it answers the broker that asked."""
    leaders = [e.node for e in in_order(events) if e.kind == "controller_leader_changed"]
    held = {
        n.controller.node_id
        for n in nodes
        if n.controller is not None
        and os.path.exists(f"{n.controller.folder}/history-{n.controller.node_id}.jsonl")
    }
    return bool(leaders) and leaders[-1] in held


def groups_of(events: Iterable[HistoryEvent], is_current: bool) -> tuple[GroupEvidence, ...]:
    """The newest record of each group in the controllers' history."""
    groups: dict[str, GroupEvidence] = {}
    for event in in_order(events):
        name, detail = event.broker_name, event.detail
        if not name:
            continue
        group = groups.get(name, GroupEvidence(name, is_current=is_current, where="history"))
        confirmed = max(group.confirmed, event.confirm_offset, detail.confirm_offset)
        group = replace(group, confirmed=confirmed)
        if event.kind == "broker_registered":
            group = replace(
                group,
                replicas={**group.replicas, event.broker_id: event.address},
                lives={**group.lives, event.broker_id: event.incarnation},
            )
        elif event.kind == "elected":
            group = replace(
                group,
                master=event.broker_id,
                last_master=event.broker_id,
                master_epoch=event.master_epoch,
                members=event.sync_state_set,
                # The winner may lack what was confirmed before.
                confirmed=-1 if event.unclean else group.confirmed,
            )
        elif event.kind == "election_failed":
            group = replace(group, master=0, master_epoch=event.master_epoch)
        elif event.kind == "set_altered" and event.sync_state_set:
            group = replace(group, members=event.sync_state_set)
        elif event.kind == "broker_cleaned":
            known = {i: a for i, a in group.replicas.items() if i != event.broker_id}
            group = replace(group, replicas=known)
        groups[name] = group
    return tuple(groups[name] for name in sorted(groups))


def _with_logs(
    nodes: Sequence[NodeEvidence], absent: list[AbsentSource], until: Callable[[], bool]
) -> list[NodeEvidence]:
    """The nodes with their logs read, of all in turn; only those whose broker does not run, since
    the others check what they serve."""
    stores = {at: node.store for at, node in enumerate(nodes) if node.store is not None}
    unread = {at: store for at, store in stores.items() if not nodes[at].has_process}
    reading = {at: read_log(store, until) for at, store in unread.items()}
    whys: dict[int, str] = {}
    while reading:
        # A part of each log in turn: one that is large must not take the time of the others.
        for at, reader in list(reading.items()):
            try:
                stores[at] = next(reader)
                continue
            except StopIteration:
                pass
            except OSError as error:
                whys[at] = f"cannot be read: {error.strerror}"
                if stores[at] is unread[at]:  # its folder: where it ends is not known
                    stores[at] = replace(unread[at], read_from=max(unread[at].known_end, 1))
            del reading[at]
    known = [*nodes]
    for at, store in stores.items():
        if left := store.read_from - store.begin:
            why = f"its oldest {left >> 20} MiB were not read in time: mqctl verifyStore"
            absent.append(AbsentSource(f"log of {nodes[at].name}", whys.get(at, why)))
        known[at] = replace(nodes[at], store=read_derived(store, until))
    return known


def _consumers(nodes: Iterable[NodeEvidence]) -> tuple[ConsumersEvidence, ...]:
    """What consumers have, read from the store with the longest log of each broker group."""
    best: dict[str, StoreEvidence] = {}
    for node in nodes:
        store = node.store
        # A longer log knows more messages, so its lags are the newest.
        if store is not None and store.end >= best.get(node.group, store).end:
            best[node.group] = store
    found: dict[tuple[str, str], int] = {}
    for store in best.values():
        for key, lag in store.lags.items():
            if not is_system_group(key[0]):
                found[key] = found.get(key, 0) + lag
    return tuple(ConsumersEvidence(g, topic, lag) for (g, topic), lag in sorted(found.items()))
