"""The terminal picture of a running cluster: roles, epochs, sets, log, lag, last events.

Drawn with rich, from the watcher's view and each broker's own HA status, once a second.
"""

import asyncio
import time
from collections import deque

from rich.console import Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batonmq.launcher.cluster import LocalCluster
from batonmq.launcher.events import ClusterEvent
from batonmq.launcher.layout import BrokerNode
from batonmq.protocol.errors import BatonError

DRAW_S = 1.0
_LINES_BESIDE = 4
"""Two headings, the last line, and one that stays free."""


class LiveView:
    """Takes the launcher's events and redraws; `attach` before the cluster starts."""

    def __init__(self) -> None:
        self._latest: deque[tuple[str, ClusterEvent]] = deque(maxlen=12)  # with the time of day
        self._cluster: LocalCluster | None = None
        self._progress: dict[str, int] = {}
        """Where the log of each broker ends, by address."""
        self._live = Live(auto_refresh=False)
        self._task: asyncio.Task[None] | None = None

    def attach(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._live.start()
        self._task = asyncio.create_task(self._draw_forever(), name="live-view")

    def report(self, event: ClusterEvent) -> None:
        self._latest.append((time.strftime("%H:%M:%S"), event))
        self._draw()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._live.stop()

    async def _draw_forever(self) -> None:
        while True:
            await self._ask()
            self._draw()
            await asyncio.sleep(DRAW_S)

    async def _ask(self) -> None:
        assert self._cluster is not None
        for node in self._cluster.layout.brokers:
            if not self._cluster.serves(node):
                self._progress.pop(node.address, None)
                continue
            try:
                info = await self._cluster.admin.brokers.runtime_info(node.address)
            except BatonError:
                # No figure rather than an old one: it would look as if the log stood still.
                self._progress.pop(node.address, None)
                continue
            self._progress[node.address] = int(info.get("commitLogMaxOffset", "0"))

    def _draw(self) -> None:
        if self._cluster is None:
            return
        above = [self._brokers(), self._name_servers()]
        taken = len(self._cluster.layout.nodes) + _LINES_BESIDE
        self._live.update(
            Group(*above, self._events(self._live.console.height - taken)), refresh=True
        )

    def _brokers(self) -> Table:
        assert self._cluster is not None
        table = _table("group", "id", "address", "pid", "role", "epoch", "set", "log", "lag")
        for node in self._cluster.layout.brokers:
            table.add_row(*self._broker_row(node))
        return table

    def _broker_row(self, node: BrokerNode) -> list[str]:
        assert self._cluster is not None
        view = self._cluster.view
        group = view.groups.get(node.group)
        state = view.states.get(node.address)
        pid = self._cluster.children.by_name[node.name].pid
        progress = self._progress.get(node.address)
        head = self._progress.get(group.master_address) if group else None
        role = state.role if state else "-"
        shown = f"[bold green]{role}[/]" if role == "MASTER" else role
        return [
            node.group,
            str(state.broker_id) if state else "-",
            node.address,
            str(pid) if pid else "[red]dead[/]",
            shown if pid else f"[dim]{role}[/]",
            str(group.master_epoch) if group else "-",
            "yes" if state and state.in_sync else "[yellow]no[/]",
            decimal(progress) if progress is not None else "-",
            decimal(max(0, head - progress)) if head is not None and progress is not None else "-",
        ]

    def _name_servers(self) -> Table:
        assert self._cluster is not None
        table = _table("name server", "controller", "pid")
        for node in self._cluster.layout.name_servers:
            pid = self._cluster.children.by_name[node.name].pid
            table.add_row(
                node.address,
                f"{node.controller_id} {node.controller_address}",
                str(pid) if pid else "[red]dead[/]",
            )
        return table

    def _events(self, lines: int) -> Text:
        """The newest that fit into so many lines: what is cut off must not be the news."""
        text, width = Text(), self._live.console.width
        shown: list[tuple[str, ClusterEvent]] = []
        for clock, event in reversed(self._latest):
            lines -= sum(
                1 + (len(clock) + 2 + len(part)) // width for part in event.text.split("\n")
            )
            if lines < 0:
                break
            shown.insert(0, (clock, event))
        for clock, event in shown:
            text.append(f"{clock}  ", style="dim")
            text.append(event.text + "\n", style="red" if event.bad else "")
        text.append("ctrl-C stops the cluster", style="dim")
        return text


def _table(*columns: str) -> Table:
    """Without borders: an address must be whole at 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        on_right = column in ("id", "pid", "epoch", "set", "log", "lag")
        table.add_column(column, justify="right" if on_right else "left", no_wrap=True)
    return table
