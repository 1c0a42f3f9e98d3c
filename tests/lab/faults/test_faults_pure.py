"""The laboratory's own judgement: orders, masters, figures."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lab.cluster import checks, many_queues, network_commands
from lab.cluster.acks import Ack
from lab.cluster.checks import Epoch
from lab.cluster.load import longest_gap
from lab.cluster.many_queues import ManyQueuesWriter
from lab.cluster.writer import QueueAck
from lab.faults.catalogue import BY_NAME, FAULTS
from lab.faults.kills import late_acks
from lab.faults.table import FaultFigures, markdown
from lab.faults.trial import InjectedFault

EPOCHS = [Epoch(1, 0, 1_000), Epoch(2, 1_000, 1_000), Epoch(4, 1_000, 2_000)]


def ack(
    number: int, *, line: int = 1, broker: int = 0, sent: float = 0.0, acked: float = 0.0
) -> Ack:
    return Ack(number, line, broker, sent or float(number), acked or number + 0.5)


# --- many queues ---


def test_a_message_that_one_of_many_queues_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six queues of two topics, two rounds. One message is gone, another stands in its place."""
    writer = ManyQueuesWriter([], 6, pause_s=0)
    stored: dict[tuple[str, int], list[int]] = {}
    for number in range(12):
        queue = stored.setdefault(writer.place(number), [])
        writer.acks.append(QueueAck(number, writer.place(number)[1], len(queue), 0.0))
        queue.append(number)
    assert sorted(stored) == [("Many0", n) for n in range(4)] + [("Many1", 0), ("Many1", 1)]
    monkeypatch.setattr(many_queues, "_stored", lambda connection, *place: stored[place])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert writer.find_lost(address) == []
        del stored["Many0", 3][1]
        stored["Many1", 1][0] = 99
        assert [found.text for found in writer.find_lost(address)] == [
            "Many0 queue 3 offset 1 is not 9",
            "Many1 queue 1 offset 0 is not 5",
        ]


# --- acks that come late ---


@pytest.mark.parametrize(("sent", "late"), [(10.002, 0), (10.004, 1)])
def test_r36_a_write_sent_while_the_network_was_being_cut_may_be_acked_late(
    sent: float, late: int
) -> None:
    """The cut took 3 ms: until its end writes reach every member, and TCP brings their acks when
    the network is whole again. What was sent behind it, the old master may not acknowledge."""
    write = ack(5, sent=sent, acked=14.0)
    lab: Any = SimpleNamespace(
        load=SimpleNamespace(since=lambda moment: [write]),
        stored={5: 100},
        epochs=lambda group: EPOCHS,
        cluster=SimpleNamespace(wait_whole=lambda: None),
    )
    injected = InjectedFault(10.0, not_from=0, old_epoch=1, took_s=0.003, healed_s=12.0)
    assert len(late_acks(lab, injected)) == late
    assert injected.notes["lateButTrue"] == 1 - late


# --- checkers ---


def test_g1_an_acked_write_that_is_not_stored_is_lost() -> None:
    found = checks.check_lost([ack(1), ack(2)], {1: 100})
    assert [one.rule for one in found] == ["lost"]
    assert "number=2" in found[0].text


def test_the_order_of_one_connection_is_kept() -> None:
    together = [ack(n, sent=1.0, acked=2.0) for n in (1, 2)]
    assert checks.check_order(together, {1: 100, 2: 200}) == []
    (found,) = checks.check_order(together, {1: 200, 2: 100})
    assert found.rule == "order" and "one connection" in found.text


def test_writes_of_two_connections_at_the_same_time_have_no_order() -> None:
    acks = [ack(1, line=1, sent=1.0, acked=2.0), ack(2, line=2, sent=1.5, acked=1.8)]
    assert checks.check_order(acks, {1: 100, 2: 200}) == []
    assert checks.check_order(acks, {1: 200, 2: 100}) == []


def test_what_was_acked_before_another_was_sent_stands_before_it() -> None:
    """On different connections, with a third write between them in the log."""
    first = ack(1, line=1, sent=1.0, acked=2.0)
    between = ack(2, line=2, sent=1.5, acked=9.0)
    later = ack(3, line=3, sent=3.0, acked=4.0)
    acks = [first, later, between]
    assert checks.check_order(acks, {1: 100, 2: 150, 3: 200}) == []
    (found,) = checks.check_order(acks, {3: 100, 2: 150, 1: 200})
    assert "was acked before" in found.text and "number=1" in found.text


@pytest.mark.parametrize(("offset", "epoch"), [(-1, 0), (0, 1), (999, 1), (1_000, 4), (5_000, 4)])
def test_the_epoch_of_a_byte_is_the_last_that_begins_at_or_before_it(
    offset: int, epoch: int
) -> None:
    """Epoch 2 has no byte of its own."""
    assert checks.epoch_at(EPOCHS, offset) == epoch


def test_g2_two_brokers_that_ack_in_one_epoch() -> None:
    acks = [ack(1, broker=0), ack(2, broker=1), ack(3, broker=1)]
    acked_by = checks.ackers(acks, {1: 100, 2: 200, 3: 1_500}, EPOCHS)
    assert acked_by == {1: {0, 1}, 4: {1}}
    (found,) = checks.check_masters(acked_by, {1: {0, 1}})[:1]
    assert found.rule == "two masters"


def test_g2_an_ack_of_a_broker_that_was_not_elected() -> None:
    assert checks.check_masters({1: {0}, 4: {1}}, {1: {0}, 4: {1}}) == []
    (found,) = checks.check_masters({4: {1}}, {1: {0}, 4: {2}})
    assert "elected" in found.text


def test_an_epoch_with_two_winners() -> None:
    (found,) = checks.check_masters({}, {3: {0, 2}})
    assert "several winners" in found.text


def test_r4_an_ack_of_the_old_epoch_after_it_was_over() -> None:
    """Not: one of another broker, of a later epoch, or of a write from before the fault."""
    acks = [
        ack(1, broker=0, sent=6.0, acked=11.0),
        ack(2, broker=1, sent=6.0, acked=11.0),
        ack(3, broker=0, sent=6.0, acked=11.0),
        ack(4, broker=0, sent=4.0, acked=11.0),
        ack(5, broker=0, sent=6.0, acked=9.0),
    ]
    stored = {1: 100, 2: 200, 3: 1_200, 4: 300, 5: 400}
    (found,) = checks.check_late(
        acks, stored, EPOCHS, broker=0, sent_after_s=5.0, acked_after_s=10.0, epoch=2
    )
    assert found.rule == "late ack" and "number=1," in found.text


# --- figures ---


def test_the_longest_gap_has_its_ends_inside() -> None:
    acks = [ack(1, acked=0.5), ack(2, acked=1.0), ack(3, acked=1.1), ack(4, acked=2.5)]
    assert longest_gap(acks, 0.9, 2.0) == pytest.approx(0.9)
    assert longest_gap(acks, 1.05, 3.0) == pytest.approx(1.4)
    assert longest_gap([], 1.0, 3.0) == 2.0


def test_a_row_keeps_its_limits_or_not() -> None:
    row = FaultFigures("A", limit_s=0.15, median_limit_s=0.06, seconds=[0.05, 0.05, 0.14])
    assert row.meets_limits
    row.seconds.append(0.151)
    assert not row.meets_limits
    assert not FaultFigures("A", median_limit_s=0.06, seconds=[0.07]).meets_limits
    assert not FaultFigures("A").meets_limits
    assert FaultFigures("A", seconds=[99.0]).meets_limits


def test_the_table_names_what_was_left_out_and_what_missed_its_limit() -> None:
    rows = [
        FaultFigures("fault a", "10 s", 1.0, None, [0.5, 1.5], lost=1, other=2, elections=[0, 2]),
        FaultFigures("fault b", left_out="no root"),
        FaultFigures("fault c", median_limit_s=0.06, limit_s=0.15, seconds=[0.05]),
        FaultFigures("fault d"),
    ]
    table = markdown(rows).splitlines()
    assert table[2] == "| fault a | 10 s | 1 s | 1.000 s | **1.500 s** | 2 | 0-2 | 1 | 2 |"
    assert "left out: no root" in table[3]
    assert "median 0.06 s, max 0.15 s" in table[4] and "| 0.050 s |" in table[4]
    assert "| - | - | 0 | - |" in table[5]
    assert len({line.count("|") for line in table}) == 1


def test_a_namespace_names_its_owner() -> None:
    name = network_commands.namespace("4711-0", "broker-a-1")
    assert network_commands.owner_of(name) == 4711
    assert network_commands.owner_of("bmqf-x-probe") is None
    assert network_commands.owner_of("bmqf-4711") is None
    assert network_commands.owner_of("somebody-4711-probe") is None


# --- the catalogue ---


def test_every_fault_has_a_name_of_its_own_and_a_title() -> None:
    assert len(BY_NAME) == len(FAULTS)
    assert all(fault.title and fault.name == fault.name.lower() for fault in FAULTS)
    assert all(fault.hold_s[0] <= fault.hold_s[1] for fault in FAULTS)


def test_a_row_counts_trials_and_findings() -> None:
    row = FaultFigures("a")
    row.add(0.05, 1)
    row.add(None, 2)
    row.found(["lost", "order", "stuck"])
    assert (row.seconds, row.elections, row.lost, row.other) == ([0.05], [1, 2], 1, 2)
