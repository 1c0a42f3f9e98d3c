"""What stands between pysyncobj and the network: members only, and two of its faults mended.

- *Members only.* The stock transport takes utility commands that change the cluster, read-only
  nodes, and anything that unpickles. Here a connection must name a configured peer, the only
  utility message is `status`, and unpickling yields plain values.
- *Snapshot under way.* A follower that is fed a snapshot commits its own, never verified log up to
  the leader's commit index, and reports commands as done that no one else holds. Those messages
  reach it with commit index 0.
- *Late acknowledgements* carry no term, so one from an earlier leadership would count in this one.
  They are stamped with the sender's term and dropped when it differs.
- *Entries that agree* are truncated and added again, though they may be acknowledged and applied,
  and a late message that ends sooner cuts them off. What this log already holds is taken out of
  the message; a message of the same term that ends before this log does is older than it.
- *Durable first.* No vote, no question for one and no acknowledgement leaves before the journal is
  on disk. A leader syncs its own entries right after it sent them, so the disks work side by side.
- *Joining nodes* (see `journal`) make nobody leader: they could outvote the one node that still
  holds what they acknowledged before their folder was lost. Nodes that all begin empty may elect
  one of them; beside a log that they do not have, they wait for a leader elected without them.

The hooks stand on pysyncobj 0.3.17's own names; `tests/controller/test_raft_node.py` pins both.
"""

import io
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any, Final

import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj.node import Node
from pysyncobj.tcp_connection import TcpConnection
from pysyncobj.transport import TCPTransport

from controller.raft import resolver
from controller.raft.journal import DurableJournal

__all__ = ["GuardedTransport", "install", "restricted_loads"]

log = logging.getLogger(__name__)

# Not `timeout_now`, and not `apply_command`, by which a node that just lost the lead hands its
# queue to the next leader: commands enter the log only where a gate let them through.
_RAFT_MESSAGES: Final = frozenset(
    {
        "request_vote",
        "response_vote",
        "append_entries",
        "next_node_idx",
    }
)

_SPEAK_OF_LOG: Final = frozenset({"request_vote", "response_vote", "next_node_idx"})


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles str, bytes, numbers, None and containers of them, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # Protocol 2 writes bytes as _codecs.encode(text, "latin1"), and empty bytes as bytes().
        if (module_name, global_name) == ("_codecs", "encode"):
            return _encode_latin1
        if global_name == "bytes" and module_name in ("__builtin__", "builtins"):
            return bytes
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding} is not allowed")
    return text.encode("latin1")


def restricted_loads(data: bytes) -> Any:
    """Reads a pickle of plain values. Raises UnpicklingError for a pickle that names code."""
    return _PlainUnpickler(io.BytesIO(data)).load()


def _refuse_load(file: object) -> Any:
    raise pickle.UnpicklingError("snapshots are not pickles here")


def _configured_journal(journal: object) -> object:
    return journal


def _configured_snapshots(_name: object, _batch: int, _fork: bool, snapshots: Any, *_: Any) -> Any:
    return snapshots


def install() -> None:
    """Puts the plain unpickler, resolver, journal and snapshots in pysyncobj's place. Idempotent.

    From then on the settings `journalFile` and `serializer` are the objects themselves, opened by
    the node that they belong to: several nodes may live in one process.
    """
    pysyncobj.pickle.loads = restricted_loads
    pysyncobj.pickle.load = _refuse_load
    resolver.install()
    pysyncobj.syncobj.createJournal = _configured_journal
    pysyncobj.syncobj.Serializer = _configured_snapshots


class GuardedTransport(TCPTransport):  # type: ignore[misc]
    """pysyncobj's TCP transport for a fixed set of peers."""

    _log_seen = False
    """Whether another node had a log when this one, joining, had none."""
    _handled: dict[str, Any] | None = None
    """The message being handled."""

    @property
    def _journal(self) -> DurableJournal:
        journal: DurableJournal = self._syncObj._SyncObj__raftLog
        return journal

    def _onTick(self) -> None:
        super()._onTick()
        journal = self._journal
        if journal.joining and (self._log_seen or journal[-1][2]):
            self._syncObj._SyncObj__raftElectionDeadline = math.inf
        journal.sync()

    def setOnUtilityMessageCallback(
        self, message: str, callback: Callable[..., None] | None
    ) -> None:
        """Keeps `status`; those that add, remove or re-version nodes are never registered."""
        if message == "status":
            super().setOnUtilityMessageCallback(message, callback)

    def _onIncomingMessageReceived(self, conn: TcpConnection, message: Any) -> None:
        if self._syncObj.encryptor and not conn.sendRandKey:
            super()._onIncomingMessageReceived(conn, message)  # the key exchange comes first
        elif (isinstance(message, list) and message[:1] == ["status"]) or (
            isinstance(message, str) and message in self._nodeAddrToNode
        ):
            super()._onIncomingMessageReceived(conn, message)
        else:
            self._unknownConnections.discard(conn)
            conn.disconnect()

    def _onMessageReceived(self, node: Node, message: Any) -> None:
        if not isinstance(message, dict):
            return
        kind = message.get("type")
        if kind not in _RAFT_MESSAGES:
            return
        if kind == "next_node_idx" and message.get("term") != self._syncObj.raftCurrentTerm:
            return
        if kind == "request_vote" and self._journal.joining and not self._may_vote(node, message):
            return
        if kind == "append_entries" and "prevLogIdx" not in message:
            message["commit_index"] = 0
        elif kind == "append_entries" and not self._keep_agreeing_entries(message):
            return
        self._handled = message
        super()._onMessageReceived(node, message)
        self._handled = None

    def _may_vote(self, node: Node, message: dict[str, Any]) -> bool:
        """For a joining node: only while neither it nor anyone it heard of has a log (term 0)."""
        if message["last_log_term"] and not self._log_seen:
            self._log_seen = True
            log.warning(
                "raft_joining candidate=%s: this node has not got the log yet and votes for nobody;"
                " a leader must be elected without it",
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

        Exact only because a message always reaches to the end of its sender's log, which is what
        the 64 MiB batch is for.
        """
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
        if message["type"] == "next_node_idx":
            message["term"] = self._syncObj.raftCurrentTerm
            if journal.joining and self._holds_all_of_leader(message):
                journal.join()
        if message["type"] in _SPEAK_OF_LOG:
            journal.sync()
        return bool(super().send(node, message))
