"""The messages between two cores: pysyncobj's, with its faults corrected, and four additions.

Corrected:
- *Snapshot under way.* A follower that is sent a snapshot would commit its own, never verified log
  up to the leader's commit index, and report commands as applied that no other node holds. Those
  messages reach the core with commit index 0.
- *Late acknowledgements* carry no term, so one from an earlier leadership would count in this one.
  They get the sender's term and are dropped when it differs.
- *Old answers* wait in a socket while a leader is stopped; read when it wakes, they would keep it
  leading. Each answer repeats when its question was sent, and counts as of then.
- *Entries that agree* are truncated and added again, though they may be acknowledged and applied,
  and a late message that ends sooner cuts them off. What this log already holds is taken out of
  the message; a message of the same term that ends before this log does is older than it.
- *Durable first.* No vote, no request for one and no acknowledgement leaves before the journal is
  on disk. A leader syncs its own entries right after it sent them, so the disks work in parallel.

Added:
- *Joining nodes* (see `journal`) make nobody leader: they could outvote the one node that still
  holds what they acknowledged before their folder was lost. Nodes that all begin empty may elect
  one of them; once another node has a log, they wait for a leader elected without them.
- *Handing over.* A leader that stops tells a follower that holds its whole log to ask for votes at
  once. That is an election like any other, without the wait.
- *Election order.* A follower whose connection to the leader breaks does not wait for its
  time-out, see `ElectionOrder`.
- *Digests* of states travel between nodes, see `log.DigestWatch`.
- *Reports* of what a follower hears go to its leader, see `liveness.hearing`. Earlier versions
  pass over them.

Uses names of pysyncobj 0.3.17; `tests/controller/test_raft_node.py` pins both.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import pysyncobj.syncobj
from pysyncobj.node import Node
from pysyncobj.transport import TCPTransport

from batonmq.controller.raft.journal import DurableJournal
from batonmq.controller.raft.log import DigestWatch, Heard

log = logging.getLogger(__name__)

# Not `apply_command`, by which a node that just lost the lead sends its queue to the next leader:
# commands enter the log only through a gate.
_RAFT_MESSAGES: Final = frozenset(
    {
        "request_vote",
        "response_vote",
        "append_entries",
        "next_node_idx",
        "timeout_now",
    }
)
_STATE_DIGEST: Final = "state_digest"
_HEARING: Final = "hearing"

_FOLLOWER: Final = 0
"""pysyncobj's _RAFT_STATE.FOLLOWER."""

_NEEDS_DURABLE_LOG: Final = frozenset({"request_vote", "response_vote", "next_node_idx"})

COMPACT_AFTER_BYTES: Final = 8 << 20
"""A journal of this size is compacted, however few its entries are: one batch must hold it all."""

STEP_S: Final = 0.1
"""Between one follower and the next: longer than an election with one candidate takes."""
PAUSE_S: Final = 10.0


def election_window_ms(
    own: str, members: Collection[str], min_ms: int, max_ms: int
) -> tuple[float, float]:
    """The range of silence (ms) after which `own` stands for election, within [min_ms, max_ms].

    Each member has a window of its own, with a gap as long as a window between two: members that
    all draw from the whole range split their votes about once in ten elections.
    """
    width_ms = (max_ms - min_ms) / len(members)
    begin_ms = min_ms + width_ms * sorted(members).index(own)
    return begin_ms, begin_ms + width_ms / 2


class ElectionOrder:
    """Who stands for election at once when the leader's connection breaks, and who a little later.

    A killed leader's sockets close at once, so waiting for a whole election time-out would waste
    time. If both followers stood at the same moment they would split the votes and wait for the
    time-out after all; so they stand one after the other, in the order of their addresses. A broken
    connection proves nothing (R6): an unnecessary election moves the lead and costs some
    milliseconds, and a link that breaks again and again takes the lead from its two ends only once
    in `PAUSE_S`. Another leader that is killed within that time is succeeded as fast. Any message
    of a leader resets the time-out. Times are seconds of the Raft clock.
    """

    def __init__(self) -> None:
        self._pause_until_s: dict[str, float] = {}

    def stand_at(self, now_s: float, own: str, leader: str, members: Iterable[str]) -> float | None:
        """When `own` should ask for votes after the connection to `leader` broke; None if its
        ordinary time-out should decide."""
        if now_s < self._pause_until_s.get(leader, 0.0):
            return None
        self._pause_until_s[leader] = now_s + PAUSE_S
        candidates = sorted(member for member in members if member != leader)
        return now_s + STEP_S * candidates.index(own)


class MendedTransport(TCPTransport):  # type: ignore[misc]
    """Between core and connections. `digests` may be None, for a core without a state machine."""

    digests: DigestWatch | None = None
    _log_seen = False
    """Whether another node had a log while this one was joining without one."""
    _handled: dict[str, Any] | None = None
    """The message being handled."""
    _hand_over_until = 0.0
    _hand_over_to: str | None = None
    hearing: tuple[int, tuple[Heard, ...]] | None = None
    """The newest report for the leader; set by any thread, sent once."""
    on_hearing: Callable[[str, int, frozenset[Heard]], None] | None = None
    """Gets (address, index, unheard) of another node's report, in the tick thread."""
    _election_order: ElectionOrder | None = None
    _compact_above = COMPACT_AFTER_BYTES

    @property
    def _journal(self) -> DurableJournal:
        journal: DurableJournal = self._syncObj._SyncObj__raftLog
        return journal

    @property
    def waits_for_log(self) -> bool:
        """Whether this node, joining, votes for nobody until a leader has sent it the log."""
        return self._log_seen and self._journal.joining

    def _onTick(self) -> None:
        super()._onTick()
        journal = self._journal
        if journal.joining and (self._log_seen or journal[-1][2]):
            self._syncObj._SyncObj__raftElectionDeadline = math.inf
        journal.sync()
        if self._hand_over_until and not self._syncObj._isLeader():
            self._hand_over_until = 0.0  # the lead moved; a later one of this node is not offered
        elif self._hand_over_until > pysyncobj.syncobj.monotonicTime():
            # At every tick: it does nothing until a follower has acknowledged the whole log.
            self._syncObj.transferLeadership(self._hand_over_to)
        if journal.size_bytes > self._compact_above:
            # Next time when it has grown as much again: the entries that stay may be large.
            self._syncObj.forceLogCompaction()
            self._compact_above = journal.size_bytes + COMPACT_AFTER_BYTES
        elif journal.size_bytes < COMPACT_AFTER_BYTES:
            self._compact_above = COMPACT_AFTER_BYTES
        self._compare_digests()
        self._report_hearing()

    def hand_over(self, timeout_s: float, address: str | None = None) -> None:
        """Offers the lead to the node at `address`, or to any other one, from the next tick on,
        until it moved. Any thread may call it."""
        self._hand_over_to = address
        self._hand_over_until = pysyncobj.syncobj.monotonicTime() + timeout_s

    def connection_broke(self, node: Node) -> None:
        """If `node` was the leader of this follower, this node stands for election soon."""
        core = self._syncObj
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

    def _compare_digests(self) -> None:
        if self.digests is None or not self._syncObj._isLeader():
            return
        due = self.digests.due(pysyncobj.syncobj.monotonicTime())
        if due is not None:
            for node in self._nodes:
                self.send(node, {"type": _STATE_DIGEST, "index": due[0], "digest": due[1]})

    def _report_hearing(self) -> None:
        report = self.hearing
        leader = self._syncObj._getLeader() if report is not None else None
        if report is not None and leader is not None and leader != self._syncObj.selfNode:
            self.hearing = None
            self.send(leader, {"type": _HEARING, "index": report[0], "unheard": report[1]})

    def _hearing_received(self, node: Node, message: dict[str, Any]) -> None:
        index, unheard = message.get("index"), message.get("unheard")
        if self.on_hearing is not None and isinstance(index, int) and isinstance(unheard, tuple):
            self.on_hearing(node.id, index, frozenset(unheard))

    def _onMessageReceived(self, node: Node, message: Any) -> None:
        if not isinstance(message, dict):
            return
        kind = message.get("type")
        if kind == _HEARING:
            self._hearing_received(node, message)
        if kind == _STATE_DIGEST:
            self._digest_received(node, message)
        if kind not in _RAFT_MESSAGES:
            return
        if kind == "next_node_idx" and message.get("term") != self._syncObj.raftCurrentTerm:
            return
        if kind == "request_vote" and self._journal.joining and not self._may_vote(node, message):
            return
        if kind == "timeout_now" and self._journal.joining:
            return
        if kind == "append_entries" and "prevLogIdx" not in message:
            self._mend_snapshot_piece(message)
        elif kind == "append_entries" and not self._keep_agreeing_entries(message):
            return
        self._handled = message
        answered = self._syncObj._SyncObj__lastResponseTime
        answered_before = answered.get(node)
        super()._onMessageReceived(node, message)
        self._handled = None
        if kind == "next_node_idx" and answered_before is not None and node in answered:
            self._count_as_of_question(node, message.get("sent"), answered_before)

    def _count_as_of_question(self, node: Node, sent: object, answered_before: float) -> None:
        answered = self._syncObj._SyncObj__lastResponseTime
        asked = sent if isinstance(sent, float) else answered_before
        answered[node] = min(answered[node], max(asked, answered_before))

    def _digest_received(self, node: Node, message: dict[str, Any]) -> None:
        if self.digests is None:
            return
        index, digest = message.get("index"), message.get("digest")
        if isinstance(index, int) and isinstance(digest, str):
            answer = self.digests.compare(node.id, index, digest)
            if answer is not None and not message.get("answer"):
                self.send(
                    node,
                    {"type": _STATE_DIGEST, "index": index, "digest": answer, "answer": True},
                )

    def _mend_snapshot_piece(self, message: dict[str, Any]) -> None:
        message["commit_index"] = 0

    def _may_vote(self, node: Node, message: dict[str, Any]) -> bool:
        """For a joining node: only while neither it nor any candidate so far has a log (term 0)."""
        if message["last_log_term"] and not self._log_seen:
            self._log_seen = True
            log.warning(
                "raft_joining candidate=%s: this node does not have the log yet and votes for"
                " nobody; a leader must be elected without it",
                node.id,
            )
        return not self._log_seen and not self._journal[-1][2]

    def _holds_all_of_leader(self, acknowledgement: dict[str, Any]) -> bool:
        """Whether this log reached the end of the leader's, its no-op of this term included."""
        message = self._handled
        if message is None or "prevLogIdx" not in message or not acknowledgement["success"]:
            return False
        _, index, term = self._journal[-1]
        current: int = self._syncObj.raftCurrentTerm
        return bool(term == message["term"] == current and index >= message["commit_index"])

    def _keep_agreeing_entries(self, message: dict[str, Any]) -> bool:
        """Moves prevLogIdx behind the entries that this log holds already. False: a stale message.

        Correct only because a message always reaches to the end of its sender's log: that is why
        the batch has 64 MiB.
        """
        if "entries" not in message:
            return False  # a piece of one entry above the batch's size: a member never sends it
        journal = self._journal
        entries, previous_index = message["entries"], message["prevLogIdx"]
        _, last_index, last_term = journal[-1]
        if last_term == message["term"] and previous_index + len(entries) < last_index:
            return False
        position = previous_index - journal[0][1]
        if not 0 <= position < len(journal) or journal[position][2] != message["prevLogTerm"]:
            return True  # pysyncobj asks for earlier entries
        ours = journal[position + 1 :]
        agreeing = 0
        for (_, _, our_term), (_, _, their_term) in zip(ours, entries, strict=False):
            if our_term != their_term:
                break
            agreeing += 1
        if agreeing:
            message["prevLogIdx"] = previous_index + agreeing
            message["prevLogTerm"] = entries[agreeing - 1][2]
            message["entries"] = entries[agreeing:]
        return True

    def send(self, node: Node, message: Any) -> bool:
        journal = self._journal
        if message["type"] == "append_entries":
            message["sent"] = float(pysyncobj.syncobj.monotonicTime())
        if message["type"] == "next_node_idx":
            if self._handled is not None and "sent" in self._handled:
                message["sent"] = self._handled["sent"]
            message["term"] = self._syncObj.raftCurrentTerm
            if journal.joining and self._holds_all_of_leader(message):
                journal.join()
        if message["type"] in _NEEDS_DURABLE_LOG:
            journal.sync()
        return bool(super().send(node, message))
