"""Runs an audit: what the stores say by themselves, then the queries, and what they found."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.audit import finding_queries
from batonmq.spark.differences.acked_list import plan_lists
from batonmq.spark.differences.checkpoint_findings import checkpoint_findings
from batonmq.spark.differences.log_findings import LogFinding, finding_table
from batonmq.spark.differences.queues import UNITS, queue_files, read_units
from batonmq.spark.differences.replica_groups import ReplicaGroup, find_groups, log_files
from batonmq.spark.read.columns import columns_of
from batonmq.spark.read.storage import gather
from batonmq.spark.severity import SEVERITIES, WARNING
from batonmq.spark.steps.sql import Engine, Step, dicts

#: The gravest findings come first, then those of lower places; what a row lacks comes first.
_RANK: Final = " ".join(f"WHEN f.severity = '{s}' THEN {n}" for n, s in enumerate(SEVERITIES))
_GRAVEST: Final = f"""
    ORDER BY CASE {_RANK} END, f.grp NULLS FIRST, f.physical_offset NULLS FIRST, f.kind,
        f.topic NULLS FIRST, f.queue_id NULLS FIRST, f.queue_offset NULLS FIRST,
        f.unique_key NULLS FIRST, f.replicas
"""
_OTHER_BROKERS: Final = """
    SELECT broker, count(*) AS many FROM lines
    WHERE fault IS NULL AND broker IS NOT NULL AND grp IS NULL GROUP BY broker ORDER BY broker
"""
_COUNTS: Final = """
    SELECT d.group AS name, CAST(sum(d.messages) AS BIGINT) AS messages,
        CAST(sum(d.agreed) AS BIGINT) AS agreed, CAST(sum(d.log_bytes) AS BIGINT) AS log_bytes
    FROM d WHERE d.part = 'count' GROUP BY d.group
"""
_KINDS: Final = f"""
    SELECT f.grp AS group, f.severity, f.kind, f.replicas, count(*) AS count,
        min(f.physical_offset) AS first_offset, max(f.physical_offset) AS last_offset,
        min(f.epoch) AS first_epoch, max(f.epoch) AS last_epoch
    FROM findings f GROUP BY f.grp, f.severity, f.kind, f.replicas
    ORDER BY CASE {_RANK} END, f.grp NULLS FIRST, f.kind, f.replicas
"""
_SHOWN: Final = ", ".join(
    f"f.{n} AS {'group' if n == 'grp' else n}" for n in finding_queries.COLUMNS
)


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What to audit, and how. `group`: all stores are replicas of it. Sizes are bytes. `limit`: so
    many findings are listed one by one.
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


@dataclass(frozen=True, slots=True)
class AuditResult:
    """`counts`: by group, messages, those that replicas hold alike, and bytes. `kinds`: a row for
    each group, severity, kind and set of replicas, the gravest first. `first`: the gravest
    findings. The view `findings` of the engine has all. `acked`: how many entries of the list
    turned out how, see `finding_queries.ACKED_COUNTS`; None without one.
    """

    groups: list[ReplicaGroup]
    counts: dict[str, dict[str, int]]
    kinds: list[dict[str, Any]]
    first: list[dict[str, Any]]
    acked: dict[str, int] | None
    warnings: list[str]

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


def run_audit(engine: Engine, request: AuditRequest, plan: AuditPlan, step: Step) -> AuditResult:
    """Audit all groups of the stores. `step` gets the name of each step.

    Raises ValueError for a list that cannot be used, OSError.
    """
    known, acked = [*plan.found], None
    notes = [
        f"{group.name} has one store here: there is nothing to compare it with"
        for group in plan.groups
        if len(group.replicas) == 1
    ]
    if request.acked:
        with step("reading the acknowledged list"):
            entries = _read_lists(engine, request, plan, notes)
            found, others = _of_other_brokers(engine, plan)
            known += found
        if not entries:
            detail = "the acknowledged list has no entry, so nothing is held against it"
            known.append(LogFinding(None, WARNING, "unchecked", detail))
    with step("comparing the replicas"):
        _define(engine, request, plan, known)
        counted = dicts(engine, _COUNTS)
    with step("looking across ranges"):
        if request.acked:
            _define_acked(engine, plan)
        _views(engine, finding_queries.findings(
            acked=bool(request.acked), duplicates=request.duplicates, queues=request.queues
        ))  # fmt: skip
        kinds = dicts(engine, _KINDS)
        gravest = f"SELECT {_SHOWN} FROM findings f {_GRAVEST} LIMIT {request.limit}"
        first = dicts(engine, gravest) if request.limit else []
        if request.acked:
            (turned,) = dicts(engine, finding_queries.ACKED_COUNTS)
            acked = {"entries": entries, **turned, "other_brokers": others}
    none = dict.fromkeys(("messages", "agreed", "log_bytes"), 0)
    counts = {group.name: none for group in plan.groups} | {row.pop("name"): row for row in counted}
    return AuditResult(plan.groups, counts, kinds, first, acked, notes)


def findings_text() -> str:
    """All findings as a query, in the order of groups and offsets."""
    return (
        f"SELECT {_SHOWN} FROM findings f ORDER BY f.grp NULLS FIRST, f.physical_offset NULLS FIRST"
    )


def _define(
    engine: Engine, request: AuditRequest, plan: AuditPlan, known: list[LogFinding]
) -> None:
    """The views of what the stores hold."""
    with_list = bool(request.acked)
    engine.source("differences", request.stores, {
        "table": "differences", "group": request.group or "", "unconfirmed": request.unconfirmed,
        "wholeLogs": with_list, "messages": request.duplicates or request.queues or with_list,
        "splitBytes": request.range_bytes, "batchBytes": request.chunk_bytes,
    })  # fmt: skip
    engine.define("d", "SELECT * FROM differences", keep=True)
    found = finding_table(known)
    engine.table("known", found.rename_columns({"group": "grp"}))
    engine.table("no_replicas", pa.table({"replicas": pa.array([[]], pa.list_(pa.string()))}))
    groups = [
        {"grp": group.name, "begins": group.first, "confirms": group.confirm}
        for group in plan.groups
    ]
    engine.table("grps", _rows(groups, "string: grp\nlong: begins confirms"))
    _views(engine, finding_queries.PARTS)
    if request.queues:
        _define_queues(engine, request, plan.groups)


def _views(engine: Engine, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        engine.define(name, text, keep=name in finding_queries.KEPT)


def _define_queues(engine: Engine, request: AuditRequest, groups: list[ReplicaGroup]) -> None:
    """The views of consume queues, and of what each replica keeps of the log."""
    stores, files, spans = [], [], []
    for group in groups:
        for each in group.replicas:
            of = {"grp": group.name, "replica": each.name}
            stores.append({
                **of, "names": [each.name], "begins": each.first, "confirms": each.confirm,
                "tags_are_hashes": each.tags_are_hashes,
            })  # fmt: skip
            files += [
                {**of, "begins": file.start, "ends": file.end}
                for file in log_files(group)
                if each.first <= file.start
            ]
        for begin, end in group.stretches():
            epoch, doubt = group.epoch_at(begin)
            span = {"begins": begin, "ends": end, "epoch": epoch, "doubt": doubt}
            spans.append({"grp": group.name, **span})
    kinds = "string: grp replica; texts: names; long: begins confirms; bool: tags_are_hashes"
    engine.table("stores", _rows(stores, kinds))
    engine.table("log_files", _rows(files, "string: grp replica; long: begins ends"))
    engine.table("spans", _rows(spans, "string: grp doubt; long: begins ends epoch"))
    found, rows = queue_files(groups)
    engine.table("queue_files", rows)
    tasks = gather(found, attrgetter("file.size"), request.range_bytes)
    engine.mapped("units", tasks, read_units, UNITS)
    _views(engine, finding_queries.QUEUE_VIEWS)


def _rows(rows: list[dict[str, Any]], columns: str) -> pa.Table:
    return pa.Table.from_pylist(rows, columns_of(columns))


def _define_acked(engine: Engine, plan: AuditPlan) -> None:
    """The views of what becomes of the entries of the list."""
    _views(engine, finding_queries.ACKED_VIEWS)
    groups = {group.name: group for group in plan.groups}
    rows = dicts(engine, finding_queries.SETS)
    for row in rows:
        group = groups[row["grp"]]
        names = group.names(at for at in range(len(group.replicas)) if row["bits"] >> at & 1)
        row |= {"replicas": names, "names": ", ".join(names), "many": len(names)}
    engine.table("sets", _rows(rows, "string: grp names\nlong: bits many\ntexts: replicas"))


def _names(plan: AuditPlan) -> dict[str, set[str]]:
    """The groups that a list may mean by a broker's name."""
    named: dict[str, set[str]] = {}
    for group in plan.groups:
        for broker in group.brokers:
            named.setdefault(broker, set()).add(group.name)
    return named | {group.name: {group.name} for group in plan.groups}


def _read_lists(engine: Engine, request: AuditRequest, plan: AuditPlan, notes: list[str]) -> int:
    """How many entries all lists have; more notes. Raises ValueError."""
    known = _names(plan).items()
    brokers = [{"broker": name, "grp": min(of)} for name, of in known if len(of) == 1]
    engine.table("brokers", _rows(brokers, "string: broker grp"))
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
    return int(total["many"])


def _of_other_brokers(engine: Engine, plan: AuditPlan) -> tuple[list[LogFinding], int]:
    """(findings, entries) of brokers without a store here. Raises ValueError for a broker that may
    be of several groups.
    """
    found, others, named = [], 0, _names(plan)
    for row in dicts(engine, _OTHER_BROKERS):
        broker, many = row["broker"], row["many"]
        if broker in named:
            raise ValueError(
                f"the acknowledged list names broker {broker}, which may be any of "
                f"{', '.join(sorted(named[broker]))}: give the stores of one cluster, or write "
                "one of these names into the list"
            )
        others += many
        what = f"{many} entries of the acknowledged list are of broker {broker}, of which no store "
        found.append(LogFinding(None, WARNING, "unchecked", f"{what}is given"))
    return found, others
