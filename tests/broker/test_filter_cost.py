"""What an SQL92 filter of a stranger costs (R58)."""

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from batonmq.broker.filter import subscription_filter
from batonmq.broker.filter.sql_compiler import SOURCE_MAX, function_of
from batonmq.broker.filter.sql_values import SqlError
from batonmq.broker.filter.subscription_filter import (
    SHORT,
    TAGS_COUNT_MAX,
    WAITING_MAX,
    Outcomes,
    filter_of,
    prepared,
)
from batonmq.protocol.bodies import SQL92, TAG
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal


def source_size(expression: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the Python code that it becomes."""
    sizes: list[int] = []

    def noted(source: str, *args: str) -> object:
        sizes.append(len(source))
        return compile(source, args[0], args[1])

    monkeypatch.setattr("batonmq.broker.filter.sql_compiler.compile", noted, raising=False)
    function_of(expression)
    return sizes[-1]


def test_r58_an_expression_has_a_limited_number_of_tags():
    most = "||".join(map(str, range(TAGS_COUNT_MAX)))
    assert len(filter_of(TAG, most, sql92=True).wanted or ()) == TAGS_COUNT_MAX
    with pytest.raises(BrokerRefusal, match="of 2049 tags, at most 2048"):
        filter_of(TAG, most + "||a", sql92=True)


def test_r58_between_has_its_operand_once(monkeypatch):
    sizes = []
    expression = "a"
    for _ in range(12):
        expression = f"-({expression} BETWEEN 1 AND 2)"
        sizes.append(source_size(f"{expression} BETWEEN 1 AND 2", monkeypatch))
    grown = [after - before for before, after in pairwise(sizes)]
    assert max(grown[1:]) <= grown[0] + 40


@pytest.mark.parametrize("how", ["BETWEEN", "NOT BETWEEN"])
def test_r58_between_of_an_operand_that_is_kept_passes_what_it_passed(how):
    def raw(value: str) -> bytes:
        return b"\x02a\x01%b\x02" % value.encode()

    for value, is_between in (("1", False), ("2", True), ("3", True), ("4", False)):
        expected = is_between is (how == "BETWEEN")
        assert function_of(f"a {how} 2 AND 3")(raw(value)) is expected
        assert function_of(f"+(a) {how} 2 AND 3")(raw(value)) is expected
    assert function_of("-5 BETWEEN -6 AND -4")(raw("1")) is True
    assert function_of("-5 NOT BETWEEN -6 AND -4")(raw("1")) is False
    assert function_of(f"(-a) {how} 2 AND 3")(raw("2")) is False


def test_r58_the_cost_of_names_grows_with_their_number_only():
    def cost_s(count: int) -> float:
        expression = " OR ".join(f"p{i}={i}" for i in range(count))
        tries = []
        for _ in range(3):
            begin = time.thread_time()
            function_of(expression)
            tries.append(time.thread_time() - begin)
        return min(tries)

    cost_s(10)
    assert cost_s(240) < 8 * cost_s(60) + 0.02


def test_r58_an_expression_that_becomes_too_much_code_is_refused():
    expression = " OR ".join(f"p{i}={i}" for i in range(1300))
    with pytest.raises(SqlError, match=f"more than {SOURCE_MAX} characters of code"):
        function_of(expression)


def test_r58_long_expressions_are_compiled_beside_the_loop_one_at_a_time(monkeypatch):
    monkeypatch.setattr(subscription_filter, "_outcomes", Outcomes())
    running = most = 0
    threads: set[int] = set()
    compile_it = subscription_filter._outcome_of

    def noted(expression: str) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads.add(threading.get_ident())
        outcome = compile_it(expression)
        running -= 1
        return outcome

    monkeypatch.setattr(subscription_filter, "_outcome_of", noted)

    async def play() -> None:
        long = [" OR ".join(f"p{i}={i + n}" for i in range(120)) for n in range(4)]
        with pytest.raises(BrokerRefusal) as refused:
            filter_of(SQL92, long[0], sql92=True)
        assert refused.value.code == ResponseCode.SYSTEM_BUSY and len(long[0]) > SHORT
        await asyncio.gather(*map(prepared, long))
        for expression in long:
            assert filter_of(SQL92, expression, sql92=True).matches is not None

    asyncio.run(play())
    assert most == 1 and threading.get_ident() not in threads


def test_r58_what_is_kept_of_expressions_is_bounded_in_size():
    outcomes = Outcomes(count_max=3, size_max=100)
    for name in "abcd":
        outcomes.put(name * 30, "refused")
    assert outcomes.size == 90 and outcomes.get("a" * 30) is None
    outcomes.put("e" * 90, "refused")
    assert outcomes.size == 90 and outcomes.get("d" * 30) is None


def test_r58_a_few_expressions_of_pulls_wait_for_the_thread(monkeypatch):
    """Each takes 0.1 s there, and a stranger can send thousands in that time."""
    monkeypatch.setattr(subscription_filter, "_outcomes", Outcomes())
    begun = []
    monkeypatch.setattr(subscription_filter, "_begin", begun.append)
    monkeypatch.setattr(subscription_filter, "_begun", begun)
    for number in range(2 * WAITING_MAX):
        with pytest.raises(BrokerRefusal, match="ask again"):
            filter_of(SQL92, f"a{number} = '{'x' * SHORT}'", sql92=True)
    assert len(begun) == WAITING_MAX
    for each in begun:
        each.close()
