"""What a master reports to the history: how long its first write waited, how its lease went."""

from typing import Any
from unittest.mock import Mock

import pytest

from batonmq.broker.replication.role_actions import RoleActions
from batonmq.broker.write.pending_acks import PendingAcks
from batonmq.broker.write.write_path import MembersConfirm, WritePath


class Master:
    """RoleActions over a real gate; HA says whether the required set is whole."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.ha = Mock(required_set_whole=True)
        self.path = WritePath(
            Mock(confirm_offset=640),
            ack_wait_ms=3_000,
            sync_flush=False,
            clock_ms=lambda: self.now_ms,
        )
        self.gate = self.path.gate
        self.actions = RoleActions(self.path, self.ha, Mock(), Mock(), Mock(), self._report)
        self.path.rule = MembersConfirm(
            self.path, self.ha, lambda now_ms: True, self.actions.first_acked
        )
        self.gate.opening(3)
        self.gate.update(lease=True, required_set_whole=True)
        self.gate.open()

    def _report(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def lease(self, valid: bool, now_ms: int) -> None:
        self.now_ms = now_ms
        self.actions.lease_changed(valid)


@pytest.mark.parametrize("whole", [True, False])
def test_r36_a_lease_that_comes_back_is_reported_with_its_absence_and_what_became_of_writes(whole):
    master = Master()
    master.ha.required_set_whole = whole
    master.lease(False, 2_000)
    assert (master.gate.refusal is None) == whole
    master.lease(True, 2_750)
    assert master.events == [("lease_back", {"awayMs": 750, "writesRefused": not whole})]
    master.ha.required_set_whole = True
    master.lease(False, 3_000)
    master.lease(True, 3_100)
    assert master.events[1:] == [("lease_back", {"awayMs": 100, "writesRefused": False})]


def test_a_lease_that_begins_with_the_role_did_not_come_back():
    master = Master()
    master.lease(True, 1_500)
    master.gate.follow(4)
    master.lease(False, 1_600)
    master.lease(True, 1_700)
    assert master.events == []


def test_the_first_ack_is_reported_once_with_how_long_its_write_waited():
    master = Master()
    master.path.acks.begin_epoch(3)
    master.path.confirmed(640)
    for end_offset in (700, 800):
        master.path.acks.add(end_offset, master.now_ms, Mock(), b"")
        master.now_ms += 12
        master.path.confirmed(end_offset)
    assert master.events == [("first_ack", {"confirmOffset": 640, "waitedMs": 12})]


def test_the_oldest_reply_shows_how_long_writes_wait():
    acks = PendingAcks(3_000)
    assert acks.waited_ms(50) == 0
    acks.add(100, 60, Mock(), b"")
    acks.add(200, 80, Mock(), b"")
    assert acks.waited_ms(90) == 30
    acks.confirm(100, 0)
    assert acks.waited_ms(90) == 10


def test_r38_a_replica_that_lacks_queue_positions_reports_a_log_that_begins_behind_its_end():
    """Controllers add no replica whose log begins behind the master's."""
    master = Master()
    master.path.store.positions.whole_from = 641
    master.path.store.max_phy_offset = 640
    assert master.actions.log_facts().min_offset == 641
