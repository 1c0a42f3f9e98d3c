"""What came of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from faults.aftermath.compare import Comparison
from faults.aftermath.jobs import DONE, Result
from faults.aftermath.record import Deed
from faults.records import Finding


@dataclass(slots=True)
class Verdict:
    """What came of a run. `findings`: of the laboratory itself, which reads everything back."""

    deeds: list[Deed] = field(default_factory=list)
    acked: int = 0
    findings: list[Finding] = field(default_factory=list)
    comparison: Comparison | None = None
    audit: Result | None = None
    streamed: int = 0
    stream_wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return (
            not self.findings
            and not self.stream_wrong
            and self.comparison is not None
            and self.comparison.agrees
            and self.audit is not None
            and self.audit.code == DONE
        )

    def both(self) -> tuple[Comparison, Result]:
        """What the tables and the audit say. Raises RuntimeError if a job has yet to run."""
        if self.comparison is None or self.audit is None:
            raise RuntimeError("not every job has run")
        return self.comparison, self.audit
