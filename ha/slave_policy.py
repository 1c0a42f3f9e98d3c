"""The numbers behind the slave core's decisions."""

from __future__ import annotations

from dataclasses import dataclass

from ha.redial import RedialPolicy


@dataclass(frozen=True, slots=True)
class SlavePolicy:
    """Times in ms."""

    sync_flush: bool = False
    sync_from_last_file: bool = False
    async_learner: bool = False
    proof_needed: bool = False
    """Whether a peer has to prove to be the master (R21): before a cut always, before a byte is
    taken on every connection but the first one of a fresh view."""
    fresh_ms: int = 3_000
    """How long a view that names another master, or another epoch, is fresh."""
    retry_ms: int = 20
    retry_ms_max: int = 1_000
    diverged_retry_ms: int = 1_000
    diverged_retry_ms_max: int = 60_000
    dial_ms: int = 1_000
    """For the connection. Longer would be TCP's own waiting, which doubles each time."""
    connect_ms: int = 3_000
    """For the answer to our handshake and for the proof, each."""
    keepalive_ms: int = 1_000
    housekeeping_ms: int = 20_000
    brisk_ms: int = 2_000
    """Instead of `housekeeping_ms` for a master with an incarnation, which sends something every
    haSendHeartbeatInterval; for another one once it has shown that it heartbeats within 1 s."""
    flood_ms: int = 20
    flood_lag_bytes: int = 2 << 20
    """So much may be here, confirmed and not shown while old bytes pour in."""
    tick_ms: int = 100
    stall_ms: int = 100

    @property
    def redial(self) -> RedialPolicy:
        return RedialPolicy(
            self.retry_ms, self.retry_ms_max, self.diverged_retry_ms, self.diverged_retry_ms_max
        )


__all__ = ["SlavePolicy"]
