"""Hands the lead to the controller that hears more brokers (R50), and passes on the reports."""

import asyncio
import logging
from collections.abc import Callable

from batonmq.controller.liveness.events import PeerReported, ReportHearing
from batonmq.controller.raft.log import ReplicatedLog
from batonmq.runtime.tasks import Tasks

log = logging.getLogger(__name__)


class LeadOffers:
    """`timeout_ms`: how long an offer is valid. After that this node may judge by itself (R35)."""

    def __init__(self, replicated_log: ReplicatedLog, timeout_ms: int) -> None:
        self._log = replicated_log
        self._timeout_ms = timeout_ms
        self._tasks = Tasks()
        self._offer: asyncio.Task[bool] | None = None
        self._stepped_aside = False

    def step_aside(self, unseen: tuple[str, ...]) -> None:
        """Offers the lead, once, if a broker of the groups `unseen` never connected to this
        process."""
        # Another controller saw that broker, and knows now whether it is alive; this one would have
        # to wait for a whole timeout. Once: controllers that all started just now would otherwise
        # hand the lead around.
        if unseen and not self._stepped_aside:
            self._stepped_aside = True
            self.offer("", f"a broker of {', '.join(unseen)} was never seen here")

    def offer(self, node: str, why: str) -> None:
        """To `node`, or to any other one if that is empty."""
        log.warning("lead_offered node=%s reason=%r", node or "any", why)
        if self._offer is not None:
            self._offer.cancel()
        self._offer = self._tasks.spawn(self._log.hand_over(self._timeout_ms, node), "lead-offer")

    def report(self, hearing: ReportHearing) -> None:
        """Sends a report of this follower to its leader."""
        self._log.reports.send(hearing.index, hearing.unheard, hearing.changed)

    def on_report(self, callback: Callable[[PeerReported], None]) -> None:
        """`callback` gets the reports of the other nodes while this one leads."""
        self._log.reports.on_report = lambda *report: callback(PeerReported(*report))

    async def close(self) -> None:
        await self._tasks.close()
