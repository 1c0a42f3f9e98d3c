"""How a controller's parts are wired, over a log of one node: pushes, the folder, the end."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from local_log import LocalLog, alone

from batonmq.controller.config import ControllerConfig
from batonmq.controller.liveness.broker_sessions import LivenessConfig
from batonmq.controller.liveness.events import (
    ElectionEnded,
    OfferLead,
    ProposeElect,
    SessionEnded,
    SessionHeartbeat,
)
from batonmq.controller.raft.log import Commit, Machine
from batonmq.controller.rules.commands import (
    CommandResult,
    ReplicasChanged,
    RoleChanged,
    SetChanged,
)
from batonmq.controller.service import ControllerService, _liveness_config
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import NotLeaderError
from batonmq.runtime import disk
from batonmq.runtime.lock_file import FolderLockedError

FACTS = (
    "epoch",
    "max_offset",
    "confirm_offset",
    "election_priority",
    "min_offset",
    "master_epoch",
    "sync_state_set_epoch",
)
"""What a heartbeat says of a replica."""


class Log(LocalLog):
    """`during` runs while the lead is offered."""

    offers = 0
    during: Callable[[], None] = staticmethod(lambda: None)

    async def hand_over(self, timeout_ms: int) -> bool:
        self.offers += 1
        self.during()
        return True


class Scene:
    """A controller that has applied what `script` did, and a session of broker 1."""

    def __init__(self, folder: Path, script: Any) -> None:
        script.three_in_sync()
        self.state = script.state
        self.log = Log("n0", Machine(self.state))
        self.service = ControllerService(alone(folder), replicated_log=self.log)
        self.pushed: list[Any] = []
        session = self.service.sessions.add("broker-a", 1, "life-1")
        session.send = self.pushed.append

    def applies(self, *effects: Any) -> None:
        """A command with these effects; without any, a snapshot."""
        result = CommandResult(ResponseCode.SUCCESS)
        command: Any = object() if effects else None
        self.service._applied(Commit(9, command, result, effects, self.state))


async def test_r20_a_snapshot_is_pushed_to_every_group(tmp_path, script):
    """Any view may have changed in what it replaced."""
    scene = Scene(tmp_path, script)
    scene.applies()
    (message,) = scene.pushed
    assert message.view.broker_name == "broker-a"


@pytest.mark.parametrize("effect", [RoleChanged, SetChanged, ReplicasChanged])
async def test_r20_whatever_changed_in_a_view_is_pushed_when_it_is_applied(
    tmp_path, script, effect
):
    """Here by a follower: its sessions hear of it as early as the leader's."""
    scene = Scene(tmp_path, script)
    assert not scene.service.gate.open
    scene.applies(effect(scene.state.role_view("broker-a")))
    (message,) = scene.pushed
    assert message.view.master_broker_id == 1


async def test_a_leader_that_stops_offers_its_lead_first_and_pushes_nothing_more(tmp_path, script):
    """Brokers use its successor already; what it still applies they hear from that one."""
    scene = Scene(tmp_path, script)
    view = scene.state.role_view("broker-a")
    scene.applies(RoleChanged(view))
    assert len(scene.pushed) == 1

    def applied_meanwhile() -> None:
        assert not scene.service.gate.open
        scene.applies(RoleChanged(view))

    scene.log.during = applied_meanwhile
    await scene.service.close()
    assert (scene.log.offers, len(scene.pushed)) == (1, 1)


async def test_a_rule_that_breaks_at_a_heartbeat_reaches_the_handler_of_the_loop(
    tmp_path, script, monkeypatch
):
    """It ends a server (`server_main`). gRPC would only end the stream, and log nothing."""
    reported: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["exception"])
    )
    scene, broken = Scene(tmp_path, script), AssertionError("a rule does not hold")
    session = scene.service.sessions.add("broker-a", 2, "life-2")
    with monkeypatch.context() as breaks:
        breaks.setattr(scene.service._core, "handle", Mock(side_effect=broken))
        with pytest.raises(AssertionError):
            scene.service._watch.session_heartbeat(session, pb.Heartbeat())
    await scene.service.close()
    assert reported == [broken]


async def test_a_folder_belongs_to_one_controller_from_its_start_to_its_end(tmp_path, script):
    """Two processes with one log could vote twice."""
    first, second = (ControllerService(alone(tmp_path)) for _ in range(2))
    await first._open_store()
    with pytest.raises(FolderLockedError):
        await second._open_store()
    await first.close()
    await second._open_store()
    await second.close()


async def test_a_history_that_cannot_be_synced_does_not_keep_the_folder(tmp_path, monkeypatch):
    first, second = (ControllerService(alone(tmp_path)) for _ in range(2))
    await first._open_store()
    with monkeypatch.context() as broken:
        broken.setattr(disk, "fsync", Mock(side_effect=OSError(errno.EIO, "I/O error")))
        await first.close()
    await second._open_store()
    await second.close()


async def test_r10_an_election_names_the_epoch_that_it_replaces(tmp_path, script, monkeypatch):
    """Proposed twice, it elects once; the time of its cause goes with it. Also without an outcome
    it ends: the core looks again."""
    scene, handle = Scene(tmp_path, script), Mock(return_value=[])
    submit = AsyncMock(side_effect=[CommandResult(ResponseCode.SUCCESS), NotLeaderError(None)])
    monkeypatch.setattr(scene.service._core, "handle", handle)
    scene.service.requests.submit = submit
    for _ in range(2):
        await scene.service._watch._run_election(
            ProposeElect("broker-a", 7, "session_silent", 0, 812)
        )
    await scene.service.close()
    told = [call.args[0] for call in handle.call_args_list]
    assert told == [ElectionEnded("broker-a", 7)] * 2
    command = submit.call_args.args[0]
    assert (command.broker_name, command.expected_master_epoch) == ("broker-a", 7)
    assert (command.reason, command.silent_ms, command.designate) == ("session_silent", 812, False)


async def test_r5_a_heartbeat_brings_which_answer_arrived_and_what_the_replica_holds(
    tmp_path, script, monkeypatch
):
    """By the first a broker that no answer reaches is known, by the rest the best candidate."""
    heard: list[Any] = []

    def note(event: object, now_ms: int) -> list[object]:
        if isinstance(event, SessionHeartbeat):
            heard.append(event)
        return []

    scene = Scene(tmp_path, script)
    monkeypatch.setattr(scene.service._core, "handle", note)
    session = scene.service.sessions.add("broker-a", 2, "life-2")
    numbers = {name: n for n, name in enumerate(FACTS, 11)}
    beat = pb.Heartbeat(sequence=9, answered=7, **numbers)
    scene.service._watch.session_heartbeat(session, beat)
    await scene.service.close()
    (event,) = heard
    assert (event.broker_name, event.session_id, event.seen.broker_id) == ("broker-a", 2, 2)
    assert (event.sequence, event.answered) == (9, 7)
    assert [getattr(event.seen, name) for name in FACTS] == [11, 12, 13, 14, 15, 16, 17]


async def test_r6_the_end_of_a_stream_brings_how_it_ended(tmp_path, script, monkeypatch):
    """One that just ended starts an election at once; and a peer may be offered the lead (R50)."""
    scene = Scene(tmp_path, script)
    handle = Mock(return_value=[OfferLead("n2", "it hears more")])
    hand_over = AsyncMock(return_value=True)
    monkeypatch.setattr(scene.service._core, "handle", handle)
    monkeypatch.setattr(scene.log, "hand_over", hand_over)
    session = scene.service.sessions.add("broker-a", 2, "life-2")
    for goodbye in (None, "planned stop", "its disk failed"):
        scene.service._watch.session_closed(session, goodbye)
    await asyncio.sleep(0)
    assert hand_over.call_args.args[1] == "n2"
    told = [call.args[0] for call in handle.call_args_list]
    handle.return_value = []
    await scene.service.close()
    assert told == [
        SessionEnded("broker-a", 2, 2, goodbye=goodbye, why=why)
        for goodbye, why in ((False, ""), (True, ""), (True, "its disk failed"))
    ]


def test_the_settings_of_failovers_reach_who_decides_them():
    config = ControllerConfig(
        broker_session_timeout_ms=1_234, master_lease_ms=567, propose_timeout_ms=2_345
    )
    assert _liveness_config(config) == LivenessConfig(
        session_timeout_ms=1_234, master_lease_ms=567, outcome_timeout_ms=2_345
    )
