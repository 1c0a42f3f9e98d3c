"""Shows the settings of a running broker, and changes those in RUNTIME_KEYS.

Changes are kept in `config/broker.properties` under the store's root, and override the file's
values at the next start; RocketMQ writes them into the configuration file itself.
Origin: AdminBrokerProcessor and Configuration in Java.
"""

import os
from collections.abc import Callable
from typing import Any, Final

from batonmq.broker.config import RUNTIME_KEYS, BrokerConfig, BrokerSections
from batonmq.broker.java_keys import JAVA_KEYS
from batonmq.broker.role_gate import RoleGate
from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.json_body import encode_json
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import answer_tls
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.properties_text import dump_properties, parse_properties, property_text
from batonmq.runtime.runtime_settings import ChangeRules, RuntimeSettings

_FOR_TOOLS: Final = {
    "clientCallbackExecutorThreads": str(os.cpu_count()),  # mqadmin's cpuNum
    "enableControllerMode": "",
    "traceOn": "true",
    "useTLS": "false",
}
"""Keys that mqadmin and the Dashboard expect in the answer, and that no section of ours has."""
_NOT_TO_NAME = frozenset({"configBlackList", "brokerConfigPath", "rocketmqHome"})


def broker_settings(config: BrokerSections) -> RuntimeSettings[BrokerConfig]:
    """The settings of all sections, with earlier changes applied. Raises ValueError, OSError if the
    file of changes cannot be read."""
    path = config.store.root / "config" / "broker.properties"
    rules = ChangeRules(
        RUNTIME_KEYS,
        _NOT_TO_NAME,
        "Can not update config in black list: {key}",
        path,
        refuses_unknown=True,
        without_effect=JAVA_KEYS,
    )
    settings = RuntimeSettings(config.broker, rules, config.store, config.ha, config.replicas)
    settings.load()
    return settings


class SettingsProcessor:
    """Changes apply to this broker only, as in Java: each replica has its own settings."""

    def __init__(
        self,
        config: BrokerSections,
        settings: RuntimeSettings[BrokerConfig],
        gate: RoleGate,
        ha_proof: Callable[[], dict[str, Any]],
    ) -> None:
        """`ha_proof`: the fields of TlsState about it."""
        self._config = config
        self._ha_proof = ha_proof
        self._gate = gate
        self._settings = settings
        self._version = DataVersion()

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.GET_BROKER_CONFIG, self.show)
        processors.register(RequestCode.UPDATE_BROKER_CONFIG, self.update)
        processors.register(RequestCode.BATON_GET_TLS, answer_tls(self._config.tls, self._ha_proof))

    def show(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """All settings as a property text, sorted by name (GET_BROKER_CONFIG, 26). As in Java, a
        role given by controllers is the current one."""
        config = self._config
        found = dict(_FOR_TOOLS)
        for section in (config.broker, config.replicas, config.store, config.ha):
            found |= parse_properties(dump_properties(section))
        found["enableControllerMode"] = str(config.controller_mode).lower()
        found["useTLS"] = str(config.tls is not None and config.tls.config.dials).lower()
        if config.controller_mode:
            found["brokerRole"] = "SYNC_MASTER" if self._gate.is_master else "SLAVE"
        version = encode_json(self._version).decode()
        body = property_text(dict(sorted(found.items()))).encode()
        return RemotingCommand.response_to(request, ext={"version": version}, body=body)

    async def update(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Applies the settings of a property text and keeps them on disk, all or none
        (UPDATE_BROKER_CONFIG, 25). The remark names Java's keys that have no effect here."""
        change = await self._settings.update(request.body)
        if change.kept:
            self._version = self._version.next(wall_ms())
        return RemotingCommand.response_to(request, remark=change.warning)
