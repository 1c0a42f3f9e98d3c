"""Reads a configuration file into one typed struct per section, or reports what is wrong. Later
sources override earlier ones: defaults, the file, `BATONMQ_SECTION__KEY` in the environment. Keys
are RocketMQ's, in camelCase; in the environment case does not matter. Unknown keys are errors, so
that no mistyped key is believed to be in force. Keys in NO_LONGER_USED give a warning."""

import difflib
import logging
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import yaml

from batonmq.protocol.errors import ConfigError
from batonmq.runtime.properties_text import parse_lines
from batonmq.runtime.section import SECRET, Section, keys_of

log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX: Final = "BATONMQ_"
_YAML_NULL: Final = "tag:yaml.org,2002:null"
_YAML_SUFFIXES: Final = {".yaml", ".yml"}

Sections = Mapping[str, type[msgspec.Struct]]
S = TypeVar("S", bound=msgspec.Struct)


class _Setting(NamedTuple):
    value: Any
    where: str


# section -> key -> setting
_Found = dict[str, dict[str, _Setting]]


def load_settings(
    path: str | Path | None,
    sections: Sections,
    *,
    environ: Mapping[str, str],
    without_effect: Set[str] = frozenset(),
) -> dict[str, msgspec.Struct]:
    """Returns a struct for each of `sections`. `path` None: environment and defaults only. A .yaml
    or .yml file is YAML. Any other is RocketMQ's property text: a key belongs to every section that
    has it, and keys in `without_effect` give a warning. Raises ConfigError, and OSError if the file
    cannot be read."""
    found: _Found = {section: {} for section in sections}
    if path is not None:
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError("the file", None, str(file), "UTF-8 text is allowed") from error
        if file.suffix.lower() in _YAML_SUFFIXES:
            _read_yaml(text, str(file), sections, found)
        else:
            _read_flat(text, str(file), sections, found, without_effect)
    _read_environment(environ, sections, found)
    for section, kind in sections.items():
        _warn_of_ignored(kind, found[section])
    return {
        section: build_section(section, kind, found[section]) for section, kind in sections.items()
    }


def _warn_of_ignored(kind: type[msgspec.Struct], found: Mapping[str, _Setting]) -> None:
    if issubclass(kind, Section):
        ignored = {key for name, key in keys_of(kind).items() if name in kind.WITHOUT_EFFECT}
        for key in sorted(found.keys() & ignored):
            log.warning("setting_without_effect key=%s where=%s", key, found[key].where)


def build_section(section: str, kind: type[S], found: Mapping[str, tuple[Any, str]]) -> S:
    """One struct from `{key: (value, where)}`. Raises ConfigError."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for key, (value, where) in found.items():
        kind_wanted = fields[key].type
        if "\0" in str(value):  # no path of the system may have it
            allowed = "text without a NUL character is allowed"
            raise ConfigError(f"{section}.{key}", _shown(key, value), where, allowed)
        try:
            values[fields[key].name] = msgspec.convert(
                _shape(value, kind_wanted), kind_wanted, strict=False
            )
        # UnicodeEncodeError: a number with half a surrogate pair, or bytes of the environment that
        # are no UTF-8.
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            allowed = f"{describe_kind(kind_wanted)} is allowed ({error})"
            raise ConfigError(f"{section}.{key}", _shown(key, value), where, allowed) from None
    for name, field in fields.items():
        if field.required and field.name not in values:
            raise ConfigError(
                f"{section}.{name}", None, "nowhere", "missing, but it has no default"
            )
    try:
        return kind(**values)
    except ValueError as error:
        raise _cross_field(section, found, error) from error


def _cross_field(
    section: str, found: Mapping[str, tuple[Any, str]], error: ValueError
) -> ConfigError:
    """The error of a `__post_init__`, located at the first setting that it names."""
    text = str(error)
    named = [key for key in found if key in text]
    if not named:
        return ConfigError(section, None, "the settings together", text)
    key = min(named, key=text.index)
    value, where = found[key]
    return ConfigError(f"{section}.{key}", _shown(key, value), where, text)


def _shown(key: str, value: object) -> object:
    return value if SECRET.search(key) is None else "(not shown)"


def _read_yaml(text: str, file: str, sections: Sections, found: _Found) -> None:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError("the file", None, where, f"not YAML: {problem}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("the file", None, f"{file}:1", "one mapping per section is allowed")
    seen: dict[str, str] = {}
    for section_node, body in root.value:
        section, where = str(section_node.value), _where(file, section_node)
        if section not in sections:
            raise ConfigError(section, None, where, _unknown_section(section, sections))
        _refuse_duplicate(seen, section, None, where)
        if isinstance(body, yaml.ScalarNode) and body.tag == _YAML_NULL:
            continue
        if not isinstance(body, yaml.MappingNode):
            raise ConfigError(section, _scalar(body), where, "a mapping of keys is allowed")
        _read_section(file, section, body, sections, found[section])


def _read_section(
    file: str, section: str, body: yaml.MappingNode, sections: Sections, found: dict[str, _Setting]
) -> None:
    fields = msgspec.structs.fields(sections[section])
    known = {field.encode_name: field.type for field in fields}
    seen: dict[str, str] = {}
    for key_node, value_node in body.value:
        key, where = str(key_node.value), _where(file, key_node)
        key = _aliases(sections[section]).get(key, key)
        if _is_no_longer_used(key, sections[section], where):
            continue
        if key not in known:
            homes = [name for name, kind in sections.items() if key in _keys(kind)]
            what = f"it belongs in section {homes[0]}" if homes else ""
            what = what or unknown_key(section, key, {s: _keys(k) for s, k in sections.items()})
            # A mistyped key may hold a secret, too, so the suggested key also decides.
            shown = _shown(f"{key} {what}", _scalar(value_node))
            raise ConfigError(f"{section}.{key}", shown, where, what)
        value = _yaml_value(value_node, known[key], f"{section}.{key}", where)
        _refuse_duplicate(seen, f"{section}.{key}", value, where)
        found[key] = _Setting(value, where)


def _yaml_value(node: yaml.Node, kind: Any, key: str, where: str) -> Any:
    """The value of a node; text as written, so that `deleteWhen: 04` stays "04"."""
    if isinstance(node, yaml.ScalarNode) and _wants_text(kind) and node.tag != _YAML_NULL:
        return node.value
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_object(node, deep=True)
    # The others come from PyYAML, too: for the date 2026-13-45, or `!!bool x`.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or f"it cannot be read: {error}"
        raise ConfigError(key, _scalar(node), where, problem) from error
    finally:
        constructor.dispose()


def _scalar(node: yaml.Node) -> str | None:
    """What an error shows of a node."""
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _wants_text(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return any(
        isinstance(kind, msgspec.inspect.StrType | msgspec.inspect.EnumType) for kind in kinds
    ) or all(
        isinstance(kind, msgspec.inspect.LiteralType)
        and all(isinstance(value, str) for value in kind.values)
        for kind in kinds
    )


def _where(file: str, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"


def _refuse_duplicate(seen: dict[str, str], key: str, value: object, where: str) -> None:
    if key in seen:
        raise ConfigError(
            key, _shown(key, value), where, f"is already set at {seen[key]}; once is allowed"
        )
    seen[key] = where


def _read_flat(
    text: str, file: str, sections: Sections, found: _Found, without_effect: Set[str]
) -> None:
    known = {section: _keys(kind) for section, kind in sections.items()}
    every = {key for keys in known.values() for key in keys}
    aliases = {alias: key for kind in sections.values() for alias, key in _aliases(kind).items()}
    seen: dict[str, str] = {}
    for line in parse_lines(text):
        where = f"{file}:{line.number}"
        line = line._replace(key=aliases.get(line.key, line.key))
        if line.key in without_effect - every:
            log.warning("setting_without_effect key=%s where=%s", line.key, where)
            continue
        if any(_is_no_longer_used(line.key, kind, where) for kind in sections.values()):
            continue
        if line.key not in every:
            what = unknown_key("", line.key, {"": every})
            raise ConfigError(line.key, _shown(f"{line.key} {what}", line.value), where, what)
        _refuse_duplicate(seen, line.key, line.value, where)
        for section, keys in known.items():
            if line.key in keys:
                found[section][line.key] = _Setting(line.value, where)


def _read_environment(environ: Mapping[str, str], sections: Sections, found: _Found) -> None:
    by_name = {section.lower(): section for section in sections}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or "__" not in name:
            continue
        section_text, _, key_text = name.removeprefix(ENVIRONMENT_PREFIX).partition("__")
        section = by_name.get(section_text.lower())
        if section is None:
            # For another process on the same machine.
            continue
        keys = {key.lower(): key for key in _keys(sections[section])}
        key = keys.get(key_text.lower())
        if _is_no_longer_used(key_text, sections[section], f"environment variable {name}"):
            continue
        if key is None:
            what = unknown_key(section, key_text, {section: set(keys.values())})
            shown = _shown(f"{key_text} {what}", environ[name])
            raise ConfigError(f"{section}.{key_text}", shown, f"environment variable {name}", what)
        found[section][key] = _Setting(environ[name], f"environment variable {name}")


def _keys(kind: type[msgspec.Struct]) -> set[str]:
    return set(kind.__struct_encode_fields__)


def _aliases(kind: type[msgspec.Struct]) -> Mapping[str, str]:
    return kind.ALIASES if issubclass(kind, Section) else {}


def _is_no_longer_used(key: str, kind: type[msgspec.Struct], where: str) -> bool:
    """Returns whether the key is no longer used, and logs it. Case does not matter."""
    if key.lower() not in map(str.lower, getattr(kind, "NO_LONGER_USED", ())):
        return False
    log.warning("setting_no_longer_used key=%s where=%s", key, where)
    return True


def unknown_key(section: str, key: str, known: Mapping[str, Set[str]]) -> str:
    """The error text for an unknown key: suggests the nearest key of its section, else of another
    one. `known`: the keys of each section."""
    if near := nearest(key, known.get(section, ())):
        return f"unknown key, did you mean {near}?"
    for other, keys in known.items():
        if near := nearest(key, keys):
            return f"unknown key, did you mean {other}.{near}?"
    return (
        "unknown key, and none is spelled like it; docs/settings.md and RocketMQ's lists name them"
    )


def _unknown_section(name: str, known: Iterable[str]) -> str:
    if near := nearest(name, known):
        return f"unknown section, did you mean {near}?"
    return f"unknown section; allowed are {', '.join(sorted(known))}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of the known names that `name` is most likely meant to be, whatever its case."""
    folded = {candidate.lower(): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def _shape(value: Any, kind: Any) -> Any:
    """The value as msgspec takes it. Files and the environment separate lists by `;`."""
    info = msgspec.inspect.type_info(kind)
    wants_list = isinstance(info, msgspec.inspect.ListType | msgspec.inspect.VarTupleType)
    if wants_list and isinstance(value, str):
        return [part.strip() for part in value.split(";") if part.strip()]
    if isinstance(value, str) and not isinstance(info, msgspec.inspect.StrType):
        return value.strip()
    return value


def describe_kind(kind: Any) -> str:
    """The values that a setting of this type takes, as a text."""
    info = msgspec.inspect.type_info(kind)
    return _describe_info(info)


def _describe_info(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType(ge=low, le=high):
            if low is not None and high is not None:
                return f"a whole number from {low} to {high}"
            if low is not None:
                return f"a whole number of {low} or more"
            return "a whole number"
        case msgspec.inspect.FloatType():
            return "a number"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.EnumType(cls=cls):
            return "one of " + ", ".join(str(member.value) for member in cls)
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return "a list"
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(
                _describe_info(t) for t in types if not isinstance(t, msgspec.inspect.NoneType)
            )
    return type(info).__name__
