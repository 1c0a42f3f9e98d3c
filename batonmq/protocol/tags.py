"""Java's string hash, which consume queues and index files hold. `tags_code` is cached, since tags
repeat; the cache is emptied when full, because tags come from clients."""

from typing import Final

_CACHE_MAX: Final = 4096


def java_string_hash(text: str) -> int:
    """Java `String.hashCode()`: over UTF-16 code units, a signed 32-bit number."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (value * 31 + (high << 8) + low) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


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
