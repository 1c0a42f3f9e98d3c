"""The order of it all: the faults, the jobs over what is left, and the verdict."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.cluster.checks import BrokenPromise
from lab.cluster.held import HOSTS
from lab.cluster.network import Network
from lab.faults.aftermath import jobs
from lab.faults.aftermath.compare import HistoryComparison, compare, stream_wrong
from lab.faults.aftermath.fault_records import DOZEN, FaultRecord, fault_record
from lab.faults.aftermath.summary import AftermathResult
from lab.faults.aftermath.tables import read_streamed, read_tables
from lab.faults.trial import Fault, Lab

LOAD: Final = ("--interval-ms", "4", "--senders", "4", "--body", "512")
STREAM: Final = "stream_history"
STREAM_OFTEN: Final = ("--trigger", "2s")
STREAM_S: Final = 300.0
REMARKS: Final = frozenset({"elections"})
"""Findings that do not count: on a busy machine a slow process may be replaced once more."""
Say = Callable[[str, bool], None]
"""Shows a line; True: something is wrong."""


@dataclass(frozen=True, slots=True)
class AftermathOptions:
    """`folder` stays. `stream`: with `stream_history`, on the Spark `master`."""

    folder: Path
    seed: int
    faults: Sequence[type[Fault]] = DOZEN
    master: str = "local[2]"
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Paths:
    """Where everything of a run is."""

    folder: Path

    @property
    def record(self) -> Path:
        return self.folder / "record.jsonl"

    @property
    def acked(self) -> Path:
        return self.folder / "acked.jsonl"

    @property
    def data(self) -> Path:
        return self.folder / "cluster" / "data"

    @property
    def histories(self) -> str:
        return str(self.data / "namesrv-*" / "controller")

    @property
    def stores(self) -> str:
        return str(self.data / "broker-*")

    def output(self, job: str) -> Path:
        return self.folder / job

    def report(self, job: str) -> Path:
        return self.output(job) / "report.html"


class Aftermath:
    """One run in a fresh folder."""

    def __init__(self, options: AftermathOptions, say: Say) -> None:
        self._options = options
        self._say = say
        self.paths = Paths(options.folder)
        self.result = AftermathResult()

    def run(self) -> AftermathResult:
        """Raises NotInTime, RuntimeError or OSError for what did not come about."""
        self.run_cluster()
        self.compare_history()
        self.audit()
        self._job("topic_stats", ["--stores", self.paths.stores, "--bucket", "1s"])
        return self.result

    # --- the cluster ---

    def run_cluster(self) -> None:
        """The cluster from its start to its clean end."""
        count = len(self._options.faults)
        self._say(f"three controllers, three replicas, {count} faults in turn", False)
        load = [*LOAD, "--acked", str(self.paths.acked)]
        self.paths.folder.mkdir(parents=True, exist_ok=True)
        network = Network(HOSTS)
        with Lab(self.paths.folder / "cluster", network, load=load, consumed=True) as lab:
            group = lab.cluster.wait_whole()
            assert group.master is not None
            name = lab.cluster.brokers[group.master].name
            self._say(f"whole, and a write acked; {name} is master", False)
            with self._streaming(lab):
                self._do_all(lab)
            self.result.findings += [
                finding for finding in lab.close_and_compare() if finding.rule not in REMARKS
            ]
            self.result.acked = len(lab.load.acks)
        acked = self.result.acked
        self._say(f"the cluster has ended; {acked:,} writes acknowledged, and each consumed", False)

    def _do_all(self, lab: Lab) -> None:
        rng = random.Random(self._options.seed)
        wall_s = time.time() - time.monotonic()
        names = tuple(process.name for process in lab.cluster.brokers)
        with self.paths.record.open("w") as record:
            for number, kind in enumerate(self._options.faults, 1):
                fault = kind()
                lab.cluster.wait_for("controllers with one leader", lab.cluster.agrees_on_leader)
                trial = lab.trial(fault, rng)
                done = fault_record(number, fault, trial, names=names, wall_s=wall_s)
                record.write(done.line())
                record.flush()
                self.result.records.append(done)
                found = [one for one in trial.findings if one.rule not in REMARKS]
                self.result.findings += found
                self._report_fault(done, found)

    def _report_fault(self, done: FaultRecord, found: Sequence[BrokenPromise]) -> None:
        text = f"{done.number:2} {done.title}: {done.affected}; "
        if done.elections:
            text += f"master: broker {done.master_before} -> {done.master_after}"
            text += f" (epoch {done.epoch_after})"
        else:
            text += f"broker {done.master_after} stays master"
        text += f", longest gap between acks {done.gap_ms:.0f} ms"
        for finding in found:
            text += f"\n          {finding.rule}: {finding.text}"
        self._say(text, bool(found))

    # --- the jobs ---

    @contextlib.contextmanager
    def _streaming(self, lab: Lab) -> Iterator[None]:
        """The history is written as Parquet while the block runs, up to the last election."""
        if not self._options.stream:
            yield
            return
        output = self.paths.output(STREAM)
        controllers = ";".join(lab.cluster.controllers)
        arguments: jobs.Arguments = ["--controllers", controllers, "--output", output]
        self._say(f"{STREAM} … (until the end of the cluster)", False)
        folder = self.paths.folder
        often = [*STREAM_OFTEN, "--master", self._options.master]
        with jobs.running(folder, STREAM, [*arguments, *often]) as job:

            def has_all() -> bool:
                if job.poll() is not None:
                    raise jobs.JobFailed(f"{STREAM} has ended, see its log in {folder}")
                streamed = {name for name, _ in read_streamed(output)}
                return streamed >= lab.cluster.history().keys()

            yield
            lab.cluster.wait_for("all events streamed", has_all, STREAM_S)
            kept = lab.cluster.history().keys()
        jobs.check_ended(folder, STREAM, job)
        streamed = [name for name, _ in read_streamed(output)]
        self.result.streamed = len(streamed)
        wrong = self.result.stream_wrong = stream_wrong(streamed, kept)
        text = f"{STREAM}: {len(streamed)} events"
        self._say("\n".join([text, *wrong]), bool(wrong))

    def compare_history(self) -> HistoryComparison:
        """The history as tables, held against the record."""
        paths = self.paths
        self._job("epoch_history", ["--history", paths.histories, "--stores", paths.stores])
        tables = read_tables(paths.output("epoch_history"))
        self.result.comparison = compare(self.result.records, tables)
        return self.result.comparison

    def audit(self) -> jobs.JobResult:
        """The stores against each other and against the list of what was acknowledged."""
        arguments = ["--stores", self.paths.stores, "--acked", str(self.paths.acked)]
        self.result.audit = self._job("message_audit", arguments)
        return self.result.audit

    def _job(self, name: str, arguments: jobs.Arguments) -> jobs.JobResult:
        self._say(f"{name} …", False)
        # Without --master: small inputs need no Spark.
        output: jobs.Arguments = ["--output", self.paths.output(name)]
        result = jobs.run(self.paths.folder, name, [*arguments, *output])
        self._say(f"{name}: {result.seconds:.0f} s, exit code {result.code}", False)
        return result
