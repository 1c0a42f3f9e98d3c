"""Which times of heartbeats, lease and session fit together (R34): for controllers and brokers."""

from typing import Final

PAUSE_ALLOWED_MS: Final = 300
"""How long the loop of a healthy process may stand still without costing a lease."""
_MARGIN_MS: Final = 100
_CLOCK_DRIFT_PERCENT: Final = 2


def silence_above_ms(lease_ms: int) -> float:
    """The silence after which a broker counts as dead must be longer than this."""
    # The lease must be over by then, by the broker's own clock, which may run slower.
    return lease_ms + _MARGIN_MS + lease_ms * _CLOCK_DRIFT_PERCENT / 100


def check_lease_times(heartbeat_ms: int, lease_ms: int, session_ms: int) -> None:
    """Raises ValueError, which names the key of a value that does not fit."""
    # A healthy master keeps its lease although one heartbeat is lost and its loop stands still.
    least_ms = 2 * heartbeat_ms + PAUSE_ALLOWED_MS
    if lease_ms <= least_ms:
        raise ValueError(
            f"masterLeaseMs: {lease_ms} must exceed 2 x brokerSessionHeartbeatMs "
            f"({heartbeat_ms}) + {PAUSE_ALLOWED_MS} = {least_ms}"
        )
    if session_ms <= silence_above_ms(lease_ms):
        raise ValueError(
            f"brokerSessionTimeoutMs: {session_ms} must exceed masterLeaseMs ({lease_ms}) + "
            f"{_MARGIN_MS} + {_CLOCK_DRIFT_PERCENT} % = {silence_above_ms(lease_ms):g}"
        )
