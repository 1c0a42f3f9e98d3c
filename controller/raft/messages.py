"""The messages between two cores: pysyncobj's, with its faults corrected, and some additions.

Corrected:
- *Snapshot under way.* While a follower receives a snapshot, pysyncobj commits the follower's own
  log, which may differ, up to the leader's commit index. Such messages get commit index 0.
- *Late acknowledgements* carry no term in pysyncobj, so one of an earlier leadership would count.
  They get the sender's term and are dropped if it differs.
- *Old answers* wait in a socket while a leader is stopped, and would keep it leading when it wakes.
  Each answer repeats when its question was sent, and counts as of that time (R8).
- *Entries that agree* would be cut and added again, though they may be acknowledged and applied;
  and a late message that ends earlier would cut entries behind it. Entries that this log has
  already are taken out of the message. A message of the same term that ends before this log is an
  old one.
- *Durable first.* No vote, no request for a vote and no acknowledgement leaves before the journal
  is on disk. While the disk is full none of these messages leaves, a leader gives up the lead, and
  the node does not become a candidate (R53).
- *Applied entries are never cut.* If a leader's log lacks an entry that this node applied, disks
  were lost. This node ends, and the next start builds its state again.

Added:
- *Pre-vote*, see `pre_vote`. With it a node with a higher term cannot force an election, so it
  sends its term to the leader.
- *Joining nodes* (see `journal`) make no node leader: they could outvote the node that still has
  what they acknowledged before their folder was lost. Nodes that all begin empty may elect one of
  them.
- *Handing over.* A leader that stops asks a follower with its whole log to become a candidate.
- *Election order*, see `ElectionOrder`.
- *Digests* of states, see `log.DigestWatch`.
- *Reports* of what a follower hears, see `liveness.hearing`. Earlier versions ignore them.

Uses names of pysyncobj 0.3.17; `tests/controller/test_raft_node.py` pins both.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import pysyncobj.syncobj
from pysyncobj.node import Node

from batonmq.controller.raft.election_messages import (
    HIGHER_TERM,
    PRE_VOTE,
    PRE_VOTE_ANSWER,
    ElectionTransport,
)
from batonmq.controller.raft.journal import end_aside
from batonmq.controller.raft.log import DigestWatch, Heard

# Not `apply_command`, by which a node that just lost the lead sends its queue to the next leader: a
# command enters the log only at a node whose gate is open.
_RAFT_MESSAGES: Final = frozenset(
    {"request_vote", "response_vote", "append_entries", "next_node_idx", "timeout_now"}
)
# Not `state_digest`: versions that send that name compare it with states of other rules too.
_STATE_DIGEST: Final = "digest"
_HEARING: Final = "hearing"

_NEEDS_DURABLE_LOG: Final = frozenset({"request_vote", "response_vote", "next_node_idx"})

COMPACT_AFTER_BYTES: Final = 8 << 20
"""A journal of this size is compacted, however few entries it has: one message must hold the whole
log."""


class MendedTransport(ElectionTransport):
    """Between core and connections. `digests` may be None, for a core without a state machine."""

    digests: DigestWatch | None = None
    _handled: dict[str, Any] | None = None
    """The message being handled."""
    hearing: tuple[int, tuple[Heard, ...]] | None = None
    """The newest report for the leader. Any thread may set it; it is sent once."""
    on_hearing: Callable[[str, int, frozenset[Heard]], None] | None = None
    """Gets (address, index, unheard) of another node's report, in the tick thread."""
    answered_s: Mapping[Node, float] = MappingProxyType({})
    """When this leader sent each node the question that it answered last. Any thread may read it,
    unlike the core's own table, which says "now" while the core handles an old answer (R8)."""
    announced: Mapping[str, int] = MappingProxyType({})
    """The newest rules that each connected member knows, by its address. Any thread may read it."""
    snapshot_due = False
    """Whether the log is to be shortened by a snapshot at the next tick."""
    _compact_above = COMPACT_AFTER_BYTES

    def _onTick(self) -> None:
        super()._onTick()
        journal = self._journal
        # A joining node becomes no candidate once there is a log in the quorum: see `_may_vote`.
        if journal.joining and (self._log_seen or journal[-1][2]):
            self._syncObj._SyncObj__raftElectionDeadline = math.inf
        # A leader syncs its own entries here, after it sent them: the disks work in parallel.
        self._sync()
        self._handle_kept_requests()
        if self._hand_over_until and not self._syncObj._isLeader():
            self._hand_over_until = 0.0  # the lead moved; a later one of this node is not offered
        elif self._hand_over_until > pysyncobj.syncobj.monotonicTime():
            # At every tick: pysyncobj does nothing until a follower has acknowledged the whole log.
            self._syncObj.transferLeadership(self._hand_over_to)
        if self.snapshot_due:
            self.snapshot_due = False
            self._syncObj.forceLogCompaction()
        elif journal.size_bytes > self._compact_above:
            # The entries that stay may be large: the next time it must have grown as much again.
            self._syncObj.forceLogCompaction()
            self._compact_above = journal.size_bytes + COMPACT_AFTER_BYTES
        elif journal.size_bytes < COMPACT_AFTER_BYTES:
            self._compact_above = COMPACT_AFTER_BYTES
        self._compare_digests()
        self._report_hearing()

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
        if kind in _RAFT_MESSAGES:
            self._raft_message_received(node, message)
        elif kind == _HEARING:
            self._hearing_received(node, message)
        elif kind == _STATE_DIGEST:
            self._digest_received(node, message)
        elif kind == PRE_VOTE:
            self._pre_vote_asked(node, message)
        elif kind == PRE_VOTE_ANSWER:
            self._pre_vote_answered(node, message)
        elif kind == HIGHER_TERM and self._syncObj._isLeader():
            self._higher_term(message["term"])

    def _raft_message_received(self, node: Node, message: dict[str, Any]) -> None:
        kind, term = message["type"], self._syncObj.raftCurrentTerm
        if kind == "next_node_idx" and (message.get("term") != term or not self._sync()):
            return  # a leader that cannot store its own entries must count no majority
        if kind == "request_vote" and not self._takes_request(node, message):
            return
        if kind == "timeout_now" and (self._journal.joining or self.disk_is_full):
            return
        if kind == "append_entries" and message["term"] < term:
            self.send(node, {"type": HIGHER_TERM, "term": term})
            return
        if kind == "append_entries" and not self._takes_entries(node, message):
            return
        self._handled = message
        answered = self._syncObj._SyncObj__lastResponseTime
        answered_before = answered.get(node)
        super()._onMessageReceived(node, message)
        self._handled = None
        if kind == "next_node_idx" and answered_before is not None and node in answered:
            self._count_as_of_question(node, message.get("sent"), answered_before)

    def _takes_entries(self, node: Node, message: dict[str, Any]) -> bool:
        """Whether a leader's message is passed to the core; corrects it."""
        self._leadership.hear(node.id, pysyncobj.syncobj.monotonicTime())
        self._kept_requests.clear()
        if self._pre_vote is not None:
            self._pre_vote.cancel()
            self._may_stand_once = False
        if "prevLogIdx" not in message:
            self._mend_snapshot_piece(message)
            return True
        if not self._keep_agreeing_entries(message):
            return False
        self._refuse_to_cut_applied(message)
        return True

    def _refuse_to_cut_applied(self, message: dict[str, Any]) -> None:
        """Ends this node if the message would make it cut entries that it applied."""
        previous_index, journal = message["prevLogIdx"], self._journal
        if previous_index is None:
            return
        snapshot_index = max(journal.snapshot_index, journal[0][1])
        if previous_index < journal[0][1]:
            if previous_index + len(message["entries"]) < snapshot_index:
                end_aside(journal, "its snapshot holds entries that the leader does not have")
            return
        position = previous_index - journal[0][1]
        if position >= len(journal) - 1 or journal[position][2] != message["prevLogTerm"]:
            return
        applied: int = self._syncObj.raftLastApplied
        if previous_index >= applied:
            return
        what = (
            f"the leader's log ends or differs after entry {previous_index}, and this node applied"
            f" the entries up to {applied}: another controller lost its disk or has an old one"
        )
        if previous_index < snapshot_index:
            end_aside(journal, what)
        journal.on_fatal(what + "; the next start builds the state again")

    def _count_as_of_question(self, node: Node, sent: object, answered_before: float) -> None:
        answered = self._syncObj._SyncObj__lastResponseTime
        asked = sent if isinstance(sent, float) else answered_before
        answered[node] = min(answered[node], max(asked, answered_before))
        self.answered_s = answered.copy()

    def _digest_received(self, node: Node, message: dict[str, Any]) -> None:
        if self.digests is None:
            return
        index, digest = message.get("index"), message.get("digest")
        if isinstance(index, int) and isinstance(digest, str):
            answer = self.digests.compare(node.id, index, digest)
            if answer is not None and not message.get("answer"):
                self.send(
                    node, {"type": _STATE_DIGEST, "index": index, "digest": answer, "answer": True}
                )

    def _mend_snapshot_piece(self, message: dict[str, Any]) -> None:
        # The follower's own log is not compared with the leader's while it gets a snapshot.
        message["commit_index"] = 0

    def _holds_all_of_leader(self, acknowledgement: dict[str, Any]) -> bool:
        """Whether this log has reached the end of the leader's, with its first entry of this
        term."""
        message = self._handled
        if message is None or "prevLogIdx" not in message or not acknowledgement["success"]:
            return False
        _, index, term = self._journal[-1]
        current: int = self._syncObj.raftCurrentTerm
        return bool(term == message["term"] == current and index >= message["commit_index"])

    def _keep_agreeing_entries(self, message: dict[str, Any]) -> bool:
        """Takes the entries that this log already has out of the message (it moves prevLogIdx).
        False: the message is an old one.

        Correct only because a message always reaches to the end of its sender's log: that is why a
        batch may have 64 MiB.
        """
        if "entries" not in message:
            return False  # a piece of an entry above the size of a batch: no member sends that
        journal = self._journal
        entries, previous_index = message["entries"], message["prevLogIdx"]
        _, last_index, last_term = journal[-1]
        if previous_index is None:
            return True  # the leader has no entry where this log ends
        # Of this leader, and it ends earlier: it was sent before what this log has.
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
            # R53: a joining node that became leader stores that it has joined before it sends
            # anything, or a kill would leave a quorum that never elects.
            if journal.joins and not self._sync():
                return False
        if message["type"] == "request_vote":
            message.update(self._flags or {})
        if message["type"] == "next_node_idx":
            if self._handled is not None and "sent" in self._handled:
                message["sent"] = self._handled["sent"]
            message["term"] = self._syncObj.raftCurrentTerm
            if journal.joining and self._holds_all_of_leader(message):
                journal.join()
        if message["type"] in _NEEDS_DURABLE_LOG and not self._sync():
            return False
        return bool(super().send(node, message))
