"""What happens to a message when it is put: its properties, and the topic where it waits. Pure.

`SendProperties` handles the property string of a send in one pass: it finds what the store needs
(TAGS, KEYS, UNIQ_KEY), drops what a client may not set, and adds what every stored message carries.
The common case searches the string a few times; anything unusual goes through a dictionary.

`PutHooks` moves a message that is to wait to a topic of the broker's own. With DELAY above 0 it
goes to the queue of its level in SCHEDULE_TOPIC_XXXX; REAL_TOPIC and REAL_QID keep where it
belongs. With TIMER_DELAY_SEC, TIMER_DELAY_MS or TIMER_DELIVER_MS it goes to rmq_sys_wheel_timer,
with its due time in ms in TIMER_OUT_MS (Java rounds to a second). Sends, commits of transactions
and retries pass here; what the broker delivers or writes for itself does not. Origin:
org.apache.rocketmq.broker.util.HookUtils."""

import re
from typing import Final

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.message_id import UniqIdGenerator
from batonmq.protocol.numbers import INT_MAX, whole_number
from batonmq.protocol.properties import (
    DELAY,
    INNER_NUM,
    PROPERTIES_ROOM,
    PROPERTIES_SIZE_MAX,
    REAL_QID,
    REAL_TOPIC,
    TIMER_DEL_UNIQKEY,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    TRAN_MSG,
    decode_properties,
    encode_properties,
    find_property,
    with_properties,
    without_properties,
)
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.sysflag import INNER_BATCH
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC
from batonmq.store.config import StoreConfig

_ACCEPTED_MAX: Final = PROPERTIES_SIZE_MAX - PROPERTIES_ROOM
_TIMER_PROPERTIES: Final = (TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)
TIMER_QUEUE: Final = 0
_INNER: Final = INNER_NUM.encode() + b"\x01"
_NOT_IN_A_BATCH: Final = (DELAY, TRAN_MSG, *_TIMER_PROPERTIES)
_may_wait: Final = re.compile("|".join(f"{name}\x01" for name in _NOT_IN_A_BATCH).encode()).search

SEPARATOR: Final = "\x02"
_DROPPED: Final = ("POP_CK", "__CRC32#")


class PutHooks:
    def __init__(self, config: StoreConfig) -> None:
        self._levels = config.delay_levels
        self._config = config

    def apply(self, message: NewMessage, now_ms: int) -> None:
        """Diverts `message`, in place, if it is to wait; a level takes precedence over a time.
        `now_ms` is the wall clock. Raises BrokerRefusal, MESSAGE_ILLEGAL for an invalid property,
        SYSTEM_ERROR if timers are off; nothing may be stored then. Dead letters never wait."""
        # A dead letter may still carry the delay of its last retry.
        if message.topic.startswith(DLQ_PREFIX):
            return
        text = find_property(message.properties, DELAY.encode()) or b""
        level = delay_level(text.decode("utf-8", "replace"))
        if level > 0:
            self._delay(message, level)
            return
        properties = decode_properties(message.properties)
        # A message that was delivered by the timers keeps this property: it must not wait again.
        if TIMER_OUT_MS not in properties:
            self._time(message, properties, now_ms)

    def _delay(self, message: NewMessage, level: int) -> None:
        """Moves the message to the queue of its delay level."""
        # A level takes precedence, and the timers must not delay the message once more.
        if b"TIMER_" in message.properties:
            names = [name.encode() for name in _TIMER_PROPERTIES]
            message.properties = without_properties(message.properties, names)
        level = min(level, len(self._levels))  # as in Java
        kept_ms = self._config.file_reserved_time * 3_600_000
        # R56: the log must still have the message when it is due. A client's message is refused, a
        # retry waits less: it must not be lost.
        if self._levels.delay_ms(level) > kept_ms:
            if not message.topic.startswith(RETRY_PREFIX):
                raise _illegal(
                    f"delay level {level} is {self._levels.delay_ms(level)} ms, and messages are"
                    f" kept for {kept_ms} ms (fileReservedTime)"
                )
            fitting = (one for one in range(level, 0, -1) if self._levels.delay_ms(one) <= kept_ms)
            level = next(fitting, 1)
        _divert(message, SCHEDULE_TOPIC, level - 1, {DELAY.encode(): b"%d" % level})

    def _time(self, message: NewMessage, properties: dict[str, str], now_ms: int) -> None:
        deliver_ms = _deliver_ms(properties, now_ms)
        if deliver_ms is None:
            return
        if not self._config.timer_wheel_enable:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR,
                "this broker has no timers (timerWheelEnable is false); the message was not stored",
            )
        if deliver_ms - now_ms > self._config.timer_max_delay_ms:
            raise _illegal(
                f"it is to be delivered in {deliver_ms - now_ms} ms, at most"
                f" {self._config.timer_max_delay_ms} ms ahead is allowed (timerMaxDelaySec,"
                " fileReservedTime)"
            )
        recalled = properties.get(TIMER_DEL_UNIQKEY)
        # The sender may have no right to the other topic.
        if recalled is not None and not recalled.startswith(f"{message.topic}+"):
            raise _illegal(
                f"{TIMER_DEL_UNIQKEY} is {recalled[:64]!r}: it may recall messages of its own"
                f" topic only, {message.topic}+UNIQ_KEY"
            )
        if deliver_ms <= now_ms:
            # A recall that is due would be stored as an ordinary message of the topic.
            if recalled is not None:
                raise _illegal("the message that it recalls is due already")
            return
        changed = {TIMER_OUT_MS.encode(): b"%d" % deliver_ms}
        _divert(message, TIMER_TOPIC, TIMER_QUEUE, changed)


def _divert(message: NewMessage, topic: str, queue_id: int, changed: dict[bytes, bytes]) -> None:
    """Moves a message to the queue where it waits; its properties say where it belongs."""
    changed[REAL_TOPIC.encode()] = message.topic.encode()
    changed[REAL_QID.encode()] = b"%d" % message.queue_id
    message.properties = with_properties(message.properties, changed)
    message.topic, message.queue_id = topic, queue_id


def delay_level(text: str) -> int:
    """The value of a DELAY property, 0 if absent. Raises BrokerRefusal MESSAGE_ILLEGAL."""
    text = text.strip()
    if not text:
        return 0
    level = whole_number(text, INT_MAX)
    if level is None:
        raise _illegal(f"property DELAY is {text[:32]!r}, allowed is a delay level, 0 for none")
    return level


def _deliver_ms(properties: dict[str, str], now_ms: int) -> int | None:
    """When a message is to be delivered, wall clock ms; None if it has no such property."""
    for name, unit_ms, start_ms in (
        (TIMER_DELAY_SEC, 1000, now_ms),
        (TIMER_DELAY_MS, 1, now_ms),
        (TIMER_DELIVER_MS, 1, 0),
    ):
        text = properties.get(name)
        if text is None:
            continue
        value = whole_number(text.strip())
        if value is None:
            raise _illegal(f"property {name} is {text[:32]!r}, allowed is a whole number")
        return start_ms + value * unit_ms
    return None


def _illegal(why: str) -> BrokerRefusal:
    return BrokerRefusal(ResponseCode.MESSAGE_ILLEGAL, f"{why}; the message was not stored")


def require_space(properties: bytes) -> None:
    """Raises BrokerRefusal MESSAGE_ILLEGAL if a client's properties leave no space for those that a
    broker adds later (R54)."""
    if len(properties) > _ACCEPTED_MAX:
        raise _illegal(
            f"its properties have {len(properties)} bytes, at most {_ACCEPTED_MAX} are taken:"
            f" {PROPERTIES_ROOM} are kept for the broker's own"
        )


def refuse_to_wait(properties: bytes) -> None:
    """Raises BrokerRefusal MESSAGE_ILLEGAL if a message of a batch is to wait: a batch is one write
    to one queue."""
    if _may_wait(properties) is None:
        return
    found = decode_properties(properties)
    waits = [name for name in _NOT_IN_A_BATCH if found.get(name, "0") not in ("0", "-1", "false")]
    if waits:
        raise _illegal(f"a message with {waits[0]} may not be part of a batch: send it alone")


def refuse_inner_batch(properties: bytes, sys_flag: int) -> None:
    """Raises BrokerRefusal MESSAGE_ILLEGAL for several messages in one record: only topics with
    `queue.type=BatchCQ` have them, and no topic here is one."""
    if sys_flag & INNER_BATCH or properties.startswith(_INNER) or b"\x02" + _INNER in properties:
        raise _illegal(
            f"it is an inner batch (property {INNER_NUM}, or bit {INNER_BATCH:#x} of sysFlag): only"
            " topics with queue.type=BatchCQ take those, and no topic of this broker has it"
        )


class SendProperties:
    """Prepares property strings. `unique_ids` makes a UNIQ_KEY for messages without one."""

    def __init__(self, cluster_name: str, region_id: str, unique_ids: UniqIdGenerator) -> None:
        self._suffix = encode_properties(
            {"MSG_REGION": region_id, "TRACE_ON": "true", "CLUSTER": cluster_name}
        )
        if not self._suffix.endswith(SEPARATOR):
            self._suffix += SEPARATOR
        self._mark = f"\x02CLUSTER\x01{cluster_name}\x02"
        self._unique_ids = unique_ids

    def prepare(self, text: str) -> tuple[bytes, int, bytes | None, bytes]:
        """(property bytes to store, tagsCode, KEYS or None, UNIQ_KEY)."""
        marked = "\x02" + text
        if "\x02POP_CK\x01" in marked or "\x02__CRC32#\x01" in marked:
            text = self._unusual(text)
            marked = "\x02" + text
        if text and text[-1] != SEPARATOR:
            text += SEPARATOR
            marked += SEPARATOR
        # With a separator on either side one search finds whole names only. Below, 10 and 6 are the
        # lengths of what is searched; a call of len() would cost each send.
        find = marked.find
        at = find("\x02UNIQ_KEY\x01")
        unique_key = marked[at + 10 : find(SEPARATOR, at + 10)] if at >= 0 else ""
        key = unique_key.encode()
        # isalnum answers for almost all keys, without a look at each character.
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
        # A retry, or a message that was stored before, has the suffix already.
        if self._mark not in marked:
            text += self._suffix
        return text.encode(), tags, keys or None, key

    def _unusual(self, text: str) -> str:
        properties = decode_properties(text)
        for key in _DROPPED:
            properties.pop(key, None)
        return encode_properties(properties)


def _fits_into_a_reply(unique_key: str) -> bool:
    """Whether the reply's template may take it as it is, without escaping in JSON."""
    return unique_key.isprintable() and not set(unique_key) & {'"', "\\"} and unique_key != ""
