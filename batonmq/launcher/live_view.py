"""The terminal picture of a running cluster: roles, epochs, offsets, sets, lag, last events.

Drawn with rich, from the watcher's view and each broker's own HA status, once a second.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from batonmq.launcher.cluster import Cluster
from batonmq.launcher.events import Event, MemoryReporter
from batonmq.launcher.layout import BrokerNode, Layout
from batonmq.protocol.errors import BatonError

DRAW_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What a broker reports of its log; offsets in bytes."""

    max_offset: int
    confirm_offset: int


class LiveView(MemoryReporter):
    """Takes the launcher's events and redraws; `attach` before the cluster starts."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self._cluster: Cluster | None = None
        self._progress: dict[str, Progress] = {}
        self._live = Live(auto_refresh=False)
        self._task: asyncio.Task[None] | None = None

    def attach(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._live.start()
        self._task = asyncio.create_task(self._draw_forever(), name="live-view")

    def report(self, event: Event) -> None:
        super().report(event)
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
        for node in self._layout.brokers:
            if not self._cluster.serves(node):
                self._progress.pop(node.address, None)
                continue
            try:
                info = await self._cluster.admin.brokers.runtime_info(node.address)
            except BatonError:
                self._progress.pop(node.address, None)
                continue
            self._progress[node.address] = Progress(
                int(info.get("commitLogMaxOffset", "0")), int(info.get("confirmOffset", "0"))
            )

    def _draw(self) -> None:
        if self._cluster is None:
            return
        self._live.update(
            Group(self._brokers(), self._name_servers(), self._events()), refresh=True
        )

    def _brokers(self) -> Table:
        assert self._cluster is not None
        table = Table(title="brokers", title_justify="left", expand=False)
        for column in (
            "group",
            "id",
            "address",
            "pid",
            "role",
            "epoch",
            "set",
            "log",
            "confirmed",
            "lag",
        ):
            table.add_column(
                column, justify="left" if column in ("group", "address", "role") else "right"
            )
        for node in self._layout.brokers:
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
            f"{progress.max_offset:,}" if progress else "-",
            f"{progress.confirm_offset:,}" if progress else "-",
            f"{head.max_offset - progress.max_offset:,}" if head and progress else "-",
        ]

    def _name_servers(self) -> Table:
        assert self._cluster is not None
        table = Table(title="name servers and controllers", title_justify="left")
        for column in ("name server", "controller", "pid"):
            table.add_column(column)
        for node in self._layout.name_servers:
            pid = self._cluster.children.by_name[node.name].pid
            table.add_row(
                node.address,
                f"{node.controller_id} {node.controller_address}" if node.controller_id else "-",
                str(pid) if pid else "[red]dead[/]",
            )
        return table

    def _events(self) -> Text:
        text = Text()
        for clock, event in self.lines:
            text.append(f"{clock}  ", style="dim")
            text.append(event.text + "\n", style="red" if event.bad else "")
        text.append("ctrl-C stops the cluster", style="dim")
        return text
