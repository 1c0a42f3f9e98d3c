"""Helpers of the HA tests: a log in memory for the cores, a group of real replicas for the shells.

A `Group` is three stores and three HA services in one loop over loopback, with a controller of a
few lines in the middle whose pushes and answers the test steers by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq.ha.config import HAConfig
from batonmq.ha.java_peer import PeerIdentity
from batonmq.ha.node_secret import NodeSecret, Unproven
from batonmq.ha.service import AutoSwitchHAService
from batonmq.ha.slave_core import SlavePhase
from batonmq.ha.sync_state import SetProposal
from batonmq.ha.wire import HAIdentity
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.runtime.tls import PortTls
from batonmq.store.config import StoreConfig
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedBySet

SEGMENT = 16 << 10
HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
TOPIC = "HaTopic"
BODY = b"x" * 40


async def until(condition: Callable[[], object]) -> None:
    """Lets the loop run until the condition holds; fails after five seconds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  the conditions are other people's state
            await asyncio.sleep(0.001)


async def expire_first_segment(node: Node) -> None:
    """Makes the first log file old, lets the store clean up, and waits until its epochs have gone:
    a thread drops them after the file."""
    first = min((node.root / "commitlog").glob("0*"))
    os.utime(first, (1_000_000, 1_000_000))
    node.store.positions.master_begins_at(node.store.max_phy_offset)  # else a slave keeps it (R27)
    assert node.store.expirer.clean_expired(manual=True) == 1
    await until(lambda: node.store.epochs.entries[0].end_offset > node.store.min_phy_offset)


def flip(node: Node, offset: int) -> None:
    """A bit rots in the first file of the replica's log."""
    path = min((node.root / "commitlog").glob("0*"))
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


class Node:
    """One replica: its store, its service, and the events that the service gave its broker."""

    def __init__(self, group: Group, broker_id: int, root: Path, config: HAConfig) -> None:
        self.group = group
        self.broker_id = broker_id
        self.root = root
        self.config = config
        self.proposals: list[SetProposal] = []
        self.following: list[int] = []
        self.truncated: list[tuple[int, int]] = []
        self.diverged: list[str] = []
        self.damage: list[str] = []
        self.fatal: list[BaseException] = []
        self.unproven: list[Unproven] = []
        self.up = False

    async def start(self) -> None:
        self.store_config = StoreConfig(
            store_path_root_dir=str(self.root),
            mapped_file_size_commit_log=self.group.segment_size,
            mapped_file_size_consume_queue=20 * 1000,
            max_hash_slot_num=100,
            max_index_num=400,
            ha_listen_port=0,
        )
        self.store = MessageStore(self.store_config, store_host=HOST, confirm_rule=ConfirmedBySet())
        self.store.open()
        self.store.start(asyncio.get_running_loop(), self.on_fatal)
        self.ha = AutoSwitchHAService(
            self.store,
            self.config,
            self,
            identity_of=self.identity,
            java_master=self.group,
        )
        self.store.flushed_listeners.append(self.ha.notify_flushed)
        await self.ha.start("127.0.0.1", self.group.tls.get(self.broker_id))
        secret = self.group.secrets.get(self.broker_id)
        if secret is not None:  # the port is known now
            self.ha._secret = replace(secret, address=f"127.0.0.1:{self.ha.port}")
        self.up = True

    def identity(self) -> HAIdentity:
        view = self.group.view
        return HAIdentity(
            view.cluster_name,
            view.broker_name,
            self.broker_id,
            self.group.incarnation_of(self.broker_id),
            self.store.log.log_id,
        )

    async def stop(self) -> None:
        if self.up:
            self.up = False
            await self.ha.close()
            self.store.close()

    # -- the listener

    def on_confirm_offset(self, offset: int) -> None:
        self.store.advance_confirm_offset(offset)

    def on_proposal(self, proposal: SetProposal) -> None:
        self.proposals.append(proposal)
        self.group.on_proposal(self, proposal)

    def on_slave_following(self, broker_id: int) -> None:
        self.following.append(broker_id)

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        self.truncated.append((from_offset, to_offset))

    def on_diverged(self, reason: str) -> None:
        self.diverged.append(reason)

    def on_damage(self, reason: str) -> None:
        self.damage.append(reason)

    def on_unproven(self, peer: Unproven) -> None:
        self.unproven.append(peer)

    def on_fatal(self, exc: BaseException) -> None:
        self.fatal.append(exc)

    # -- what a test does with it

    def put(self, count: int = 1, body: bytes = BODY) -> int:
        """Writes messages as the broker's send path does, one loop turn; the log's end."""
        for n in range(count):
            self.store.appender.put_message(
                NewMessage(
                    TOPIC,
                    0,
                    body + b"%06d" % n,
                    b"",
                    0,
                    None,
                    None,
                    born_timestamp=1_700_000_000_000,
                    born_host=HOST,
                )
            )
        end = self.store.end_turn()
        self.ha.notify_append(end)
        self.store.background.request_flush()
        return end

    def log_bytes(self) -> bytes:
        store = self.store
        parts: list[bytes] = []
        offset = store.min_phy_offset
        while offset < store.max_phy_offset:
            view = store.log.view(offset, 1 << 30)
            parts.append(bytes(view))
            offset += len(view)
        return b"".join(parts)

    @property
    def confirm_offset(self) -> int:
        """As master by its SyncState, else as far as the store shows it."""
        sync = self.ha.sync_state
        return self.store.confirm_offset if sync is None else sync.log.confirm_offset

    @property
    def proposal(self) -> SetProposal | None:
        sync = self.ha.sync_state
        return None if sync is None else sync.proposal

    @property
    def is_following(self) -> bool:
        slave = self.ha._slave
        return slave is not None and slave.core.phase is SlavePhase.TRANSFER

    @property
    def readable(self) -> int:
        return self.store.queries.max_offset_in_queue(TOPIC, 0)

    @property
    def epochs(self) -> list[tuple[int, int]]:
        return [(e.epoch, e.start_offset) for e in self.store.epochs.entries]


class Group:
    """Replicas and the recorded state of their controller. `auto` answers proposals at once."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.segment_size = SEGMENT
        self.prove_master: Callable[[RoleView], Awaitable[PeerIdentity]] = self._no_java_master
        self.nodes: dict[int, Node] = {}
        self.incarnations: dict[int, str] = {}
        self.tls: dict[int, PortTls] = {}
        self.secrets: dict[int, NodeSecret] = {}
        self.view = RoleView(cluster_name="C", broker_name="broker-a")
        self.auto = True

    async def add(self, broker_id: int, config: HAConfig | None = None) -> Node:
        root = self.tmp_path / f"b{broker_id}"
        node = Node(self, broker_id, root, config or HAConfig())
        self.nodes[broker_id] = node
        await node.start()
        return node

    async def pair(self) -> tuple[Node, Node]:
        """1 leads, and 2 is in its set."""
        one, two = await self.add(1), await self.add(2)
        await self.elect(one)
        await until(lambda: one.ha.in_sync_count == 2)
        return one, two

    async def restart(self, node: Node) -> None:
        await node.stop()
        await node.start()

    async def _no_java_master(self, view: RoleView) -> PeerIdentity:
        raise AssertionError("a master of ours is not asked by 1007")

    async def identity(self, view: RoleView) -> PeerIdentity:
        return await self.prove_master(view)

    async def ha_address(self, view: RoleView) -> str:
        """What a Java master answers."""
        assert view.master_broker_id is not None and not view.master_incarnation
        return f"127.0.0.1:{self.nodes[view.master_broker_id].ha.port}"

    def incarnation_of(self, broker_id: int) -> str:
        """ "" for a Java broker."""
        return self.incarnations.get(broker_id, f"first start of {broker_id}")

    def registered(self) -> tuple[Replica, ...]:
        return tuple(
            Replica(
                broker_id,
                ha_address=f"127.0.0.1:{node.ha.port}",
                alive=node.up,
                learner=node.config.async_learner,
                incarnation=self.incarnation_of(broker_id),
                log_id=node.store.log.log_id,
            )
            for broker_id, node in sorted(self.nodes.items())
        )

    def register(self) -> None:
        """The controllers push who is registered by now to the master."""
        self.view = replace(self.view, replicas=self.registered())
        master = self.nodes.get(self.view.master_broker_id or 0)
        if master is not None and master.up:
            master.ha.adopt_view(self.view)

    def next_view(self, master: Node, *members: int) -> RoleView:
        """A committed election that no one has heard of."""
        incarnation = self.incarnation_of(master.broker_id)
        self.view = replace(
            self.view,
            master_broker_id=master.broker_id,
            master_address=f"remoting-{master.broker_id}",
            # Controllers do not know a Java broker's.
            master_ha_address=f"127.0.0.1:{master.ha.port}" if incarnation else "",
            master_incarnation=incarnation,
            master_epoch=self.view.master_epoch + 1,
            sync_state_set_epoch=self.view.sync_state_set_epoch + 1,
            sync_state_set=frozenset(members or (master.broker_id,)),
            replicas=self.registered(),
        )
        return self.view

    async def elect(self, master: Node, *members: int, others: bool = True) -> None:
        """A committed election: the winner gets it first, then the others."""
        await master.ha.change_to_master(self.next_view(master, *members))
        for node in list(self.nodes.values()) if others else ():
            if node is not master and node.up:
                await self.follow(node)

    async def follow(self, node: Node) -> None:
        """A registered node learns the view, as its master does, and takes the tables (R42)."""
        self.register()
        await node.ha.change_to_slave(self.view)
        node.ha.tables_followed(self.view.master_epoch)

    def commit(self, new_set: frozenset[int]) -> RoleView:
        self.view = replace(
            self.view,
            sync_state_set=new_set,
            sync_state_set_epoch=self.view.sync_state_set_epoch + 1,
            replicas=self.registered(),
        )
        return self.view

    def on_proposal(self, node: Node, proposal: SetProposal) -> None:
        if self.auto:
            asyncio.get_running_loop().call_soon(self.answer, node, proposal)

    def answer(self, node: Node, proposal: SetProposal) -> None:
        if node.proposal is not proposal:
            return
        if proposal.sync_state_set_epoch != self.view.sync_state_set_epoch:
            node.ha.proposal_refused(2001, "set epoch differs")
            return
        node.ha.adopt_view(self.commit(proposal.new_set))

    async def caught_up(self, *nodes: Node) -> None:
        """Waits until all logs are the same and all of them is readable everywhere."""
        first = nodes[0]
        await until(
            lambda: all(
                n.store.max_phy_offset == first.store.max_phy_offset
                and n.store.confirm_offset == first.store.max_phy_offset
                for n in nodes
            )
        )
        assert (
            len(
                {
                    n.log_bytes()[-(first.store.max_phy_offset - n.store.min_phy_offset) :]
                    for n in nodes
                    if n.store.min_phy_offset == first.store.min_phy_offset
                }
            )
            == 1
        )

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.stop()
        assert not [n.fatal for n in self.nodes.values() if n.fatal]


@pytest.fixture
@contextlib.asynccontextmanager
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    """An empty group; what was started in it is stopped."""
    made = Group(tmp_path)
    try:
        yield made
    finally:
        await made.close()
