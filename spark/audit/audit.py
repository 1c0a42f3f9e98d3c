"""Runs an audit: what the stores say by themselves, then the queries, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa

from batonmq.spark.audit import finding_queries
from batonmq.spark.differences.acked_list import plan_lists
from batonmq.spark.differences.checkpoint_findings import checkpoint_findings
from batonmq.spark.differences.log_findings import LogFinding, finding_table
from batonmq.spark.differences.replica_groups import ReplicaGroup, find_groups, log_files
from batonmq.spark.severity import SEVERITIES, WARNING
from batonmq.spark.steps.sql import Engine, dicts

StepName = Callable[[str], AbstractContextManager[None]]
#: The gravest findings come first, then those of lower places; what a row lacks comes first.
_GRAVEST: Final = f"""
    ORDER BY CASE {" ".join(f"WHEN f.severity = '{s}' THEN {n}" for n, s in enumerate(SEVERITIES))}
    END, f.grp NULLS FIRST, f.physical_offset NULLS FIRST, f.kind, f.topic NULLS FIRST,
    f.queue_id NULLS FIRST, f.queue_offset NULLS FIRST, f.unique_key NULLS FIRST, f.replicas
"""
_SHOWN: Final = ", ".join(
    f"f.{n} AS {'group' if n == 'grp' else n}" for n in finding_queries.COLUMNS
)


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What to audit, and how. `group`: all stores are replicas of it. Sizes are bytes. `limit`: so
    many findings are told one by one.
    """

    stores: tuple[str, ...]
    acked: tuple[str, ...] = ()
    group: str | None = None
    unconfirmed: bool = False
    duplicates: bool = True
    queues: bool = True
    limit: int = 20
    range_bytes: int = 64 << 20
    chunk_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """The groups of the stores, and what was found while they were looked at.

    `size_bytes`: of the logs, one a group, or of the lists, whichever is more.
    """

    groups: list[ReplicaGroup]
    found: list[LogFinding]
    size_bytes: int


def plan_audit(request: AuditRequest) -> AuditPlan:
    """Reads identities, epochs and confirmOffsets. Raises ValueError, StoreError, OSError."""
    groups = find_groups(
        request.stores, group=request.group, unconfirmed=request.unconfirmed,
        with_tails=bool(request.acked),
    )  # fmt: skip
    found: list[LogFinding] = []
    log_bytes = 0
    for group in groups:
        files = log_files(group)
        found.extend(checkpoint_findings(group, files, unconfirmed=request.unconfirmed))
        top = max(replica.end for replica in group.replicas)
        log_bytes += sum(max(0, min(file.end, top) - file.start) for file in files)
    return AuditPlan(groups, found, max(log_bytes, plan_lists(request.acked)[1]))


class AckedCounts(msgspec.Struct):
    """How many entries of the list turned out how.

    `elsewhere`: not where they were acknowledged. `not_everywhere`: whole in some replicas, but not
    in all that confirm their place. `unconfirmed`: found, above what any replica confirms.
    `expired`: older than the log. `unchecked`: they name no place, and part of the log has
    expired. `other_brokers`: their broker is not audited.
    """

    entries: int = 0
    found: int = 0
    lost: int = 0
    elsewhere: int = 0
    not_everywhere: int = 0
    unconfirmed: int = 0
    expired: int = 0
    unchecked: int = 0
    other_brokers: int = 0


@dataclass(slots=True)
class AuditResult:
    """`counts`: by group, messages, those that replicas hold alike, and bytes. `kinds`: a row for
    each group, severity, kind and set of replicas, the gravest first. `first`: the gravest
    findings. The view `findings` of the engine has all.
    """

    groups: list[ReplicaGroup]
    counts: dict[str, dict[str, int]]
    kinds: list[dict[str, Any]]
    first: list[dict[str, Any]]
    acked: AckedCounts | None = None
    warnings: list[str] = field(default_factory=list)

    def count(self, severity: str | None = None, *, group: str | None = None) -> int:
        """How many findings there are of a severity, of a group; None: of all."""
        return sum(
            row["count"]
            for row in self.kinds
            if severity in (None, row["severity"]) and group in (None, row["group"])
        )

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing but information."""
        return not any(self.count(severity) for severity in SEVERITIES[:2])


def _no_step(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def run_audit(
    engine: Engine, request: AuditRequest, plan: AuditPlan, step: StepName = _no_step
) -> AuditResult:
    """Audit all groups of the stores. `step` gets the name of each step.

    Raises ValueError for a list that cannot be used, OSError.
    """
    known, notes, listed = [*plan.found], _of_single_stores(plan), None
    if request.acked:
        with step("reading the acknowledged list"):
            listed, found = _read_lists(engine, request, plan, notes)
            known += found
    with step("comparing the replicas"):
        _define(engine, request, plan, known)
        counted = dicts(engine, """
            SELECT d.group AS name, CAST(sum(d.messages) AS BIGINT) AS messages,
                CAST(sum(d.agreed) AS BIGINT) AS agreed,
                CAST(sum(d.log_bytes) AS BIGINT) AS log_bytes
            FROM d WHERE d.part = 'count' GROUP BY d.group
        """)  # fmt: skip
    with step("looking across ranges"):
        if listed is not None:
            _define_acked(engine, plan)
        text = finding_queries.findings(acked=listed is not None, duplicates=request.duplicates)
        engine.define("findings", text, keep=True)
        kinds = dicts(engine, """
            SELECT f.grp AS group, f.severity, f.kind, f.replicas, count(*) AS count,
                min(f.physical_offset) AS first_offset, max(f.physical_offset) AS last_offset,
                min(f.epoch) AS first_epoch, max(f.epoch) AS last_epoch
            FROM findings f GROUP BY f.grp, f.severity, f.kind, f.replicas
        """)  # fmt: skip
        gravest = f"SELECT {_SHOWN} FROM findings f {_GRAVEST} LIMIT {request.limit}"
        first = dicts(engine, gravest) if request.limit else []
        if listed is not None:
            (turned,) = dicts(engine, finding_queries.ACKED_COUNTS)
            listed = msgspec.structs.replace(listed, **turned)
    kinds.sort(key=lambda row: (
        SEVERITIES.index(row["severity"]), row["group"] or "", row["kind"], row["replicas"]
    ))  # fmt: skip
    counts = dict.fromkeys(("messages", "agreed", "log_bytes"), 0)
    by_group = {group.name: dict(counts) for group in plan.groups}
    for row in counted:
        by_group[row.pop("name")] = row
    return AuditResult(plan.groups, by_group, kinds, first, listed, notes)


def findings_text() -> str:
    """All findings as a query, in the order of groups and offsets."""
    return (
        f"SELECT {_SHOWN} FROM findings f ORDER BY f.grp NULLS FIRST, f.physical_offset NULLS FIRST"
    )


def _of_single_stores(plan: AuditPlan) -> list[str]:
    return [
        f"{group.name} has one store here: there is nothing to compare it with"
        for group in plan.groups
        if len(group.replicas) == 1
    ]


def _define(
    engine: Engine, request: AuditRequest, plan: AuditPlan, known: list[LogFinding]
) -> None:
    """The views of what the stores hold."""
    options = {
        "group": request.group or "", "unconfirmed": _flag(request.unconfirmed),
        "queues": _flag(request.queues), "wholeLogs": _flag(bool(request.acked)),
        "messages": _flag(request.duplicates or bool(request.acked)),
        "splitBytes": str(request.range_bytes), "batchBytes": str(request.chunk_bytes),
    }  # fmt: skip
    engine.source("differences", request.stores, {"table": "differences", **options})
    engine.define("d", "SELECT * FROM differences", keep=True)
    told = finding_table(known)
    names = ["grp" if name == "group" else name for name in told.column_names]
    engine.table("known", told.rename_columns(names))
    engine.table("no_replicas", pa.table({"replicas": pa.array([[]], pa.list_(pa.string()))}))
    groups = [(group.name, group.first, group.confirm) for group in plan.groups]
    columns = list(zip(*groups, strict=True))
    engine.table("grps", pa.table(
        [pa.array(columns[0]), *(pa.array(each, pa.int64()) for each in columns[1:])],
        names=["grp", "begins", "confirms"],
    ))  # fmt: skip
    for name, text in finding_queries.PARTS.items():
        engine.define(name, text, keep=name in finding_queries.KEPT)


def _flag(value: bool) -> str:
    return str(value).lower()


def _define_acked(engine: Engine, plan: AuditPlan) -> None:
    """The views of what becomes of the entries of the list."""
    for name, text in finding_queries.ACKED_VIEWS.items():
        engine.define(name, text, keep=name in finding_queries.KEPT)
    groups = {group.name: group for group in plan.groups}
    rows = []
    for row in dicts(engine, finding_queries.SETS):
        group, bits = groups[row["grp"]], row["bits"]
        names = group.names(at for at in range(len(group.replicas)) if bits >> at & 1)
        rows.append({"grp": group.name, "bits": bits, "replicas": names,
                     "names": ", ".join(names), "many": len(names)})  # fmt: skip
    kinds = [("grp", pa.string()), ("bits", pa.int64()), ("replicas", pa.list_(pa.string())),
             ("names", pa.string()), ("many", pa.int64())]  # fmt: skip
    engine.table("sets", pa.Table.from_pylist(rows, pa.schema(kinds)))


def _read_lists(
    engine: Engine, request: AuditRequest, plan: AuditPlan, notes: list[str]
) -> tuple[AckedCounts, list[LogFinding]]:
    """What all lists have, and what is wrong with them whatever the stores hold; more notes.

    Raises ValueError.
    """
    named: dict[str, set[str]] = {}
    for group in plan.groups:
        for broker in group.brokers:
            named.setdefault(broker, set()).add(group.name)
    named |= {group.name: {group.name} for group in plan.groups}
    known = [(broker, min(names)) for broker, names in named.items() if len(names) == 1]
    columns = [pa.array(each, pa.string()) for each in zip(*known, strict=True)]
    brokers = pa.table(columns or [pa.array([], pa.string())] * 2, names=["broker", "grp"])
    engine.table("brokers", brokers)
    only = f"'{plan.groups[0].name}'" if len(plan.groups) == 1 else "CAST(NULL AS STRING)"
    engine.source("acknowledged", request.acked, {"table": "acknowledged"})
    engine.define("lines", f"""
        SELECT a.*, CASE WHEN a.broker IS NULL THEN {only} ELSE b.grp END AS grp
        FROM acknowledged a LEFT JOIN brokers b ON a.broker = b.broker
    """, keep=True)  # fmt: skip
    engine.define("entries", "SELECT * FROM lines WHERE fault IS NULL "
                  "AND (grp IS NOT NULL OR broker IS NULL)")  # fmt: skip
    bad: list[str] = []
    for row in dicts(engine, "SELECT * FROM lines WHERE fault IS NOT NULL ORDER BY entry"):
        if not row["is_torn"] or row["file"] in bad:
            raise ValueError(row["fault"])
        bad.append(row["file"])
        notes.append(f"{row['file']} ends within a line, which is left out: its writer was killed")
    (total,) = dicts(engine, "SELECT count(*) AS many FROM lines WHERE fault IS NULL")
    found, others = _of_other_brokers(engine, named)
    if not total["many"]:
        detail = "the acknowledged list has no entry, so nothing is held against it"
        found.append(LogFinding(None, WARNING, "unchecked", detail))
    return AckedCounts(entries=total["many"], other_brokers=others), found


def _of_other_brokers(
    engine: Engine, named: Mapping[str, set[str]]
) -> tuple[list[LogFinding], int]:
    """(findings, entries) of brokers without a store here. Raises ValueError for a broker that may
    be of several groups.
    """
    found, others = [], 0
    for row in dicts(
        engine,
        """
        SELECT broker, count(*) AS many FROM lines
        WHERE fault IS NULL AND broker IS NOT NULL AND grp IS NULL GROUP BY broker ORDER BY broker
    """,
    ):
        broker = row["broker"]
        if broker in named:
            raise ValueError(
                f"the acknowledged list names broker {broker}, which may be any of "
                f"{', '.join(sorted(named[broker]))}: give the stores of one cluster, or write "
                "one of these names into the list"
            )
        others += row["many"]
        detail = (
            f"{row['many']} entries of the acknowledged list are of broker {broker}, of which no "
            "store is given"
        )
        found.append(LogFinding(None, WARNING, "unchecked", detail))
    return found, others
