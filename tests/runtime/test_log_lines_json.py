"""`logFormat: json`: one object a line, with the fields of the message."""

import json
import logging
import sys
from typing import Any

import pytest

from batonmq.runtime.log_lines import JsonFormatter


def line(msg: str, *args: object, exc_info: Any = None) -> dict[str, Any]:
    record = logging.LogRecord("batonmq.x", logging.INFO, "f", 1, msg, args, exc_info)
    text = JsonFormatter(datefmt="%Y-%m-%dT%H:%M:%S").format(record)
    assert "\n" not in text and text.isascii()
    found: dict[str, Any] = json.loads(text)
    return found


def test_fields_are_those_of_the_message() -> None:
    found = line("role_changed group=%s epoch=%d set=%s ok=%s", "broker-a", 7, [1, 2], True)
    assert (found["event"], found["group"], found["epoch"]) == ("role_changed", "broker-a", 7)
    assert (found["set"], found["ok"], found["level"]) == ("[1, 2]", True, "INFO")
    assert found["message"] == "role_changed group=broker-a epoch=7 set=[1, 2] ok=True"
    assert found["time"][10] == "T" and found["time"][-4] == "."


@pytest.mark.parametrize(
    ("msg", "args"),
    [
        ("A sentence with %s in it", ("x",)),
        ("%s %s", ("a", "b")),
        ("100%% of it", ()),
        ("mapping %(a)s", ({"a": 1},)),
    ],
)
def test_other_texts_are_only_a_message(msg: str, args: tuple[object, ...]) -> None:
    found = line(msg, *args)
    assert set(found) <= {"time", "level", "logger", "message", "event"}


def test_r46_a_name_forges_no_line_and_no_field() -> None:
    found = line("topic_made name=%s level=%s", 'x\n"}{"level":"CRITICAL', "fake")
    assert found["level"] == "INFO" and found["name"] == 'x\n"}{"level":"CRITICAL'


def test_a_traceback_is_one_text() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert found["exception"].endswith("ValueError: bad")
