"""Fault points that the laboratory arms, and what it concludes of consumers."""

import random
from pathlib import Path

import pytest

from lab.cluster.acks import Ack
from lab.cluster.fault_points import parse_disk_faults, parse_jump
from lab.faults import consumers, failing, midway
from lab.faults.consumers import COMING, STAYING, GivenNumbers
from lab.faults.disks import had_rejoined


def test_every_kill_inside_a_step_is_a_rule_of_the_servers() -> None:
    rng, actions = random.Random(7), set()
    for _ in range(500):
        (rule,) = parse_disk_faults(midway.KillInCut().rule(rng, midway.CUT_STEPS, 12))
        actions.add(rule.action)
        assert rule.call == ("pwrite" if rule.action == "during" else "changes")
    assert actions == {"before", "during", "after"}


def test_every_jump_is_one_that_a_server_takes() -> None:
    assert all(parse_jump(jump) for jump in failing.JUMPS)
    assert failing.EXPIRED_S <= parse_jump(failing.past_delete_when()) < failing.EXPIRED_S + 86_400


@pytest.fixture
def given(tmp_path: Path) -> GivenNumbers:
    """Of consumers that wrote what the test writes."""
    return GivenNumbers(tmp_path)


def acks(*numbers: int) -> list[Ack]:
    return [Ack(number, 1, 0, 1.0, 2.0) for number in numbers]


def test_g1_a_write_that_one_group_was_not_given_is_found(
    given: GivenNumbers, tmp_path: Path
) -> None:
    (tmp_path / STAYING).write_text("1\n2\n2\n3\n")
    (tmp_path / COMING).write_text("1\n3")  # the last line is not out yet
    (found,) = given.check(acks(1, 2, 3), limit_s=0)
    assert (found.rule, found.text) == ("not delivered", f"2 writes to {COMING}, the first: [2, 3]")


def test_what_is_given_meanwhile_counts(
    given: GivenNumbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / STAYING).write_text("1\n20")

    def more(_: float) -> None:
        (tmp_path / STAYING).write_text("1\n2000\n")
        (tmp_path / COMING).write_text("2000\n1\n")

    monkeypatch.setattr(consumers.time, "sleep", more)
    assert given.check(acks(1, 2000), limit_s=60) == []


REGISTERED = {"kind": "broker_registered", "broker_id": 1}
OUT = {"kind": "set_altered", "set_before": [1, 2], "sync_state_set": [2]}
JOINED = {"kind": "set_altered", "set_before": [2], "sync_state_set": [1, 2]}
ELECTED = {"kind": "elected", "broker_id": 1}


@pytest.mark.parametrize(
    ("events", "rejoined"),
    [
        ((JOINED, ELECTED, OUT, REGISTERED, JOINED, ELECTED), True),
        ((JOINED, ELECTED, REGISTERED, ELECTED), False),
        ((JOINED, REGISTERED, OUT, ELECTED, JOINED), False),
    ],
    ids=["refilled before the kill", "never left the set", "refilled after the election"],
)
def test_r17_a_wiped_slave_may_win_only_if_it_had_joined_again(
    events: tuple[dict[str, object], ...], rejoined: bool
) -> None:
    assert had_rejoined(events, 1) == rejoined
