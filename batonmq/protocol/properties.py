"""The property string of a message: `key \\x01 value \\x02`, repeated. A reader skips pairs with an
empty key or value and accepts a missing last separator; the last one of a repeated key counts. A
stored string is kept as it is. Origin: Java `MessageDecoder.messageProperties2String`,
`string2messageProperties`, `MessageConst`."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

NAME_VALUE_SEPARATOR: Final = "\x01"
PROPERTY_SEPARATOR: Final = "\x02"

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
UNIQ_KEY: Final = "UNIQ_KEY"
RETRY_TOPIC: Final = "RETRY_TOPIC"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QID: Final = "REAL_QID"
RECONSUME_TIME: Final = "RECONSUME_TIME"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PGROUP: Final = "PGROUP"
TRAN_MSG: Final = "TRAN_MSG"
TRANSACTION_ID: Final = "__transactionId__"
TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
TRAN_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
CLUSTER: Final = "CLUSTER"
MSG_REGION: Final = "MSG_REGION"
TRACE_ON: Final = "TRACE_ON"
MIN_OFFSET: Final = "MIN_OFFSET"
MAX_OFFSET: Final = "MAX_OFFSET"
INNER_NUM: Final = "INNER_NUM"
INNER_BASE: Final = "INNER_BASE"
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
POP_CK: Final = "POP_CK"
FIRST_POP_TIME: Final = "1ST_POP_TIME"
SHARDING_KEY: Final = "__SHARDINGKEY"
CRC32: Final = "__CRC32#"
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
MSG_TYPE: Final = "MSG_TYPE"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
TIMER_DEL_UNIQKEY: Final = "TIMER_DEL_UNIQKEY"
INSTANCE_ID: Final = "INSTANCE_ID"
DUP_INFO: Final = "DUP_INFO"
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"

PROPERTIES_SIZE_MAX: Final = 32767
PROPERTIES_ROOM: Final = 1536
"""Bytes that must stay free in a client's message for properties that the broker adds later (delay,
POP, transactions): three names of 255 bytes and a dozen numbers."""

# Names that a client may not use for its own properties (Java `MessageConst.STRING_HASH_SET`).
RESERVED: Final = frozenset(
    {
        KEYS, TAGS, WAIT, DELAY, UNIQ_KEY, RETRY_TOPIC, REAL_TOPIC, REAL_QID, RECONSUME_TIME,
        MAX_RECONSUME_TIMES, ORIGIN_MESSAGE_ID, PGROUP, TRAN_MSG, TRANSACTION_ID,
        TRANSACTION_CHECK_TIMES, TRAN_PREPARED_QUEUE_OFFSET, CHECK_IMMUNITY_TIME_IN_SECONDS,
        CLUSTER, MSG_REGION, TRACE_ON, MIN_OFFSET, MAX_OFFSET, INNER_NUM, INNER_BASE,
        INNER_MULTI_DISPATCH, INNER_MULTI_QUEUE_OFFSET, POP_CK, FIRST_POP_TIME, SHARDING_KEY,
        CRC32, CORRELATION_ID, REPLY_TO_CLIENT, TTL, PUSH_REPLY_TIME, MSG_TYPE, TIMER_DELAY_SEC,
        TIMER_DELAY_MS, TIMER_DELIVER_MS, TIMER_OUT_MS, TIMER_ROLL_TIMES, TIMER_DEL_UNIQKEY,
        INSTANCE_ID, DUP_INFO,
    }
)  # fmt: skip


def decode_properties(raw: str | bytes) -> dict[str, str]:
    """Reads a property string; pairs without key or value are skipped, the last of a key wins."""
    text = raw if isinstance(raw, str) else bytes(raw).decode("utf-8", "replace")
    properties: dict[str, str] = {}
    for pair in text.split(PROPERTY_SEPARATOR):
        name, separator, value = pair.partition(NAME_VALUE_SEPARATOR)
        if separator and name and value:
            properties[name] = value
    return properties


def encode_properties(properties: Mapping[str, str]) -> str:
    """A property string with a separator after each pair; empty values are left out. Check names
    and values with `name_value_problem` first."""
    return "".join(
        f"{name}{NAME_VALUE_SEPARATOR}{value}{PROPERTY_SEPARATOR}"
        for name, value in properties.items()
        if name and value
    )


def name_value_problem(name: str, value: str) -> str | None:
    """Why this pair cannot be stored, or None."""
    for what, text in (("name", name), ("value", value)):
        if not text:
            return f"the property {what} is empty"
        if NAME_VALUE_SEPARATOR in text or PROPERTY_SEPARATOR in text:
            return f"the property {what} {text!r} holds a separator (\\x01 or \\x02)"
    return None


def find_property(raw: bytes, key: bytes) -> bytes | None:
    """The value of one key, without reading the others; None if absent or empty. The last one of a
    repeated key counts."""
    needle = key + b"\x01"
    end = len(raw)
    while True:
        at = raw.rfind(needle, 0, end)
        if at < 0:
            return None
        if at == 0 or raw[at - 1] == 2:
            start = at + len(needle)
            stop = raw.find(b"\x02", start)
            value = raw[start:] if stop < 0 else raw[start:stop]
            if value:
                return value
        # Part of a longer key or of a value, or an empty value: search before it.
        end = at + len(needle) - 1


def with_properties(raw: bytes, values: Mapping[bytes, bytes]) -> bytes:
    """`raw` with these pairs appended; pairs of the same names are removed."""
    raw = without_properties(raw, values)
    if raw and raw[-1] != 2:
        raw += b"\x02"
    return raw + b"".join([b"%b\x01%b\x02" % pair for pair in values.items()])


def without_properties(raw: bytes, names: Iterable[bytes]) -> bytes:
    """`raw` without the pairs of these names."""
    return _pairs_of(tuple(names)).sub(b"", b"\x02" + raw)[1:]


@lru_cache(maxsize=64)
def _pairs_of(names: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Finds pairs of these names, each with the separator before it."""
    return re.compile(b"\x02(?:%b)\x01[^\x02]*" % b"|".join(map(re.escape, names)))
