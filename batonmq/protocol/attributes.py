"""Attributes of a topic, and the notation of changes: `+key=value` or `-key`, joined by commas
(UPDATE_AND_CREATE_TOPIC, 17), or a map of `+key` to value and `-key` to "" (18). The broker only
stores and shows attributes: RocketMQ's proxy uses `message.type`, its tiered storage
`reserve.time`. Origin: Java TopicAttributes, AttributeParser, AttributeUtil. As Java, a refusal is
a SYSTEM_ERROR (1), and INVALID_PARAMETER (29) for MIXED without enableMixedMessageType."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from batonmq.protocol.codes import LONG_MAX, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.numbers import whole_number

MESSAGE_TYPE: Final = "message.type"
MIXED: Final = "MIXED"


class Attribute(NamedTuple):
    """`allowed`: the valid values, for error texts; `takes` checks a value. Unless `changeable`, it
    can be set only at creation."""

    allowed: str
    takes: Callable[[str], bool]
    changeable: bool


def _one_of(*values: str, changeable: bool, note: str = "") -> Attribute:
    return Attribute(", ".join(values) + note, values.__contains__, changeable)


def _is_reserve_time(value: str) -> bool:
    # Java reads what is stored here: not int(), which takes `1_000`, too.
    number = whole_number(value)
    return number is not None and number >= -1


TOPIC_ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    MESSAGE_TYPE: _one_of(
        "UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", MIXED, changeable=True
    ),
    # Java's other values, BatchCQ and COMPACTION, need another way to store messages.
    "queue.type": _one_of("SimpleCQ", changeable=False, note=" (no other is built here)"),
    "cleanup.policy": _one_of("DELETE", changeable=False, note=" (no other is built here)"),
    "reserve.time": Attribute(f"-1 to {LONG_MAX}", _is_reserve_time, changeable=True),
}


def parse_attributes(text: str) -> dict[str, str]:
    """`+a=b,-c` -> {"+a": "b", "-c": ""}. Raises BrokerRefusal."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not key.startswith("+" if equals else "-"):
            raise _refused(part, "+key=value sets one and -key takes one away")
        if key in found:
            raise _refused(part, f"{key} is given twice")
        found[key] = value
    return found


def altered(
    known: Mapping[str, str] | None, changes: Mapping[str, str], *, mixed: bool
) -> dict[str, str]:
    """A topic's attributes after `changes`. `known` None: a new topic. `mixed`: whether MIXED
    messages are enabled. Raises BrokerRefusal that says what is allowed."""
    after = dict(known or {})
    names: set[str] = set()
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        attribute = TOPIC_ATTRIBUTES.get(name)
        if sign not in ("+", "-"):
            raise _refused(signed, "+key=value sets one and -key takes one away")
        if attribute is None:
            raise _refused(name, f"there are {', '.join(TOPIC_ATTRIBUTES)}")
        if name in names:
            raise _refused(name, "it is changed twice in one request")
        names.add(name)
        if sign == "+":
            if not attribute.takes(value):
                raise _refused(f"{name}={value}", f"allowed are {attribute.allowed}")
            if value == MIXED and not mixed:
                why = "MIXED needs enableMixedMessageType"
                raise _refused(f"{name}={value}", why, ResponseCode.INVALID_PARAMETER)
            after[name] = value
        elif name not in after:
            raise _refused(signed, "the topic has no such attribute")
        else:
            del after[name]
        if known is not None and not attribute.changeable and after.get(name) != known.get(name):
            raise _refused(name, "it can be set only when the topic is made")
    return after


def _refused(what: str, why: str, code: ResponseCode = ResponseCode.SYSTEM_ERROR) -> BrokerRefusal:
    return BrokerRefusal(code, f"topic attribute {what!r}: {why}")
