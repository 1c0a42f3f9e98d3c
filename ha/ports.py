"""The two seams of the HA service: the store it ships, and the broker it tells.

`LogStore` is what is needed of `store.MessageStore`; the tests have a log in memory beside it.
`HAListener` is the broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from epoch.entry import EpochEntry
from ha.sync_state import Proposal


class EpochList(Protocol):
    """An EpochFileCache: each change is durable before it returns."""

    @property
    def entries(self) -> tuple[EpochEntry, ...]: ...

    @property
    def last_epoch(self) -> int: ...

    def append(self, entry: EpochEntry) -> bool: ...

    def replace_all(self, entries: Sequence[EpochEntry]) -> bool: ...

    def drop_above(self, log_end: int) -> bool: ...


class LogStore(Protocol):
    """Offsets are exclusive ends, but for `min_phy_offset`."""

    @property
    def min_phy_offset(self) -> int: ...

    @property
    def max_phy_offset(self) -> int: ...

    @property
    def flushed_offset(self) -> int: ...

    @property
    def confirm_offset(self) -> int: ...

    @property
    def epochs(self) -> EpochList: ...

    def log_view(self, offset: int, size: int) -> memoryview: ...

    def append_replicated(self, offset: int, data: memoryview | bytes) -> int: ...

    def advance_confirm_offset(self, offset: int) -> object: ...

    def prepare_master(self, *, discard_damage: bool = False) -> int: ...

    def truncate_to(
        self, offset: int, *, keep_aside: bool = True, unclean_epoch: bool = False
    ) -> object: ...

    def discard_damaged_tail(self) -> object: ...

    def clear_suspect(self) -> object: ...

    def drop_unverified(self) -> int: ...

    def fault_at(self, offset: int) -> str: ...

    def reset_for_empty_start(self, offset: int) -> object: ...

    def request_flush(self) -> object: ...


class HAListener(Protocol):
    """What a broker is told. All calls come on the loop; none may await or raise."""

    def on_confirm_offset(self, offset: int) -> None:
        """As master: all below `offset` is on every required member (G1)."""

    def on_proposal(self, proposal: Proposal) -> None:
        """Put this set to the controller, then call proposal_applied, _refused or _unknown."""

    def on_slave_following(self, broker_id: int) -> None:
        """As master: that slave has taken our history and acked."""

    def on_truncated(self, from_offset: int, to_offset: int) -> None:
        """As slave: our log was cut to follow the master."""

    def on_diverged(self, reason: str) -> None:
        """As slave: cannot follow until an operator has looked."""

    def on_damage(self, reason: str) -> None:
        """As master: our own log is bad where a slave goes on (G8)."""

    def on_fatal(self, exc: BaseException) -> None:
        """The log or the epoch file can no longer be written: the process must stop."""


__all__ = ["EpochList", "HAListener", "LogStore"]
