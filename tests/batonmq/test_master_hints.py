"""A refusal that names the new master: where the client goes then, and when it does not."""

from __future__ import annotations

from batonmq.master_hints import HINT_MS, MasterHints
from batonmq.route import TopicRoute

OLD, NEW, THIRD = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.3:10911"


def route(master: str, slave: str) -> TopicRoute:
    return TopicRoute("T", (), (), {"b": {0: master, 2: slave}}, {"b": "C"})


def ext(address: str, epoch: int) -> dict[str, str]:
    return {"batonMasterAddress": address, "batonMasterEpoch": str(epoch)}


def test_a_hint_goes_before_a_name_server_that_lags() -> None:
    hints = MasterHints()
    assert hints.heard("b", ext(NEW, 8), 0) == NEW
    assert hints.over(route(OLD, NEW), 10).brokers == {"b": {0: NEW}}
    agreed = route(NEW, OLD)
    assert hints.over(agreed, 10) is agreed


def test_a_hint_ends_with_time_or_when_nobody_answers_there() -> None:
    hints = MasterHints()
    hints.heard("b", ext(NEW, 8), 0)
    assert hints.over(route(OLD, NEW), HINT_MS).master_address("b") == OLD
    hints.heard("b", ext(NEW, 8), 0)
    hints.unreachable(OLD)
    assert hints.over(route(OLD, NEW), 1).master_address("b") == NEW
    hints.unreachable(NEW)
    assert hints.over(route(OLD, NEW), 1).master_address("b") == OLD


def test_news_of_a_lower_epoch_is_old_news() -> None:
    """The new master, which does not know it yet, still names the old one."""
    hints = MasterHints()
    hints.heard("b", ext(NEW, 8), 0)
    assert hints.heard("b", ext(OLD, 7), 1) is None
    assert hints.over(route(OLD, NEW), 2).master_address("b") == NEW
    assert hints.heard("b", ext(THIRD, 9), 3) == THIRD


def test_what_is_no_hint_is_none() -> None:
    hints = MasterHints()
    for odd in (
        {},
        {"batonMasterAddress": NEW},
        ext("", 8),
        {**ext(NEW, 8), "batonMasterEpoch": "x"},
    ):
        assert hints.heard("b", odd, 0) is None
    other = TopicRoute("T", (), (), {"c": {0: OLD}, "d": {2: THIRD}}, {})
    hints.heard("d", ext(NEW, 1), 0)
    assert hints.over(other, 1) is other  # a group without a master has no queues to write to
