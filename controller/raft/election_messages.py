"""How nodes elect a leader: pysyncobj's votes, with the pre-votes before them (`pre_vote`), and the
order in which nodes become candidates. `messages` has the other messages.
"""

import functools
import logging
from collections.abc import Collection, Iterable
from typing import Any, Final

import pysyncobj.syncobj
from pysyncobj.node import Node
from pysyncobj.transport import TCPTransport

from batonmq.controller.raft.journal import DurableJournal, has_commands
from batonmq.controller.raft.pre_vote import Leadership, PreVote, is_up_to_date

log = logging.getLogger(__name__)

PRE_VOTE: Final = "pre_vote"
PRE_VOTE_ANSWER: Final = "pre_vote_answer"
HIGHER_TERM: Final = "higher_term"

_FOLLOWER: Final = 0
"""pysyncobj's _RAFT_STATE.FOLLOWER."""
_FULL_RETRY_S: Final = 0.2

STEP_S: Final = 0.1
"""Between one follower and the next: longer than an election with one candidate takes."""
PAUSE_S: Final = 10.0
"""How long a second break of the connection to one leader starts no election (R6)."""


def election_window_ms(
    own: str, members: Collection[str], min_ms: int, max_ms: int
) -> tuple[float, float]:
    """The range of silence (ms) after which `own` becomes a candidate, within [min_ms, max_ms]."""
    # Each member has its own range, with a gap behind it. If all drew from the whole range they
    # would split their votes about once in ten elections.
    width_ms = (max_ms - min_ms) / len(members)
    begin_ms = min_ms + width_ms * sorted(members).index(own)
    return begin_ms, begin_ms + width_ms / 2


class ElectionOrder:
    """Which follower becomes a candidate first when the connection to the leader breaks.

    A killed leader's sockets close at once, so waiting for an election time-out would waste time.
    Followers that become candidates at the same moment split the votes, so they do so one after the
    other, in the order of their addresses. Any message of a leader resets the time-out. Times are
    seconds of the Raft clock.
    """

    def __init__(self) -> None:
        self._pause_until_s: dict[str, float] = {}

    def stand_at(self, now_s: float, own: str, leader: str, members: Iterable[str]) -> float | None:
        """When `own` asks for votes after the connection to `leader` broke; None: at its ordinary
        election time-out."""
        # R6: a broken connection proves nothing. A link that breaks repeatedly moves the lead once
        # in PAUSE_S only.
        if now_s < self._pause_until_s.get(leader, 0.0):
            return None
        self._pause_until_s[leader] = now_s + PAUSE_S
        candidates = sorted(member for member in members if member != leader)
        return now_s + STEP_S * candidates.index(own)


def majority_since(answered_s: Iterable[float], nodes: int, since_s: float) -> bool:
    """Whether the leader and the nodes that answered it since then are more than half of all."""
    return 2 * (1 + sum(at_s > since_s for at_s in answered_s)) > nodes


class ElectionTransport(TCPTransport):  # type: ignore[misc]
    """What a node asks and answers in elections, and when it may become a candidate."""

    _log_seen = False
    """Whether another node had a log while this one was joining without one."""
    _hand_over_until = 0.0
    _hand_over_to: str | None = None
    _election_order: ElectionOrder | None = None
    _pre_vote: PreVote | None = None
    _may_stand_once = False
    """A majority agreed: the next election time-out begins a term."""
    _flags: dict[str, bool] | None = None
    """What this node, as a candidate, adds to its requests for votes."""
    _sync_again_s = 0.0
    """When to try the disk again; 0 if it is not full."""

    @functools.cached_property
    def _leadership(self) -> Leadership:
        return Leadership()

    @functools.cached_property
    def _kept_requests(self) -> dict[Node, dict[str, Any]]:
        """The newest request of each candidate that waits for this node to lose its leader."""
        return {}

    @functools.cached_property
    def _without_pre_vote(self) -> set[Node]:
        """Connected members of an earlier version."""
        return set()

    @property
    def _journal(self) -> DurableJournal:
        journal: DurableJournal = self._syncObj._SyncObj__raftLog
        return journal

    @property
    def waits_for_log(self) -> bool:
        """Whether this node is joining and gives no vote until a leader has sent it the log."""
        return self._log_seen and self._journal.joining

    @property
    def disk_is_full(self) -> bool:
        """Whether the disk has no space for what this node must store. Then it neither leads nor
        votes (R53)."""
        return self._sync_again_s > 0.0

    def _sync(self) -> bool:
        """Makes the log durable; false while the disk is full."""
        now_s = pysyncobj.syncobj.monotonicTime()
        if now_s < self._sync_again_s:
            return False
        if self._journal.sync():
            if self._sync_again_s:
                log.info("raft_disk_full_over")
            self._sync_again_s = 0.0
            return True
        if not self._sync_again_s:
            failure = self._journal.failure
            log.error("raft_disk_full reason=%r: this node neither leads nor votes", failure)
        self._sync_again_s = now_s + _FULL_RETRY_S
        # A leader counts itself in each majority, but these entries are not on its disk.
        if self._syncObj._isLeader():
            self._resign()
        return False

    def _resign(self) -> None:
        core = self._syncObj
        core._SyncObj__raftLeader = None
        core._SyncObj__setState(_FOLLOWER)

    def hand_over(self, timeout_s: float, address: str | None = None) -> None:
        """Offers the lead to the node at `address`, or to any node, at every tick until the lead
        has moved or the time is over. Any thread may call it."""
        self._hand_over_to = address
        self._hand_over_until = pysyncobj.syncobj.monotonicTime() + timeout_s

    def connection_broke(self, node: Node) -> None:
        """If `node` was the leader of this follower, this node becomes a candidate soon."""
        core = self._syncObj
        self._leadership.disconnected(node.id)
        self._handle_kept_requests()
        if core._SyncObj__raftState != _FOLLOWER or core._getLeader() != node:
            return
        if self._journal.joining:
            return
        self._election_order = self._election_order or ElectionOrder()
        own, others = core.selfNode.id, [other.id for other in core.otherNodes]
        now_s = pysyncobj.syncobj.monotonicTime()
        at_s = self._election_order.stand_at(now_s, own, node.id, [own, *others])
        if at_s is not None:
            log.info("raft_leader_gone leader=%s stand_in_ms=%d", node.id, (at_s - now_s) * 1000)
            deadline = core._SyncObj__raftElectionDeadline
            core._SyncObj__raftElectionDeadline = min(deadline, at_s)

    # Elections: see `pre_vote`.

    def may_stand(self) -> bool:
        """Whether the core begins a term now. It asks this when its election time-out has
        passed."""
        core = self._syncObj
        if self._nodes and not core._SyncObj__connectedNodes:
            return False
        handed_over = bool(core._SyncObj__transferInProgress)
        self._pre_vote = self._pre_vote or PreVote(len(self._nodes) + 1)
        if self.disk_is_full:
            self._stand_later()
            return False
        # A leader that hands over has chosen this node: to ask the others would only take time, and
        # they would refuse, since they hear that leader.
        if not handed_over and not self._may_stand_once and not self._ask():
            return False
        self._flags = {
            "hand_over": handed_over,
            "blank": not has_commands(self._journal),
            "unanimous": self._pre_vote.unanimous,
        }
        self._pre_vote.cancel()
        self._may_stand_once = False
        return True

    def _stand_later(self) -> None:
        core = self._syncObj
        now_s = pysyncobj.syncobj.monotonicTime()
        core._SyncObj__raftElectionDeadline = now_s + core._SyncObj__generateRaftTimeout()

    def _ask(self) -> bool:
        """Begins a round of pre-votes. True if no answers are needed."""
        assert self._pre_vote is not None
        self._stand_later()
        _, last_index, last_term = self._journal[-1]
        question = {
            "type": PRE_VOTE,
            "round": self._pre_vote.begin(),
            "last_log_index": last_index,
            "last_log_term": last_term,
            "blank": not has_commands(self._journal),
        }
        for node in self._nodes:
            # A member of an earlier version does not answer pre-votes: its vote itself decides.
            if node in self._without_pre_vote:
                self._pre_vote.add(node.id, 0, joining=False)
            else:
                self.send(node, dict(question))
        return self._pre_vote.won

    def _pre_vote_answered(self, node: Node, message: dict[str, Any]) -> None:
        mine, core = self._pre_vote, self._syncObj
        if mine is None or message["round"] != mine.round or core._isLeader():
            return
        mine.add(node.id, message["term"], joining=message["joining"])
        if mine.won and not self._may_stand_once:
            # The new term must be above all terms that the voters know, or they would refuse it.
            if mine.term > core.raftCurrentTerm:
                core._SyncObj__setCurrentTerm(mine.term, None)
            self._may_stand_once = True
            core._SyncObj__raftElectionDeadline = 0.0

    def _pre_vote_asked(self, node: Node, message: dict[str, Any]) -> None:
        if self._would_vote(node, message):
            answer = {
                "type": PRE_VOTE_ANSWER,
                "round": message["round"],
                "term": self._syncObj.raftCurrentTerm,
                "joining": self._journal.joining and message["last_log_term"] > 0,
            }
            self.send(node, answer)

    def _would_vote(self, node: Node, message: dict[str, Any]) -> bool:
        _, last_index, last_term = self._journal[-1]
        if self.disk_is_full or self._is_led(node, message):
            return False
        if self._journal.joining and not self._may_vote(node, {"unanimous": True, **message}):
            return False
        return is_up_to_date(message, last_index, last_term)

    def _takes_request(self, node: Node, message: dict[str, Any]) -> bool:
        """Whether a request for a vote is passed to the core, which may still refuse it."""
        if self.disk_is_full:
            return False
        # R51: a node that hears its leader ignores a higher term: it would depose that leader.
        raises = message["term"] > self._syncObj.raftCurrentTerm
        if raises and not message.get("hand_over") and self._is_led(node, message):
            return False
        return not self._journal.joining or self._may_vote(node, message)

    def _is_led(self, candidate: Node, message: dict[str, Any]) -> bool:
        """Whether this node leads with a majority, or follows another leader than the candidate. As
        a follower it keeps the request until that leader is lost or heard again."""
        now_s = pysyncobj.syncobj.monotonicTime()
        core = self._syncObj
        if core._isLeader():
            offers = self._hand_over_until > now_s
            answered_s = core._SyncObj__lastResponseTime.values()
            since_s = now_s - self._election_min_s
            return not offers and majority_since(answered_s, len(self._nodes) + 1, since_s)
        if not self._leadership.forbids(candidate.id, now_s, self._election_min_s):
            return False
        self._kept_requests[candidate] = message
        return True

    @property
    def _election_min_s(self) -> float:
        return float(self._syncObj._SyncObj__conf.leaderFallbackTimeout)

    def _handle_kept_requests(self) -> None:
        for node, message in list(self._kept_requests.items()):
            del self._kept_requests[node]
            self._onMessageReceived(node, message)

    def _higher_term(self, term: int) -> None:
        # A node with a higher term takes nothing from this leader, and with pre-votes it cannot
        # begin a term either. So this one gives up, and is elected again above that term if the
        # others want it.
        if term > self._syncObj.raftCurrentTerm:
            log.info("raft_lead_given_up reason='a node has a higher term' term=%d", term)
            self._syncObj._SyncObj__setCurrentTerm(term, None)
            self._resign()

    def _may_vote(self, node: Node, message: dict[str, Any]) -> bool:
        """Whether a joining node may vote: while neither it nor any candidate so far has a log
        (term 0); or if all members agree and neither log has a command, in the first start of a
        quorum."""
        is_blank = bool(message.get("blank") and message.get("unanimous"))
        if is_blank and not self._log_seen:
            return not has_commands(self._journal)
        if message["last_log_term"] and not self._log_seen:
            self._log_seen = True
            log.warning(
                "raft_joining candidate=%s: this node does not have the log yet and gives no"
                " vote; a leader must be elected without it",
                node.id,
            )
        return not self._log_seen and not self._journal[-1][2]
