"""One name server: listener, liveness scan, and a controller in the same loop if configured."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from batonmq.auth.config import AuthConfig
from batonmq.auth.guard import Guard
from batonmq.controller.config import ControllerConfig
from batonmq.controller.service import ControllerService
from batonmq.namesrv.config import RUNTIME_KEYS, NamesrvConfig
from batonmq.namesrv.endpoint import NamesrvEndpoint
from batonmq.namesrv.kv_config import KVConfig
from batonmq.namesrv.state import MinIdChange, RouteInfoManager
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BatonError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer, answer_tls
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.metrics import MetricsPage
from batonmq.runtime.runtime_settings import ChangeRules, RuntimeSettings
from batonmq.runtime.tasks import Tasks
from batonmq.runtime.tls import Tls

log = logging.getLogger(__name__)

NOTICES_MAX = 1024
"""Connections to members that get a notice of a change, and attempts to connect; others find out by
polling."""


class NamesrvService:
    """`await start()`, then `await close()`. `port` is the one bound.

    A `controller` configuration is used only with enableControllerInNamesrv. `start` raises
    OSError for a taken port and CorruptLogError for unusable files."""

    def __init__(
        self,
        config: NamesrvConfig,
        controller: ControllerConfig | None = None,
        tls: Tls | None = None,
        auth: AuthConfig | None = None,
    ) -> None:
        self._guard = Guard(auth, "", None) if auth and auth.authentication_enabled else None
        self.config = config
        self.port = 0
        self.routes = RouteInfoManager(
            delete_topic_with_broker_registration=config.delete_topic_with_broker_registration,
            entries_max=config.route_entries_max,
        )
        self.controller: ControllerService | None = None
        if config.enable_controller_in_namesrv:
            self.controller = ControllerService(
                controller or ControllerConfig(), tls=tls, guard=self._guard
            )
        remark = "Can not update config in black list."
        path = Path(config.store_path) if config.store_path else None
        rules = ChangeRules(RUNTIME_KEYS, config.black_list, remark, path)
        self._runtime = RuntimeSettings(config, rules)
        self._kv = KVConfig(Path(config.kv_path) if config.kv_path else None)
        self._endpoint = NamesrvEndpoint(
            self.routes, self._kv, self._runtime, boot_ms, self._notify, self._guard
        )
        self._client = RemotingClient(
            name="namesrv-out", tls=tls, sign=self._guard.signer if self._guard else None
        )
        self._notices = Tasks()
        processors = Processors()
        processors.register(RequestCode.BATON_GET_TLS, answer_tls(tls))
        self._endpoint.install(processors)
        self._server = RemotingServer(
            processors,
            name="namesrv",
            idle_timeout_s=config.server_channel_max_idle_time_seconds,
            tls=tls.for_clients if tls is not None else None,
        )
        self._server.on_disconnect = self._endpoint.connection_lost
        self._scan_timer: asyncio.TimerHandle | None = None

    async def start(self, answers: Callable[[], None] = lambda: None) -> None:
        """Calls `answers` once routes are answered; the controller's start may still wait for disk
        space (R45)."""
        self._runtime.load()
        self._kv.load()
        address = self.config.bind_address
        try:
            self.port = await self._server.listen(address, self.config.listen_port)
            self._scan_later()
            answers()
            if self.controller is not None:
                await self.controller.start()
        except BaseException:
            await self.close()
            raise
        log.info("namesrv_started address=%s:%d", address, self.port)

    labels: ClassVar[dict[str, str]] = {}
    """A name server serves many clusters."""

    async def collect(self, page: MetricsPage) -> None:
        clusters = self.routes.clusters()
        page.gauge("batonmq_namesrv_clusters", "in the routes", len(clusters))
        page.gauge("batonmq_namesrv_groups", "in the routes", sum(map(len, clusters.values())))
        page.gauge("batonmq_namesrv_topics", "in the routes", len(self.routes.all_topics()))
        brokers = 0
        async for _, group in page.pace.through(self.routes.brokers()):
            brokers += len(group.broker_addrs)
        page.gauge("batonmq_namesrv_brokers", "registered", brokers)

    def why_not_ready(self) -> list[str]:
        return [] if self.port else ["it does not listen yet"]

    async def close(self) -> None:
        if self._scan_timer is not None:
            self._scan_timer.cancel()
            self._scan_timer = None
        if self.controller is not None:
            await self.controller.close()
        await self._notices.close()
        await self._client.close()
        await self._server.close()
        await self._kv.close()
        if self._guard is not None:
            self._guard.close()

    def _notify(self, change: MinIdChange) -> None:
        for address in change.to:
            known = self._client.live_connection(address) is not None
            # R58: any host can register any addresses.
            if known or len(self._notices) + len(self._client.connections) < NOTICES_MAX:
                self._notices.spawn(self._send_notice(address, change))

    async def _send_notice(self, address: str, change: MinIdChange) -> None:
        """Sends NOTIFY_MIN_BROKER_ID_CHANGE (905). A broker that misses it finds out by polling."""
        fields = {
            "brokerName": change.broker_name,
            "minBrokerId": str(change.min_id),
            "minBrokerAddr": change.min_addr,
            "offlineBrokerAddr": change.offline_addr,
            "haBrokerAddr": change.ha_addr,
        }
        request = RemotingCommand.request(
            RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE,
            {key: value for key, value in fields.items() if value is not None},
        )
        try:
            await self._client.oneway(address, request)
        except BatonError as error:
            log.info("min_broker_id_notice_lost address=%s reason=%s", address, error)

    def _scan_later(self) -> None:
        delay_s = self.config.scan_not_active_broker_interval / 1000
        self._scan_timer = asyncio.get_running_loop().call_later(delay_s, self._scan)

    def _scan(self) -> None:
        # First: an error in this scan must not end all later ones.
        self._scan_later()
        self._endpoint.scan()
