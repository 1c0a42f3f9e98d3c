"""RocketMQ's property text: `key=value` lines, in `.conf` files and in the bodies of the requests
that read and change settings. Origin: `java.util.Properties`, `MixAll.properties2String`."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_WRITTEN = {ord("\\"): "\\\\"} | {ord(each): f"\\u{ord(each):04x}" for each in _LINE_BREAKS}
_WRITTEN_IN_KEYS = _WRITTEN | {ord(each): f"\\{each}" for each in "=:#! \t"}


class SettingLine(NamedTuple):
    """`number`: the line that the setting begins on, from 1."""

    key: str
    value: str
    number: int


def parse_lines(text: str) -> list[SettingLine]:
    """All settings in order, including repeated keys. As in Java, comments begin with `#` or `!`, a
    trailing backslash continues a line, and `=`, `:` or blanks separate key and value."""
    found: list[SettingLine] = []
    logical = ""
    first = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.lstrip(" \t\f")
        if not logical:
            first = number
            if not line or line[0] in "#!":
                continue
        logical += line
        if _continues(logical):
            logical = logical[:-1]
            continue
        found.append(SettingLine(*_split(logical), first))
        logical = ""
    if logical:
        found.append(SettingLine(*_split(logical), first))
    return found


def parse_properties(text: str) -> dict[str, str]:
    """Key -> value; the last one of a repeated key counts."""
    return {line.key: line.value for line in parse_lines(text)}


def dump_properties(settings: msgspec.Struct) -> str:
    """`key=value` lines of all fields, sorted, with the names used in files; None is left out."""
    values = msgspec.to_builtins(settings)
    assert isinstance(values, dict)
    return property_text(
        {key: value_text(values[key]) for key in sorted(values) if values[key] is not None}
    )


def property_text(settings: Mapping[str, str]) -> str:
    """`key=value` lines that parse to these settings, except for blanks at the end of a value."""
    return "".join(
        f"{key.translate(_WRITTEN_IN_KEYS)}={_escaped(value)}\n" for key, value in settings.items()
    )


def has_line_break(text: str) -> bool:
    return any(each in text for each in _LINE_BREAKS)


def value_text(value: object) -> str:
    """As Java prints it: booleans in lower case, lists joined by `;`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ";".join(value_text(item) for item in value)
    return str(value)


def _escaped(value: str) -> str:
    text = value.translate(_WRITTEN)
    return f"\\{text}" if text[:1] in (" ", "\t") else text


def _continues(line: str) -> bool:
    backslashes = len(line) - len(line.rstrip("\\"))
    # An even number: each escapes the next one.
    return backslashes % 2 == 1


def _split(line: str) -> tuple[str, str]:
    at = 0
    while at < len(line) and line[at] not in "=: \t\f":
        at += 2 if line[at] == "\\" else 1
    key = line[:at]
    rest = line[at:].lstrip(" \t\f")
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(" \t\f")
    return _unescape(key), _unescape(rest).rstrip()


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    out: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char != "\\" or at == len(text):
            out.append(char)
            continue
        char = text[at]
        at += 1
        if char == "u" and len(text) >= at + 4:
            try:
                out.append(chr(int(text[at : at + 4], 16)))
                at += 4
                continue
            except ValueError:
                pass
        out.append(_ESCAPES.get(char, char))
    return "".join(out)
