"""The figures of stock clients: gaps, failures, and what a consumer was given twice or too late."""

from typing import Any

from lab.cluster.stock_load import GivenTotals, Seen, StockLoad, judged
from lab.faults.clients import CLIENT_FAULTS_BY_NAME, client_table


def lines(*keys: str) -> list[dict[str, Any]]:
    return [{"key": key, "by": "orderly", "at": 0} for key in keys]


def test_an_order_is_broken_by_the_first_time_of_a_message_and_not_by_its_second() -> None:
    given = judged(lines("ordered-1-0", "ordered-5-0", "ordered-2-1", "ordered-1-0", "sync-1"))
    assert given == GivenTotals(twice=1, rolled_back=0, out_of_order=0)
    given = judged(lines("ordered-5-0", "ordered-1-0", "ordered-6-0", "rolledback-4"))
    assert given == GivenTotals(twice=0, rolled_back=1, out_of_order=1)


def test_gaps_and_failures_are_those_of_one_kind_from_a_moment_on() -> None:
    class Program:
        def __init__(self, *said: dict[str, Any]) -> None:
            self.said = said

        def of(self, field: str) -> list[dict[str, Any]]:
            return [line for line in self.said if field in line]

    load = StockLoad.__new__(StockLoad)
    load.senders, load.consumers = ("sync", "transaction"), ("lite",)
    acks = (
        {"acked": "sync-1", "at": 0},
        {"acked": "sync-2", "at": 70},
        {"acked": "async-1", "at": 40},
    )
    failed = (
        {"failed": "rolledback-4", "why": "code 14", "at": 90},
        {"failed": "sync-3", "why": "x", "at": 9},
    )
    load.producer = Program(*acks, *failed)  # type: ignore[assignment]
    load.consumer = Program(*({"key": "k", "by": "lite", "at": at} for at in (0, 10, 60)))  # type: ignore[assignment]
    seen = load.since(50)
    assert seen == {"sync": Seen(70, 0), "transaction": Seen(0, 1), "lite": Seen(50)}
    assert load.reasons(50) == {"rolledback: code N": 1}
    fault = CLIENT_FAULTS_BY_NAME["kill"]
    table = client_table([fault], {"kill": [seen]}, load.senders, load.consumers)
    assert "| kill -9 of the master | sync | 0.07 s, 0.07 s | 0, 0 | 1 |" in table
    assert "| kill -9 of the master | lite | 0.05 s, 0.05 s | - | 1 |" in table
