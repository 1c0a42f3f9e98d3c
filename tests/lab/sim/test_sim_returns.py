"""Disks of another time that come back in lives, and the checkers of them."""

from types import SimpleNamespace
from typing import Any, cast

from batonmq.controller.rules.groups import BrokerGroup, ReplicaRecord
from lab.sim.decisions import Decisions
from lab.sim.hosts import BrokerHost
from lab.sim.kinds import RETURNING
from lab.sim.life import plan_of, run
from lab.sim.stray_logs import Lineage

PLANS = [plan for plan in map(plan_of, range(1, 300)) if plan.settings.returns]


def test_lives_draw_each_kind_alone_before_the_other_faults() -> None:
    assert {plan.faults[0].kind for plan in PLANS} == set(RETURNING)
    for plan in PLANS:
        first, *others = plan.faults
        assert all(fault.at_s >= first.at_s + first.for_s for fault in others)
        assert not plan.settings.lasts and not plan.settings.unclean


def test_r47_a_life_with_a_foreign_volume_is_whole() -> None:
    """The other kinds are in lives of `make test`, this one is not."""
    kind = "foreign volume"
    plan = min((p for p in PLANS if p.faults[0].kind == kind), key=lambda p: p.seconds)
    outcome = run(plan.seed)
    assert outcome.violation is None, outcome.error
    assert outcome.statistics.faults[kind] == 1


def _stray(group: BrokerGroup, *, is_open: bool = False) -> list[str]:
    """What the checker says of a stray process i2 with id 2."""
    violations: list[str] = []
    manager = SimpleNamespace(broker_id=2, incarnation="i2")
    host = SimpleNamespace(manager=manager, is_open=is_open, incarnation="broker 2, start 2")
    lineage = Lineage(cast(Any, SimpleNamespace(violate=violations.append)), lambda: group)
    lineage.strays.append(cast(BrokerHost, host))
    lineage.check()
    return violations


def _group(members: tuple[int, ...], **record: Any) -> BrokerGroup:
    replicas = (ReplicaRecord(1, incarnation="i1"), ReplicaRecord(2, **record))
    return BrokerGroup(
        "c",
        "g",
        replicas=replicas,
        sync_state_set=members,
        master_epoch=1,
        master_broker_id=1,
        master_incarnation="i1",
    )


def test_r47_a_stray_in_the_set_or_in_the_lead_is_seen() -> None:
    assert not _stray(_group((1,), incarnation="i2"))
    assert not _stray(_group((1, 2), incarnation="the process before"))
    assert not _stray(_group((1, 2), incarnation="i2", suspect=True)), "R17: it is not trusted"
    (found,) = _stray(_group((1, 2), incarnation="i2"))
    assert "is a member of (1, 2)" in found
    (found,) = _stray(_group((1,), incarnation="i2"), is_open=True)
    assert "opens as master" in found


def test_r47_an_epoch_that_is_given_twice_is_seen() -> None:
    violations: list[str] = []
    copies = SimpleNamespace(never_confirmed=lambda floor: "")
    decisions = Decisions(cast(Any, copies), violations.append)
    for index, (incarnation, found) in enumerate((("i1", 0), ("i1", 0), ("i2", 1)), 1):
        group = SimpleNamespace(
            master_broker_id=1, master_epoch=4, master_incarnation=incarnation, confirm_floor=0
        )
        state = SimpleNamespace(applied_index=index, group=lambda _, group=group: group)
        decisions.applied(cast(Any, SimpleNamespace(state=state, command=None)))
        assert len(violations) == found
