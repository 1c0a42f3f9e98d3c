"""Settings that admin requests read and change while a server runs. Only keys that take effect at
once may be changed; the sections are changed in place. Changes are stored as property text and
override the file's values at the next start."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file
from batonmq.runtime.properties_text import (
    dump_properties,
    parse_properties,
    property_text,
    value_text,
)
from batonmq.runtime.settings import describe_kind, unknown_key

log = logging.getLogger(__name__)

C = TypeVar("C", bound=msgspec.Struct)

TEXT_SIZE_MAX: Final = 32 * 1024  # of one request; all settings of a server need a tenth of it


def listed_keys(text: str) -> frozenset[str]:
    """The keys in a list such as `configBlackList`, separated by `;`."""
    return frozenset(filter(None, map(str.strip, text.split(";"))))


@dataclass(frozen=True, slots=True)
class ChangeRules:
    """`keys` may be changed. Requests with keys in `black_list` are refused with `remark`, where
    `{key}` is the first of them. `path`: where changes are stored; None: nowhere. Unknown keys are
    ignored, as in Java, unless `refuses_unknown`; those in `without_effect` are reported."""

    keys: frozenset[str]
    black_list: frozenset[str]
    remark: str
    path: Path | None
    refuses_unknown: bool = False
    without_effect: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A checked change: section -> new values of its fields, and the text to store.
    `without_effect`: RocketMQ's keys that have no effect here, sorted."""

    values: list[tuple[msgspec.Struct, dict[str, Any]]]
    kept: dict[str, str]
    without_effect: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        if not self.without_effect:
            return None
        return f"without effect in BatonMQ: {', '.join(self.without_effect)}"


class RuntimeSettings(Generic[C]):
    """`current` and the other sections are in force; `on_change(current)` is called after each
    change."""

    def __init__(self, config: C, rules: ChangeRules, *more: msgspec.Struct) -> None:
        self.current = config
        self.on_change: Callable[[C], None] | None = None
        self._sections: tuple[msgspec.Struct, ...] = (config, *more)
        self._rules = rules
        self._kept: dict[str, str] = {}
        self._unsure: set[str] = set()
        """Keys of failed writes: the file may have their new values."""
        self._one_at_a_time = asyncio.Lock()
        self._set_log_level()

    def load(self) -> None:
        """Applies stored changes over the file's values. Raises ValueError that names a bad
        file."""
        path = self._rules.path
        if path is None or not path.exists():
            return
        try:
            kept = parse_properties(disk.read_bytes(path).decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        for key in sorted(kept.keys() - self._rules.keys):
            log.warning("setting_no_longer_used key=%s where=%s", key, path)
        kept = {key: value for key, value in kept.items() if key in self._rules.keys}
        try:
            self.apply(self._planned(kept))
        except BrokerRefusal as refusal:
            raise ValueError(f"{path}: {refusal.remark}") from refusal
        log.info("kept_settings_loaded path=%s keys=%s", path, ",".join(sorted(kept)))

    async def update(self, body: bytes) -> SettingChange:
        """Stores the settings of a property text, then applies them, all or none. Raises
        BrokerRefusal: NO_PERMISSION for a key that may not be changed, INVALID_PARAMETER for an
        unknown key, SYSTEM_ERROR for a bad body or value and for a failed write."""
        if len(body) > TEXT_SIZE_MAX:
            why = f"the settings have {len(body)} bytes, allowed are {TEXT_SIZE_MAX}"
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, why)
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            why = f"no UTF-8 text: {error}"
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, why) from error
        async with self._one_at_a_time:
            change = self.plan(text)
            try:
                # On the disk first: a restart must not undo what was answered as changed.
                await asyncio.to_thread(self._keep, change)
            except OSError as error:
                self._unsure |= change.kept.keys()
                reason = disk.described(error)
                why = (
                    f"cannot keep the settings: {reason}; none was changed, but a restart may bring"
                    " them: set them again"
                )
                raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, why) from error
            if change.kept:
                self._unsure.clear()
            self.apply(change)
        return change

    def plan(self, text: str) -> SettingChange:
        """The change that a property text would make. Raises as `update`."""
        wanted = parse_properties(text)
        for key in sorted(wanted.keys() & self._rules.black_list):
            raise BrokerRefusal(ResponseCode.NO_PERMISSION, self._rules.remark.format(key=key))
        present: dict[str, Any] = {}
        for section in self._sections:
            present |= msgspec.to_builtins(section)
        changed = {
            key: value
            for key, value in wanted.items()
            if key in present and (value != value_text(present[key]) or key in self._unsure)
        }
        unknown = wanted.keys() - present.keys() if self._rules.refuses_unknown else set()
        without_effect = unknown & self._rules.without_effect
        for key in sorted((changed.keys() | unknown) - self._rules.keys - without_effect):
            if key in unknown:
                why = unknown_key("", key, {"": present.keys()})
                raise BrokerRefusal(ResponseCode.INVALID_PARAMETER, f"{key}: {why}")
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION,
                f"{key} is changed only in the file, at a restart; while running:"
                f" {', '.join(sorted(self._rules.keys))}",
            )
        return replace(self._planned(changed), without_effect=tuple(sorted(without_effect)))

    def apply(self, change: SettingChange) -> None:
        for section, values in change.values:
            for name, value in values.items():
                msgspec.structs.force_setattr(section, name, value)
        self._set_log_level()
        if change.warning is not None:
            log.warning("settings_without_effect keys=%s", ",".join(change.without_effect))
        self._kept |= change.kept
        if change.kept and self.on_change is not None:
            self.on_change(self.current)

    def _set_log_level(self) -> None:
        if level := getattr(self.current, "log_level", ""):
            logging.getLogger().setLevel(level)

    def _keep(self, change: SettingChange) -> None:
        if self._rules.path is not None and change.kept:
            kept = self._kept | change.kept
            text = property_text(dict(sorted(kept.items())))
            replace_file(self._rules.path, text.encode())

    def as_properties(self) -> str:
        """All settings of the first section as property text, sorted."""
        return dump_properties(self.current)

    def _planned(self, changed: dict[str, str]) -> SettingChange:
        found: list[tuple[msgspec.Struct, dict[str, Any]]] = []
        kept: dict[str, str] = {}
        for section in self._sections:
            fields = {field.encode_name: field for field in msgspec.structs.fields(section)}
            values = {
                fields[key].name: _converted(key, text, fields[key].type)
                for key, text in changed.items()
                if key in fields
            }
            try:
                new = type(section)(**{**msgspec.structs.asdict(section), **values})
            except ValueError as error:
                raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, str(error)) from error
            shown = msgspec.to_builtins(new)
            kept |= {key: value_text(shown[key]) for key in changed if key in fields}
            found.append((section, values))
        return SettingChange(found, kept)


def _converted(key: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(text.strip(), kind, strict=False)
    except msgspec.ValidationError:
        raise BrokerRefusal(
            ResponseCode.SYSTEM_ERROR, f"{key} is {text!r}: {describe_kind(kind)} is allowed"
        ) from None
