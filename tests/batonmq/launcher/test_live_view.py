"""The picture that `batonmq up` draws in a terminal."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import rich
from rich.console import Console
from waiting import until

from batonmq.launcher import live_view
from batonmq.launcher.cluster import LocalCluster
from batonmq.launcher.cluster_file import BrokerState
from batonmq.launcher.events import ClusterEvent
from batonmq.launcher.layout import plan
from batonmq.launcher.live_view import LiveView
from batonmq.launcher.watch import ClusterSnapshot, GroupView
from batonmq.protocol.errors import BatonError

PICTURE = """\
group     id  address           pid  role    epoch  set     log      lag
broker-a   1  127.0.0.1:10911    20  MASTER      7  yes  3.0 MB  0 bytes
broker-a   2  127.0.0.1:11011    20  SLAVE       7  yes  2.0 MB   1.0 MB
broker-a   3  127.0.0.1:11111    20  SLAVE       7   no       -        -
broker-a   -  127.0.0.1:11211  dead  -           7   no       -        -
name server     controller         pid
127.0.0.1:9876  n0 127.0.0.1:9878   20
12:00:00  event 4
12:00:00  event 5
12:00:00  event 6
12:00:00  event 7
second line
12:00:00  event 8
ctrl-C stops the cluster
"""


async def test_it_shows_each_process_and_the_newest_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    room_for_six_events = Console(file=screen, width=80, height=15)
    monkeypatch.setattr(rich, "_console", room_for_six_events)
    monkeypatch.setattr(live_view, "DRAW_S", 0)
    layout = plan(tmp_path, controllers=1, replicas=4)
    first, second, silent, dead = layout.brokers
    states = {
        first.address: BrokerState(1, "MASTER", True),
        second.address: BrokerState(2, "SLAVE", True),
        silent.address: BrokerState(3, "SLAVE", False),
    }
    asked: list[str] = []

    async def runtime_info(address: str) -> dict[str, str]:
        asked.append(address)
        if address == silent.address and asked.count(address) == 2:
            raise BatonError("no answer")
        return {"commitLogMaxOffset": "3000000" if address == first.address else "2000000"}

    def child(name: str) -> SimpleNamespace:
        return SimpleNamespace(pid=None if name == dead.name else 20)

    cluster = SimpleNamespace(
        layout=layout,
        view=ClusterSnapshot({first.group: GroupView(first.address, 7, states)}),
        children=SimpleNamespace(by_name={node.name: child(node.name) for node in layout.nodes}),
        serves=lambda node: node is not dead or dead.address not in asked,
        admin=SimpleNamespace(brokers=SimpleNamespace(runtime_info=runtime_info)),
    )
    view = LiveView()
    view.attach(cast(LocalCluster, cluster))
    await until(lambda: asked.count(silent.address) == 2)  # no figure is better than an old one
    for number in range(9):
        view.report(ClusterEvent("role", f"event {number}" + "\nsecond line" * (number == 7)))
    await view.close()
    shown = re.sub(r"\d\d:\d\d:\d\d", "12:00:00", screen.getvalue())
    assert [line.rstrip() for line in shown.splitlines()] == PICTURE.splitlines()
