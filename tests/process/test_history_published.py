"""BATON_SYS_HISTORY holds what the controllers wrote down, whoever led them and the brokers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_process import ClusterProcess
from history_watch import Killer, published, told

pytestmark = pytest.mark.process


def test_the_topic_tells_what_the_files_hold_through_failovers(tmp_path: Path) -> None:
    with ClusterProcess(tmp_path) as cluster:
        killer = Killer(cluster)
        cluster.wait_in_sync(3)
        published(cluster)
        for _ in range(2):
            old = killer.master()
            killer.kill(old)
            killer.other_master(old)
            killer.revive(old)

            first = killer.leader()
            killer.kill(first)
            killer.other_leader(first)
            killer.revive(first)

        old, first = killer.master(), killer.leader()
        killer.kill(first)
        killer.kill(old)
        killer.other_leader(first)
        killer.other_master(old)
        killer.revive(first)
        killer.revive(old)
        cluster.wait_in_sync(3)

        messages = published(cluster)
        events = [json.loads(text) for text in told(messages).values()]
        # Without repeats the topic has the order of the log.
        order = [(each["raft_index"], each.get("part", 0)) for each in events]
        assert order == sorted(order)
        kinds = [each["kind"] for each in events]
        assert kinds.count("controller_leader_changed") >= 4
        assert kinds.count("elected") >= 4
        # Nobody wrote but the publisher, and that is not what a failover waits for.
        assert "opened" in kinds and "first_ack" not in kinds
