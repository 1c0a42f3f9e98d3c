"""Which groups get which topics by POP, and `config/messageRequestMode.json`.

Changes travel in the log as those of topics do (R31). What is not here is pulled.
Origin: Java `MessageRequestModeManager`.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from batonmq.process.clock import wall_ms
from batonmq.protocol.bodies import (
    MessageRequestModeSerializeWrapper,
    SetMessageRequestModeRequestBody,
)
from batonmq.store.config_file import ConfigManager


class MessageRequestModeManager(ConfigManager[MessageRequestModeSerializeWrapper]):
    """One thread only."""

    def __init__(self, path: Path, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        """`path` is `config/messageRequestMode.json`; call `load` next."""
        super().__init__(path, MessageRequestModeSerializeWrapper, clock_ms)
        self._table: dict[str, dict[str, SetMessageRequestModeRequestBody]] = {}
        self._dirty = False
        self.change_count = 0

    def load(self) -> None:
        """Takes over what is on disk. Raises CorruptLogError if nothing there can be used."""
        body = self._file.load()
        if body is not None:
            self._table = body.message_request_mode_map

    def wrapper(self) -> MessageRequestModeSerializeWrapper:
        table = dict(zip(self._table, map(dict, self._table.values()), strict=True))
        return MessageRequestModeSerializeWrapper(message_request_mode_map=table)

    def get(self, topic: str, group: str) -> SetMessageRequestModeRequestBody | None:
        return self._table.get(topic, {}).get(group)

    def put_all(self, modes: Iterable[SetMessageRequestModeRequestBody]) -> None:
        for mode in modes:
            if self.get(mode.topic, mode.consumer_group) != mode:
                self._table.setdefault(mode.topic, {})[mode.consumer_group] = mode
                self._changed()

    def replace_all(self, table: MessageRequestModeSerializeWrapper) -> None:
        """Becomes what the master has."""
        if table.message_request_mode_map != self._table:
            self._table = table.message_request_mode_map
            self._changed()

    def _changed(self) -> None:
        self.change_count += 1
        self._new_version()
