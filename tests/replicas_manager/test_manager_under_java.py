"""The whole ReplicasManager under a controller of RocketMQ, over real sockets and files."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

from fake_controller import manager_config
from java_controller import JavaController

from batonmq.protocol.codes import RequestCode
from batonmq.protocol.role_view import Role, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.replicas_manager.config import remoting_timings
from batonmq.replicas_manager.identity import RoleFile
from batonmq.replicas_manager.link import LogFacts
from batonmq.replicas_manager.service import ReplicasManager


class Scene:
    """A controller that has elected nobody yet, and a broker with what was done with its role."""

    def __init__(self, folder: Path) -> None:
        self.role_path = folder / "masterEpoch"
        self.facts = LogFacts(0, 500, 400, 0, "log-1")
        self.roles: list[tuple[str, int]] = []
        self._changed = asyncio.Event()
        self.actions = AsyncMock()
        self.actions.log_facts = lambda: self.facts
        self.actions.become_master = self._become_master
        self.actions.stand_down = self._stand_down
        self.actions.lease_changed = self.actions.role_will_change = Mock()
        self.controller = JavaController()
        self.folder = folder

    async def _become_master(self, view: RoleView, durable: Awaitable[None]) -> None:
        await durable
        self._acted("master", view)

    async def _stand_down(self, view: RoleView) -> None:
        self._acted("stand_down", view)

    def _acted(self, name: str, view: RoleView) -> None:
        self.roles.append((name, view.master_epoch))
        self._changed.set()

    async def until(self, role: tuple[str, int]) -> None:
        async with asyncio.timeout(10):
            while role not in self.roles:
                self._changed.clear()
                await self._changed.wait()

    async def asked_again(self, code: int) -> None:
        asked = self.controller.asked
        before = asked.count(code)
        await self.controller.until(lambda: asked.count(code) > before)

    def manager(self) -> ReplicasManager:
        config = manager_config(
            controllers=(self.controller.address,),
            identity_path=self.folder / "brokerIdentity",
            role_path=self.role_path,
            timings=remoting_timings(200, 5000),
            protocol="remoting",
        )
        return ReplicasManager(config, self.actions, Mock())

    def names_us(self, epoch: int) -> None:
        self.controller.master, self.controller.key = 1, (epoch, epoch)
        self.controller.members = [1]


def play(folder: Path, script: Callable[[Scene, ReplicasManager], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene(folder)
        await scene.controller.listen()
        manager = scene.manager()
        try:
            await manager.start()
            await script(scene, manager)
        finally:
            await manager.close()
            await scene.controller.close()

    asyncio.run(run())


def test_r17_an_election_of_a_log_that_just_became_suspect_is_refused(tmp_path):
    """1. The controllers elect this broker, and its log becomes suspect in that moment. 2. It is
    whole again and registers anew. 3. They name it again in the epoch that it refused: it stays
    silent. 4. They elect it anew."""

    async def script(scene: Scene, manager: ReplicasManager) -> None:
        controller = scene.controller

        def elected(_: RemotingCommand) -> None:
            scene.facts = replace(scene.facts, suspect="rot")
            scene.names_us(1)
            controller.elected = lambda _: None

        controller.elected = elected
        await scene.until(("stand_down", 1))
        assert RoleFile(scene.role_path).load() == 1, "a restart knows that epoch, too"
        registrations = RequestCode.CONTROLLER_REGISTER_BROKER
        await controller.until(lambda: controller.asked.count(registrations) == 2)
        scene.facts = replace(scene.facts, suspect="")
        await scene.asked_again(registrations)
        controller.heartbeats.clear()
        for _ in range(2):
            await scene.asked_again(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA)
        assert manager.role is Role.FENCED and not controller.heartbeats
        scene.names_us(2)
        await scene.until(("master", 2))
        assert ("master", 1) not in scene.roles
        await controller.until(lambda: controller.heartbeats)

    play(tmp_path, script)
