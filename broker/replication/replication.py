"""What the broker needs of replication, in either mode.

`controlled` is controller mode: controllers elect the master and record the SyncStateSet. `classic`
is the same without controllers, with the roles of the configuration. A reader of one of them need
not read the other.
"""

import asyncio
import contextlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from typing import Any, Final, Protocol

from batonmq.auth.guard import Guard
from batonmq.broker.config import BrokerSections
from batonmq.broker.tables.slave_sync import SlaveSynchronize
from batonmq.broker.write.write_path import WritePath
from batonmq.ha.node_secret import NONCE_BYTES, NodeSecret, Unproven
from batonmq.ha.shells import HAService
from batonmq.protocol.bodies import EpochEntryCache
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, CorruptLogError
from batonmq.protocol.role_view import RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.metrics import MetricsPage
from batonmq.runtime.turns import in_slices

log = logging.getLogger(__name__)

LAST_ACKS_S: Final = 0.3


def _node_secret(config: BrokerSections, guard: Guard | None) -> NodeSecret | None:
    """What HA peers prove to each other; None without `authenticationEnabled`."""
    if guard is None:
        return None
    broker = config.broker
    return NodeSecret(
        secrets=lambda: guard.node_secrets,
        new_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
        required=not guard.allows_unproven,
        address=config.ha_address,
        name=(broker.broker_cluster_name, broker.broker_name, str(broker.broker_id)),
    )


class BrokerHooks(Protocol):
    """What else of the broker depends on its role; `BrokerService` implements it."""

    def routes_changed(self) -> None:
        """Role or topics changed: register at the name servers again."""

    def master_opened(self) -> None:
        """This broker takes writes as the master from now on."""

    def role_left(self) -> None:
        """This broker is not master any more: ends held pulls, and deletions that are not
        confirmed."""

    def fatal(self, exc: BaseException) -> None:
        """The process must stop."""


class Replication(ABC):
    """The replication of one broker, on its loop."""

    def __init__(
        self,
        config: BrokerSections,
        path: WritePath,
        slave_sync: SlaveSynchronize,
        hooks: BrokerHooks,
        guard: Guard | None,
    ) -> None:
        self._config = config
        self._guard = guard
        self.node_secret = _node_secret(config, guard)
        self._unproven = 0
        self._unproven_last = ""
        self._path = path
        self._slave_sync = slave_sync
        self._hooks = hooks
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    @abstractmethod
    def service(self) -> HAService:
        """The HA service of this mode."""

    @abstractmethod
    def broker_id(self) -> int:
        """This broker's id; 0 for a master of classic mode, and until controllers assign one."""

    async def _listen(self) -> None:
        """The HA service listens."""
        broker, tls = self._config.broker, self._config.tls
        port_tls = tls.for_replicas(broker.broker_name) if tls is not None else None
        await self.service.start(broker.bind_host, port_tls, self.node_secret)

    @abstractmethod
    async def start(self) -> None:
        """Registers at the controllers, or takes the role of the configuration."""

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, self._role_changed)
        processors.register(RequestCode.RESET_MASTER_FLUSH_OFFSET, self._reset_flush_offset)

    def _role_changed(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """A hint of a controller (NOTIFY_BROKER_ROLE_CHANGED, 1008)."""
        return RemotingCommand.response_to(request)

    def _reset_flush_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """As on Java's masters there is none to set (RESET_MASTER_FLUSH_OFFSET, 908): epochs decide
        where a log is cut."""
        return RemotingCommand.response_to(request)

    def tick(self, now_ms: int) -> None:  # noqa: B027  classic mode has nothing to do
        """Called several times a second, for what changes with time alone."""

    def in_sync_count(self) -> int:
        """The size of the recorded SyncStateSet, or the master and its slaves within the gap."""
        return self.service.in_sync_count

    def other_members(self) -> list[str]:
        """The addresses of the other replicas, as far as they are known."""
        return []

    def followed_master(self) -> RoleView | None:
        """On a slave: the view of the master whose log arrives now; None in classic mode."""
        return None

    def note_slave(self, link: str, name: str) -> None:  # noqa: B027  only classic has names
        """A slave of classic mode named itself and its HA connection."""

    def master_named(self, _address: str, _ha_address: str) -> bool:
        """A name server's reply names the master. Returns whether that is enough, and no other name
        server needs to be asked."""
        return True

    def epoch_cache(self) -> tuple[EpochEntryCache, dict[str, str]] | None:
        """The epoch list (GET_BROKER_EPOCH_CACHE, 1007), and in extFields which process this is
        (R41); None in classic mode."""
        return None

    def status(self) -> dict[str, str]:
        """The keys of the broker's status (GET_BROKER_RUNTIME_INFO, 28) that only this mode has."""
        return {}

    def collect(self, page: MetricsPage) -> None:  # noqa: B027  classic mode has none
        """Adds the figures for `/metrics` that only this mode has."""

    def slaves(self) -> Iterator[tuple[str, int, bool]]:
        """On a master, of each slave: a name, how many bytes it lacks, whether it is in the set. A
        classic slave without a name gets a number, in the order in which they connected."""
        for number, slave in enumerate(self.service.runtime_info().ha_connection_info, 1):
            yield slave.slave_name or f"slave-{number}", slave.diff, slave.in_sync

    def problems(self) -> dict[str, str]:
        """For `mqctl health`: what may be wrong, and why it is; an empty reason means it is not."""
        return {
            "cannot follow its master": self.service.following_problem,
            "gets no tables and consumer offsets from its master": self._slave_sync.failure,
            "its audit log is not written": self._guard.audit.failure if self._guard else "",
        }

    @property
    def why_not_in_sync(self) -> str:
        """Why this replica may lack acknowledged messages; "" if it has all, or need not."""
        return ""

    async def hand_over(self) -> None:  # noqa: B027  in classic mode no other may become master
        """Before a planned stop: a master hands over to another member, if there is one."""

    async def close(self, reason: str) -> None:
        """`reason` goes to the controllers, and from there into the history."""
        path = self._path
        path.hold.release()  # held sends are refused now, while their connections last
        # The slaves still follow, so these writes can be acknowledged. A stock client does not send
        # an asynchronous message again after a refusal.
        if len(path.acks) and not path.store.health.has_failed:
            with contextlib.suppress(TimeoutError, BatonError):
                async with asyncio.timeout(LAST_ACKS_S):
                    await path.wait_confirmed(path.store.max_phy_offset, "the last acks")
        path.acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, "this broker is stopping")
        await in_slices(path.acks.answer_failed)
        await self._close(reason)

    @abstractmethod
    async def _close(self, reason: str) -> None:
        """Ends the connections. All writes are answered by then."""

    def on_unproven(self, peer: Unproven) -> None:
        """An HA peer did not prove that it knows the secret of the nodes."""
        self._unproven += 1
        self._unproven_last = f"{peer.address}: {peer.reason}"
        log.warning(
            "ha_unproven peer=%s passes=%s reason=%r", peer.address, peer.passes, peer.reason
        )
        if self._guard is not None:
            name = self._config.broker.broker_name
            self._guard.audit.refused(
                "", peer.address, "HA", f"broker group {name}", peer.reason, passes=peer.passes
            )

    def proof_state(self) -> dict[str, Any]:
        """The fields of TlsState about the proofs of HA peers."""
        if self.node_secret is None:
            return {}
        return {
            "ha_proof": "required" if self.node_secret.required else "optional",
            "ha_unproven": self._unproven,
            "ha_unproven_last": self._unproven_last,
        }

    def on_damage(self, reason: str) -> None:
        """A record of this broker's log is damaged."""
        log.error("log_damaged reason=%s", reason)

    def on_damage_found(self, error: CorruptLogError) -> None:
        """The background check found a bad record below confirmOffset (R24)."""
        self.on_damage(str(error))
        self._path.store.trust.note_rot(error)

    def on_fatal(self, exc: BaseException) -> None:
        self._hooks.fatal(exc)

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Runs `work` as a task; logs `name` if it fails."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failed := task.exception()) is not None:
            log.error("%s", task.get_name(), exc_info=failed)
