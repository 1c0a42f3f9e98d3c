"""What the HA service calls in the broker, for each mode."""

from __future__ import annotations

from typing import Protocol

from batonmq.ha.sync_state import SetProposal


class HAListener(Protocol):
    """The broker. All calls come on the loop and may neither await nor raise."""

    def on_confirm_offset(self, offset: int) -> None:
        """As master: every required member has all below `offset` (G1)."""

    def on_proposal(self, proposal: SetProposal) -> None:
        """Propose this set; `adopt_view` or `proposal_refused` ends the proposal."""

    def on_slave_following(self, broker_id: int) -> None:
        """As master: that slave accepted our history and acked."""

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        """As slave: the log was cut to follow the master."""

    def on_diverged(self, reason: str) -> None:
        """As slave: an operator must act."""

    def on_damage(self, reason: str) -> None:
        """As master: our log is damaged where a slave continues (G8)."""

    def on_fatal(self, exc: BaseException) -> None:
        """The log or the epoch file cannot be written: the process must stop."""


class ClassicListener(Protocol):
    """The broker in classic mode, under the same conditions."""

    def on_acknowledged(self, offset: int) -> None:
        """As master: enough slaves have all below `offset`."""

    def on_slaves_missing(self, wanted: int, present: int) -> None:
        """As master: no write can be acknowledged now."""

    def on_diverged(self, reason: str) -> None:
        """As slave: an operator must act."""

    def on_master_lost(self) -> None:
        """As slave: the connection ended; the master's address may be another now."""

    def on_fatal(self, exc: BaseException) -> None:
        """The log cannot be written: the process must stop."""
