"""SQL92 filters: Java's own outcomes as the oracle, and what is refused, by name."""

import asyncio
import json
from pathlib import Path

import pytest

from batonmq.broker.filter.sql_compiler import DEPTH_MAX
from batonmq.broker.filter.sql_values import SqlError
from batonmq.broker.filter.subscription_filter import EXPRESSION_MAX, compiled, filter_of, prepared
from batonmq.protocol.tags import tags_code

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3" / "sql92.json"


def passes(expression: str, **properties: str) -> bool:
    raw = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    asyncio.run(prepared(expression))
    return compiled(expression)(f"\x02{raw}\x02".encode())


def test_every_outcome_is_that_of_the_java_evaluator():
    golden = json.loads(GOLDEN.read_text("utf-8"))
    messages = [f"\x02{text}\x02".encode() for text in golden["properties"]]
    wrong = []
    for expression, wanted in golden["outcomes"].items():
        try:
            matches = compiled(expression)
            outcome = "".join("01"[matches(message)] for message in messages)
        except SqlError:
            outcome = "E"
        if outcome != wanted:
            wrong.append((expression, outcome, wanted))
    assert not wrong


@pytest.mark.parametrize(
    ("expression", "properties", "wanted"),
    [
        ("a > 3 AND name = 'bob'", {"a": "5", "name": "bob"}, True),
        ("a > 3", {"a": "five"}, False),
        ("NOT (a > 3)", {}, False),
        ("a IS NULL OR a > 3", {}, True),
        ("NOT a = 5", {"a": "5"}, False),  # NOT binds to the name alone
        ("a = 3000000000", {"a": "3000000000"}, True),
        ("a > 5", {"a": "3000000000"}, False),  # no int32, as in Java
        ("a < 0", {"a": "-2147483648"}, True),
        ("a < 0", {"a": "-2147483649"}, False),
        ("a < b", {"a": "-0.0", "b": "0.0"}, True),  # as Double.compareTo
        ("a > b", {"a": "NaN", "b": "Infinity"}, True),
        ("Ab = 'x'", {"AB": "x"}, False),
        ("TAGS = 'x' -- to the end", {"TAGS": "x"}, True),
        ("/* all */ name in ('it''s')", {"name": "it's"}, True),
        ("name CONTAINS 'ü'", {"name": "grün"}, True),
        ("ANDROID = 'x'", {"ANDROID": "x"}, True),
    ],
)
def test_an_expression(expression, properties, wanted):
    assert passes(expression, **properties) is wanted


def test_an_expression_may_be_as_long_as_the_limit_says():
    assert passes("a = 1".ljust(EXPRESSION_MAX), a="1")
    with pytest.raises(SqlError, match="16385 characters"):
        compiled("a = 1".ljust(EXPRESSION_MAX + 1))


@pytest.mark.parametrize(
    ("expression", "tags"),
    [("A", "A"), (" A ||B || ", "AB"), ("A || *", None), ("", None), (" * ", None)],
)
def test_which_tags_a_subscription_wants(expression, tags):
    wanted = filter_of("TAG", expression, sql92=False).wanted
    assert wanted == (None if tags is None else frozenset(map(tags_code, tags)))


def test_of_a_repeated_name_the_last_value_counts_and_empty_ones_do_not():
    matches = compiled("a = '2'")
    assert matches(b"\x02a\x011\x02a\x012\x02\x02")
    assert matches(b"\x02a\x012\x02a\x01\x02\x02")
    assert not compiled("a IS NOT NULL")(b"\x02a\x01\x02ba\x011\x02\x02")


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("a = 1 b", "line 1, column 7"),
        ("a LIKE 'x'", "LIKE"),
        ("a != 1", "'!'"),
        ("a > 'x'", "needs numbers, not 'x'"),
        ("a = NULL", "IS NULL"),
        ("0.0 < a", "above 0"),
        ("a = 99999999999999999999", "64 bits"),
        ("a BETWEEN 5 AND 3", "the lower comes first"),
        ("5", "a condition is needed"),
        ("a = 'x" * 9, "refused"),
        ("NOT " * (DEPTH_MAX + 1) + "(a = 1)", f"deeper than {DEPTH_MAX}"),
        ("a = 1 OR " * EXPRESSION_MAX + "a = 1", f"at most {EXPRESSION_MAX}"),
        ("", "refused"),
    ],
)
def test_what_is_no_expression_is_refused_by_name(expression, named):
    for _ in range(2):  # a refusal is kept, too
        with pytest.raises(SqlError) as caught:
            compiled(expression)
        assert named in str(caught.value)


def test_a_long_chain_is_no_deep_one():
    assert passes(" OR ".join(f"a = '{number}'" for number in range(1000)), a="999")
