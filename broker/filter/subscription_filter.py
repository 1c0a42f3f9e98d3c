"""What a pull, a POP or a subscription asks for: messages with some tags, or by an SQL92 filter.

Each SQL92 expression is compiled once and kept, or its refusal is. The parser library and the
tables of the grammar cost a tenth of a second, so they are loaded with the first expression, or a
second after the start beside the loop (`preload`), never in a start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from batonmq.broker.filter.sql_values import Matches, SqlError
from batonmq.protocol.bodies import SQL92, TAG
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.tags import tags_code

EXPRESSION_MAX: Final = 16_384
CACHED: Final = 1000


class SubscriptionFilter(NamedTuple):
    """`wanted` are tag hashes, None for all; `matches` is the SQL92 filter, None for none."""

    wanted: frozenset[int] | None
    matches: Matches | None


def filter_of(
    kind: str, expression: str, *, sql92: bool, off: int = ResponseCode.SYSTEM_ERROR
) -> SubscriptionFilter:
    """`kind` is the expression type, `sql92` whether such filters are switched on. Raises
    BrokerRefusal 23 for an expression or a type that is none, `off` where SQL92 is off."""
    if kind == TAG:
        return SubscriptionFilter(_wanted_tags(expression), None)
    if kind != SQL92:
        raise BrokerRefusal(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"expression type {kind} is not supported, allowed are TAG and SQL92",
        )
    if not sql92:  # Java's words
        raise BrokerRefusal(off, "The broker does not support consumer to filter message by SQL92")
    try:
        return SubscriptionFilter(None, compiled(expression))
    except SqlError as error:
        raise BrokerRefusal(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error


def _wanted_tags(expression: str) -> frozenset[int] | None:
    """Tag hashes of `a || b`; None for `*` or nothing, which is everything."""
    tags = [tag.strip() for tag in expression.split("||")]
    if not expression.strip() or "*" in tags:
        return None
    return frozenset(tags_code(tag) for tag in tags if tag)


def preload() -> None:
    """Loads what the first expression would otherwise wait for. May run on another thread."""
    import batonmq.broker.filter.sql_compiler  # noqa: F401


@lru_cache(CACHED)
def _outcome(expression: str) -> Matches | str:
    if len(expression) > EXPRESSION_MAX:
        return f"{len(expression)} characters long, at most {EXPRESSION_MAX} are allowed"
    from batonmq.broker.filter.sql_compiler import function_of

    try:
        return function_of(expression)
    except SqlError as error:
        return str(error)


def compiled(expression: str) -> Matches:
    """The test that an expression stands for. Raises SqlError."""
    outcome = _outcome(expression)
    if isinstance(outcome, str):
        raise SqlError(f"the SQL92 expression {expression[:100]!r} is refused: {outcome}")
    return outcome
