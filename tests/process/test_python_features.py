"""Retries, dead letters, delays, timers, recalls and transactions of this project's client, all at
the same time, through a kill -9 of the master: what stock Java clients do in
`interop/test_java_features`, held to the same rules."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from batonmq.runtime.clock import wall_ms
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess
from tests.interop.features import LEVELS_MS, SETTINGS, Seen, check_commits, commands_of
from tests.interop.python_features import PythonFeatures

pytestmark = pytest.mark.process

NAME: Final = "Python"
LIMIT_S: Final = 90


def test_features_through_a_kill(tmp_path: Path) -> None:
    """What waited for a while, a try, a check or a recall when the master died goes on with the
    next; counts of tries do not fall, nothing is early, each commit is stored once."""
    topics = [f"{NAME}-a", f"{NAME}-b"]
    with (
        ClusterProcess(tmp_path, controllers=1, replicas=2, settings=SETTINGS) as cluster,
        PythonFeatures(cluster.name_servers, f"{NAME}-group", topics, reads_dead=True) as python,
    ):

        def seen() -> Seen:
            return Seen(list(python.lines), list(python.lines), failover=True)

        cluster.wait_in_sync(2)
        for command in commands_of(NAME):
            python.send(f"{command} 0")
        wait_for("dead letters", lambda: seen().dead, LIMIT_S)
        killed, killed_ms, at_kill = cluster.master(), wall_ms(), len(seen().acked())
        cluster.kill(killed)
        wait_for("acks", lambda: len(seen().acked()) >= at_kill + 400, LIMIT_S)
        python.stop()
        cluster.restart(killed)
        wait_for("every acknowledged message", lambda: not seen().missing(), LIMIT_S)
        wait_for("every check", lambda: not seen().unchecked(), LIMIT_S)
        # What was recalled, or is left open, can come no more once a later timer was due.
        sent = len(seen().acked())
        python.send(f"ms {max(LEVELS_MS)} {topics[0]} 1")
        wait_for("the last send", lambda: len(seen().acked()) > sent, LIMIT_S)
        wait_for("the last message", lambda: not seen().missing(), LIMIT_S)
        seen().check_all()
        seen().check_across(killed_ms)
        seen().check_before(killed_ms)
        check_commits(cluster.name_servers, topics[1])
