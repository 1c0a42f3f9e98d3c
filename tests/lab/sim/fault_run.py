"""One seeded run of a cluster: kills, hangs, cuts, a slow network, planned elections, recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpc.aio import AioRpcError

from batonmq.proto.controller.v1 import controller_pb2 as pb
from lab.sim.loop import Process
from lab.sim.rpc import CallContext
from tests.lab.sim.sim_cluster import BROKERS, GROUP, NODES, Broker, Violation, World

HOSTS = tuple(f"10.0.0.{number}" for number in BROKERS) + NODES


class FaultRun:
    """A cluster under traffic. The same seed gives the same run."""

    def __init__(self, seed: int, folder: Path, **settings: Any) -> None:
        self.world = World(seed, folder, **settings)
        self.rng = self.world.rng
        for node in NODES:
            self.world.start_controller(node)
        for number in BROKERS:
            self.world.start_broker(number)
        self._traffic = True
        self._send_soon()

    # -- clients

    def _send_soon(self) -> None:
        if self._traffic:
            self.world.call_later(self.rng.uniform(0.001, 0.02), self._send)

    def _send(self) -> None:
        takers = [broker for broker in self.world.living() if broker.is_open]
        for broker in takers:  # a deposed master has clients, too
            for _ in range(self.rng.choice((0, 1, 1, 3))):
                broker.process.post(broker.put)
        self._send_soon()

    # -- faults

    def run_faults(self, seconds: float) -> None:
        end = self.world.loop.time() + seconds
        while self.world.loop.time() < end:
            self.world.run(self.rng.choice((0.002, 0.01, 0.03, 0.08)))
            if self.rng.random() < 0.3:
                self._fault()

    def _fault(self) -> None:
        world, rng = self.world, self.rng
        living, paused = self._hosts(paused=False), self._hosts(paused=True)
        name = rng.choices(
            ("kill", "kill_master", "start", "pause", "resume", "cut", "isolate", "heal",
             "kill_node", "kill_leader", "start_node", "slow", "fast", "designate"),
            (4, 6, 10, 3, 8, 4, 3, 8, 2, 2, 8, 1, 3, 3),
        )[0]  # fmt: skip
        world.counts.faults[name] = world.counts.faults.get(name, 0) + 1
        brokers = world.living()
        match name:
            case "kill" if brokers:
                self._kill(rng.choice(brokers))
            case "kill_master":
                for broker in brokers:
                    if broker.is_open:
                        self._kill(broker)
            case "start":
                for number in BROKERS:
                    if world.brokers[number] is None and rng.random() < 0.7:
                        world.start_broker(number)
            case "pause" if living:
                rng.choice(living).pause()
            case "resume":
                for process in paused:
                    process.resume()
            case "cut":
                world.network.block(*rng.sample(HOSTS, 2))
            case "isolate":
                isolated = rng.choice(HOSTS)
                for other in HOSTS:
                    if other != isolated:
                        world.network.block(isolated, other)
            case "heal":
                world.network.heal()
            case "kill_node":
                world.kill_controller(rng.choice(NODES), vanish=rng.random() < 0.15)
            case "kill_leader" if world.raft.leader is not None:
                world.kill_controller(world.raft.leader, vanish=rng.random() < 0.15)
            case "start_node":
                self._start_nodes()
            case "slow" | "fast":
                world.network.slow = name == "slow"
            case "designate":
                self._designate(rng.choice(BROKERS))

    def _kill(self, broker: Broker) -> None:
        self.world.kill_broker(broker.number, vanish=self.rng.random() < 0.15)
        if self.world.ha_sync and self.rng.random() < 0.3:
            self.world.disks[broker.number].lose_power()

    def _start_nodes(self) -> None:
        for node in NODES:
            if self.world.raft.logs[node].process.dead:
                self.world.start_controller(node)

    def _hosts(self, *, paused: bool) -> list[Process]:
        processes = [broker.process for broker in self.world.living()]
        processes += [log.process for log in self.world.raft.logs.values()]
        return [p for p in processes if not p.dead and p.paused == paused]

    def _designate(self, number: int) -> None:
        """An operator names the next master."""
        request = pb.ElectMasterRequest(
            cluster_name="C",
            broker_name=GROUP,
            broker_id=number,
            designate=True,
            expected_master_epoch=-1,
            reason="operator",
        )
        for node, service in self.world.services.items():
            process = self.world.raft.logs[node].process
            if not process.paused and not process.dead:
                process.spawn(elect(service._grpc_endpoint, request))

    # -- recovery

    def recover(self, seconds: float = 15.0) -> None:
        """All faults end: the group becomes whole and level by itself, or this raises Violation."""
        world = self.world
        world.network.heal()
        world.network.slow = False
        for process in self._hosts(paused=True):
            process.resume()
        self._start_nodes()
        end = world.loop.time() + seconds
        while world.loop.time() < end:
            world.run(0.1)
            for number in BROKERS:
                if world.brokers[number] is None:
                    world.start_broker(number)
            if self._traffic and end - world.loop.time() < seconds - 1.5:
                self._traffic = False
            if not self._traffic and self._is_level():
                return
        raise Violation(f"the group does not become whole: {self.describe()}")

    def _is_level(self) -> bool:
        world = self.world
        group = world.raft.truth.state.group(GROUP)
        brokers = world.living()
        if group is None or len(brokers) != len(BROKERS) or len(group.sync_state_set) != 3:
            return False
        logs = {bytes(broker.store.disk.data) for broker in brokers}
        confirms = {broker.store.confirm_offset for broker in brokers}
        histories = {broker.store.epochs.entries for broker in brokers}
        masters = [broker for broker in brokers if broker.is_open]
        return (
            len(logs) == len(confirms) == len(histories) == len(masters) == 1
            and confirms == {len(next(iter(logs)))}
            and masters[0].gate.master_epoch == group.master_epoch
            and next(iter(logs)).startswith(world.truth)
        )

    def describe(self) -> str:
        world = self.world
        group = world.raft.truth.state.group(GROUP)
        parts = [f"raft leader {world.raft.leader}, recorded {group}"]
        for number, broker in world.brokers.items():
            if broker is None:
                parts.append(f"{number}: dead")
                continue
            sync = broker.ha.sync_state
            slave = broker.ha._slave
            view = broker.manager.view
            parts.append(
                f"{number}: {broker.gate.role.value} epoch {broker.gate.master_epoch} "
                f"refusal {broker.gate.refusal} log {broker.store.max_phy_offset} "
                f"confirm {broker.store.confirm_offset} view {view.key if view else None} "
                f"epochs {[(e.epoch, e.start_offset) for e in broker.store.epochs.entries][-3:]} "
                f"registered {broker.manager._state.registered if broker.manager._state else 0} "
                f"leader {broker.manager.leader} " + (f"slave {slave.core.phase}" if slave else "")
            )
            if sync is not None:
                parts.append(
                    f"   required {sorted(sync.required_set)} dead {set(sync.dead)} "
                    f"proposal {sync.proposal} followers {sync._followers}"
                )
        return "\n".join(map(str, [*parts, world.fatal[-3:]]))


async def elect(endpoint: Any, request: Any) -> None:
    """An operator's request to one controller."""
    try:
        await endpoint.ElectMaster(request, CallContext())
    except AioRpcError:
        pass  # it lost its lead


def run_with_faults(seed: int, folder: Path, *, seconds: float = 4.0, **settings: Any) -> World:
    """Raises Violation, or whatever the code raised."""
    run = FaultRun(seed, folder, **settings)
    try:
        run.world.run(0.3)
        run.run_faults(seconds)
        run.recover()
    finally:
        run.world.close()
    return run.world
