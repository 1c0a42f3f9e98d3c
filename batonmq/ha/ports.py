"""The broker's callbacks for the HA service of each mode."""

from __future__ import annotations

from typing import Protocol

from batonmq.ha.node_secret import Unproven
from batonmq.ha.sync_state import SetProposal


class ProofListener(Protocol):
    """In both modes."""

    def on_unproven(self, peer: Unproven) -> None:
        """A peer did not prove that it knows the secret of the nodes."""


class HAListener(ProofListener, Protocol):
    """The broker with controllers. Called on the loop; must neither block nor raise."""

    def on_confirm_offset(self, offset: int) -> None:
        """Master: every required member has all bytes below `offset` (G1)."""

    def on_proposal(self, proposal: SetProposal) -> None:
        """Master: propose this set; `adopt_view` or `proposal_refused` ends the proposal."""

    def on_slave_following(self, broker_id: int) -> None:
        """Master: that slave accepted our history and acked."""

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        """Slave: the log was cut to follow the master."""

    def on_diverged(self, reason: str) -> None:
        """Slave: an operator must act."""

    def on_damage(self, reason: str) -> None:
        """Master: our log is damaged where a slave continues (G8)."""

    def on_fatal(self, exc: BaseException) -> None:
        """The log or the epoch file cannot be written: the process must stop."""


class ClassicListener(ProofListener, Protocol):
    """The broker in classic mode; the same conditions."""

    def on_acknowledged(self, offset: int) -> None:
        """Master: enough slaves have all bytes below `offset`."""

    def on_slaves_missing(self, wanted: int, present: int) -> None:
        """Master: no write can be acknowledged now."""

    def on_diverged(self, reason: str) -> None:
        """Slave: an operator must act."""

    def on_master_lost(self) -> None:
        """Slave: the connection ended; the master may have another address now."""

    def on_fatal(self, exc: BaseException) -> None:
        """The log cannot be written: the process must stop."""
