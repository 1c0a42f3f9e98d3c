"""One is one, and two are many."""

import pytest

from batonmq.runtime.words import counted, named


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "message", "0 messages"),
        (1, "message", "1 message"),
        (2, "half message", "2 half messages"),
        (1, "history", "1 history"),
        (3, "history", "3 histories"),
        (2, "process", "2 processes"),
        (2, "key", "2 keys"),
    ],
)
def test_one_is_one(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


def test_names_stand_behind_their_noun() -> None:
    assert named("broker", [3]) == "broker 3"
    assert named("broker", [1, 3]) == "brokers 1, 3"
