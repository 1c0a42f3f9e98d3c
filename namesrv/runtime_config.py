"""The settings of a running name server: read by code 319, changed by code 318.

Only keys that take effect while running may be changed; what was changed is kept in
`configStorePath`, if one is set, and laid over the file's values at the next start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from epoch.durable_file import replace_file
from namesrv.config import RUNTIME_KEYS, NamesrvConfig
from protocol.codes import ResponseCode
from protocol.errors import BrokerRefusal
from settings import dump_properties, parse_properties
from settings.properties_text import value_text


class RuntimeConfig:
    """`current` is what is in force."""

    def __init__(self, config: NamesrvConfig) -> None:
        self.current = config
        self._changed: dict[str, str] = {}
        self._path = Path(config.store_path) if config.store_path else None

    def load(self) -> None:
        """Lay kept changes over the file's values. Raises ValueError naming the file."""
        if self._path is None or not self._path.exists():
            return
        kept = parse_properties(self._path.read_text(encoding="utf-8"))
        try:
            self._take({key: value for key, value in kept.items() if key in RUNTIME_KEYS})
        except BrokerRefusal as refusal:
            raise ValueError(f"{self._path}: {refusal.remark}") from refusal

    def update(self, text: str) -> None:
        """Take the settings of a property text, all or none; unknown keys are passed over.

        Raises BrokerRefusal: 16 for a key that may not be changed so, 1 for a wrong value.
        """
        wanted = parse_properties(text)
        if wanted.keys() & self.current.black_list:
            raise BrokerRefusal(ResponseCode.NO_PERMISSION, "Can not update config in black list.")
        present = msgspec.to_builtins(self.current)
        changed = {
            key: value
            for key, value in wanted.items()
            if key in present and value != value_text(present[key])
        }
        for key in sorted(changed.keys() - RUNTIME_KEYS):
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, f"{key} can be changed only in the file, with a restart"
            )
        if changed:
            self._take(changed)
            self._keep()

    def as_properties(self) -> str:
        """All settings as property text, sorted."""
        return dump_properties(self.current)

    def _take(self, changed: dict[str, str]) -> None:
        fields = {field.encode_name: field for field in msgspec.structs.fields(self.current)}
        values: dict[str, Any] = {}
        for key, text in changed.items():
            try:
                values[fields[key].name] = msgspec.convert(
                    text.strip(), fields[key].type, strict=False
                )
            except msgspec.ValidationError as error:
                raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"{key}={text}: {error}") from error
        self.current = msgspec.structs.replace(self.current, **values)
        self._changed |= changed

    def _keep(self) -> None:
        if self._path is not None:
            lines = (f"{key}={self._changed[key]}\n" for key in sorted(self._changed))
            replace_file(self._path, "".join(lines).encode())
