"""Faults that come together: a switch while a member hangs, a connection that broke at one end, a
stranger that comes as a slave of another group, and in the name of the master; a log without disk
space for the commit of a transaction, and a switch there and back; a master that ends before the
op, or behind the answer to a recall.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc.aio

from batonmq.broker.service import BrokerService
from batonmq.ha import wire
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.properties import TIMER_DEL_UNIQKEY
from batonmq.protocol.topic_name import TRANS_OP_HALF_TOPIC
from lab.sim.clients import Client, Operator, Recreator
from lab.sim.cluster import SimCluster
from lab.sim.features.transactions import TransactionSender
from lab.sim.hosts import CLUSTER, GROUP, GRPC_ADDRESSES, BrokerHost, controlled
from lab.sim.kinds import Kinds, PlannedFault
from lab.sim.loop import SimProcess

_STRANGER = "10.0.3.1"
_HANGS_S = 0.45
_SLOW_S = 0.1
_LOOK_S = 0.002
_AGAIN_S = 0.1
_WAITS_S = 2.0
_ANSWERED_S = 0.003
"""From the arrival of a record at a slave until its request is answered."""
_UNNAMED_S = 1.0
_LAGS_S = 6.0
_COMMITTED = b"\x06TopicT"
"""Topic of a record of TransactionSender's that is committed, with its length. A half message has
that name among its properties only."""
_OP = TRANS_OP_HALF_TOPIC.encode()
_RECALL = TIMER_DEL_UNIQKEY.encode()


class StrainFaults(Kinds):
    def __init__(self, cluster: SimCluster, clients: Sequence[Client]) -> None:
        super().__init__(cluster)
        self._clients = clients
        self._operator = Operator(cluster)

    def _master_and_slaves(self) -> tuple[BrokerHost | None, list[BrokerHost]]:
        """Those of the set that run."""
        hosts = [host for host in self.cluster.brokers.values() if self._is_running(host)]
        master = next((host for host in hosts if host.is_open), None)
        return master, [h for h in hosts if h is not master and self._is_member(h)]

    @staticmethod
    def _is_running(host: BrokerHost) -> bool:
        return host.process is not None and not host.process.paused

    def strained_switch(self, fault: PlannedFault) -> str | None:
        """To one slave, while the other hangs: the chosen one has what is not confirmed. Or
        while the link to the chosen one is slow: it lacks what was sent last."""
        master, slaves = self._master_and_slaves()
        if master is None or len(slaves) < 2:
            return None
        chosen, other = slaves if fault.pick < 0.5 else slaves[::-1]
        process = other.process
        assert process is not None
        self._operator.elect(chosen.broker_id)
        if fault.pick2 < 0.5:
            self._slow(master, chosen, _SLOW_S, _HANGS_S)
            return f"to {chosen.name}, by a slow link"
        process.pause()
        self.cluster.later(_HANGS_S, process.resume)
        return f"to {chosen.name}, {other.name} hangs"

    def half_open(self, fault: PlannedFault) -> str | None:
        """A slave loses its connection and dials again. The master does not hear of the loss."""
        master, slaves = self._master_and_slaves()
        slave = self._of(slaves, fault.pick)
        ha = master.ha if master is not None else None
        if master is None or slave is None or ha is None or slave.process is None:
            return None
        peer = (master.address, ha.port)
        for transport in self.cluster.network.transports:
            if transport.process is slave.process and transport.peer_address == peer:
                slave.process.post(transport.break_unseen)
                return f"{slave.name} to {master.name}"
        return None

    def stranger(self, fault: PlannedFault) -> str | None:
        """A slave of another group comes to the master by a member's id, and acks what it gets.
        And a process that knows all that is public of the master opens sessions in its name."""
        master, slaves = self._master_and_slaves()
        slave = self._of(slaves, fault.pick)
        if master is None or slave is None or slave.service is None:
            return None
        ha, manager = master.ha, master.manager
        if ha is None or manager is None:
            return None
        process = SimProcess(self.cluster.loop, _STRANGER)
        process.spawn(_dial(master.address, ha.port, slave.broker_id))
        hello = pb.Hello(
            cluster_name=CLUSTER,
            broker_name=GROUP,
            broker_id=manager.broker_id,
            incarnation=manager.incarnation,
        )
        for address in GRPC_ADDRESSES:
            process.spawn(self._impersonate(address, hello))
        self._later(fault, process.kill)
        return f"as {slave.name}, to {master.name}"

    def late_confirm(self, fault: PlannedFault) -> str | None:
        """A slave has the log, but does not learn what is confirmed, so it carries out no deletion.
        It copies its master's offsets of the topic that was made again, and is killed once its file
        has them (R39)."""
        _, slaves = self._master_and_slaves()
        slave = self._of(slaves, fault.pick)
        if slave is None or slave.service is None:
            return None
        service, until_s = slave.service, self.cluster.now_s + _LAGS_S
        store, ha = service.store, controlled(service).ha
        advance = store.advance_confirm_offset

        def on_confirm(offset: int) -> int:
            is_late = ha._slave is not None and self.cluster.now_s < until_s and not self.over
            return store.confirm_offset if is_late else advance(offset)

        store.advance_confirm_offset = on_confirm  # type: ignore[method-assign]
        self._once_at_stake(slave, service, until_s)
        return slave.name

    def _once_at_stake(self, slave: BrokerHost, service: BrokerService, until_s: float) -> None:
        if slave.service is not service or self.over or self.cluster.now_s > until_s:
            return
        if self.cluster.promises.progress.is_at_stake(slave, Recreator.PROGRESS):
            self.cluster.tell("fault", f"late confirm: {slave.name} is killed")
            self.cluster.later(_AGAIN_S, slave.kill)
            self.cluster.later(2 * _AGAIN_S, slave.start)
        else:
            self.cluster.later(_AGAIN_S, self._once_at_stake, slave, service, until_s)

    def no_room_for_a_commit(self, fault: PlannedFault) -> str | None:
        """The log of the master has no disk space from the next commit on, and the producer ends.
        Another master is named, and what found none is forgotten; then this one leads again, before
        it asks how that transaction ended (R55)."""
        master, slaves = self._master_and_slaves()
        heir = self._of(slaves, fault.pick)
        if master is None or heir is None:
            return None
        plan = master.disk.plan

        def on_log(data: bytes) -> None:
            if _COMMITTED in data:
                plan.on_log, plan.log_is_full = None, True
                for client in self._clients:
                    if isinstance(client, TransactionSender):
                        self.cluster.later(0.0, client.kill)
                        self._later(fault, client.start)

        plan.on_log = on_log
        self._once_full(master, heir, self.cluster.now_s + _WAITS_S)
        return f"at {master.name}"

    def _once_full(self, master: BrokerHost, heir: BrokerHost, until_s: float) -> None:
        if master.disk.plan.log_is_full:
            self._name(heir)
            self._once_forgotten(master, until_s)
        elif self.over or self.cluster.now_s > until_s or not master.is_open:
            self._make_room(master)
        else:
            self.cluster.later(_LOOK_S, self._once_full, master, heir, until_s)

    def _once_forgotten(self, master: BrokerHost, until_s: float) -> None:
        """It has left its role, and has not begun to follow."""
        appender = master.service.store.appender if master.service is not None else None
        if appender is not None and not appender.is_writable and not appender.has_buffered:
            self._make_room(master)
            self.cluster.later(_AGAIN_S, self._lead_again, master, until_s)
        elif self.over or self.cluster.now_s > until_s:
            self._make_room(master)
        else:
            self.cluster.later(_LOOK_S, self._once_forgotten, master, until_s)

    def _make_room(self, master: BrokerHost) -> None:
        master.disk.plan.on_log, master.disk.plan.log_is_full = None, False

    def _lead_again(self, master: BrokerHost, until_s: float) -> None:
        if not (self.over or master.is_open or self.cluster.now_s > until_s):
            self._name(master)
            self.cluster.later(_AGAIN_S, self._lead_again, master, until_s)

    def _name(self, host: BrokerHost) -> None:
        if host.service is not None:
            self._operator.elect(host.broker_id)

    def end_before_the_op(self, fault: PlannedFault) -> str | None:
        """The master ends when each slave has the commit of a transaction, and its op is under way:
        so it is for the next master to write, which takes its time by a slow link, while the
        producer asks for the commit again (R30)."""

        def commit_came(master: BrokerHost, slave: BrokerHost, slaves: list[BrokerHost]) -> None:
            self._block(master, slave, fault.for_s)
            self.cluster.later(0.0, self._end_master, fault, master, slaves)

        return self._when_it_came(
            fault, lambda data: _COMMITTED in data and _OP not in data, commit_came
        )

    def _end_master(
        self, fault: PlannedFault, master: BrokerHost, slaves: list[BrokerHost]
    ) -> None:
        if self._came_to_all(slaves):
            self._down(fault, master, master.kill)
            others, links = frozenset(s.address for s in slaves), self.cluster.network.slow_links
            links[others] = _SLOW_S
            self._later(fault, links.pop, others, None)

    def end_after_a_recall(self, fault: PlannedFault) -> str | None:
        """The master ends once it has answered a recall, before a slave knows that it is confirmed.
        No controller names another master before what was recalled is due: that one must see the
        recall first (R30)."""

        def recall_came(master: BrokerHost, _: BrokerHost, slaves: list[BrokerHost]) -> None:
            if self._came_to_all(slaves):
                self.cluster.later(_ANSWERED_S, self._down, fault, master, master.kill)
                for host in self.cluster.controllers.values():
                    self.cluster.later(_ANSWERED_S, host.kill)
                    self.cluster.later(_UNNAMED_S, host.start)

        return self._when_it_came(fault, lambda data: _RECALL in data, recall_came)

    def _when_it_came(
        self,
        fault: PlannedFault,
        is_it: Callable[[bytes], bool],
        then: Callable[[BrokerHost, BrokerHost, list[BrokerHost]], None],
    ) -> str | None:
        """`then(master, slave, slaves)` at the first write of each slave's log for which `is_it`
        is true, while the fault lasts. The name of the master, None if no slave follows one."""
        master, slaves = self._master_and_slaves()
        if master is None or not slaves:
            return None

        def wrote(slave: BrokerHost, data: bytes) -> None:
            if is_it(data):
                slave.disk.plan.on_log = None
                then(master, slave, slaves)

        for slave in slaves:
            slave.disk.plan.on_log = partial(wrote, slave)
            self._later(fault, setattr, slave.disk.plan, "on_log", None)
        return master.name

    @staticmethod
    def _came_to_all(slaves: list[BrokerHost]) -> bool:
        return all(each.disk.plan.on_log is None for each in slaves)

    async def _impersonate(self, address: str, hello: pb.Hello) -> None:
        """R59: every controller refuses a session without the secret of its process."""

        async def messages() -> AsyncIterator[pb.BrokerMessage]:
            yield pb.BrokerMessage(hello=hello)
            await asyncio.Event().wait()

        channel = grpc.aio.insecure_channel(address)
        stub = controller_pb2_grpc.ControllerServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            async for message in stub.BrokerSession(messages()):
                if message.WhichOneof("kind") != "refused":
                    self.cluster.violate(f"R59: {address} takes a stranger for the master")
        except grpc.aio.AioRpcError:
            return  # that controller is away


async def _dial(host: str, port: int, broker_id: int) -> None:
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(lambda: _Stranger(broker_id), host, port)
    except OSError:
        return  # the master has gone


class _Stranger(asyncio.Protocol):
    def __init__(self, broker_id: int) -> None:
        self._broker_id = broker_id
        self._reader = wire.MasterFrameReader()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        identity = wire.HAIdentity(
            CLUSTER, "broker-b", self._broker_id, "another life", "another log"
        )
        transport.write(
            wire.encode_slave_handshake(wire.SlaveHandshake(self._broker_id, identity=identity))
        )

    def data_received(self, data: bytes) -> None:
        try:
            for item in self._reader.feed(memoryview(data)):
                self._answer(item)
        except RemoteProtocolError:
            self._transport.close()

    def _answer(self, item: object) -> None:
        if isinstance(item, wire.MasterHandshake):
            epoch = item.last_epoch
            self._transport.write(wire.encode_epoch_mark(epoch) + wire.encode_tables_mark(epoch))
            self._transport.write(wire.encode_ack(item.max_offset))
        elif isinstance(item, wire.TransferHeader):
            self._transport.write(wire.encode_ack(item.offset + item.body_size))
