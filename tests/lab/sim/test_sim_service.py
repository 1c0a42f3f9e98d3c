"""Service during a fault: named lives with one lasting partial fault each, as `python -m lab.sim
cuts` shows them, and the checker that measures the gaps.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.sim.cuts import Cut, all_cuts, live
from lab.sim.kinds import LASTING
from lab.sim.life import plan_of
from lab.sim.service import AMONG_OTHERS_S, BOUNDS_S, Reach, Service


def _roles_swapped(cut: Cut, swapped: dict[str, str]) -> object:
    """The same fault of hosts whose roles are swapped."""
    ways = frozenset(tuple(swapped.get(role, role) for role in way) for way in cut.ways)
    return cut.kind, ways, swapped.get(cut.at, cut.at)


def _unlike() -> Iterator[Cut]:
    """Without those that are another one with its followers, or its slaves, swapped."""
    followers, slaves = {"F1": "F2", "F2": "F1"}, {"S1": "S2", "S2": "S1"}
    seen: set[object] = set()
    for cut in all_cuts():
        if _roles_swapped(cut, {}) not in seen:
            yield cut
        for swapped in ({}, followers, slaves, followers | slaves):
            seen.add(_roles_swapped(cut, swapped))


@pytest.mark.parametrize("cut", list(_unlike()), ids=lambda cut: cut.name)
def test_r50_r51_a_group_is_served_while_a_partial_fault_lasts(cut: Cut) -> None:
    gaps = live(cut)
    assert not gaps.violation
    assert gaps.alone_s <= BOUNDS_S[cut.kind] and gaps.after_s <= BOUNDS_S[cut.then]


@pytest.mark.parametrize("name", ["zone L+S1>F1+M, kill", "one way L>M, silence"])
def test_r32_a_name_server_whose_answers_are_lost_shows_the_master(name: str) -> None:
    """A registration is not answered for 3 s; then its connection ends, and with it the route.
    Another member registers the master. A stock client asks this name server only."""
    cut = next(cut for cut in all_cuts() if cut.name == name)
    gaps = live(replace(cut, lasts_s=14.0))
    assert not gaps.violation


def test_the_table_has_all_links_and_zones() -> None:
    cuts = list(all_cuts())
    names = [cut.name for cut in cuts]
    assert len(set(names)) == len(names)
    assert sum(cut.kind in ("link", "one way") for cut in cuts) == 45
    assert sum(cut.kind == "zone" and not re.search("off|brokers", cut.name) for cut in cuts) == 18


def test_lives_draw_every_kind_of_lasting_fault_before_the_others() -> None:
    plans = [plan for plan in map(plan_of, range(1, 300)) if plan.settings.lasts]
    assert {plan.faults[0].kind for plan in plans} == set(LASTING)
    for plan in plans:
        lasting, *others = plan.faults
        assert all(fault.at_s >= lasting.at_s + lasting.for_s for fault in others)


def test_r32_lives_draw_a_name_server_that_does_not_answer_the_master() -> None:
    plans = [plan for plan in map(plan_of, range(1, 300)) if plan.settings.unanswered]
    assert plans
    for plan in plans:
        first, *others = plan.faults
        assert first.kind == "unanswered master" and first.for_s > 2 * AMONG_OTHERS_S
        assert all(fault.at_s >= first.at_s + first.for_s for fault in others)


def _service() -> tuple[Any, Service, list[str]]:
    violations: list[str] = []
    world = SimpleNamespace(now_s=10.0, violate=violations.append)
    return world, Service(world), violations  # type: ignore[arg-type]


def test_a_gap_beyond_the_bound_is_a_violation_once() -> None:
    world, service, violations = _service()
    service.expect("a fault", 2.0)
    for now_s in (11.0, 12.5):
        world.now_s = now_s
        service.acked()
    world.now_s = 14.4
    service.check()
    assert not violations and service.longest_s == pytest.approx(1.9)
    world.now_s = 14.6
    service.check()
    service.check()
    assert len(violations) == 1 and "a fault" in violations[0]


def test_nothing_is_expected_once_the_fault_is_over() -> None:
    world, service, violations = _service()
    service.expect("a fault", 2.0)
    world.now_s = 11.0
    assert service.end() == 1.0
    world.now_s = 99.0
    service.check()
    assert not violations


@pytest.mark.parametrize(
    "down, cut, min_in_sync, served",
    [
        ("", "", 1, True),
        ("C1 C2", "", 1, False),
        ("B1 B2 B3", "", 1, False),
        ("B1 B2", "", 1, True),
        ("B1 B2", "", 2, False),
        ("C1", "C2-C3", 1, False),
        ("", "C1-C2 C1-C3", 1, True),
        ("B1", "B2-B3", 1, True),
        ("B1", "B2-B3", 2, False),
        ("C1", "C2-B1 C2-B2 C2-B3", 1, True),
        ("C1", "C2-B1 C2-B2 C2-B3 C3-B1 C3-B2 C3-B3", 1, False),
    ],
)
def test_a_group_could_serve(down: str, cut: str, min_in_sync: int, served: bool) -> None:
    pairs = {frozenset(pair.split("-")) for pair in cut.split()}
    reach = Reach(lambda one: one not in down.split(), lambda *two: frozenset(two) not in pairs)
    controllers, members = (tuple(f"{kind}{n}" for n in (1, 2, 3)) for kind in "CB")
    for mixed in itertools.permutations(members):
        assert reach.could_serve(controllers, mixed, min_in_sync) is served
