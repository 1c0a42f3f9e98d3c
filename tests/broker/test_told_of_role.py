"""What a master tells the history of itself: whether its first write waited, how its lease went."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from broker.pending_acks import PendingAcks
from broker.role_actions import RoleActions
from broker.role_gate import RoleGate


class Told:
    """RoleActions over a real gate; HA says whether the required set is whole."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.gate = RoleGate()
        self.ha = Mock(required_set_whole=True)
        self.actions = RoleActions(
            Mock(confirm_offset=640), self.ha, self.gate, Mock(), Mock(), Mock(), Mock(),
            routes_changed=Mock(), role_left=Mock(), hold=Mock(), end_turn=Mock(),
            clock_ms=lambda: self.now_ms,
        )  # fmt: skip
        self.actions.report = lambda kind, **fields: self.events.append((kind, fields))
        self.gate.opening(3)
        self.gate.standing(lease=True, required_set_whole=True)
        self.gate.open()

    def lease(self, valid: bool, now_ms: int) -> None:
        self.now_ms = now_ms
        self.actions.lease_changed(valid)


@pytest.mark.parametrize("whole", [True, False])
def test_r36_a_lease_that_comes_back_is_told_with_its_absence_and_what_became_of_writes(whole):
    told = Told()
    told.ha.required_set_whole = whole
    told.lease(False, 2_000)
    assert (told.gate.refusal is None) == whole
    told.lease(True, 2_750)
    assert told.events == [("lease_back", {"awayMs": 750, "writesRefused": not whole})]
    told.ha.required_set_whole = True
    told.lease(False, 3_000)
    told.lease(True, 3_100)
    assert told.events[1:] == [("lease_back", {"awayMs": 100, "writesRefused": False})]


def test_a_lease_that_begins_with_the_role_did_not_come_back():
    told = Told()
    told.lease(True, 1_500)
    told.gate.follow(4)
    told.lease(False, 1_600)
    told.lease(True, 1_700)
    assert told.events == []


def test_the_first_ack_is_told_once_with_how_long_its_write_waited():
    told = Told()
    told.actions.first_ack_due = True
    told.actions.acked(12)
    told.actions.acked(99)
    assert told.events == [("first_ack", {"confirmOffset": 640, "waitedMs": 12})]


def test_the_oldest_reply_tells_how_long_writes_wait():
    acks = PendingAcks(3_000)
    assert acks.waited_ms(50) == 0
    acks.add(100, 60, Mock(), b"")
    acks.add(200, 80, Mock(), b"")
    assert acks.waited_ms(90) == 30
    acks.confirm(100)
    assert acks.waited_ms(90) == 10
