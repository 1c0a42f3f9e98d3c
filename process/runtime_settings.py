"""Settings of a running process: read and changed by its admin requests, kept over a restart.

Only keys that take effect while it runs may be changed. What was changed is kept as property text
and laid over the file's values at the next start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from batonmq.process.durable_file import replace_file
from batonmq.process.properties_text import dump_properties, parse_properties, value_text
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal

C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """`keys` may be changed, `black_list` may not even be named; `remark` answers the latter, with
    `{key}` for the first of them. `path`: where changes are kept, None keeps none."""

    keys: frozenset[str]
    black_list: frozenset[str]
    remark: str
    path: Path | None


class RuntimeSettings(Generic[C]):
    """`current` is in force now; `on_change(new)` is called after each change."""

    def __init__(self, config: C, rules: ChangeRules) -> None:
        self.current = config
        self.on_change: Callable[[C], None] | None = None
        self._rules = rules
        self._changed: dict[str, Any] = {}

    def load(self) -> None:
        """Lays kept changes over the file's values. Raises ValueError that names a bad file."""
        path = self._rules.path
        if path is None or not path.exists():
            return
        kept = parse_properties(path.read_text(encoding="utf-8"))
        try:
            self._take({key: value for key, value in kept.items() if key in self._rules.keys})
        except BrokerRefusal as refusal:
            raise ValueError(f"{path}: {refusal.remark}") from refusal

    def update(self, text: str) -> None:
        """Takes the settings of a property text, all or none. Unknown keys are ignored.

        Raises BrokerRefusal: 16 for a key that may not be changed so, 1 for a wrong value.
        """
        wanted = parse_properties(text)
        for key in sorted(wanted.keys() & self._rules.black_list):
            raise BrokerRefusal(ResponseCode.NO_PERMISSION, self._rules.remark.format(key=key))
        present = msgspec.to_builtins(self.current)
        changed = {
            key: value
            for key, value in wanted.items()
            if key in present and value != value_text(present[key])
        }
        for key in sorted(changed.keys() - self._rules.keys):
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
            field = fields[key]
            try:
                values[field.name] = msgspec.convert(text.strip(), field.type, strict=False)
            except msgspec.ValidationError as error:
                raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"{key}={text}: {error}") from error
        try:
            new = type(self.current)(**{**msgspec.structs.asdict(self.current), **values})
        except ValueError as error:
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, str(error)) from error
        self.current = new
        self._changed |= {key: msgspec.to_builtins(new)[key] for key in changed}
        if self.on_change is not None:
            self.on_change(new)

    def _keep(self) -> None:
        if self._rules.path is not None:
            lines = (f"{key}={value_text(self._changed[key])}\n" for key in sorted(self._changed))
            replace_file(self._rules.path, "".join(lines).encode())
