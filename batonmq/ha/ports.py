"""What the HA service needs of the store (`LogStore`) and of the broker (`HAListener`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from batonmq.epoch.entry import EpochEntry
from batonmq.ha.sync_state import SetProposal
from batonmq.store.commit_log import Lineage
from batonmq.store.health import StoreHealth


class EpochList(Protocol):
    """EpochFileCache: each change is durable on return."""

    @property
    def entries(self) -> tuple[EpochEntry, ...]: ...

    @property
    def last_epoch(self) -> int: ...

    def append(self, entry: EpochEntry) -> bool: ...

    def replace_all(self, entries: Sequence[EpochEntry]) -> bool: ...

    def drop_above(self, log_end: int) -> bool: ...


class LogBytes(Protocol):
    """CommitLog. `flushed_offset` is exclusive."""

    @property
    def flushed_offset(self) -> int: ...

    @property
    def health(self) -> StoreHealth: ...

    @property
    def lineage(self) -> Lineage: ...

    def view(self, offset: int, size: int) -> memoryview: ...


class ReplicaLog(Protocol):
    """SlaveLog: what only a replica does to its log."""

    @property
    def whole_end(self) -> int: ...

    def append_replicated(self, offset: int, data: memoryview | bytes) -> int: ...

    def truncate_to(
        self, offset: int, *, keep_aside: bool = True, unclean_epoch: bool = False
    ) -> object: ...

    def drop_unverified(self) -> int: ...

    def reset_for_empty_start(self, offset: int) -> object: ...


class Trust(Protocol):
    """LogTrust."""

    @property
    def lost_epochs(self) -> bool: ...

    @property
    def must_refetch(self) -> bool: ...

    def discard_damaged_tail(self) -> object: ...

    def clear_suspect(self) -> object: ...

    def fault_at(self, offset: int) -> str: ...

    def fault_before(self, end: int) -> str: ...


class Flusher(Protocol):
    """Background."""

    def request_flush(self) -> object: ...


class LogStore(Protocol):
    """MessageStore. Offsets are exclusive ends, except `min_phy_offset`."""

    @property
    def log(self) -> LogBytes: ...

    @property
    def slave_log(self) -> ReplicaLog: ...

    @property
    def trust(self) -> Trust: ...

    @property
    def background(self) -> Flusher: ...

    @property
    def epochs(self) -> EpochList: ...

    @property
    def min_phy_offset(self) -> int: ...

    @property
    def max_phy_offset(self) -> int: ...

    @property
    def confirm_offset(self) -> int: ...

    def advance_confirm_offset(self, offset: int) -> object: ...

    def prepare_master(self, *, discard_damage: bool = False) -> int: ...


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
