"""Leaves out faults of a failing life as long as it still fails.

Delta debugging (ddmin): halves, quarters, … of the schedule are left out; what the life fails by
may change, since leaving out one fault changes everything behind it.
"""

from collections.abc import Callable
from dataclasses import replace

from lab.sim.life import LifeOutcome, LifePlan, run_plan

Live = Callable[[LifePlan], LifeOutcome]


def shrink(
    plan: LifePlan, say: Callable[[str], None], live: Live = run_plan
) -> tuple[LifePlan, str | None]:
    """The smallest schedule found, and its violation; None if `plan` has none."""
    violation = live(plan).violation
    if violation is None:
        return plan, None
    parts = 2
    while len(plan.faults) >= 2:
        smaller = _without_a_part(plan, parts, live)
        if smaller is None:
            if parts >= len(plan.faults):
                break
            parts = min(2 * parts, len(plan.faults))
            continue
        plan, violation = smaller  # by which it fails may have changed
        parts = max(2, parts - 1)
        say(f"  {len(plan.faults)} faults: {violation.splitlines()[0]}")
    return plan, violation


def _without_a_part(plan: LifePlan, parts: int, live: Live) -> tuple[LifePlan, str] | None:
    size = -(-len(plan.faults) // parts)
    for begin in range(0, len(plan.faults), size):
        tried = replace(plan, faults=plan.faults[:begin] + plan.faults[begin + size :])
        violation = live(tried).violation
        if violation is not None:
            return tried, violation
    return None
