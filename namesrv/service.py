"""One name server: listener, liveness scan, and the controller that may live in the same loop."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from controller.config import ControllerConfig
from controller.service import ControllerService
from namesrv.config import NamesrvConfig
from namesrv.door import NamesrvDoor
from namesrv.kv_config import KVConfig
from namesrv.runtime_config import RuntimeConfig
from namesrv.state import RouteInfoManager
from remoting.processors import Processors
from remoting.server import RemotingServer

log = logging.getLogger(__name__)


def boottime_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class NamesrvService:
    """`await start()`, then `await close()`. `port` is the one bound.

    A `controller` configuration is used only with enableControllerInNamesrv. `start` raises
    OSError for a taken port and ValueError for kept files that are no use.
    """

    def __init__(self, config: NamesrvConfig, controller: ControllerConfig | None = None) -> None:
        self.config = config
        self.port = 0
        self.routes = RouteInfoManager(
            delete_topic_with_broker_registration=config.delete_topic_with_broker_registration
        )
        self.controller: ControllerService | None = None
        if config.enable_controller_in_namesrv:
            self.controller = ControllerService(controller or ControllerConfig())
        self._runtime = RuntimeConfig(config)
        self._kv = KVConfig(Path(config.kv_path) if config.kv_path else None)
        self._door = NamesrvDoor(self.routes, self._kv, self._runtime, boottime_ms)
        processors = Processors()
        self._door.install(processors)
        self._server = RemotingServer(
            processors,
            name="namesrv",
            idle_timeout_s=config.server_channel_max_idle_time_seconds,
        )
        self._server.on_disconnect = self._door.connection_lost
        self._scan_timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._runtime.load()
        self._kv.load()
        address = self.config.bind_address
        try:
            self.port = await self._server.listen(address, self.config.listen_port)
            if self.controller is not None:
                await self.controller.start()
        except BaseException:
            await self._server.close()
            raise
        self._scan_later()
        log.info("namesrv_started address=%s:%d", address, self.port)

    async def close(self) -> None:
        if self._scan_timer is not None:
            self._scan_timer.cancel()
            self._scan_timer = None
        if self.controller is not None:
            await self.controller.close()
        await self._server.close()

    def _scan_later(self) -> None:
        delay_s = self.config.scan_not_active_broker_interval / 1000
        self._scan_timer = asyncio.get_running_loop().call_later(delay_s, self._scan)

    def _scan(self) -> None:
        self._scan_later()
        self._door.scan()
