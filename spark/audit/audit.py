"""Runs an audit: plans ranges, scans them as tasks, checks what crosses them, and sums up.

Free of Spark: an engine runs the steps.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyarrow import fs

from batonmq.spark.audit import acked, steps
from batonmq.spark.audit.acked_list import Piece, plan_lists
from batonmq.spark.audit.findings import Finding, FindingFiles, Sums, merged
from batonmq.spark.audit.relations import AckedCounts, across_ranges
from batonmq.spark.audit.replicas import ReplicaGroup, find_groups, log_files
from batonmq.spark.audit.scan import AuditRequest, Counts, RangeTask, plan_tasks
from batonmq.spark.audit.standing import standing
from batonmq.spark.audit.steps import Listed, Shared, Step
from batonmq.spark.read.storage import locate
from batonmq.spark.steps.engine import Engine
from batonmq.spark.steps.result_folder import to_delta
from batonmq.spark.steps.severity import SEVERITIES, WARNING
from batonmq.spark.steps.sql import DELTA, PARQUET

StepName = Callable[[str], AbstractContextManager[None]]
_WORK: Final = "_work-"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be read of the stores and lists, and what was found while that was planned.

    `size_bytes`: of the logs, one a group, or of the lists, whichever is more.
    """

    groups: list[ReplicaGroup]
    tasks: list[RangeTask]
    pieces: list[Piece]
    found: list[Finding]
    size_bytes: int


def plan_audit(request: AuditRequest) -> Plan:
    """Reads identities, epochs and confirmOffsets. Raises ValueError, StoreError, OSError."""
    groups = find_groups(
        request.stores,
        group=request.group,
        unconfirmed=request.unconfirmed,
        with_tails=bool(request.acked),
    )
    tasks: list[RangeTask] = []
    found: list[Finding] = []
    for number, group in enumerate(groups):
        files = log_files(group)
        found.extend(standing(group, files, unconfirmed=request.unconfirmed))
        tasks.extend(plan_tasks(number, group, files, request.range_bytes))
    pieces, list_bytes = plan_lists(request.acked)
    log_bytes = sum(task.end - task.begin for task in tasks)
    return Plan(groups, tasks, pieces, found, max(log_bytes, list_bytes))


@dataclass(slots=True)
class AuditResult:
    """The result of an audit. `files`: all findings, until the end of the work folder."""

    groups: list[ReplicaGroup]
    counts: dict[str, Counts]
    sums: Sums
    acked: AckedCounts | None
    files: FindingFiles
    warnings: list[str]

    def count(self, severity: str | None = None, *, group: str | None = None) -> int:
        """How many findings there are of a severity, of a group; None: of all."""
        return sum(
            count
            for (theirs, each), count in self.sums.totals().items()
            if severity in (None, each) and group in (None, theirs)
        )

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing but information."""
        return not any(self.count(severity) for severity in SEVERITIES[:2])


@contextmanager
def work_folder(output: str | None) -> Iterator[str]:
    """A folder below the output, or a local one; it is removed at the end. Raises OSError."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="batonmq-audit-") as made:
            yield made
        return
    folder = f"{output.rstrip('/')}/{_WORK}{uuid.uuid4().hex[:12]}"
    storage, place = locate(folder)
    storage.file_system.create_dir(place)
    try:
        yield folder
    finally:
        storage.file_system.delete_dir(place)


def _no_step(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def run_audit(
    engine: Engine, request: AuditRequest, plan: Plan, folder: str, step: StepName = _no_step
) -> AuditResult:
    """Audit all groups of the stores; steps and findings are kept below `folder`, which all tasks
    share. `step` gets the name of each step.

    Raises ValueError for a list that cannot be used, OSError.
    """
    files = FindingFiles(f"{folder}/findings", request.limit)
    by_name = {group.name: group for group in plan.groups}
    shared = Shared(by_name, folder, engine.buckets(plan.size_bytes), files)
    warnings = [
        f"{group.name} has one store here: there is nothing to compare it with"
        for group in plan.groups
        if len(group.replicas) == 1
    ]
    known, listed, outcome = [*plan.found], Listed(), None
    if request.acked:
        with step("reading the acknowledged list"):
            listed, notes = _read_lists(engine, shared, plan)
        warnings += notes
        known += _of_list(listed)
        others = sum(listed.others.values())
        outcome = AckedCounts(entries=listed.count, other_brokers=others)
    sums = [files.write("known", known)]
    with step("comparing the replicas"):
        topics = frozenset(listed.topics) if request.acked else None
        scan = steps.Scan(shared, plan.groups, request, topics, listed.has_ids)
        packs = list(enumerate(packed(plan.tasks, shared.buckets, request.range_bytes)))
        counts = {group.name: Counts() for group in plan.groups}
        for result, of_task in engine.map(scan, packs):
            sums.append(of_task)
            for name, more in result.items():
                counts[name].add(more)
    with step("looking across ranges"):
        for each in _across(engine, shared, request):
            sums.append(each.sums)
            if outcome is not None:
                outcome.add(each.counts)
    return AuditResult(
        plan.groups, counts, merged(sums, request.limit), outcome, files, warnings
    )  # fmt: skip


def _across(engine: Engine, shared: Shared, request: AuditRequest) -> Iterator[steps.Result]:
    """What crosses ranges: each step reads what those before it sent."""
    buckets = range(shared.buckets)
    begins: dict[tuple[str, str, int], int] = {}
    for each in engine.map(Step(shared, across_ranges), buckets):
        begins |= each.begins
        yield each
    links = Step(shared, acked.by_links, (begins, request.duplicates))
    todo = [links] if request.duplicates else []
    if request.acked:
        todo = [Step(shared, acked.at_places), links]
        todo += [Step(shared, one) for one in (acked.lost, acked.by_offsets, acked.in_order)]
    for one in todo:
        yield from engine.map(one, buckets)


def packed(tasks: Sequence[RangeTask], slots: int, range_bytes: int) -> list[list[RangeTask]]:
    """Small ranges put together, so that many small logs are no swarm of tasks: up to
    `range_bytes` each, but as many as there are `slots` to run them at once.
    """
    room = min(range_bytes, sum(task.end - task.begin for task in tasks) // slots)
    packs: list[list[RangeTask]] = []
    filled = room
    for task in tasks:
        size = task.end - task.begin
        if not packs or filled + size > room:
            packs.append([])
            filled = 0
        packs[-1].append(task)
        filled += size
    return packs


def _read_lists(engine: Engine, shared: Shared, plan: Plan) -> tuple[Listed, list[str]]:
    """What all lists have, and notes about what is left out. Raises ValueError."""
    named: dict[str, set[str]] = {}
    for group in plan.groups:
        for broker in group.brokers:
            named.setdefault(broker, set()).add(group.name)
    named |= {group.name: {group.name} for group in plan.groups}
    several = {broker: names for broker, names in named.items() if len(names) > 1}
    brokers = {broker: min(names) for broker, names in named.items() if broker not in several}
    only = plan.groups[0].name if len(plan.groups) == 1 else None
    read = steps.ReadList(shared, brokers, frozenset(several), only)
    every = Listed()
    bad: list[str] = []
    notes = []
    for one in engine.map(read, list(enumerate(plan.pieces))):
        every.count += one.count
        every.others.update(one.others)
        every.topics |= one.topics
        every.has_ids |= one.has_ids
        every.named |= one.named
        if one.bad is not None:
            path, sentence, is_torn = one.bad
            if not is_torn or path in bad:
                raise ValueError(sentence)
            notes.append(f"{path} ends within a line, which is left out: its writer was killed")
            bad.append(path)
    for broker in sorted(every.named):
        raise ValueError(
            f"the acknowledged list names broker {broker}, which may be any of "
            f"{', '.join(sorted(several[broker]))}: give the stores of one cluster, or write one "
            "of these names into the list"
        )
    return every, notes


def _of_list(listed: Listed) -> Iterable[Finding]:
    """What is wrong with a list, whatever the stores hold."""
    for broker, count in sorted(listed.others.items()):
        detail = (
            f"{count} entries of the acknowledged list are of broker {broker}, of which no store "
            "is given"
        )
        yield Finding(None, WARNING, "unchecked", detail)
    if not listed.count:
        detail = "the acknowledged list has no entry, so nothing is held against it"
        yield Finding(None, WARNING, "unchecked", detail)


def check_output(folder: str, *, overwrite: bool, form: str) -> None:
    """Raises FileExistsError if the folder holds something and may not be overwritten, ValueError
    for a Delta table elsewhere than on this machine's file system."""
    if form == DELTA and "://" in folder and not folder.startswith("file:"):
        raise ValueError(f"--output {folder}: --format {DELTA} needs a path of this machine")
    storage, place = locate(folder)
    if storage.children(place) and not overwrite:
        raise FileExistsError(f"--output {folder}: it is not empty; --overwrite replaces it")


def write_result(
    result: AuditResult, folder: str, summary: dict[str, Any], *, form: str = PARQUET
) -> None:
    """`findings` and `summary.json`, which comes last and only whole. Raises OSError."""
    storage, place = locate(folder)
    system = storage.file_system
    if storage.exists(f"{place}/summary.json"):
        system.delete_file(f"{place}/summary.json")
    if storage.exists(f"{place}/findings"):
        system.delete_dir(f"{place}/findings")
    if not result.count():
        result.files.write_none()
    _, made = locate(result.files.folder)
    system.create_dir(f"{place}/findings")
    fs.copy_files(
        made, f"{place}/findings", source_filesystem=system, destination_filesystem=system
    )
    if form == DELTA:
        to_delta(Path(place) / "findings")
    growing = f"{place}/summary.json.growing"
    with system.open_output_stream(growing) as stream:
        text = json.dumps(summary, indent=2, ensure_ascii=False, default=str)
        stream.write(f"{text}\n".encode())
    system.move(growing, f"{place}/summary.json")
