"""A controller's view of one broker group, and the roles. Mirrors `RoleView` and `Replica` of
`baton.controller.v1` without gRPC. A view is accepted only if its `key` grows (R20); its set is the
committed one."""

import enum
from dataclasses import dataclass


class Role(enum.Enum):
    """A broker's role in its group. FENCED: it may not act."""

    MASTER = "MASTER"
    SLAVE = "SLAVE"
    FENCED = "FENCED"


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as recorded; `alive`: as the sending controller sees it."""

    broker_id: int
    address: str = ""
    ha_address: str = ""
    alive: bool = False
    learner: bool = False
    incarnation: str = ""
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class RoleView:
    """`master_broker_id` is None without a master; then its address is "". `unclean_epoch`: the
    last masterEpoch won outside the set (R7), 0: none. Only towards it may a replica cut below its
    confirmOffset (R23)."""

    cluster_name: str
    broker_name: str
    master_broker_id: int | None = None
    master_address: str = ""
    master_ha_address: str = ""
    master_incarnation: str = ""
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    sync_state_set: frozenset[int] = frozenset()
    replicas: tuple[Replica, ...] = ()
    raft_index: int = 0
    unclean_epoch: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """(masterEpoch, syncStateSetEpoch): the order of views (R20)."""
        return (self.master_epoch, self.sync_state_set_epoch)

    def replica(self, broker_id: int) -> Replica | None:
        """The registered replica of that id, or None."""
        for replica in self.replicas:
            if replica.broker_id == broker_id:
                return replica
        return None
