"""Java's string hash, used in consume queues and index files. `tags_code` is cached, since tags
repeat; a full cache is emptied, because clients choose the tags."""

import sys
from operator import mul
from typing import Final

_CACHE_MAX: Final = 4096
_UTF_16: Final = "utf-16-le" if sys.byteorder == "little" else "utf-16-be"
_PART: Final = 256
_POWERS: Final = tuple(pow(31, exponent, 1 << 32) for exponent in reversed(range(_PART)))


def java_string_hash(text: str) -> int:
    """Java `String.hashCode()`: over UTF-16 code units, a signed 32-bit number."""
    # ASCII, as nearly every text is: each byte is a unit.
    units = text.encode() if text.isascii() else _utf_16_units(text)
    value = 0
    # Part by part: a Python loop over a key of 32,767 characters would block the broker.
    for begin in range(0, len(units), _PART):
        part = units[begin : begin + _PART]
        parts_sum = sum(map(mul, part, _POWERS[-len(part) :]))
        value = (value * pow(31, len(part), 1 << 32) + parts_sum) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


def _utf_16_units(text: str) -> memoryview:
    return memoryview(text.encode(_UTF_16, "surrogatepass")).cast("H")


class _TagsCodes(dict[str | bytes, int]):
    def __missing__(self, tag: str | bytes) -> int:
        text = tag if isinstance(tag, str) else bytes(tag).decode("utf-8", "replace")
        code = java_string_hash(text) if text else 0
        if len(self) >= _CACHE_MAX:
            self.clear()
        self[tag] = code
        return code


_codes: Final = _TagsCodes()


def tags_code(tag: str | bytes | None) -> int:
    """The tagsCode of a consume queue unit: the sign-extended hash of TAGS; 0 without tags."""
    return _codes[tag] if tag else 0
