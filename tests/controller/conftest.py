"""A controller group to script: commands pass through their bytes, invariants are checked.

`tests/controller` is put on the path for its helper modules.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batonmq.controller.rules.commands import (
    AlterSyncStateSet,
    AnyCommand,
    ApplyBrokerId,
    BecomeController,
    CleanBrokerData,
    CommandResult,
    Effect,
    ElectMaster,
    LiveBroker,
    NewMember,
    RegisterBroker,
    decode,
    encode,
)
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.role_view import RoleView

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules here

NAME = "broker-a"
CLUSTER = "DefaultCluster"


class Script:
    """One log's worth of commands about the group `broker-a`.

    `living` is the liveness that the leader stamps; replicas registered here are added to it.
    """

    def __init__(self) -> None:
        self.state = ControllerState()
        self.effects: tuple[Effect, ...] = ()
        self.now_ms = 1_000_000
        self.controller_epoch = 0
        self.living: dict[int, LiveBroker] = {}
        self._index = 0

    @property
    def group(self) -> BrokerGroup:
        group = self.state.group(NAME)
        assert group is not None
        return group

    @property
    def view(self) -> RoleView:
        view = self.state.role_view(NAME, self.living)
        assert view is not None
        return view

    @property
    def epochs(self) -> tuple[int, int]:
        return (self.group.master_epoch, self.group.sync_state_set_epoch)

    @property
    def kinds(self) -> list[str]:
        """The kinds of history events so far."""
        return [str(event.kind) for event in self.state.history]

    def live(self) -> tuple[LiveBroker, ...]:
        return tuple(self.living[broker_id] for broker_id in sorted(self.living))

    def die(self, *broker_ids: int) -> None:
        for broker_id in broker_ids:
            self.living.pop(broker_id, None)

    def revive(self, broker_id: int, incarnation: str | None = None, **facts: int) -> None:
        if incarnation is None:
            record = self.group.replica(broker_id)
            assert record is not None
            incarnation = record.incarnation
        self.living[broker_id] = LiveBroker(broker_id, incarnation, **facts)

    def tell(self, broker_id: int, **facts: int) -> None:
        """The replica's newest heartbeat."""
        self.living[broker_id] = msgspec.structs.replace(self.living[broker_id], **facts)

    def apply(self, command: AnyCommand) -> CommandResult:
        command = command.stamped(controller_epoch=self.controller_epoch, now_ms=self.now_ms)
        self._index += 1
        transition = self.state.apply(decode(encode(command))[0], self._index)
        transition.state.check_invariants()
        self.state, self.effects = transition.state, transition.effects
        return transition.result

    def lead(self, node: str = "n0") -> int:
        """`node` becomes the controller."""
        result = self.apply(BecomeController(node=node, nonce=f"nonce-{node}-{self._index}"))
        self.controller_epoch = result.controller_epoch
        return result.controller_epoch

    def register(self, broker_id: int = 0, **fields: Any) -> CommandResult:
        """Registers natively; the first life of replica n is `life-n`."""
        label = broker_id or self.state.next_broker_id(NAME)
        fields.setdefault("incarnation", f"life-{label}")
        fields.setdefault("register_check_code", "" if broker_id else f"code-{label}")
        fields.setdefault("address", f"10.0.0.{label}:10911")
        fields.setdefault("ha_address", f"10.0.0.{label}:10912")
        fields.setdefault("cluster_name", CLUSTER)
        fields.setdefault("live", self.live())
        command = RegisterBroker(broker_name=NAME, broker_id=broker_id, **fields)
        result = self.apply(command)
        if result.ok:
            self.living[result.broker_id] = LiveBroker(result.broker_id, command.incarnation)
        return result

    def apply_id(self, broker_id: int, check_code: str = "", **fields: Any) -> CommandResult:
        """1013, as a broker that speaks only remoting does it."""
        fields.setdefault("cluster_name", CLUSTER)
        check_code = check_code or f"10.0.0.{broker_id}:10911;1"
        return self.apply(
            ApplyBrokerId(
                broker_name=NAME, broker_id=broker_id, register_check_code=check_code, **fields
            )
        )

    def elect(self, broker_id: int = 0, **fields: Any) -> CommandResult:
        fields.setdefault("broker_name", NAME)
        fields.setdefault("live", self.live())
        return self.apply(ElectMaster(broker_id=broker_id, **fields))

    def alter(self, *broker_ids: int, **fields: Any) -> CommandResult:
        """The recorded master proposes this set, naming what it should unless told otherwise."""
        fields.setdefault("master_broker_id", self.group.master_broker_id)
        fields.setdefault("master_incarnation", self.group.master_incarnation)
        fields.setdefault("master_epoch", self.group.master_epoch)
        fields.setdefault("sync_state_set_epoch", self.group.sync_state_set_epoch)
        fields.setdefault("live", self.live())
        lives = {record.broker_id: record.incarnation for record in self.group.replicas}
        members = tuple(
            NewMember(broker_id, lives.get(broker_id, "nobody")) for broker_id in broker_ids
        )
        fields.setdefault("new_set", members)
        fields.setdefault("broker_name", NAME)
        return self.apply(AlterSyncStateSet(**fields))

    def clean(self, *broker_ids: int, **fields: Any) -> CommandResult:
        fields.setdefault("broker_name", NAME)
        fields.setdefault("live", self.live())
        return self.apply(CleanBrokerData(broker_ids=broker_ids, **fields))

    def three_in_sync(self) -> None:
        """The start of RocketMQ's ReplicasInfoManagerTest: master 1, set {1,2,3}, epochs 1/2."""
        for _ in range(3):
            assert self.register().ok
        assert self.elect(1).ok
        assert self.alter(1, 2, 3).ok
        assert self.epochs == (1, 2)


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    again = ControllerState.from_snapshot(made.state.to_snapshot())
    assert again == made.state
    assert again.digest() == made.state.digest()


@pytest.fixture
def trio(script: Script) -> Script:
    """One whose group has three replicas in sync."""
    script.three_in_sync()
    return script


@pytest.fixture
def new_script() -> Callable[[], Script]:
    """For tests that need several logs."""
    return Script


@pytest.fixture
def cluster(tmp_path: Path) -> AbstractAsyncContextManager[Any]:
    """Three Raft nodes: a `raft_cluster.Cluster`."""
    from raft_cluster import started

    return started(tmp_path)
