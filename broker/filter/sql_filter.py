"""SQL92 filters, ready to use: each expression is compiled once and kept, or its refusal is.

The parser library and the tables of the grammar cost a tenth of a second, so they are loaded with
the first expression, or a second after the start beside the loop (`preload`), never in a start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from batonmq.broker.filter.sql_values import Matches, SqlError

EXPRESSION_MAX: Final = 16_384
CACHED: Final = 1000


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
