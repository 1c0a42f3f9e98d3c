"""Reads the JSON that Java's fastjson writes: also keys that are numbers (`{0:"a"}`), objects
(`{{"topic":"T"}:1}`) or bare words, single quotes, and `{"$ref":"$.a.b"}` for an object that was
written before. Number, boolean and null keys become text, an object key a tuple. Standard
JSON without references takes a fast path."""

import re
from typing import Any, Final

import msgspec

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?[LlFfDdSsBb]?")
_WORD: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.-]*")
_HEX: Final = re.compile(r"[0-9A-Fa-f]+")
_SPACE: Final = re.compile(r"[ \t\r\n\f\b\ufeff]*")
_PLAIN: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES: Final = {
    "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0",
    '"': '"', "'": "'", "\\": "\\", "/": "/",
}  # fmt: skip
_WORDS: Final = {"true": True, "false": False, "null": None, "undefined": None, "NaN": None}
_DEPTH_MAX: Final = 200

# Limits of the dialect in a request, since Python code reads it in one turn of the loop (R58).
REQUEST_SIZE_MAX: Final = 32_768
REQUEST_VALUES_MAX: Final = 4096  # Values in it, with references replaced.
# Of an answer that has references: 400 bytes could stand for a billion values.
REFERENCED_VALUES_MAX: Final = 1_000_000

NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for unreadable text; RecursionError for a thousand lists in each other, even
where it would skip them."""

_decode: Final = msgspec.json.Decoder().decode


class FastjsonError(ValueError):
    """The text is neither JSON nor fastjson's dialect, or too large. `position`: characters from 0;
    -1: the whole text."""

    def __init__(self, what: str, position: int = -1) -> None:
        super().__init__(what, position)
        self.what = what
        self.position = position

    def __str__(self) -> str:
        return self.what if self.position < 0 else f"{self.what} at character {self.position}"


def loads(data: bytes | str, *, is_request: bool = False, values_max: int | None = None) -> Any:
    """Parses a text. Raises FastjsonError, also if a request has too much of the dialect, or more
    than `values_max` values with references replaced (None: REFERENCED_VALUES_MAX)."""
    has_reference = ('"$ref"' in data) if isinstance(data, str) else (b'"$ref"' in data)
    if not has_reference:
        try:
            return _decode(data)
        except NOT_JSON:
            pass  # it may be the dialect; if not, the reader below says where it fails
    if is_request and len(data) > REQUEST_SIZE_MAX:
        raise FastjsonError(
            f"{len(data)} bytes that are not standard JSON, or have references, in one request:"
            f" at most {REQUEST_SIZE_MAX} are allowed"
        )
    text = data if isinstance(data, str) else bytes(data).decode("utf-8", "replace")
    reader = _JsonReader(text)
    value = reader.read_all()
    if has_reference:
        value = _resolve(value, value, ())
        values_max = values_max or REFERENCED_VALUES_MAX
    if is_request:
        values_max = REQUEST_VALUES_MAX
    if values_max is not None:
        _check_values(value, values_max)
    return value


def _check_values(value: Any, values_max: int) -> None:
    """References to lists of references could stand for any number of values."""
    left, values = values_max - 1, [value]
    while values:
        each = values.pop()
        if not isinstance(each, dict | list):
            continue
        left -= len(each)  # before they are listed: 4,000 references may name the same long list
        if left < 0:
            raise FastjsonError(
                f"more than {values_max} values in a text that is not standard JSON, or has"
                " references"
            )
        values.extend(each.values() if isinstance(each, dict) else each)


class _JsonReader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read_all(self) -> Any:
        value = self._value()
        self._skip_space()
        if self._at != len(self._text):
            raise FastjsonError("something follows the value", self._at)
        return value

    def _skip_space(self) -> str:
        match = _SPACE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _value(self) -> Any:
        char = self._skip_space()
        if char == "{" or char == "[":
            self._depth += 1
            if self._depth > _DEPTH_MAX:
                raise FastjsonError(f"nested deeper than {_DEPTH_MAX}", self._at)
            value = self._object() if char == "{" else self._array()
            self._depth -= 1
            return value
        if char == '"' or char == "'":
            return self._string(char)
        number = _NUMBER.match(self._text, self._at)
        if number is not None:
            self._at = number.end()
            return _number(number)
        return self._word()

    def _word(self) -> Any:
        word = _WORD.match(self._text, self._at)
        if word is None or word.group() not in _WORDS:
            raise FastjsonError("a value was expected", self._at)
        self._at = word.end()
        return _WORDS[word.group()]

    def _object(self) -> dict[Any, Any]:
        self._at += 1
        members: dict[Any, Any] = {}
        while True:
            char = self._skip_space()
            if char == ",":
                self._at += 1
                continue
            if char == "}":
                self._at += 1
                return members
            key = self._key(char)
            if self._skip_space() != ":":
                raise FastjsonError("a colon was expected", self._at)
            self._at += 1
            members[key] = self._value()
            if self._skip_space() not in (",", "}"):
                raise FastjsonError("a comma or the end of an object was expected", self._at)

    def _key(self, char: str) -> Any:
        if char == "{":
            return object_key(self._value())
        if char == '"' or char == "'":
            return self._string(char)
        number = _NUMBER.match(self._text, self._at)
        word = _WORD.match(self._text, self._at) if number is None else number
        if word is None:
            raise FastjsonError("a key was expected", self._at)
        self._at = word.end()
        return word.group()

    def _array(self) -> list[Any]:
        self._at += 1
        items: list[Any] = []
        while True:
            char = self._skip_space()
            if char == ",":
                self._at += 1
                continue
            if char == "]":
                self._at += 1
                return items
            items.append(self._value())
            if self._skip_space() not in (",", "]"):
                raise FastjsonError("a comma or the end of an array was expected", self._at)

    def _string(self, quote: str) -> str:
        start = self._at
        self._at += 1
        pieces: list[str] = []
        while True:
            plain = _PLAIN[quote].match(self._text, self._at)
            assert plain is not None
            pieces.append(plain.group())
            self._at = plain.end() + 1
            end = self._text[plain.end() : self._at]
            if end == quote:
                return "".join(pieces)
            if not end:
                raise FastjsonError("a string does not end", start)
            pieces.append(self._escape())

    def _escape(self) -> str:
        begin = self._at - 1
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char in _ESCAPES and char:
            return _ESCAPES[char]
        if char == "u" or char == "x":
            digits = 4 if char == "u" else 2
            code = self._hex(digits)
            if 0xD800 <= code < 0xDC00 and self._text[self._at : self._at + 2] == "\\u":
                self._at += 2
                low = self._hex(4)
                if 0xDC00 <= low < 0xE000:
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            if 0xD800 <= code < 0xE000:
                # Python would take it, but no record, file or answer could contain it.
                raise FastjsonError("half of a surrogate pair", begin)
            return chr(code)
        raise FastjsonError("an unknown escape", begin + 1)

    def _hex(self, digits: int) -> int:
        text = self._text[self._at : self._at + digits]
        if not _HEX.fullmatch(text) or len(text) != digits:  # `int` alone would take signs
            raise FastjsonError("hexadecimal digits were expected", self._at)
        self._at += digits
        return int(text, 16)


def _number(match: re.Match[str]) -> int | float:
    text = match.group().rstrip("LlFfDdSsBb")
    try:
        return float(text) if match.group(1) or match.group(2) else int(text)
    except ValueError as error:  # more than Python's limit of 4300 digits
        raise FastjsonError(str(error), match.start()) from None


def object_key(value: Any) -> Any:
    """A hashable form of an object used as a key."""
    if isinstance(value, dict):
        return tuple(sorted((str(name), object_key(member)) for name, member in value.items()))
    if isinstance(value, list):
        return tuple(object_key(item) for item in value)
    return value


def _resolve(value: Any, root: Any, path: tuple[Any, ...]) -> Any:
    """Replaces references in place. `path`: the containers from the root to `value`."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        if len(value) == 1 and isinstance(reference, str):
            return _find(reference, root, path)
        inner = (*path, value)
        for name, member in value.items():
            value[name] = _resolve(member, root, inner)
    elif isinstance(value, list):
        inner = (*path, value)
        for index, item in enumerate(value):
            value[index] = _resolve(item, root, inner)
    return value


def _find(reference: str, root: Any, path: tuple[Any, ...]) -> Any:
    if reference == "@":
        return path[-1]
    if reference == "..":
        return path[-2] if len(path) > 1 else root
    if not reference.startswith("$"):
        raise FastjsonError(f"reference {reference!r} is not understood", 0)
    found = root
    for step in _steps(reference[1:]):
        try:
            found = found[int(step)] if isinstance(found, list) else found[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise FastjsonError(f"reference {reference!r} leads nowhere", 0) from None
    return found


def _steps(path: str) -> list[str]:
    """`.a.b[0]`, with a backslash before special characters of a name."""
    steps: list[str] = []
    current = ""
    at = 0
    while at < len(path):
        char = path[at]
        at += 1
        if char == "\\" and at < len(path):
            current += path[at]
            at += 1
        elif char in ".[]":
            if current:
                steps.append(current)
            current = ""
        else:
            current += char
    if current:
        steps.append(current.strip("'\""))
    return steps
