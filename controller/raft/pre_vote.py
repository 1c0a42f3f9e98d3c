"""Pre-vote: a node asks whether a majority would vote for it before it begins a new term. Pure.

A node that cannot hear its leader would raise the term repeatedly, and each new term deposes the
leader that all others hear (R51). So it asks first. A node agrees if it would vote: its log is not
newer, and it has no leader (`Leadership`). Otherwise it keeps the request, and agrees as soon as it
loses its own leader.

A *joining* node (see `journal`) gives its vote to a candidate with a log only in the first start of
a quorum: no command is in that log, and all members agree, so nothing can have been acknowledged.
Without this exception one kill in the first start would leave one node with a log, and a majority
of joining nodes that never vote for it. A member of an earlier version does not know these messages
and counts as one that agrees: the vote itself decides.

Origin: Ongaro's thesis (2014), 9.6, and the check of a leader's lease in etcd's raft.
"""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PreVote:
    """The rounds of one node, and what was answered in the newest one."""

    members: int
    """The number of members, this node included."""
    round: int = 0
    term: int = 0
    """The highest term that an answer named."""
    agreed: set[str] = field(default_factory=set)
    joining: set[str] = field(default_factory=set)
    """Joining members, whose agreement counts only if all members agree."""

    def begin(self) -> int:
        """The number of the new round."""
        self.round += 1
        self.term = 0
        self.agreed.clear()
        self.joining.clear()
        return self.round

    def cancel(self) -> None:
        """A late answer to the last round must not begin a term."""
        self.begin()

    def add(self, member: str, term: int, *, joining: bool) -> None:
        """Another member agrees."""
        self.term = max(self.term, term)
        (self.joining if joining else self.agreed).add(member)

    @property
    def unanimous(self) -> bool:
        """Whether all members agree."""
        return 1 + len(self.agreed | self.joining) >= self.members

    @property
    def won(self) -> bool:
        # Joining members may lack what they acknowledged, so they make no majority. If all agree no
        # node is left that could have more.
        return 2 * (1 + len(self.agreed)) > self.members or self.unanimous


@dataclass(slots=True)
class Leadership:
    """When this follower last heard a leader. Times are seconds of the Raft clock."""

    leader: str = ""
    heard_s: float = -math.inf

    def hear(self, leader: str, now_s: float) -> None:
        self.leader, self.heard_s = leader, now_s

    def disconnected(self, member: str) -> None:
        """If that was the leader it counts as lost."""
        if member == self.leader:
            # A killed process closes its connections: no need to wait for silence.
            self.heard_s = -math.inf

    def forbids(self, candidate: str, now_s: float, election_min_s: float) -> bool:
        """Whether the leader was heard so recently that this node votes for no other candidate."""
        # The leader itself may ask again: it stood still, or was deposed.
        return candidate != self.leader and now_s - self.heard_s < election_min_s


def is_up_to_date(candidate: dict[str, Any], last_index: int, last_term: int) -> bool:
    """Whether the candidate's log is not older than the one that ends there."""
    end: tuple[int, int] = (candidate["last_log_term"], candidate["last_log_index"])
    return end >= (last_term, last_index)
