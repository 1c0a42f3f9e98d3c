"""The shell: a ReplicasManager against a scripted gRPC endpoint, over real sockets and files."""

import asyncio
import contextlib
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_controller import FakeController, RecordingBroker, manager_config, view_message

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager import identity
from batonmq.replicas_manager.config import SessionTimings
from batonmq.replicas_manager.identity import IdentityError, IncarnationLog, RoleFile
from batonmq.replicas_manager.link import LogFacts
from batonmq.replicas_manager.service import ReplicasManager
from batonmq.runtime import start_retry
from batonmq.runtime.clock import boot_ms
from tests.shared.failing_disk import failing
from tests.shared.waiting import until

SHORT = SessionTimings(
    heartbeat_ms=5, follower_heartbeat_ms=20, session_timeout_ms=430, master_lease_ms=320
)


class Broker(RecordingBroker):
    """Writes down its calls; a gate can hold a role change open."""

    def __init__(self, role_path: Path) -> None:
        super().__init__()
        self.facts = LogFacts(epoch=-1, max_offset=0, confirm_offset=0, min_offset=0, log_id="log")
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.failure: Exception = OSError("the disk said no")
        self.persisted_at_action: list[int] = []
        self._role_path = role_path

    def log_facts(self) -> LogFacts:
        return self.facts

    async def _role(self, name: str, view: RoleView) -> None:
        self.persisted_at_action.append(RoleFile(self._role_path).load())
        self._note(name, view.master_epoch)
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise self.failure
        self._note(f"{name} done", view.master_epoch)

    async def become_master(self, view: RoleView, role_durable: Awaitable[None]) -> None:
        await self._role("master", view)
        await role_durable
        self._note("master durable", view.master_epoch)

    async def become_slave(self, view: RoleView) -> None:
        await self._role("slave", view)

    def adopt_view(self, view: RoleView) -> None:
        self._note("adopt", view.sync_state_set_epoch)


class Scene:
    """One fake controller, one broker, one manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity = folder / "brokerIdentity"
        self.temp = folder / "brokerIdentity-temp"
        self.controller = FakeController()
        self.broker = Broker(folder / "brokerRole.json")
        self.manager: ReplicasManager | None = None
        self.controller.handlers["RegisterBroker"] = self.register
        self.controller.handlers["ReportEvent"] = lambda request: pb.ReportEventReply()
        self.controller.handlers["ElectMaster"] = lambda request: pb.ElectMasterReply(
            status=pb.Status(code=2012, remark="no candidate")
        )
        self.view: pb.RoleView | None = None

    def register(self, request: pb.RegisterBrokerRequest) -> pb.RegisterBrokerReply:
        return pb.RegisterBrokerReply(broker_id=request.broker_id or 1, view=self.view)

    def make(
        self,
        *addresses: str,
        cluster: str = "C",
        incarnation: str = "life",
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> Any:
        config = manager_config(
            cluster_name=cluster,
            controllers=addresses or (self.controller.address,),
            identity_path=self.identity,
            role_path=self.folder / "brokerRole.json",
            timings=SHORT,
        )
        self.manager = ReplicasManager(
            config, self.broker, self.broker, incarnation=incarnation, on_fatal=on_fatal
        )
        return self.manager

    async def started(self, **options: Any) -> Any:
        manager = self.make(**options)
        await manager.start()
        async with asyncio.timeout(10):
            await until(lambda: manager.registered)
        return manager

    async def master(self, members: list[int] | None = None) -> Any:
        """Registered, elected in epoch 1, with a lease."""
        manager = await self.started()
        session = await self.controller.session()
        incarnations = {1: "life", 2: "life-2"}
        self.controller.key = (1, 1)
        await session.push(view_message(1, 1, 1, members or [1], incarnations))
        await self.broker.until("master done", 1)
        await self.broker.until("lease", True)
        return manager


@contextlib.asynccontextmanager
async def new_scene(folder: Path) -> AsyncIterator[Scene]:
    scene = Scene(folder)
    await scene.controller.start()
    try:
        yield scene
    finally:
        if scene.manager is not None:
            await scene.manager.close()
        await scene.controller.stop()


@pytest.fixture
def scene(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Scene]:
    return new_scene(tmp_path)


async def test_restart_with_changed_names_is_refused_with_both_sides(scene):
    """...AndRestartWithChangedBrokerConfig: says which file, what it holds, what to do."""
    scene.identity.write_text("C#broker-a#1")
    manager = scene.make(cluster="Other")
    with pytest.raises(IdentityError) as caught:
        await manager.start()
    text = str(caught.value)
    assert str(scene.identity) in text
    assert "brokerClusterName=C" in text and "brokerClusterName=Other" in text
    assert "move the whole data folder aside" in text


async def test_a_lost_register_reply_leaks_no_id(scene):
    """...AtApplyBrokerIdFailed: 1. The controller assigns, the reply is lost, the process dies.
    2. The temporary file stands, no identity. 3. The next process requests with the same code."""
    codes: list[str] = []

    async def lose(request: pb.RegisterBrokerRequest) -> pb.RegisterBrokerReply:
        codes.append(request.register_check_code)
        await asyncio.Event().wait()
        raise AssertionError

    scene.controller.handlers["RegisterBroker"] = lose
    first = scene.make(incarnation="life-1")
    await first.start()
    await scene.controller.until(lambda: bool(codes))
    await first.close()
    assert not scene.identity.exists()
    assert scene.temp.read_text() == f"C#broker-a#0#{codes[0]}"

    def assign(request: pb.RegisterBrokerRequest) -> pb.RegisterBrokerReply:
        codes.append(request.register_check_code)
        return pb.RegisterBrokerReply(broker_id=7)

    scene.controller.handlers["RegisterBroker"] = assign
    second = await scene.started()
    assert second.broker_id == 7
    assert codes[-1] == codes[0] != ""
    assert scene.identity.read_text() == "C#broker-a#7"
    assert not scene.temp.exists()


async def test_a_temporary_identity_of_java_is_taken_up(scene):
    """...AtCreateMetadataFileAndDeleteTemp: restart finishes with the code that was kept."""
    scene.temp.write_text("C#broker-a#3#127.0.0.1:10911;1700000000000")
    await scene.started()
    request = scene.controller.asked["RegisterBroker"][0]
    assert request.register_check_code == "127.0.0.1:10911;1700000000000"


async def test_restart_registers_the_same_id_under_a_new_incarnation(scene):
    """...AtRegisterSuccess: the permanent file is kept and rules."""
    scene.identity.write_text("C#broker-a#5")
    scene.temp.write_text("C#broker-a#0#old")
    manager = await scene.started()
    assert manager.broker_id == 5
    request = scene.controller.asked["RegisterBroker"][0]
    assert (request.broker_id, request.incarnation) == (5, "life")
    assert request.address == "127.0.0.1:10911"
    assert not scene.temp.exists()


async def test_r2_the_epoch_is_on_disk_when_the_broker_begins_to_follow(scene):
    await scene.started()
    session = await scene.controller.session()
    await session.push(view_message(2, 4, 7, [2], {1: "life", 2: "life-2"}))
    await scene.broker.until("slave done", 4)
    assert scene.broker.persisted_at_action == [4]


async def test_r2_a_master_opens_when_its_epoch_is_on_the_disk(tmp_path, monkeypatch):
    """The two fsyncs of a mastership run side by side; the gate opens after both."""
    stored = threading.Event()
    store = RoleFile.store

    def slow_store(self: RoleFile, master_epoch: int) -> None:
        assert stored.wait(10)
        store(self, master_epoch)

    monkeypatch.setattr(RoleFile, "store", slow_store)
    async with new_scene(tmp_path) as scene:
        await scene.started()
        session = await scene.controller.session()
        await session.push(view_message(1, 3, 1, [1], {1: "life"}))
        await scene.broker.until("master done", 3)
        assert scene.broker.persisted_at_action == [0]
        assert ("master durable", 3) not in scene.broker.calls
        stored.set()
        await scene.broker.until("master durable", 3)
        assert RoleFile(scene.folder / "brokerRole.json").load() == 3


async def test_r17_a_log_that_is_whole_again_is_registered_at_once(scene):
    """1. The broker registers as suspect. 2. Its log is refilled: it registers again, healthy.

    3. Later it finds damage: that is registered as well. Nothing else registers it again.
    """
    scene.broker.facts = LogFacts(3, 900, 800, 0, "log", "stopped before a reboot")
    await scene.started()
    asked = scene.controller.asked["RegisterBroker"]
    assert [request.suspect for request in asked] == ["stopped before a reboot"]
    assert asked[0].accepted_epoch == 3
    scene.broker.facts = LogFacts(3, 900, 900, 0, "log")
    await scene.controller.until(lambda: len(asked) == 2)
    scene.broker.facts = LogFacts(3, 900, 900, 0, "log", "damage")
    await scene.controller.until(lambda: len(asked) == 3)
    assert [request.suspect for request in asked[1:]] == ["", "damage"]
    assert len({request.request_id for request in asked}) == 3


async def test_r17_a_registration_names_the_incarnations_that_wrote_in_the_folder(scene, tmp_path):
    for life in ("one", "two", "three"):
        manager = await scene.started(incarnation=life)
        await manager.close()
    asked = scene.controller.asked["RegisterBroker"]
    assert [list(request.earlier_lives) for request in asked] == [[], ["one"], ["two"]]
    (tmp_path / "lives").write_text("one\n")
    await scene.started(incarnation="four")
    assert list(asked[-1].earlier_lives) == ["one"]


def test_r17_the_first_incarnations_of_a_folder_count_for_nothing_before_one_is_registered(
    tmp_path, monkeypatch
):
    """An older version may have written here, whose incarnation is recorded, but in no file."""
    monkeypatch.setattr(identity, "INCARNATIONS_MAX", 8)
    log = IncarnationLog(tmp_path / "lives")
    assert [log.begin(life) for life in ("one", "two")] == [(), ()]
    for number in range(8):
        assert log.begin(f"life-{number}") == ()
    log.registered("three")
    assert log.begin("four") == ("three",)


def test_r17_many_starts_without_a_registration_do_not_look_like_a_folder_put_back(
    tmp_path, monkeypatch
):
    """The controllers remember the last registered incarnation: it is never dropped."""
    monkeypatch.setattr(identity, "INCARNATIONS_MAX", 8)
    log = IncarnationLog(tmp_path / "lives")
    log.begin("registered")
    log.registered("registered")
    for number in range(3 * 8):
        earlier = log.begin(f"life-{number}")
        assert earlier[0] == "registered"
    assert len(earlier) == 8
    assert earlier[-1] == f"life-{3 * 8 - 2}"


async def test_r2_the_highest_epoch_is_remembered_over_a_restart(scene):
    first = await scene.master()
    await first.close()
    scene.make(incarnation="life-2")
    assert scene.manager is not None
    await scene.manager.start()
    assert scene.manager._state is not None
    assert scene.manager._state.current.highest_master_epoch == 1
    assert scene.manager.role is Role.FENCED


async def test_hello_heartbeats_and_goodbye(scene):
    scene.broker.facts = LogFacts(3, 900, 800, 100, "log-9")
    manager = await scene.started()
    session = await scene.controller.session()
    hello = session.hello
    assert (hello.broker_id, hello.incarnation, hello.log_id) == (1, "life", "log-9")
    await scene.controller.until(lambda: bool(session.heartbeats))
    heartbeat = session.heartbeats[0]
    assert (heartbeat.epoch, heartbeat.max_offset, heartbeat.min_offset) == (3, 900, 100)
    await manager.close("maintenance")
    await session.ended.wait()
    assert session.goodbye == "maintenance"


async def test_a_newer_view_replaces_what_waits_behind_a_running_change(scene):
    """1. Becoming slave of epoch 1 hangs. 2. Epochs 2 and 3 are pushed. 3. After the hang only
    epoch 3 is acted on, and it was on disk before."""
    await scene.started()
    session = await scene.controller.session()
    incarnations = {1: "life", 2: "life-2"}
    scene.broker.gate.clear()
    await session.push(view_message(2, 1, 1, [2], incarnations))
    await scene.broker.until("slave", 1)
    await session.push(view_message(2, 2, 2, [2], incarnations))
    await session.push(view_message(2, 3, 3, [2], incarnations))
    await scene.controller.until(lambda: session.heartbeats[-1].master_epoch == 3)
    scene.broker.gate.set()
    await scene.broker.until("slave done", 3)
    assert ("slave", 2) not in scene.broker.calls
    assert scene.broker.persisted_at_action == [1, 3]


async def test_a_role_change_that_raised_is_tried_again(tmp_path, caplog):
    async with new_scene(tmp_path) as scene:
        await scene.started()
        session = await scene.controller.session()
        scene.broker.failures = 1
        await session.push(view_message(2, 1, 1, [2], {1: "life", 2: "life-2"}))
        await scene.broker.until("slave done", 1)
        assert scene.broker.calls.count(("slave", 1)) == 2
    assert "role_change_failed" in caplog.text


async def test_an_id_that_cannot_be_kept_is_fatal(scene):
    """A broker that only drops the reply is registered, never heard of again, and says nothing."""
    fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    manager = scene.make(on_fatal=fatal.set_result)
    await manager.start()
    scene.identity.mkdir()  # so its file cannot be replaced
    async with asyncio.timeout(10):
        assert isinstance(await fatal, OSError)
    assert not manager.registered


async def test_r45_a_full_disk_keeps_nobody_from_being_elected_and_ends_no_process(
    tmp_path, monkeypatch
):
    """After some attempts the sessions break, so another one is elected. This one goes on trying,
    and is master once there is room, if nobody else was elected."""
    monkeypatch.setattr("batonmq.replicas_manager.role_runner.MASTER_ATTEMPTS_MAX", 2)
    async with new_scene(tmp_path) as scene:
        await scene.started(on_fatal=lambda error: pytest.fail(str(error)))
        session = await scene.controller.session()
        scene.broker.failures = 3
        scene.broker.failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await session.push(view_message(1, 1, 1, [1], {1: "life"}))
        assert await scene.controller.session(2) is not session
        await scene.broker.until("master durable", 1)
        assert scene.broker.calls.count(("master", 1)) == 4


async def test_r24_a_damaged_log_does_not_try_to_become_master_twice(scene):
    """The next start finds the damage, and the controllers elect another one meanwhile."""
    fatal: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    await scene.started(on_fatal=fatal.set_result)
    session = await scene.controller.session()
    scene.broker.failures = 100
    scene.broker.failure = CorruptLogError("file", 7, "CRC")
    await session.push(view_message(1, 1, 1, [1], {1: "life"}))
    async with asyncio.timeout(10):
        assert await fatal is scene.broker.failure
    assert scene.broker.calls.count(("master", 1)) == 1


async def test_r36_a_controller_that_comes_back_is_found_again(scene):
    manager = await scene.master()
    session = await scene.controller.session()
    port = int(scene.controller.address.rpartition(":")[2])
    await scene.controller.stop()
    await session.ended.wait()
    await scene.broker.until("lease", False)
    assert not manager.lease_valid(boot_ms())
    scene.broker.calls.remove(("lease", True))
    await scene.controller.start(port)
    await scene.broker.until("lease", True)
    assert manager.role is Role.MASTER
    assert not [call for call in scene.broker.calls if call[0] == "stand_down"]


@pytest.mark.parametrize("lost", ["the answer", "the connection"])
async def test_r11_an_alter_without_an_answer_is_the_same_request_again(
    tmp_path, monkeypatch, lost
):
    """Its outcome is unknown until then. A session that is dropped for its silence closes the
    channel under the calls, too."""
    monkeypatch.setattr(
        "batonmq.replicas_manager.session.CALL_TIMEOUT_S", 0.05 if lost == "the answer" else 60
    )
    async with new_scene(tmp_path) as scene:
        manager = await scene.master()
        hanging = asyncio.Event()

        async def hang(request: pb.AlterSyncStateSetRequest) -> pb.AlterSyncStateSetReply:
            hanging.set()
            await asyncio.Event().wait()
            raise AssertionError

        scene.controller.handlers["AlterSyncStateSet"] = hang
        manager.propose(frozenset({1, 2}), "expand", confirm_offset=44)
        await hanging.wait()
        scene.controller.handlers["AlterSyncStateSet"] = lambda request: pb.AlterSyncStateSetReply(
            view=view_message(1, 1, 2, [1, 2], {1: "life", 2: "life-2"})
        )
        if lost == "the connection":
            await manager._link._channels.drop(scene.controller.address)
        await scene.broker.until("unknown")
        await scene.broker.until("adopt", 2)
        first, second = scene.controller.asked["AlterSyncStateSet"]
        assert first == second
        assert (first.master_incarnation, first.confirm_offset) == ("life", 44)
        members = [(each.broker_id, each.incarnation) for each in first.new_set]
        assert members == [(1, "life"), (2, "life-2")]


async def test_events_reach_the_history(scene):
    manager = await scene.master()
    manager.report_event("opened", end_offset=5)
    asked = scene.controller.asked
    await scene.controller.until(
        lambda: any(r.kind == "opened" for r in asked.get("ReportEvent", []))
    )
    event = next(r for r in asked["ReportEvent"] if r.kind == "opened")
    assert (event.broker_id, event.master_epoch) == (1, 1)
    assert json.loads(event.json) == {"end_offset": 5}
    assert asked["ReportEvent"][0].kind == "role_changed"


async def test_registration_follows_the_leader(scene):
    """The first controller asked is not the leader, the second is not there at all."""
    follower = FakeController()
    await follower.start()
    follower.leader = False
    follower.handlers["RegisterBroker"] = lambda request: pb.RegisterBrokerReply(
        status=pb.Status(code=2007, remark="not the leader")
    )
    try:
        manager = scene.make(follower.address, "127.0.0.1:1", scene.controller.address)
        await manager.start()
        async with asyncio.timeout(10):
            await until(lambda: manager.registered)
        await follower.session()
        await scene.controller.session()
        await manager.close()
    finally:
        await follower.stop()


async def test_a_refused_session_is_said_and_dialled_again(tmp_path, caplog):
    """R18: another incarnation has a session. Once it is gone, this one is taken."""

    async with new_scene(tmp_path) as scene:
        scene.controller.refuse = pb.Status(code=2005, remark="another incarnation has a session")
        await scene.started()
        await scene.controller.until(lambda: scene.controller.refusals > 0)
        scene.controller.refuse = None
        await scene.controller.session()
    assert "another incarnation has a session" in caplog.text


@pytest.mark.parametrize("dies", [False, True], ids=["waits", "dies waiting"])
async def test_r45_a_first_start_without_room_goes_on_and_leaks_no_id(tmp_path, monkeypatch, dies):
    """The n-th call that needs room fails, and all after it until the manager says so: then there
    is room, or it is killed, and the next process goes on."""
    monkeypatch.setattr(start_retry, "SPACE_POLL_S", 0)

    async def start(number: int) -> bool:
        folder = tmp_path / str(number)
        folder.mkdir()
        codes: list[str] = []

        async with new_scene(folder) as scene:

            def assign(request: pb.RegisterBrokerRequest) -> pb.RegisterBrokerReply:
                if request.register_check_code not in codes:
                    codes.append(request.register_check_code)
                return pb.RegisterBrokerReply(broker_id=len(codes))

            scene.controller.handlers["RegisterBroker"] = assign
            manager = scene.make(on_fatal=fatal.append)
            with failing(f"room {folder} ENOSPC after {number}"):
                starting = asyncio.ensure_future(manager.start())
                while not manager.start_retry.missing and not manager.registered:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                missing.append(manager.start_retry.missing)
                if dies:
                    starting.cancel()
                    await asyncio.wait((starting,))
                    await manager.close()
            if dies:
                manager = await scene.started(incarnation="life-2")
            async with asyncio.timeout(10):
                await until(lambda: manager.registered)
            assert manager.broker_id == 1 and not manager.start_retry.missing
            assert scene.identity.read_text() == "C#broker-a#1"

        return bool(missing[-1])

    fatal: list[BaseException] = []
    missing: list[str] = []
    tried = 0
    while await start(tried):
        tried += 1
    assert tried > 5
    assert not fatal
    assert {text.partition(": ")[2] for text in missing[:-1]} == {
        "No space left on device; make space on that disk"
    }
