"""`batonmq up`: a local cluster in the foreground, and the loop that watches over it.

`Cluster` is what `up` and `demo` share: it starts the processes, looks at the cluster twice a
second, keeps `cluster.json` true, and reports what changes. It lives on when a process dies, but
not when those end by themselves without which there is no cluster.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

import uvloop

from batonmq.admin import Admin
from batonmq.controller_admin import ControllerAdmin
from batonmq.launcher.children import ChildChanged, Children, tail_of_log
from batonmq.launcher.cluster_file import cluster_document, write_document
from batonmq.launcher.current import announce, withdraw
from batonmq.launcher.events import Event, JsonReporter, LineReporter, Reporter
from batonmq.launcher.layout import BrokerNode, Layout, write_configs
from batonmq.launcher.ports import StartError, check_folder, check_ports, lock_folder
from batonmq.launcher.watch import ClusterView, look

LOOK_STARTING_S = 0.05
LOOK_S = 0.5


class Cluster:
    """A local cluster of this process's children. Use `start`, then `stop`, in one event loop."""

    def __init__(self, layout: Layout, reporter: Reporter, *, respawn: bool = False) -> None:
        self.layout = layout
        self.view = ClusterView()
        self.whole = False
        self.announced = False
        """Whether `~/.batonmq/current` shall name this cluster while it runs."""
        self._reporter = reporter
        self.children = Children(layout.nodes, self._child_changed)
        self.children.respawn = respawn
        self._started_at_ms = 0
        self._written: dict[str, object] | None = None
        self._admin: Admin | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        self._lock: int | None = None
        self._gave_up: set[str] = set()
        self.hopeless: asyncio.Future[str] | None = None
        """Done, with the reason, when `gave_up` says so."""
        self.on_view: Callable[[ClusterView], None] = lambda view: None

    async def start(self) -> None:
        """Starts every process. Raises StartError for what keeps the cluster from starting."""
        check_folder(self.layout)
        self._lock = lock_folder(self.layout)
        check_ports(self.layout)
        self._started_at_ms = int(time.time() * 1000)
        self.layout.cluster_file.unlink(missing_ok=True)
        nobody = dict.fromkeys(self.children.by_name)
        planned = cluster_document(self.layout, self._started_at_ms, nobody, {})
        try:
            write_configs(self.layout)
            write_document(self.layout.planned_cluster_file, planned)
        except OSError as exc:
            raise StartError(f"--data {self.layout.data_dir}: {exc}") from exc
        self._admin = Admin(self.layout.name_server_addresses)
        await self._admin.start()
        self.hopeless = asyncio.get_running_loop().create_future()
        await self.children.start_all()
        self._watcher = asyncio.create_task(self._watch(), name="watch-cluster")

    async def wait_whole(self, seconds: float) -> None:
        """Returns when the cluster is whole. Raises StartError that says what it lacks."""
        deadline = time.monotonic() + seconds
        while not self.whole:
            if time.monotonic() > deadline:
                raise StartError(
                    f"the cluster is not whole after {seconds:.0f} s:"
                    f" {self.view.missing(self.layout)}"
                )
            for child in self.children.by_name.values():
                if child.pid is None and child.process is not None:
                    raise StartError(
                        f"{child.node.name} ended at once; the end of {child.log_path}:\n"
                        + tail_of_log(child)
                    )
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Stops all processes cleanly and at once.

        The controllers are told first: they decide nothing from then on, so no good-bye of a
        broker becomes the election of one that is about to stop as well, and the sets that are
        recorded stay full for the next start.
        """
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self.announced and self._written is not None:
            withdraw(self.layout.cluster_file)
        await self.children.stop_all([[node.name for node in self.layout.nodes]])
        if self._admin is not None:
            await self._admin.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def controller(self) -> ControllerAdmin:
        """Calls to the controllers of this cluster, led to the leader."""
        return self.admin.controller([n.controller_address for n in self.layout.controllers])

    @property
    def admin(self) -> Admin:
        assert self._admin is not None, "the cluster is not started"
        return self._admin

    def broker_at(self, address: str) -> BrokerNode:
        """The broker process behind an address. Raises KeyError for an unknown one."""
        for node in self.layout.brokers:
            if node.address == address:
                return node
        raise KeyError(address)

    async def _watch(self) -> None:
        while True:
            self._look_now.clear()
            before, self.view = self.view, await look(self.admin, self.layout, self.view)
            self._tell(before, self.view)
            self.on_view(self.view)
            if not self.whole and self.view.is_whole(self.layout):
                self.whole = True
                took = int(time.time() * 1000) - self._started_at_ms
                self._reporter.report(
                    Event("cluster_ready", f"the cluster is whole after {took} ms", {"ms": took})
                )
            self._write()
            try:
                async with asyncio.timeout(LOOK_S if self.whole else LOOK_STARTING_S):
                    await self._look_now.wait()
            except TimeoutError:
                pass

    def _child_changed(self, change: ChildChanged) -> None:
        name = change.node.name
        died = change.pid is None and not self.children.stopping
        fields: dict[str, object] = {"name": name, "pid": change.pid, "how": change.how}
        if change.pid is not None:
            text = f"{name} {change.how} (pid {change.pid})"
            kind = "process_started"
        else:
            text, kind = f"{name} ended: {change.how}", "process_ended"
            if died and change.how.startswith("exit"):
                text += "\n" + tail_of_log(self.children.by_name[name])
        self._reporter.report(Event(kind, text, fields, bad=died))
        failed = change.how.startswith("exit ") and change.how != "exit 0"
        if died and failed and not self.children.respawn:
            self._gave_up.add(name)
        else:
            self._gave_up.discard(name)
        why = gave_up(self.layout, self._gave_up, was_whole=self.whole)
        if why and self.hopeless is not None and not self.hopeless.done():
            self.hopeless.set_result(why)
        self._write()
        self._look_now.set()

    def _tell(self, before: ClusterView, after: ClusterView) -> None:
        for name, group in after.groups.items():
            old = before.groups.get(name)
            if old is None or old.master_address != group.master_address:
                self._reporter.report(
                    Event(
                        "master_changed",
                        f"{name}: master is {group.master_address or 'nobody'}"
                        f" (epoch {group.master_epoch})",
                        {
                            "group": name,
                            "master": group.master_address,
                            "masterEpoch": group.master_epoch,
                        },
                        bad=not group.master_address,
                    )
                )
            if old is None or old.in_sync != group.in_sync:
                self._reporter.report(
                    Event(
                        "set_changed",
                        f"{name}: {group.in_sync} of {len(group.replicas)} replicas in sync",
                        {
                            "group": name,
                            "inSync": group.in_sync,
                            "replicas": len(group.replicas),
                        },
                    )
                )

    def _write(self) -> None:
        if not self.whole:
            return
        pids = {name: child.pid for name, child in self.children.by_name.items()}
        document = cluster_document(self.layout, self._started_at_ms, pids, self.view.states)
        if document != self._written:
            write_document(self.layout.cluster_file, document)
            if self.announced and self._written is None:
                announce(self.layout.cluster_file)
            self._written = document


def gave_up(layout: Layout, ended: set[str], *, was_whole: bool) -> str:
    """Why there will be no cluster any more, empty while there may be one.

    `ended`: the processes that ended by themselves, as over a wrong setting; what was killed may be
    started again by hand. Until it was whole once, all brokers or all name servers are enough.
    """
    names = {node.name for node in layout.nodes}
    if names <= ended:
        return "all processes have ended by themselves"
    servers = {node.name for node in layout.name_servers}
    for what, some in (("name servers", servers), ("brokers", names - servers)):
        if some <= ended and not was_whole:
            return f"all {what} have ended by themselves before the cluster was whole"
    return ""


def run_up(layout: Layout, *, respawn: bool, as_json: bool) -> int:
    """Runs the cluster until SIGTERM or ctrl-C; the exit code. Raises StartError."""
    return uvloop.run(_up(layout, respawn=respawn, as_json=as_json))


async def _up(layout: Layout, *, respawn: bool, as_json: bool) -> int:
    stop = stop_event()
    live = not as_json and sys.stdout.isatty()
    if live:
        from batonmq.launcher.live_view import LiveView

        view: LiveView | None = LiveView(layout)
    else:
        view = None
    reporter: Reporter = view if view is not None else _plain_reporter(as_json)
    cluster = Cluster(layout, reporter, respawn=respawn)
    cluster.announced = True
    try:
        if view is not None:
            view.attach(cluster)
        await cluster.start()
        assert cluster.hopeless is not None
        cluster.hopeless.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if cluster.hopeless.done():
            raise StartError(cluster.hopeless.result())
    finally:
        if view is not None:
            await view.close()
        await cluster.stop()
    reporter.report(Event("stopped", "all processes have ended"))
    return 0


def _plain_reporter(as_json: bool) -> Reporter:
    return JsonReporter(sys.stdout) if as_json else LineReporter(sys.stdout)


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and ctrl-C set."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
