"""A local cluster, for `up` and `demo`: `LocalCluster` starts the processes, polls the cluster
twice a second, updates `cluster.json`, and reports changes.

It continues when a process dies, and gives up when those processes end by themselves without which
there is no cluster (`gave_up`).
"""

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.client.instance.connections import ClientOptions
from batonmq.launcher import control, preparation
from batonmq.launcher.children import Children, tail_of_log
from batonmq.launcher.cluster_file import cluster_document, write_document
from batonmq.launcher.current import UNFINISHED, announce, withdraw
from batonmq.launcher.events import ClusterEvent, Report
from batonmq.launcher.forks import ForkServer
from batonmq.launcher.layout import (
    STAGES,
    BrokerNode,
    Layout,
    LayoutError,
    NameServerNode,
    Node,
    grown,
)
from batonmq.launcher.watch import ClusterSnapshot, poll
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_s, wall_ms
from batonmq.runtime.durable_file import replace_file
from batonmq.runtime.lock_file import FolderLock
from batonmq.runtime.sockets import listens
from batonmq.runtime.tls import TlsError
from batonmq.runtime.turns import is_set_within
from batonmq.runtime.words import counted

log = logging.getLogger(__name__)

POLL_STARTING_S = 0.05
POLL_S = 0.5


class LocalCluster:
    """A local cluster of this process's children. Use `start`, then `stop`, in one event loop."""

    def __init__(
        self,
        layout: Layout,
        report: Report,
        fork_server: ForkServer,
        *,
        respawn: bool = False,
        watchdog_s: float = 0.0,
    ) -> None:
        """`fork_server` is not closed here."""
        self.layout = layout
        self.view = ClusterSnapshot()
        self.whole = False
        self.announced = False
        """Whether `~/.batonmq/current` names this cluster while it runs."""
        self._report_event = report
        self.children = Children(
            layout, fork_server, self._child_changed, self._comes_back, watchdog_s
        )
        self._fork_server = fork_server
        self._respawn = respawn
        self._started_at_ms = 0
        self._written: dict[str, object] | None = None
        self._is_stale = False
        """Whether `cluster.json` could not be written; reported once."""
        self._admin: Admin | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._poll_now = asyncio.Event()
        self._lock: FolderLock | None = None
        self._control: asyncio.Server | None = None
        self._one_change = asyncio.Lock()
        self._gave_up: set[str] = set()
        self._served: set[str] = set()
        """See `serves`."""
        self._asked: object = None
        """Addresses and user of `_admin`."""
        self.hopeless: asyncio.Future[preparation.StartError] | None = None
        """Done with the reason why this start cannot succeed any more."""

    async def start(self) -> None:
        """Starts every process. Raises StartError for what keeps the cluster from starting."""
        folder = self.layout.data_dir
        try:
            await self._start()
        except TlsError as exc:
            raise preparation.StartError(f"--data {folder}: {exc}") from exc
        except OSError as exc:
            file = Path(str(exc.filename or ""))
            is_ours = file.is_relative_to(folder) or file in folder.parents
            what = f"--data {folder}" if is_ours else "no server can be started"
            raise preparation.StartError(f"{what}: {disk.described(exc)}") from exc

    async def _start(self) -> None:
        await preparation.check_settings(self.layout, self._fork_server)
        preparation.check_folder(self.layout)
        self._lock = preparation.lock_folder(self.layout)
        preparation.check_ports(self.layout)
        self._started_at_ms = wall_ms()
        # It is there only while the cluster is whole: an old one would name processes that ended.
        self.layout.cluster_file.unlink(missing_ok=True)
        preparation.write_configs(self.layout)
        self._write_plan()
        self._unfinished.touch()
        try:
            self._control = await control.serve(self.layout.lock_file.parent, self._answer)
        except OSError as exc:  # not every file system has sockets
            self._report(
                "no_control", f"mqctl up cannot reach this cluster: {exc.strerror}", bad=True
            )
        # It sends nothing before its start.
        self._admin = self._new_admin(self.layout.name_server_addresses)
        self.hopeless = asyncio.get_running_loop().create_future()
        await self.children.start_all()
        self._watcher = asyncio.create_task(self._watch(), name="watch-cluster")

    def _write_plan(self) -> None:
        """Raises OSError."""
        no_pids = dict.fromkeys(self.children.by_name)
        planned = cluster_document(self.layout, self._started_at_ms, no_pids, {})
        write_document(self.layout.planned_cluster_file, planned, replace_file)

    async def _answer(self, asked: Mapping[str, object]) -> Mapping[str, str]:
        """Answers one request on `control`; changes are made one after the other."""
        changes = {"add": self.add_broker, "remove": self.remove_broker, "secure": self.secure}
        change = changes.get(str(asked.get("do")))
        what = asked.get("group", asked.get("address", asked.get("stage")))
        if change is None or not isinstance(what, str):
            return {"error": f"{asked!r} is no request"}
        try:
            async with self._one_change:
                if self.children.stopping:
                    return {"error": "the cluster is being stopped"}
                node = await change(what)
        except (preparation.StartError, LayoutError, OSError) as error:
            return {"error": disk.described(error)}
        if node is None:
            return {"stage": self.layout.secure}
        return {"name": node.name, "address": node.address, "group": node.group}

    async def add_broker(self, group: str) -> BrokerNode:
        """Starts one broker more in `group`, in a new group for "". Raises LayoutError, StartError;
        then nothing has changed."""
        layout, node = grown(self.layout, group, preparation.folder_owners(self.layout.data_dir))
        if taken := preparation.taken_ports(node):
            raise preparation.ports_taken(taken)
        before = self.layout
        try:
            preparation.check_folder(layout)
            if layout.secure != "disabled":
                preparation.make_certificates(layout)
            node.python_file.unlink(missing_ok=True)
            preparation.write_config(layout, node)
            self.layout = self.children.layout = layout
            await self.children.add(node)
            self._write_plan()
        except (OSError, TlsError) as exc:
            self.layout = self.children.layout = before
            if node.name in self.children.by_name:
                await self.children.remove(node.name)
            raise preparation.StartError(
                f"{node.name} cannot be started: {disk.described(exc)}"
            ) from exc
        self._poll_now.set()
        return node

    async def remove_broker(self, address: str) -> BrokerNode:
        """Stops the broker at `address` for good; its folder stays. Whether its group can do
        without it is the caller's care. Raises StartError."""
        try:
            node = self.broker_at(address)
        except KeyError:
            raise preparation.StartError(f"no broker of this cluster is at {address}") from None
        if len(self.layout.brokers) == 1:
            raise preparation.StartError(
                f"{node.name} is the only broker: stop `batonmq up` instead"
            )
        await self.children.remove(node.name)
        left = tuple(each for each in self.layout.brokers if each is not node)
        self.layout = self.children.layout = replace(self.layout, brokers=left)
        try:
            self._write_plan()
        except OSError as exc:
            why = disk.described(exc)
            raise preparation.StartError(
                f"{node.name} has ended, and the next start has it again: {why}"
            ) from exc
        self._write()
        return node

    async def secure(self, stage: str) -> None:
        """Each process gets the settings of this stage of TLS, for its next start. Raises
        StartError; then some may have them."""
        wanted = next((known for known in STAGES if known == stage), None)
        if wanted is None:
            raise preparation.StartError(f"{stage!r} is no stage: {', '.join(STAGES)}")
        if "tls" in self.layout.overrides:
            raise preparation.StartError(
                "the settings of this cluster have a section tls: change it in the file of --config"
            )
        layout = replace(self.layout, secure=wanted)
        try:
            if wanted != "disabled":
                preparation.make_certificates(layout)
            for node in layout.nodes:
                preparation.write_config(layout, node)
            self.layout = self.children.layout = layout
            self._write_plan()
        except (OSError, TlsError) as exc:
            raise preparation.StartError(
                f"--data {layout.data_dir}: {disk.described(exc)}"
            ) from exc
        self._asked = None  # the next poll dials as this stage does
        self._write()
        self._poll_now.set()

    async def wait_whole(self, seconds: float) -> None:
        """Returns when the cluster is whole. Raises StartError that names what it lacks."""
        deadline_s = boot_s() + seconds
        while not self.whole:
            if boot_s() > deadline_s:
                raise preparation.StartError(
                    f"the cluster is not whole after {seconds:.0f} s:"
                    f" {self.view.missing(self.layout)}"
                )
            if self.hopeless is not None and self.hopeless.done():
                raise self.hopeless.result()
            for child in self.children.by_name.values():
                if child.pid is None and child.process is not None:
                    raise preparation.StartError(
                        f"{child.node.name} ended at once; the end of {child.log_path}:\n"
                        + tail_of_log(child)
                    )
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Stops all processes cleanly and at once.

        The controllers get the signal first and decide nothing from then on. So no stopping broker
        causes an election, and the recorded sets stay full for the next start."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self.announced and self._written is not None:
            withdraw(self.layout.cluster_file)
        if self._control is not None:
            self._control.close()
        async with self._one_change:
            await self.children.stop_all([[node.name for node in self.layout.nodes]])
        if self._admin is not None:
            with suppress(OSError):  # then `mqctl verdict` says that it was killed
                self._unfinished.unlink()
            await self._admin.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def _unfinished(self) -> Path:
        return self.layout.lock_file.parent / UNFINISHED

    @property
    def controller(self) -> ControllerAdmin:
        """Calls to the controllers of this cluster, led to the leader."""
        serving = filter(self.serves, self.layout.name_servers)
        return self.admin.controller([node.controller_address for node in serving])

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
            self._poll_now.clear()
            served = [node for node in self.layout.name_servers if self.serves(node)]
            before = self.view
            if served:
                await self._ask_only(served)
                controllers = [node.controller_address for node in served]
                self.view = await poll(self.admin, self.layout.groups, controllers, before)
            self._report_changes(before, self.view)
            # A name server that still starts may find its port taken.
            is_starting = any(
                node not in served and node.name not in self._gave_up
                for node in self.layout.name_servers
            )
            if not self.whole and not is_starting and self.view.is_whole(self.layout):
                self.whole = True
                took = wall_ms() - self._started_at_ms
                at = self.layout.name_server_addresses
                text = f"the cluster is whole after {took} ms; name servers: {at}"
                self._report("cluster_ready", text, ms=took)
            self._write()
            await is_set_within(self._poll_now, POLL_S if self.whole else POLL_STARTING_S)

    def _child_changed(self, node: Node, pid: int | None, how: str) -> None:
        name = node.name
        leaving = self.children.by_name[name].leaving
        died = pid is None and not leaving and not self.children.stopping
        if pid is not None:
            text = f"{name} {how} (pid {pid})"
            kind = "process_started"
        else:
            text, kind = f"{name} ended: {how}", "process_ended"
            if died and how.startswith("exit"):
                text += "\n" + tail_of_log(self.children.by_name[name])
        self._report(kind, text, bad=died, name=name, pid=pid, how=how)
        failed = how.startswith("exit ") and how != "exit 0"
        # Before the cluster was whole it will fail again, for example for a wrong setting.
        if died and failed and not (self._respawn and self.whole):
            self._gave_up.add(name)
        else:
            self._gave_up.discard(name)
        self._served.discard(name)
        taken = preparation.taken_ports(node) if name in self._gave_up and not self.whole else []
        if taken:  # somebody was faster: what answers there is no part of this cluster
            self._end_start(preparation.ports_taken(taken))
        elif why := gave_up(self.layout, self._gave_up, was_whole=self.whole):
            child = self.children.by_name[name]
            self._end_start(
                preparation.StartError(f"{why}; the end of {child.log_path}:\n{tail_of_log(child)}")
            )
        self._write()
        self._poll_now.set()

    def _comes_back(self, name: str) -> bool:
        return self._respawn and name not in self._gave_up

    def _end_start(self, why: preparation.StartError) -> None:
        if self.hopeless is not None and not self.hopeless.done():
            self.hopeless.set_result(why)

    def serves(self, node: Node) -> bool:
        """Whether its process was seen to listen on its ports: only then is it asked anything.

        The port of one that has not come so far, or has ended, may be another cluster's."""
        if node.name in self._served:
            return True
        pid = self.children.by_name[node.name].pid
        if pid is None or not all(listens(pid, port) for port in node.ports):
            return False
        self._served.add(node.name)
        return True

    def _new_admin(self, addresses: str | Sequence[str]) -> Admin:
        layout = self.layout
        options = ClientOptions(tls=layout.client_tls, credentials=layout.credentials)
        return Admin(addresses, client_options=options)

    async def _ask_only(self, name_servers: Sequence[NameServerNode]) -> None:
        """`admin` asks only these from now on."""
        addresses = [node.address for node in name_servers]
        try:
            asked = addresses, self.layout.credentials
            if asked == self._asked:
                return
            admin = self._new_admin(addresses)
            await admin.start()
        except (TlsError, ValueError) as exc:
            # Certificates or secrets may be just being replaced: the next poll tries again.
            log.warning("cluster_not_asked reason=%s", exc)
            return
        before, self._admin = self._admin, admin
        self._asked = asked
        if before is not None:
            await before.close()

    def _report(self, kind: str, text: str, *, bad: bool = False, **fields: object) -> None:
        try:
            self._report_event(ClusterEvent(kind, text, fields, bad=bad))
        except OSError:
            # The reader of the output has ended (`| head`), or its disk is full. That must not stop
            # the watching and restarting of processes.
            pass

    def _report_changes(self, before: ClusterSnapshot, after: ClusterSnapshot) -> None:
        for name, group in after.groups.items():
            old = before.groups.get(name)
            if old is None or old.master_address != group.master_address:
                who = f"master is {group.master_address} (epoch {group.master_epoch})"
                self._report(
                    "master_changed",
                    f"{name}: {who if group.master_address else 'no master'}",
                    bad=not group.master_address,
                    group=name,
                    master=group.master_address,
                    masterEpoch=group.master_epoch,
                )
            if old is None or old.in_sync != group.in_sync:
                count = len(group.replicas)
                text = f"{name}: {group.in_sync} of {counted(count, 'replica')} in sync"
                self._report("set_changed", text, group=name, inSync=group.in_sync, replicas=count)

    def _write(self) -> None:
        if not self.whole:
            return
        pids = {name: child.pid for name, child in self.children.by_name.items()}
        document = cluster_document(self.layout, self._started_at_ms, pids, self.view.states)
        if document != self._written:
            try:
                write_document(self.layout.cluster_file, document)
            except OSError as exc:
                # The next poll tries again. A full disk must not end the watch over the processes:
                # one that died would not be started again.
                if not self._is_stale:
                    text = f"cluster.json is not up to date: {disk.described(exc)}"
                    self._report("cluster_file_stale", text, bad=True)
                self._is_stale = True
                return
            self._is_stale = False
            if self.announced and self._written is None:
                announce(self.layout.cluster_file)
            self._written = document


def gave_up(layout: Layout, ended: set[str], *, was_whole: bool) -> str:
    """Why this cluster cannot become whole any more, empty while it can.

    `ended`: processes that ended by themselves, for example after a wrong setting; those that were
    killed may be started again. Before it was whole once, the end of all brokers or of all name
    servers is enough."""
    names = {node.name for node in layout.nodes}
    if names <= ended:
        return "all processes have ended by themselves"
    servers = {node.name for node in layout.name_servers}
    for what, some in (("name servers", servers), ("brokers", names - servers)):
        if some <= ended and not was_whole:
            return f"all {what} have ended by themselves before the cluster was whole"
    return ""


def stop_event() -> asyncio.Event:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event
