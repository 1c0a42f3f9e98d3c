"""Checks of an application's arguments: an invalid value raises at the call and names the argument.

Otherwise a wrong type or a typo would show much later, as an endless retry or a lost message. Pure.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

from batonmq.client.errors import ArgumentError, MessageIllegalError
from batonmq.protocol.message import Message, MessageExt, MessageQueue
from batonmq.protocol.numbers import PORT_MAX, host_and_port
from batonmq.protocol.topic_name import topic_problem

# A condition that is given as a tag would match no message, and nothing would say so.
_SQL: Final = re.compile(r"[=<>'()]|\s(AND|OR|NOT|IS|IN|BETWEEN|CONTAINS)\s", re.IGNORECASE)


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ArgumentError(name, value, "a text is allowed")


def check_number(name: str, value: object, least: int) -> None:
    """Checks a whole number of at least `least`."""
    # A bool is an int as well.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(name, value, f"a whole number of at least {least} is allowed")


class CheckedOptions:
    """A base of dataclasses that refuses values of other types, and numbers below 1, or below 0
    for the names in `MAY_BE_ZERO`."""

    __slots__ = ()
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name, getattr(self, field.name)
            kind: Any = field.type
            if not isinstance(value, kind):
                raise ArgumentError(name, value, f"{getattr(kind, '__name__', kind)} is allowed")
            if isinstance(value, int):
                check_number(name, value, 0 if name in self.MAY_BE_ZERO else 1)


def check_timeout(value: object) -> None:
    """Checks a `timeout_ms`; None means the default."""
    if value is not None:
        check_number("timeout_ms", value, 1)


def check_call(name: str, value: object, parameters: tuple[str, ...]) -> None:
    """Checks that a callable takes these arguments."""
    shape = f"a function of ({', '.join(parameters)}) is allowed"
    if not callable(value):
        raise ArgumentError(name, value, shape)
    try:
        signature = inspect.signature(value)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        raise ArgumentError(name, value, shape) from None


def check_topic_name(topic: object) -> None:
    check_text("topic", topic)
    if (problem := topic_problem(str(topic))) is not None:
        raise ArgumentError("topic", topic, problem)


def check_tags(expression: str) -> None:
    """Checks a tag expression: `*`, or `a || b`."""
    if _SQL.search(expression):
        raise ArgumentError(
            "expression", expression, "this is no tag; a condition needs expression_type='SQL92'"
        )
    for tag in expression.split("||"):
        # Brokers take "a|b" as one tag, which no message has.
        if "|" in tag:
            raise ArgumentError("expression", expression, "tags are joined by two bars: 'a || b'")


def check_address(text: str) -> None:
    """Checks `host:port`."""
    found = host_and_port(text)
    if found is None or re.search(r"[/\s]", found[0]):
        allowed = f"host:port is allowed, with a port of 1 to {PORT_MAX}"
        raise ArgumentError("an address", text, allowed)


def check_queue(queue: object, topic: str | None = None, name: str = "queue") -> None:
    """Checks a queue, and that it is one of `topic`, if given."""
    if not isinstance(queue, MessageQueue):
        raise ArgumentError(name, queue, "a MessageQueue is allowed")
    if topic is not None and queue.topic != topic:
        raise ArgumentError(name, queue, f"one of topic {topic} is allowed")


def checked_queues(queues: object) -> list[MessageQueue]:
    # A text can be iterated as well.
    if isinstance(queues, str) or not isinstance(queues, Iterable):
        raise ArgumentError("queues", queues, "several MessageQueues are allowed")
    found: list[Any] = list(queues)
    for queue in found:
        check_queue(queue)
    return found


def check_received(name: str, message: object) -> None:
    if not isinstance(message, MessageExt):
        raise ArgumentError(name, message, "a message that was consumed is allowed")


def check_shape(message: object) -> None:
    """Checks the types of a message's parts. Raises MessageIllegalError."""
    if not isinstance(message, Message):
        raise MessageIllegalError(f"message is {_short(message)}, allowed is a Message")
    for name, value, kinds, allowed in (
        ("topic", message.topic, str, "a text"),
        ("body", message.body, (bytes, bytearray, memoryview), "bytes; Message.of takes a text"),
        ("flag", message.flag, int, "a whole number"),
        ("properties", message.properties, dict, "a dict of texts"),
    ):
        if not isinstance(value, kinds):
            raise MessageIllegalError(f"{name} is {_short(value)}, allowed: {allowed}")
    # A broker refuses a larger one with a code that is retried, until the deadline of the send.
    if not -(1 << 31) <= message.flag < 1 << 31:
        raise MessageIllegalError(f"flag is {message.flag}, allowed are 32 bits")
    for key, value in message.properties.items():
        for part in (key, value):
            if not isinstance(part, str):
                raise MessageIllegalError(
                    f"property {_short(key)} is {_short(value)}, allowed are texts"
                )


def check_send(
    messages: Sequence[Message], queue: MessageQueue | None, timeout_ms: int | None
) -> None:
    """Checks the arguments of a send. Raises MessageIllegalError, ArgumentError."""
    for message in messages:
        check_shape(message)
    if queue is not None:
        check_queue(queue, messages[0].topic)
    check_timeout(timeout_ms)


def _short(value: object) -> str:
    return repr(value)[:80]
