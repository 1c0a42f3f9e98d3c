"""The filter of a pull, a POP or a subscription: tags, or an SQL92 expression.

Each SQL92 expression is compiled once; the result or the error is cached. A long one takes 0.1 s,
so it is compiled in a thread, one at a time (`prepared`, R58). The parser library and its tables
cost 0.1 s as well, so they are loaded with the first expression, or in a thread a second after the
start (`preload`).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from batonmq.broker.filter.sql_values import Matches, SqlError
from batonmq.protocol.bodies import SQL92, TAG
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.tags import tags_code

EXPRESSION_MAX: Final = 16_384
CACHED: Final = 1000
CACHED_SIZE: Final = 1024 * 1024
"""The most characters of all cached expressions; their code is up to twenty times as large."""
SHORT: Final = 512
"""The longest expression (characters) that is compiled on the loop."""
WAITING_MAX: Final = 64
"""Expressions of pulls and POPs that wait for the thread."""
TAGS_MAX: Final = 32_768
"""The longest tag expression (characters)."""
TAGS_COUNT_MAX: Final = 2048
"""R58: each is hashed, for every pull that brings its own expression."""


class NotCompiledError(Exception):
    """A long expression that was not `prepared` yet."""


class SubscriptionFilter(NamedTuple):
    """`wanted`: tag hashes, None for all. `matches`: the SQL92 filter, None for none."""

    wanted: frozenset[int] | None
    matches: Matches | None


def filter_of(
    kind: str, expression: str, *, sql92: bool, off: int = ResponseCode.SYSTEM_ERROR
) -> SubscriptionFilter:
    """`kind`: the expression type; `sql92`: whether SQL92 is enabled. Raises BrokerRefusal:
    SUBSCRIPTION_PARSE_FAILED for an invalid expression or type, `off` if SQL92 is disabled."""
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
    except NotCompiledError as error:
        # The client retries in a moment, and then it is compiled; R58: unless too many wait.
        if len(_begun) < WAITING_MAX:
            _begin(prepared(expression))
        raise BrokerRefusal(ResponseCode.SYSTEM_BUSY, str(error)) from error


_begun: Final[set[asyncio.Task[None]]] = set()


def _begin(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    # The loop keeps only weak references: without this one the task could be garbage-collected.
    _begun.add(task)
    task.add_done_callback(_begun.discard)


def _wanted_tags(expression: str) -> frozenset[int] | None:
    """Tag hashes of `a || b`; None for `*` or an empty expression, which match all."""
    if len(expression) > TAGS_MAX:
        raise BrokerRefusal(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"tags of {len(expression)} characters, at most {TAGS_MAX} are allowed",
        )
    tags = [tag for each in expression.split("||") if (tag := each.strip())]
    if not expression.strip() or "*" in tags:
        return None
    if len(tags) > TAGS_COUNT_MAX:
        raise BrokerRefusal(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"an expression of {len(tags)} tags, at most {TAGS_COUNT_MAX} are allowed",
        )
    return frozenset(map(tags_code, tags))


def preload() -> None:
    """Loads the compiler; call it in a thread."""
    import batonmq.broker.filter.sql_compiler  # noqa: F401


class Outcomes:
    """An LRU cache of compiled expressions, or of the reasons why they do not compile."""

    def __init__(self, count_max: int = CACHED, size_max: int = CACHED_SIZE) -> None:
        self.size = 0
        self._count_max, self._size_max = count_max, size_max
        self._outcomes: OrderedDict[str, Matches | str] = OrderedDict()

    def get(self, expression: str) -> Matches | str | None:
        outcome = self._outcomes.get(expression)
        if outcome is not None:
            self._outcomes.move_to_end(expression)
        return outcome

    def put(self, expression: str, outcome: Matches | str) -> None:
        if expression not in self._outcomes:
            self.size += len(expression)
        self._outcomes[expression] = outcome
        while len(self._outcomes) > self._count_max or self.size > self._size_max:
            self.size -= len(self._outcomes.popitem(last=False)[0])


_outcomes: Final = Outcomes()
_one_at_a_time: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]] = (
    WeakKeyDictionary()
)


def _outcome_of(expression: str) -> Matches | str:
    from batonmq.broker.filter.sql_compiler import function_of

    try:
        return function_of(expression)
    except SqlError as error:
        return str(error)


def is_known(expression: str) -> bool:
    return len(expression) > EXPRESSION_MAX or _outcomes.get(expression) is not None


async def prepared(expression: str) -> None:
    """Compiles an expression in a thread, if it is not cached yet."""
    lock = _one_at_a_time.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        if not is_known(expression):
            _outcomes.put(expression, await asyncio.to_thread(_outcome_of, expression))


def compiled(expression: str) -> Matches:
    """The compiled expression. Raises SqlError; NotCompiledError for a long one that was not
    prepared."""
    if len(expression) > EXPRESSION_MAX:
        outcome: Matches | str | None = (
            f"{len(expression)} characters long, at most {EXPRESSION_MAX} are allowed"
        )
    else:
        outcome = _outcomes.get(expression)
    if outcome is None:
        # Compiling it here would block the loop, and anyone can send an expression (R58).
        if len(expression) > SHORT:
            raise NotCompiledError("this SQL92 expression is not compiled yet: ask again")
        outcome = _outcome_of(expression)
        _outcomes.put(expression, outcome)
    if isinstance(outcome, str):
        raise SqlError(f"the SQL92 expression {expression[:100]!r} is refused: {outcome}")
    return outcome
