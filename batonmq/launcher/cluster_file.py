"""`cluster.json`: how outside scripts find the processes of a local cluster.

Removed at the start, written when the cluster is whole (every group has a master, a full set and a
registered route), and again when a process, a role or a set changes; always by rename, so no reader
sees half of it. Ids and addresses are strings, pids numbers. `conf/cluster.json` is written first:
the same document without pids and roles, for tools that ask what the cluster lacks to be whole.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batonmq.launcher.layout import CLUSTER_NAME, BrokerNode, Layout
from batonmq.runtime.durable_file import show_file


@dataclass(frozen=True, slots=True)
class BrokerState:
    """What the controller records about one replica, by the broker's address."""

    broker_id: int
    role: str  # "MASTER", "SLAVE"
    in_sync: bool


def cluster_document(
    layout: Layout,
    started_at_ms: int,
    pids: Mapping[str, int | None],
    states: Mapping[str, BrokerState],
) -> dict[str, object]:
    """The document's content. `pids` by node name, `states` by broker address."""
    tls = layout.client_tls
    secure = {"tls": {"trust": tls.trust_cert_path, "cert": tls.cert_path}} if tls else {}
    return secure | {
        "supervisorPid": os.getpid(),
        "startedAt": started_at_ms,
        "cluster": CLUSTER_NAME,
        "nameServers": [
            {
                "address": node.address,
                "pid": pids[node.name],
                "argv": node.argv,
                "config": str(node.config),
            }
            for node in layout.name_servers
        ],
        "controllers": [
            {
                "id": node.controller_id,
                "address": node.controller_address,
                "grpc": node.grpc_address,
                "pid": pids[node.name],
            }
            for node in layout.name_servers
        ],
        "brokers": [_broker(node, pids, states) for node in layout.brokers],
    }


def _broker(
    node: BrokerNode, pids: Mapping[str, int | None], states: Mapping[str, BrokerState]
) -> dict[str, object]:
    state = states.get(node.address)
    return {
        "cluster": CLUSTER_NAME,
        "name": node.group,
        "id": str(state.broker_id) if state else "",
        "role": state.role if state else "",
        "address": node.address,
        "haAddress": node.ha_address,
        "pid": pids[node.name],
        "argv": node.argv,
        "config": str(node.config),
        "dataDir": str(node.data_dir),
    }


def write_document(
    path: Path, document: Mapping[str, object], write: Callable[[Path, bytes], None] = show_file
) -> None:
    """Replaces the file in one step; `replace_file` as `write` makes it durable."""
    write(path, json.dumps(document, indent=2).encode() + b"\n")
