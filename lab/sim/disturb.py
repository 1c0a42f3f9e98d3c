"""What operators and strangers do to servers that work, and what must not come of it.

An operator cleans a replica while it is cut off: it has to notice, and to register again (R52). The
session of the master breaks again and again: the second time the controllers wait before they
decide (R6). A stranger announces frames that never come: no memory is taken for them. It opens more
connections to an HA port than are allowed: each displaces another one of its own (R58). A stranger
asks for the election of a planned switch that no controller began: no replica is elected. It claims
the id of a replica that is away: no controller gives it (R59). A stranger names topics and groups
as no file can be named: nothing else is removed, and no member ends (R46). A stranger answers at
the address of a dead master: no slave follows it (R21).
"""

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from batonmq.controller.rules.groups import ReplicaRecord
from batonmq.ha.node_secret import NONCE_BYTES, PROOF_BYTES
from batonmq.ha.proof import STRANGERS_MAX
from batonmq.ha.wire import HAIdentity, SlaveFrameReader, encode_master_handshake
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.controller_pb2_grpc import ControllerServiceStub
from batonmq.protocol.bodies import ConsumerData, HeartbeatData
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.incarnation import new_process_name
from batonmq.protocol.topic_name import GROUP_LENGTH_MAX, NAME_BYTES_MAX
from batonmq.remoting.command import BUFFER_SIZE, FRAME_SIZE_MAX, RemotingCommand, encode_frame
from lab.sim.clients import Operator
from lab.sim.cluster import SimCluster
from lab.sim.hosts import (
    BROKER_PORT,
    CLUSTER,
    GROUP,
    GRPC_ADDRESSES,
    NAMESRV_PORT,
    BrokerHost,
    ControllerHost,
)
from lab.sim.kinds import Kinds, PlannedFault
from lab.sim.loop import SimProcess

_STRANGER = "10.0.3.2"
_AWAY_S = 1.5
"""Longer than the session time-out: the controllers call it dead."""
_AGAIN_S = 0.3
_CONNECTIONS = 4
_BEYOND_ALL = 1 << 40
_STAYS_S = 60.0
_WRONG_NONCE, _WRONG_PROOF = bytes(NONCE_BYTES).hex(), bytes(PROOF_BYTES).hex()
_OTHERS_MASTER = HAIdentity(CLUSTER, "broker-b", 1, "another life", "another log")


class DisturbFaults(Kinds):
    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster)
        cluster.checks.append(self._check_cost)

    def clean(self, fault: PlannedFault) -> str | None:
        """A slave is cut off from the controllers and the others, cleaned, and comes back."""
        host = self._of(self._slaves(), fault.pick)
        if host is None or self.cluster.master is None:
            return None
        broker_id = host.broker_id
        self.cluster.later(_AWAY_S, self._clean, broker_id)
        self._isolate(host, 2 * _AWAY_S)
        return f"{host.name}, broker id {broker_id}"

    def _clean(self, broker_id: int) -> None:
        group = self.cluster.promises.group
        if not self.over and group is not None and group.master_broker_id != broker_id:
            Operator(self.cluster).clean(broker_id)

    def reset_session(self, fault: PlannedFault) -> str | None:
        """Of the master with each controller, twice."""
        master = self.cluster.master
        if master is None:
            return None
        self._reset(master)
        self.cluster.later(_AGAIN_S + fault.for_s, self._reset, master)
        return master.name

    def _reset(self, host: BrokerHost) -> None:
        for stream in list(self.cluster.network.streams):
            if not stream.done() and stream.client_host == host.address:
                stream.reset()

    def foreign_switch(self, fault: PlannedFault) -> str | None:
        """To a slave of the set, with a drained offset beyond every log. Or its id is claimed."""
        group = self.cluster.promises.group
        slaves = [i for i in group.sync_state_set if i != group.master_broker_id] if group else []
        broker_id = self._of(slaves, fault.pick)
        if group is None or broker_id is None:
            return None
        host, replica = self.cluster.promises.host_of(broker_id), group.replica(broker_id)
        if fault.pick2 < 0.3 and host is not None and replica is not None:
            host.kill()
            self.cluster.later(_AWAY_S, self._claim, replica)
            self.cluster.later(_AWAY_S + _AGAIN_S, host.start)
            return f"no, broker id {broker_id} is claimed"
        request = pb.ElectMasterRequest(
            cluster_name=CLUSTER,
            broker_name=GROUP,
            broker_id=broker_id,
            designate=True,
            expected_master_epoch=group.master_epoch,
            request_id=f"switch:{fault.pick2}",
            drained_offset=_BEYOND_ALL,
        )
        process = SimProcess(self.cluster.loop, _STRANGER)
        process.spawn(_ask_all(request))
        return f"to broker id {broker_id}"

    def _claim(self, replica: ReplicaRecord) -> None:
        """With all that is public of it, once its process is dead."""
        name = new_process_name()
        request = pb.RegisterBrokerRequest(
            cluster_name=CLUSTER,
            broker_name=GROUP,
            broker_id=replica.broker_id,
            register_check_code=replica.register_check_code,
            address=replica.address,
            ha_address=replica.ha_address,
            incarnation=name.incarnation,
            secret=name.secret,
            log_id=replica.log_id,
            owner=replica.owner,
            epoch=replica.epoch,
            max_offset=replica.max_offset,
        )
        SimProcess(self.cluster.loop, _STRANGER).spawn(self._register(request))

    async def _register(self, request: pb.RegisterBrokerRequest) -> None:
        """R59: no controller takes the claim for the owner's."""
        for address in GRPC_ADDRESSES:
            stub: Any = ControllerServiceStub(grpc.aio.insecure_channel(address))  # type: ignore[no-untyped-call]
            with contextlib.suppress(grpc.aio.AioRpcError):
                reply = await stub.RegisterBroker(request, timeout=1.0)
                if reply.status.code == 0:
                    self.cluster.violate(f"R59: {address} gives {request.broker_id} to a stranger")

    def bad_names(self, fault: PlannedFault) -> str | None:
        """Of topics and groups, in requests to the master. The name of a topic is a
        path out of its folder, that of a group is longer than a file name may be (R46)."""
        master = self.cluster.master
        if master is None:
            return None
        process = SimProcess(self.cluster.loop, _STRANGER)
        process.spawn(_send(master.address, BROKER_PORT, b"".join(map(encode_frame, _bad_names()))))
        self._later(fault, process.kill)
        return f"at {master.name}"

    def stranger_master(self, fault: PlannedFault) -> str | None:
        """The master ends while no controller could name another one, and a stranger with the same
        epochs answers at its address: the master of another group. Where brokers prove the secret
        of the nodes it knows all of the master but that secret (R41)."""
        master = self.cluster.master
        if master is None or master.service is None:
            return None
        store, ha, manager = master.service.store, master.ha, master.manager
        assert ha is not None and manager is not None
        named = _OTHERS_MASTER
        if self.cluster.settings.proves:
            named = HAIdentity(
                CLUSTER, GROUP, manager.broker_id, manager.incarnation, "another log",
                nonce=_WRONG_NONCE, proof=_WRONG_PROOF,
            )  # fmt: skip
        hello = encode_master_handshake(store.max_phy_offset, store.epochs.entries, named)
        for host in (master, *self.cluster.controllers.values()):
            host.kill()
            self.cluster.later(_AWAY_S, host.start)
        stranger = SimProcess(self.cluster.loop, master.address)
        self.cluster.network.listen(
            stranger, lambda: _StrangeMaster(hello, self.cluster.violate), master.address, ha.port
        )
        self.cluster.later(_AWAY_S - _AGAIN_S, stranger.kill)
        return f"in place of {master.name}"

    def announced_frames(self, fault: PlannedFault) -> str | None:
        """Of the largest size, at a broker or a name server; a little of each comes. And there are
        more connections to the HA port of a broker than it has places."""
        host = self._of(self._up(), fault.pick)
        if host is None:
            return None
        port = NAMESRV_PORT if isinstance(host, ControllerHost) else BROKER_PORT
        process = SimProcess(self.cluster.loop, _STRANGER)
        for _ in range(_CONNECTIONS):
            process.spawn(_announce(host.address, port))
        ha = host.ha if isinstance(host, BrokerHost) else None
        if ha is not None and fault.pick2 > 0.5:
            process.spawn(_flood(host.address, ha.port))
        self._later(fault, process.kill)
        return f"at {host.name} for {fault.for_s:.2f} s"

    def _check_cost(self) -> None:
        """R58: memory is taken for bytes that arrived, and at most as much again. Strangers have
        few of the connections of an HA port. What a process that hangs has not accepted yet is its
        kernel's."""
        strangers: Counter[tuple[str, int]] = Counter()
        for transport in self.cluster.network.transports:
            accepted = transport.peer.protocol
            if accepted is None or transport.peer.ended:
                continue
            if transport.process.host == _STRANGER:
                strangers[transport.peer_address] += 1
            intake = getattr(accepted, "intake", None)
            if intake is not None and intake.reader.held > 2 * intake.reader.waiting:
                self.cluster.violate(
                    f"R58: {intake.reader.held} bytes of memory are held for"
                    f" {intake.reader.waiting} that came from {transport.process.host}"
                )
        for (host, port), count in strangers.items():
            if count > STRANGERS_MAX:
                self.cluster.violate(f"R58: {host}:{port} has {count} connections of a stranger")


class _StrangeMaster(asyncio.Protocol):
    """Answers a slave's handshake with `hello`. No slave may accept it as its master (R21)."""

    def __init__(self, hello: bytes, violate: Callable[[str], None]) -> None:
        self._hello = hello
        self._violate = violate
        self._reader = SlaveFrameReader()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        handshake, acks = self._reader.feed(data)
        if handshake is not None:
            self._transport.write(self._hello)
        if self._reader.proof:
            self._violate("R41: a slave proves itself to a master whose proof is wrong")
        if acks:
            self._violate(f"R21: a slave acks {acks} to a stranger in place of its master")


async def _ask_all(request: pb.ElectMasterRequest) -> None:
    """Each controller; the leader answers."""
    for address in GRPC_ADDRESSES:
        channel = grpc.aio.insecure_channel(address)
        stub: Any = ControllerServiceStub(channel)  # type: ignore[no-untyped-call]
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.ElectMaster(request, timeout=1.0)


def _bad_names() -> Iterator[RemotingCommand]:
    for group in ("g\0", "g" * (GROUP_LENGTH_MAX + 1), "g" * GROUP_LENGTH_MAX):
        consumer = ConsumerData(group_name=group, subscription_data_set=[])
        heartbeat = HeartbeatData(client_id="stranger", consumer_data_set=[consumer])
        yield RemotingCommand.request(RequestCode.HEART_BEAT, {}, heartbeat.encode())
    for topic in ("../commitlog", "t\0", "t" * (NAME_BYTES_MAX + 1)):
        yield RemotingCommand.request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})


async def _announce(host: str, port: int) -> None:
    head = struct.pack(">ii", FRAME_SIZE_MAX - 4, 100)
    await _send(host, port, head + bytes(BUFFER_SIZE))


async def _flood(host: str, port: int) -> None:
    for _ in range(STRANGERS_MAX + _CONNECTIONS):
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.create_connection(asyncio.Protocol, host, port)
    await asyncio.sleep(_STAYS_S)


async def _send(host: str, port: int, data: bytes) -> None:
    """And then nothing, for as long as this process runs."""
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
    except OSError:
        return  # it has gone
    transport.write(data)
    await asyncio.sleep(_STAYS_S)
