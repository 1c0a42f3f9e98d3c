"""The history as it was written down, and who leads."""

from __future__ import annotations

import json
from typing import Any

from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess

Name = tuple[str, int, int]


def in_files(cluster: ClusterProcess) -> dict[Name, str]:
    """Every event that any controller wrote down, as its line."""
    found: dict[Name, str] = {}
    for path in cluster.data_dir.glob("namesrv-*/controller/history-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                name = (event["log"], event["raft_index"], event.get("part", 0))
                assert found.setdefault(name, line[:-1]) == line[:-1], path
    return found


class Leaders:
    """Who leads, by what the controllers record, and who leads after it was killed."""

    def __init__(self, cluster: ClusterProcess) -> None:
        self.cluster = cluster

    def master(self) -> dict[str, Any]:
        address = self.cluster.wait_in_sync(3)["masterAddress"]
        return next(each for each in self.cluster.brokers if each["address"] == address)

    def leader(self) -> dict[str, Any]:
        """The name server whose controller leads by the newest event."""
        events = (json.loads(line) for line in in_files(self.cluster).values())
        changes = [each for each in events if each["kind"] == "controller_leader_changed"]
        newest = max(changes, key=lambda each: each["controller_epoch"])
        servers = self.cluster.document["nameServers"]
        return servers[int(newest["node"].removeprefix("n"))]

    def other_leader(self, before: dict[str, Any]) -> None:
        wait_for("another controller", lambda: self.leader()["address"] != before["address"])

    def other_master(self, before: dict[str, Any]) -> None:
        def elected() -> bool:
            state = self.cluster.group_state()
            return bool(state) and state.get("masterAddress") not in ("", None, before["address"])

        wait_for("another master", elected)
