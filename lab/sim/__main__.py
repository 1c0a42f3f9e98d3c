"""`python -m lab.sim`: lives of the whole cluster on virtual time.

    python -m lab.sim --seeds 300 --jobs 2     seeds 1 to 300; each that fails is named
    python -m lab.sim --seeds 200-250          those
    python -m lab.sim --seeds 40 --known       also those in which a promise was broken once
    python -m lab.sim --seed 56 --trace        one life, traced line by line
    python -m lab.sim --seed 56 --shrink       the fewest of its faults with which it still fails
    python -m lab.sim --seed 56 --plain        without the features that it uses
    python -m lab.sim cuts                     the table of lasting partial faults, and their gaps
    python -m lab.sim cuts --only 'L-M'        those whose names contain it (--trace: traced)

Exit codes: 0 no violation, 1 some, 2 wrong usage.
"""

import argparse
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from lab.sim.ambient import real_seconds
from lab.sim.cuts import all_cuts, show
from lab.sim.known_lives import KNOWN
from lab.sim.life import LifeOutcome, LifePlan, plan_of, run_numbered, run_plan
from lab.sim.shrink import shrink

_PROGRESS_S = 5.0


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.what == "cuts":
        return _cuts(arguments.only, arguments.seed or 1, trace=arguments.trace)
    if arguments.seed is None:
        known = list(KNOWN) if arguments.known else []
        return _many([*_seeds(arguments.seeds), *known], arguments.jobs)
    if arguments.shrink:
        return _shrink(plan_of(arguments.seed, plain=arguments.plain))
    return _one(plan_of(arguments.seed, plain=arguments.plain), trace=arguments.trace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.sim", description="the cluster, simulated")
    parser.add_argument("what", nargs="?", choices=("lives", "cuts"), default="lives")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="of cuts: whose names contain it"
    )
    parser.add_argument("--seeds", default="300", metavar="N|A-B", help="how many, or from A to B")
    parser.add_argument("--known", action="store_true", help="also the lives of known_lives")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seed", type=int, help="one life")
    parser.add_argument("--trace", action="store_true", help="print its events")
    parser.add_argument("--plain", action="store_true", help="of --seed: without features")
    parser.add_argument(
        "--shrink", action="store_true", help="leave out faults that its failure does not need"
    )
    return parser


def _cuts(only: str, seed: int, *, trace: bool) -> int:
    cuts = [cut for cut in all_cuts() if only in cut.name]
    if not cuts:
        sys.exit(f"--only is {only!r}, and no fault's name contains that")
    return 1 if show(cuts, seed, _tell if trace else None) else 0


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        sys.exit(f"--seeds is {text!r}, allowed are a number, or two as in 200-250")
    return range(int(first), int(last) + 1) if dash else range(1, int(first) + 1)


def _one(plan: LifePlan, *, trace: bool) -> int:
    if trace:
        print(plan.settings)
        for fault in plan.faults:
            print(f"  drawn: {fault}")
    outcome = run_plan(plan, tell=_tell if trace else None, logs=logging.INFO if trace else None)
    print(_line(plan.seed, outcome))
    print(outcome.error, end="")
    return 1 if outcome.violation else 0


def _tell(at_s: float, who: str, what: str) -> None:
    print(f"{at_s:9.4f}  {who:16}  {what}")


def _line(seed: int, outcome: LifeOutcome) -> str:
    s = outcome.statistics
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(s.faults.items()))
    return (
        f"seed {seed}: {outcome.violation or 'no violation'}\n"
        f"  {s.seconds:.1f} s in {s.took_s:.2f} s, {s.acked} acknowledged, {s.delivered} delivered,"
        f" {s.sends_failed} sends failed, {s.elections} masters, {s.commits} commits,"
        f" {s.expired} segments expired,"
        f" {s.callbacks} callbacks, digest {s.digest}\n  faults: {faults or 'none'}"
    )


def _shrink(whole: LifePlan) -> int:
    plan, violation = shrink(whole, print)
    if violation is None:
        print(f"seed {plan.seed} has no violation")
        return 0
    print(f"{violation}\nwith {len(plan.faults)} faults:")
    for fault in plan.faults:
        print(f"  {fault}")
    return 1


def _many(seeds: Sequence[int], jobs: int) -> int:
    began = shown = real_seconds()
    failed: list[tuple[int, str]] = []
    faults: Counter[str] = Counter()
    seconds = took_s = 0.0
    acked = count = 0
    for seed, outcome in _outcomes(seeds, jobs):
        count += 1
        seconds += outcome.statistics.seconds
        took_s += outcome.statistics.took_s
        acked += outcome.statistics.acked
        faults.update(outcome.statistics.faults)
        if outcome.violation is not None:
            failed.append((seed, outcome.violation))
            known = f" ({KNOWN[seed]})" if seed in KNOWN else ""
            print(f"seed {seed}{known}: {outcome.violation.splitlines()[0]}", flush=True)
        now = real_seconds()
        if now - shown > _PROGRESS_S:
            shown = now
            print(f"  {count} of {len(seeds)}, {count / (now - began):.1f} seeds/s", flush=True)
    passed_s = real_seconds() - began
    print(
        f"{count} seeds in {passed_s:.0f} s ({count / passed_s:.1f}/s): {seconds:.0f} s simulated,"
        f" {seconds / max(took_s, 1e-9):.1f} times real time on one core, {acked} messages"
        f" acknowledged, {faults.total()} faults, {len(failed)} failed"
    )
    print("  " + ", ".join(f"{n} {kind}" for kind, n in faults.most_common()))
    for seed, violation in failed:
        print(f"failed: seed {seed}: {violation.splitlines()[0]}")
    return 1 if failed else 0


def _outcomes(seeds: Sequence[int], jobs: int) -> Iterator[tuple[int, LifeOutcome]]:
    """Each life in a process of its own: what one leaves behind must not change the next."""
    context = multiprocessing.get_context("fork")
    with context.Pool(max(1, jobs), maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(run_numbered, seeds, chunksize=1)


if __name__ == "__main__":
    sys.exit(main())
