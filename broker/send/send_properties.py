"""The property string of a send on its way into a record.

One pass that finds what the store needs (TAGS, KEYS, UNIQ_KEY), drops what no client may set, and
adds what every stored message carries. The common case searches the string a few times; anything
unusual takes the slow way through a dictionary.
"""

from __future__ import annotations

import os
from typing import Final

from batonmq.process.clock import wall_ms
from batonmq.protocol.message_id import UniqIdGenerator
from batonmq.protocol.properties import decode_properties, encode_properties
from batonmq.protocol.tags import tags_code

SEPARATOR: Final = "\x02"
_DROPPED: Final = ("POP_CK", "__CRC32#")


class SendProperties:
    """Prepares property strings for one broker."""

    def __init__(self, cluster_name: str, region_id: str, store_host: bytes) -> None:
        self._suffix = encode_properties(
            {"MSG_REGION": region_id, "TRACE_ON": "true", "CLUSTER": cluster_name}
        )
        if not self._suffix.endswith(SEPARATOR):
            self._suffix += SEPARATOR
        self._mark = f"\x02CLUSTER\x01{cluster_name}\x02"
        self._unique_ids = UniqIdGenerator(store_host[:-4], os.getpid(), wall_ms)

    def prepare(self, text: str) -> tuple[bytes, int, bytes | None, bytes]:
        """(property bytes to store, tagsCode, KEYS or None, UNIQ_KEY)."""
        marked = "\x02" + text
        if "\x02POP_CK\x01" in marked or "\x02__CRC32#\x01" in marked:
            text = self._unusual(text)
            marked = "\x02" + text
        if text and text[-1] != SEPARATOR:
            text += SEPARATOR
            marked += SEPARATOR
        find = marked.find
        at = find("\x02UNIQ_KEY\x01")
        unique_key = marked[at + 10 : find(SEPARATOR, at + 10)] if at >= 0 else ""
        key = unique_key.encode()
        if not key.isalnum() and not _fits_into_a_reply(unique_key):
            unique_key = self._unique_ids.next()
            key = unique_key.encode()
            text = encode_properties({**decode_properties(text), "UNIQ_KEY": unique_key})
            if text[-1] != SEPARATOR:
                text += SEPARATOR
            marked = "\x02" + text
            find = marked.find
        at = find("\x02TAGS\x01")
        tags = tags_code(marked[at + 6 : find(SEPARATOR, at + 6)]) if at >= 0 else 0
        at = find("\x02KEYS\x01")
        keys = marked[at + 6 : find(SEPARATOR, at + 6)].encode() if at >= 0 else None
        if self._mark not in marked:
            text += self._suffix
        return text.encode(), tags, keys or None, key

    def _unusual(self, text: str) -> str:
        properties = decode_properties(text)
        for key in _DROPPED:
            properties.pop(key, None)
        return encode_properties(properties)


def _fits_into_a_reply(unique_key: str) -> bool:
    """Whether the reply's template may take it as it is: nothing in it needs escaping in JSON."""
    return unique_key.isprintable() and not set(unique_key) & {'"', "\\"} and unique_key != ""
