"""What must hold whenever one looks: roles and their views, routes, leases.

R1, R3, R4: a master follows no other, is the process that was elected, and nothing waits at others.
R20: the view that a broker follows never goes back. R32: a name server gives a master up only at
its own request, or for one of no lower epoch. R7: a lease begins with a heartbeat that a leading
controller had, and not with the arrival of its answer. R8: right after a stall nothing is
acknowledged. R22, R24: a log ends at its end, and a cut has an intent. R23: cut bytes are kept.
"""

import json
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from batonmq.broker.service import BrokerService
from batonmq.controller.liveness.core import LivenessCore
from batonmq.namesrv.state import BrokerRegistration, Registered, RouteInfoManager
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.protocol.role_view import Role
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.state import ReplicasState
from batonmq.runtime.clock import boot_ms
from batonmq.store.message_store import MessageStore
from lab.sim.decisions import Verdicts
from lab.sim.hosts import CLUSTER, GROUP, BrokerHost, ControllerHost
from lab.sim.rot import read_log

LEASE_S = 0.6
_ACKS_WAIT_S = 0.8  # of the second for which they wait at most
_SLACK_S = 0.1  # until somebody looks, and drift


class Sightings:
    """`check` is to be called all the time. `violate` ends the run."""

    def __init__(
        self,
        brokers: Iterable[BrokerHost],
        controllers: Iterable[ControllerHost],
        now_s: Callable[[], float],
        violate: Callable[[str], None],
    ) -> None:
        self._brokers = tuple(brokers)
        self._controllers = tuple(controllers)
        self._now_s = now_s
        self._violate = violate
        self._views: dict[str, tuple[object, tuple[int, int]]] = {}
        self._cores: dict[str, LivenessCore] = {}
        self._answered: dict[str, tuple[LivenessCore, int]] = {}
        self._answered_s = 0.0
        self._seen: dict[str, BrokerService] = {}
        self._paused_s: dict[str, tuple[float, float, int]] = {}
        """Since when, until when, and in which epoch."""
        self.routes: dict[str, RouteInfoManager] = {}
        """Of each name server that runs, or ran last."""
        self._tails: dict[str, tuple[int, int, int]] = {}  # start, log end and disk calls when seen

    def check(self) -> None:
        self._note_answers()
        for host in self._brokers:
            self._note_pause(host)
            self._check_view(host)
            self._check_lease_end(host)
            self._check_role(host)

    def _check_view(self, host: BrokerHost) -> None:
        manager = host.manager
        state = manager._state if manager is not None else None
        if state is None:
            return
        key = state.current.key
        of, before = self._views.get(host.name, (None, key))
        if of is not state:
            self._watch_lease(host, state)
        elif key < before:
            self._violate(f"R20: the view of {host.incarnation} goes back from {before} to {key}")
        self._views[host.name] = (state, key)

    def _check_lease_end(self, host: BrokerHost) -> None:
        """R7, R34: a lease is over long before an unclean election may begin."""
        process, manager = host.process, host.manager
        if process is None or process.paused or manager is None:
            return
        old_s = self._now_s() - self._answered_s
        if old_s > LEASE_S + _SLACK_S and manager.lease_valid(process.run(boot_ms)):
            self._violate(f"R34: {host.incarnation} has a lease, heard {old_s:.3f} s ago")

    def _check_role(self, host: BrokerHost) -> None:
        service = host.service
        if service is None:
            return
        gate, ha, manager = service.path.gate, host.ha, host.manager
        state = manager._state if manager is not None else None
        view = state.current.view if state is not None else None
        if self._seen.get(host.name) is not service:
            self._seen[host.name] = service
            self._paused_s.pop(host.name, None)  # of an earlier start
            self._watch_acks(host, service)
            self._watch_cuts(host, service.store)
        self._check_tail(host, service.store)
        if gate.role is not Role.MASTER:
            if len(service.path.acks):
                self._violate(f"R4: {len(service.path.acks)} writes wait at {host.incarnation}")
            return
        if ha is not None and ha._slave is not None:
            self._violate(f"R1: {host.incarnation}, a master, follows another one")
        if manager is None or view is None or view.master_epoch != gate.master_epoch:
            return
        if view.master_incarnation != manager.incarnation:
            self._violate(f"R3: {host.incarnation} is master in the place of an earlier start")

    def _watch_acks(self, host: BrokerHost, service: BrokerService) -> None:
        """R8: stopped for longer than its lease, it acknowledges nothing before that is renewed."""
        acks, manager = service.path.acks, host.manager
        confirm = acks.confirm
        assert manager is not None

        def on_confirm(confirm_offset: int, now_ms: int) -> int:
            released = confirm(confirm_offset, now_ms)
            since_s, until_s, epoch = self._paused_s.get(host.name, (0.0, 0.0, 0))
            if epoch != service.path.gate.master_epoch:
                return released  # elected since
            was_long = until_s - since_s > LEASE_S and self._now_s() - until_s < _ACKS_WAIT_S
            if released and was_long and not manager.lease_valid(boot_ms()):
                self._violate(f"R8: {host.incarnation} acknowledges right after a stall")
            return released

        acks.confirm = on_confirm  # type: ignore[method-assign]

    def _watch_cuts(self, host: BrokerHost, store: MessageStore) -> None:
        """R22: from the first change of a cut to its last one an intent tells the next start. R23:
        what is cut is kept aside, but for bytes that never were a whole record here."""
        truncation = store.slave_log._truncation
        begin, cut = 0, b""

        def after_step(step: str) -> None:
            nonlocal begin, cut
            if step not in ("intent", "done") and not truncation._intent_path.exists():
                self._violate(f"R22: {host.incarnation} cuts {step} without an intent")
            if step == "intent" and truncation._intent_path.exists():
                begin = json.loads(truncation._intent_path.read_bytes())["offset"]
                cut = read_log(store, begin, store.slave_log.whole_end)
            if step == "done" and not _is_kept(truncation._aside_root, begin, cut):
                self._violate(f"R23: {host.incarnation} cuts at {begin}, {len(cut)} bytes are gone")

        truncation.after_step = after_step

    def _note_pause(self, host: BrokerHost) -> None:
        now_s = self._now_s()
        since_s, until_s, _ = self._paused_s.get(host.name, (now_s, 0.0, 0))
        if host.process is not None and host.process.paused and host.service is not None:
            is_same = now_s - until_s < 2 * _SLACK_S
            epoch = host.service.path.gate.master_epoch
            self._paused_s[host.name] = (since_s if is_same else now_s, now_s, epoch)

    def _check_tail(self, host: BrokerHost, store: MessageStore) -> None:
        """R22, R24: what was cut, or torn, cannot come back behind the end of the log. What was
        right is so until the next call to the disk."""
        end, plan = store.log.max_offset, host.disk.plan
        seen = (host.starts, end, host.disk.calls)
        if self._tails.get(host.name) == seen:
            return
        if store.slave_log._truncation._intent_path.exists() and not store.health.has_failed:
            self._violate(f"R37: {host.incarnation} continues with a cut that is not finished")
        segment = store.log.segment_at(end)
        if segment is None or not plan.is_idle or store.health.full or store.health.has_failed:
            return
        behind = bytes(segment.buffer[end - segment.start_offset :])
        if store.trust.damage is None and behind != bytes(len(behind)):
            self._violate(f"R22: behind {end}, the end of its log, {host.incarnation} has more")
        self._tails[host.name] = seen

    # Routes.

    def watch_routes(self, host: ControllerHost, routes: RouteInfoManager) -> None:
        """Judges each change of the routes of a name server that starts."""
        self.routes[host.name] = routes
        register, unregister = routes.register, routes.unregister

        def on_register(
            registration: BrokerRegistration, body: RegisterBrokerBody, now_ms: int
        ) -> Registered:
            before, entry = self._master_of(routes)
            done = register(registration, body, now_ms)
            after, successor = self._master_of(routes)
            versions = [each.data_version.state_version for each in (entry, successor) if each]
            if before != after and len(versions) == 2 and versions[1] < versions[0]:
                self._violate(f"R32: {host.name} takes {after}, an older master than {before}")
            return done

        def on_unregister(
            cluster_name: str, broker_addr: str, broker_name: str, asked_on: Hashable = None
        ) -> bool:
            before, entry = self._master_of(routes)
            done = unregister(cluster_name, broker_addr, broker_name, asked_on)
            after, _ = self._master_of(routes)
            if entry is not None and before not in (broker_addr, after):
                self._violate(f"R32: {host.name} loses {before} at the end of {broker_addr}")
            return done

        routes.register = on_register  # type: ignore[method-assign]
        routes.unregister = on_unregister  # type: ignore[method-assign]

    @staticmethod
    def _master_of(routes: RouteInfoManager) -> tuple[str, Any]:
        """Its address, and its registration if it is alive."""
        address = routes.members(GROUP).get(MASTER_ID, "")
        return address, routes._live.get((CLUSTER, address))

    # Leases.

    def _note_answers(self) -> None:
        """When a master was last answered; one that has died since may have done it."""
        for host in self._controllers:
            if host.service is not None:
                core = host.service._core
                if self._cores.get(host.name) is not core:
                    Verdicts(host.name, core, self._violate)
                self._cores[host.name] = core
        for name, core in self._cores.items():
            watch = core._watches.get(GROUP)
            answered = (core, watch.master_answered_ms if watch is not None else 0)
            if answered != self._answered.get(name, (core, 0)):
                self._answered_s = self._now_s()
            self._answered[name] = answered

    def _watch_lease(self, host: BrokerHost, state: ReplicasState) -> None:
        step = state.step

        def on_step(event: ev.Event, now_ms: int) -> list[ev.Effect]:
            effects = step(event, now_ms)
            if isinstance(event, ev.AnswerReceived) and state.lease_valid(now_ms):
                self._paused_s.pop(host.name, None)  # renewed; once it is lost again, R36 holds
                self._check_lease(host)
            return effects

        state.step = on_step  # type: ignore[method-assign]

    def _check_lease(self, host: BrokerHost) -> None:
        self._note_answers()
        old_s = self._now_s() - self._answered_s
        if old_s > LEASE_S + _SLACK_S:
            self._violate(f"R7: a lease of {host.incarnation}, heard {old_s:.3f} s ago")


def _is_kept(aside: Path, begin: int, cut: bytes) -> bool:
    """Whether the newest set of cut bytes holds `cut`, which stood from `begin` on."""
    if not cut:
        return True
    kept = bytearray(len(cut))
    newest = max(aside.glob("*-*-*"), key=lambda path: path.name, default=None)
    for path in newest.iterdir() if newest is not None else ():
        data, at = path.read_bytes(), int(path.stem) - begin
        if 0 <= at < len(cut):  # a segment that was made ahead has none of it
            data = data[: len(cut) - at]
            kept[at : at + len(data)] = data
    return kept == cut
