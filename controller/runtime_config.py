"""The settings of a running node: read by code 1010, changed by code 1009, kept over a restart.

Only keys that take effect while running may be changed; what was changed is kept in
`configStorePath` as property text and laid over the file's values at the next start. Keys that name
where this node lives, or that all nodes must agree on, belong into the file.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import msgspec

from controller.config import ControllerConfig
from protocol.codes import ResponseCode
from protocol.errors import BrokerRefusal
from settings import dump_properties, parse_properties
from settings.properties_text import value_text

__all__ = ["RUNTIME_KEYS", "RuntimeConfig"]

RUNTIME_KEYS: Final = frozenset(
    {
        "enableElectUncleanMaster",
        "notifyBrokerRoleChanged",
        "electMasterMaxRetryCount",
        "isProcessReadEvent",
        "scanNotActiveBrokerInterval",
        "scanInactiveMasterInterval",
        "historyTopicGroup",
        "historyTopicDelayMs",
        "historyTopicBatch",
    }
)


class RuntimeConfig:
    """`current` is in force now; `on_change(new)` hears of each change."""

    def __init__(self, config: ControllerConfig) -> None:
        self.current = config
        self.on_change: Callable[[ControllerConfig], None] | None = None
        self._changed: dict[str, Any] = {}

    def load(self) -> None:
        """Lays kept changes over the file's values. Raises ValueError for unusable content."""
        try:
            with open(self.current.config_path, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            return
        kept = {key: value for key, value in parse_properties(text).items() if key in RUNTIME_KEYS}
        try:
            self._take(kept)
        except BrokerRefusal as refusal:
            raise ValueError(f"{self.current.config_path}: {refusal.remark}") from refusal

    def update(self, text: str) -> None:
        """Takes the settings of a property text, all or none. Unknown keys are passed over.

        Raises BrokerRefusal: 16 for a key that may not be changed so, 1 for a value that is wrong.
        """
        wanted = parse_properties(text)
        for key in sorted(wanted.keys() & self.current.black_list):
            raise BrokerRefusal(ResponseCode.NO_PERMISSION, f"Can not update config {key}")
        fields = {field.encode_name for field in msgspec.structs.fields(self.current)}
        before = msgspec.to_builtins(self.current)
        known = {
            key: value
            for key, value in wanted.items()
            if key in fields and value != value_text(before[key])
        }
        for key in sorted(known.keys() - RUNTIME_KEYS):
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, f"{key} can be changed only in the file, with a restart"
            )
        if known:
            self._take(known)
            self._keep()

    def as_properties(self) -> str:
        """All settings as property text, sorted, with the listening port as Java shows it."""
        lines = dump_properties(self.current).splitlines()
        lines.append(f"listenPort={self.current.self_peer.port}")
        return "\n".join(sorted(lines)) + "\n"

    def _take(self, changed: dict[str, str]) -> None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(self.current)}
        values: dict[str, Any] = {}
        for key, text in changed.items():
            field = fields[key]
            try:
                values[field.name] = msgspec.convert(text.strip(), field.type, strict=False)
            except msgspec.ValidationError as error:
                raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"{key}={text}: {error}") from error
        try:
            new = msgspec.structs.replace(self.current, **values)
            new.__post_init__()
        except ValueError as error:
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, str(error)) from error
        self.current = new
        self._changed |= {key: msgspec.to_builtins(new)[key] for key in changed}
        if self.on_change is not None:
            self.on_change(new)

    def _keep(self) -> None:
        path = self.current.config_path
        folder = os.path.dirname(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        content = "".join(
            f"{key}={value_text(self._changed[key])}\n" for key in sorted(self._changed)
        )
        temporary = path + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)
