"""BATON_SYS_HISTORY holds what the controllers wrote down, whoever led them and the brokers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.cluster.up import ClusterProcess
from tests.process.history_watch import Leaders, first_of_each, published

pytestmark = pytest.mark.process


def test_the_topic_tells_what_the_files_hold_through_failovers(tmp_path: Path) -> None:
    with ClusterProcess(tmp_path) as cluster:
        leaders = Leaders(cluster)
        cluster.wait_in_sync(3)
        published(cluster)
        for _ in range(2):
            old = leaders.master()
            cluster.kill(old)
            leaders.other_master(old)
            cluster.restart(old)

            first = leaders.leader()
            cluster.kill(first)
            leaders.other_leader(first)
            cluster.restart(first)

        old, first = leaders.master(), leaders.leader()
        cluster.kill(first)
        cluster.kill(old)
        leaders.other_leader(first)
        leaders.other_master(old)
        cluster.restart(first)
        cluster.restart(old)
        cluster.wait_in_sync(3)

        messages = published(cluster)
        events = [json.loads(text) for text in first_of_each(messages).values()]
        # Without repeats the topic has the order of the log.
        order = [(each["raft_index"], each.get("part", 0)) for each in events]
        assert order == sorted(order)
        kinds = [each["kind"] for each in events]
        assert kinds.count("controller_leader_changed") >= 4
        assert kinds.count("elected") >= 4
        # Nobody wrote but the publisher, and that is not what a failover waits for.
        assert "opened" in kinds and "first_ack" not in kinds
