"""MendedTransport: plain values only, and pysyncobj's faults B and F mended.

The node under it is a stand-in; what counts is which messages reach it, and in what shape.
"""

import errno
import math
import pickle
import socket
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pysyncobj.pickle
import pysyncobj.syncobj
import pysyncobj.tcp_server
import pysyncobj.transport
import pytest
from failing_disk import failing
from pysyncobj.node import TCPNode
from pysyncobj.poller import POLL_EVENT_TYPE
from raft_files import fatal

from batonmq.controller.raft import messages
from batonmq.controller.raft.messages import MendedTransport
from batonmq.controller.raft.node import _Node
from batonmq.controller.raft.transport import (
    GuardedConnection,
    GuardedTransport,
    install,
    restricted_loads,
)
from batonmq.runtime.clock import boot_s
from tests.shared.ports import free_ports

PEER, OTHER = TCPNode("127.0.0.1:2"), TCPNode("127.0.0.1:3")


class FakeJournal(list[tuple[bytes, int, int]]):
    """Entries (command, index, term); counts how often it was made durable."""

    syncs = 0
    size_bytes = 0
    joining = False
    joins = False
    has_commands = True
    snapshot_index = 1
    failure = ""

    def join(self) -> None:
        self.joining = False

    def sync(self) -> bool:
        self.syncs += 1
        return True


class Harness:
    """A transport that was never started, over a log of (command, index, term)."""

    def __init__(self, log: list[tuple[bytes, int, int]] | None = None, term: int = 2) -> None:
        self.journal = FakeJournal(log or [(b"", 1, 0)])
        self.transport: Any = MendedTransport.__new__(MendedTransport)
        self.received: list[dict[str, Any]] = []
        self.transport._syncObj = SimpleNamespace(
            encryptor=None,
            raftCurrentTerm=term,
            raftLastApplied=1,
            _isLeader=lambda: False,
            _SyncObj__raftLog=self.journal,
            _SyncObj__lastResponseTime={},
            _SyncObj__conf=SimpleNamespace(leaderFallbackTimeout=0.3),
            _SyncObj__connectedNodes={PEER},
            _SyncObj__transferInProgress=False,
            _SyncObj__generateRaftTimeout=lambda: 1.0,
        )
        self.transport._connections = {}
        self.transport._onMessageReceivedCallback = lambda _, message: self.received.append(message)

    def receive(self, message: Any, node: TCPNode = PEER) -> list[dict[str, Any]]:
        self.received.clear()
        self.transport._onMessageReceived(node, message)
        return self.received


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_utility_messages_are_never_registered():
    """`status` tells strangers, the others change the cluster."""
    transport: Any = GuardedTransport.__new__(GuardedTransport)
    transport._onUtilityMessageCallbacks = {}
    for name in ("status", "add", "remove", "set_version", "transfer"):
        transport.setOnUtilityMessageCallback(name, lambda *_: None)
    assert transport._onUtilityMessageCallbacks == {}


def test_only_rafts_messages_pass(harness):
    forwarded = {"type": "apply_command", "command": b"past the gate"}
    for message in (["x"], {"no": "type"}, None, forwarded):
        assert harness.receive(message) == []
    assert harness.receive({"type": "response_vote", "term": 2}) != []
    assert harness.receive({"type": "timeout_now", "term": 2}) != []


def test_a_joining_node_takes_over_from_nobody(harness):
    harness.journal.joining = True
    assert harness.receive({"type": "timeout_now", "term": 2}) == []


def test_fault_f_acknowledgements_carry_the_term():
    harness = Harness(term=5)
    acknowledgement = {"type": "next_node_idx", "next_node_idx": 7, "reset": False, "success": True}
    harness.transport.send(PEER, acknowledgement)
    assert acknowledgement["term"] == 5
    assert harness.receive(dict(acknowledgement)) != []
    assert harness.receive({**acknowledgement, "term": 4}) == []
    assert harness.receive({k: v for k, v in acknowledgement.items() if k != "term"}) == []


def test_r8_an_answer_counts_as_of_its_question(monkeypatch):
    """A leader that was stopped finds old answers in its sockets; they may not keep it leading."""
    monkeypatch.setattr(pysyncobj.syncobj, "monotonicTime", lambda: 100.0)
    leader, follower = Harness(), Harness()
    question = append((1, 0))
    leader.transport.send(PEER, question)
    assert question["sent"] == 100.0
    monkeypatch.setattr(pysyncobj.syncobj, "monotonicTime", lambda: 110.0)
    answer = {"type": "next_node_idx", "next_node_idx": 2, "reset": False, "success": True}
    follower.transport._onMessageReceivedCallback = lambda *_: follower.transport.send(PEER, answer)
    follower.transport._onMessageReceived(PEER, question)
    assert answer["sent"] == 100.0
    heard = leader.transport._syncObj._SyncObj__lastResponseTime

    def heard_at(now: float, before: float, message: dict[str, Any]) -> float:
        heard[PEER] = before
        leader.transport._onMessageReceivedCallback = lambda *_: heard.update({PEER: now})
        leader.transport._onMessageReceived(PEER, message)
        return float(heard[PEER])

    assert heard_at(now=130.0, before=90.0, message=answer) == 100.0
    assert heard_at(now=130.0, before=120.0, message=answer) == 120.0, "answers overtake none"
    assert heard_at(now=130.0, before=90.0, message={**answer, "sent": 999.0}) == 130.0
    without = {key: value for key, value in answer.items() if key != "sent"}
    assert heard_at(now=130.0, before=90.0, message=without) == 90.0


def test_r8_an_old_answer_never_counts_as_new_to_another_thread():
    """The core notes it as of now, before that is corrected. The loop may ask just then."""
    leader = Harness()
    heard = leader.transport._syncObj._SyncObj__lastResponseTime
    heard[PEER] = 90.0
    node: Any = object.__new__(_Node)
    node._SyncObj__otherNodes = {PEER, OTHER}
    node._SyncObj__transport = leader.transport
    node._SyncObj__lastResponseTime = heard
    seen: list[bool] = []

    def core_takes(*_: object) -> None:
        heard[PEER] = 130.0
        seen.append(node.majority_answered_since(129.0))

    leader.transport._onMessageReceivedCallback = core_takes
    answer = {"type": "next_node_idx", "term": 2, "sent": 100.0, "success": True}
    leader.transport._onMessageReceived(PEER, answer)
    assert seen == [False]
    assert node.majority_answered_since(99.0) and not node.majority_answered_since(100.0)


# What a tick and a broken link do, at a core that only counts.


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The Raft clock, in seconds; connections are left alone."""
    made = SimpleNamespace(s=100.0)
    monkeypatch.setattr(pysyncobj.syncobj, "monotonicTime", lambda: made.s)
    monkeypatch.setattr(pysyncobj.transport.TCPTransport, "_onTick", lambda self: None)
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TCPNode, Any]]:
    """What the transport sends, in turn."""
    found: list[tuple[TCPNode, Any]] = []

    def send(_: object, node: TCPNode, message: Any) -> bool:
        found.append((node, message))
        return True

    monkeypatch.setattr(pysyncobj.transport.TCPTransport, "send", send)
    return found


def counting(harness: Harness, **core: Any) -> list[str]:
    """What the transport makes its core do."""
    done: list[str] = []
    vars(harness.transport._syncObj).update(
        forceLogCompaction=lambda: done.append("compacts"),
        transferLeadership=lambda node: done.append(f"offers it to {node}"),
        _isLeader=lambda: True,
        _SyncObj__raftElectionDeadline=200.0,
        **core,
    )
    return done


def test_the_lead_is_offered_at_each_tick_of_its_time_and_not_longer(now, harness):
    """Else it would go to the next follower that is complete, long after nobody asks for it."""
    done = counting(harness)
    harness.transport.hand_over(1.0, PEER.id)
    for now.s in (100.0, 100.9, 101.0, 160.0):
        harness.transport._onTick()
    assert done == [f"offers it to {PEER.id}"] * 2


def test_a_journal_that_stays_large_is_not_compacted_at_every_tick(now, harness):
    """Nodes that are far behind, or large entries, may keep it so."""
    done, limit = counting(harness), messages.COMPACT_AFTER_BYTES
    sizes = [limit, limit + 1, limit + 1, 2 * limit + 1, 2 * limit + 2, 1, limit + 1]
    told = []
    for size in sizes:
        harness.journal.size_bytes = size
        harness.transport._onTick()
        told.append(len(done))
    assert told == [0, 1, 1, 1, 2, 2, 3]
    harness.transport.snapshot_due = True
    for _ in range(2):
        harness.transport._onTick()
    assert len(done) == 4, "also where one is asked for"


def test_r50_a_report_goes_once_and_to_another_leader(now, sent, harness):
    core = harness.transport._syncObj
    core.selfNode, harness.transport.hearing = TCPNode("127.0.0.1:1"), (7, ())
    for leader in (None, core.selfNode, PEER, PEER):
        core._getLeader = lambda leader=leader: leader
        harness.transport._onTick()
    assert sent == [(PEER, {"type": "hearing", "index": 7, "unheard": ()})]


def test_a_digest_is_answered_and_an_answer_is_not(sent, harness):
    harness.transport.digests = SimpleNamespace(compare=lambda peer, index, digest: "ours")
    message = {"type": "digest", "index": 7, "digest": "theirs"}
    for answer in ({}, {"answer": True}):
        harness.receive(message | answer)
    assert sent == [(PEER, {**message, "digest": "ours", "answer": True})]


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        ({}, True),
        ({"joining": True}, False),
        ({"_SyncObj__raftState": 2}, False),
        ({"_getLeader": lambda: OTHER}, False),
    ],
    ids=["a follower", "joining", "a leader", "of another leader"],
)
def test_only_a_follower_with_its_whole_log_stands_when_its_leaders_link_breaks(
    harness, change, stands, now
):
    """One that joins could win over the node that holds what it acknowledged before."""
    harness.journal.joining = change.pop("joining", False)
    core: dict[str, Any] = {
        "_SyncObj__raftState": 0,
        "_getLeader": lambda: PEER,
        "selfNode": TCPNode("127.0.0.1:1"),
        "otherNodes": {PEER, OTHER},
    }
    counting(harness, **(core | change))
    harness.transport.connection_broke(PEER)
    deadline = harness.transport._syncObj._SyncObj__raftElectionDeadline
    assert deadline == (100.0 if stands else 200.0)


def vote_question(last_index: int, last_term: int) -> dict[str, Any]:
    return {
        "type": "request_vote",
        "term": 2,
        "last_log_index": last_index,
        "last_log_term": last_term,
    }


def pre_vote_question(last_index: int, last_term: int, *, blank: bool = False) -> dict[str, Any]:
    question = {**vote_question(last_index, last_term), "type": "pre_vote", "round": 4}
    return question | {"blank": blank}


def test_r51_a_node_agrees_if_it_would_vote_at_the_latest_when_its_leader_is_lost(now, sent):
    harness = Harness(LOG)
    answer = {"type": "pre_vote_answer", "round": 4, "term": 2, "joining": False}
    harness.receive(pre_vote_question(4, 2))
    assert sent == [(PEER, answer)]
    sent.clear()
    harness.receive(pre_vote_question(3, 2))
    harness.receive(append((4, 2)), OTHER)
    harness.receive(pre_vote_question(4, 2))
    assert sent == []
    harness.transport._syncObj._SyncObj__raftState = 2
    harness.transport.connection_broke(OTHER)
    assert sent == [(PEER, answer)]
    for message in (append((4, 2)), pre_vote_question(4, 2), append((4, 2))):
        harness.receive(message, PEER if message["type"] == "pre_vote" else OTHER)
    harness.transport.connection_broke(OTHER)
    assert len(sent) == 1, "it was heard after the question"


def test_r53_a_joining_node_says_so_to_a_candidate_with_a_log(now, sent):
    harness = Harness([(b"\x01", 1, 0)])
    harness.journal.joining = True
    harness.receive(pre_vote_question(1, 0))
    harness.receive(pre_vote_question(2, 1, blank=True))
    assert [answer["joining"] for _, answer in sent] == [False, True]
    harness.receive(pre_vote_question(2, 1))
    assert len(sent) == 2


def test_r53_a_full_disk_takes_part_in_no_election(now, sent, harness, monkeypatch):
    harness.transport._nodes = set()
    monkeypatch.setattr(harness.journal, "sync", lambda: False)
    harness.transport._onTick()
    requests = vote_question(1, 0), {"type": "timeout_now", "term": 2}
    assert not any(harness.receive(each) for each in requests)
    harness.receive(pre_vote_question(1, 0))
    assert sent == [] and not harness.transport.may_stand()
    monkeypatch.setattr(harness.journal, "sync", lambda: True)
    now.s += 1
    harness.transport._onTick()
    assert all(harness.receive(each) for each in requests)


def test_r51_a_leader_gives_up_to_a_higher_term_and_never_goes_back(harness):
    done: list[int] = []
    core = harness.transport._syncObj
    counting(harness, _SyncObj__setState=done.append, _SyncObj__raftLeader=None)
    core._SyncObj__setCurrentTerm = lambda term, _: done.append(term)
    for term in (1, 2, 3):
        harness.receive({"type": "higher_term", "term": term})
    assert done == [3, 0]


def test_r53_a_leader_whose_disk_is_full_resigns_and_tries_it_again_later(
    now, harness, monkeypatch
):
    attempts: list[None] = []
    states: list[int] = []
    counting(harness, _SyncObj__raftLeader=PEER, _SyncObj__setState=states.append)
    monkeypatch.setattr(harness.journal, "sync", lambda: attempts.append(None))
    for now.s in (100.0, 100.1, 100.2):
        harness.transport._onTick()
    assert len(attempts) == len(states) == 2 and not any(states)
    answer = {"type": "next_node_idx", "term": 2, "next_node_idx": 2, "success": True}
    assert harness.receive(answer) == [], "its entries are on no majority"
    assert harness.transport._syncObj._SyncObj__raftLeader is None


def test_a_joining_node_votes_only_where_nobody_has_a_log(now, harness):
    """Its folder was lost; beside a candidate with a log it may be the voter that makes forgotten
    what it acknowledged before. Once it heard of such a log, it elects no empty node either."""
    harness.journal.joining = True
    assert harness.receive(vote_question(1, 0)) != [], "the first election of a new cluster"
    assert harness.receive(vote_question(9, 1)) == []
    assert harness.receive(vote_question(1, 0)) == []
    harness.transport._onTick()
    assert harness.transport._syncObj._SyncObj__raftElectionDeadline == math.inf
    harness.journal.joining = False
    assert harness.receive(vote_question(9, 1)) != []


def test_r51_who_hears_its_leader_votes_for_its_heir_only(now, harness):
    harness.receive(append((1, 0)))
    question = {**vote_question(9, 2), "term": 3}
    assert harness.receive(question, OTHER) == []
    assert harness.receive({**question, "hand_over": True}, OTHER) != []
    now.s += 0.4
    assert harness.receive(question, OTHER) != []


def test_r51_a_leader_votes_once_no_majority_answers_it_or_it_offers_the_lead(now, harness):
    counting(harness)
    core, harness.transport._nodes = harness.transport._syncObj, {PEER, OTHER}
    core._SyncObj__lastResponseTime = {PEER: 99.8, OTHER: 90.0}
    question = {**vote_question(9, 2), "term": 3}
    assert harness.receive(question) == []
    now.s += 0.2
    assert harness.receive(question) != []
    now.s = 100.0
    harness.transport.hand_over(1.0)
    assert harness.receive(question) != []


def test_r51_answers_to_the_newest_question_begin_a_term_above_theirs(now, harness):
    terms: list[int] = []
    transport, core = harness.transport, harness.transport._syncObj
    core._SyncObj__setCurrentTerm = lambda term, _: terms.append(term)
    transport._nodes = {PEER, OTHER}
    answer = {"type": "pre_vote_answer", "round": 1, "term": 7, "joining": False}
    harness.receive(answer)
    assert not transport.may_stand() and not transport.may_stand()
    harness.receive(answer)
    assert not transport.may_stand() and core._SyncObj__raftElectionDeadline == 101.0
    harness.receive({**answer, "round": 3})
    assert core._SyncObj__raftElectionDeadline == 0.0 and terms == [7]
    assert transport.may_stand()
    question = vote_question(1, 0)
    transport.send(PEER, question)
    # Or a member whose folder was lost would count: see `pre_vote`.
    assert not question["blank"] and not question["unanimous"]
    assert not transport.may_stand(), "one term only"


def test_r51_an_heir_asks_nobody_and_a_node_apart_begins_no_term(now, sent, harness):
    transport, core = harness.transport, harness.transport._syncObj
    transport._nodes, core._SyncObj__connectedNodes = {PEER, OTHER}, set()
    assert not transport.may_stand()
    core._SyncObj__connectedNodes, core._SyncObj__transferInProgress = {PEER}, True
    assert transport.may_stand() and sent == []
    transport.send(PEER, vote_question(1, 0))
    assert sent[0][1]["hand_over"]


@pytest.mark.parametrize("agreed", [True, False])
def test_r51_a_leader_that_is_heard_again_ends_a_candidacy(now, harness, agreed):
    transport, core = harness.transport, harness.transport._syncObj
    transport._nodes = {PEER, OTHER}
    assert not transport.may_stand()
    answer = {"type": "pre_vote_answer", "round": 1, "term": 2, "joining": False}
    for message in (answer, append((1, 0))) if agreed else (append((1, 0)), answer):
        harness.receive(message)
    assert not transport.may_stand() and core._SyncObj__raftElectionDeadline == 101.0


def test_a_joining_node_with_half_a_log_votes_for_nobody_and_never_stands(now):
    harness = Harness([(b"", 8, 1), (b"", 9, 1)])
    harness.journal.joining = True
    harness.transport._onTick()
    assert harness.transport._syncObj._SyncObj__raftElectionDeadline == math.inf
    assert harness.receive(vote_question(1, 0)) == []
    assert harness.receive(vote_question(9, 1)) == []


def test_a_joining_node_has_joined_when_it_holds_all_that_its_leader_had():
    harness = Harness(LOG)
    harness.journal.joining = True
    acknowledgement = {"type": "next_node_idx", "next_node_idx": 5, "reset": False, "success": True}

    def acknowledge(message: dict[str, Any], **changed: Any) -> bool:
        harness.transport._onMessageReceivedCallback = lambda *_: harness.transport.send(
            PEER, {**acknowledgement, **changed}
        )
        harness.transport._onMessageReceived(PEER, message)
        return not harness.journal.joining

    assert not acknowledge({"type": "append_entries", "term": 2, "serialized": None})
    assert not acknowledge({**append((4, 2)), "commit_index": 5}), "the leader has more"
    assert not acknowledge(append((4, 2)), success=False)
    assert acknowledge(append((4, 2)))
    earlier = Harness(LOG, term=3)
    earlier.journal.joining = True
    harness = earlier
    assert not acknowledge({**append((4, 2)), "term": 3}), "nothing of this leader's term yet"


@pytest.mark.parametrize(("unanimous", "own"), [(True, b"\x01"), (False, b"\x01"), (True, b"x")])
def test_r53_a_joining_node_votes_in_a_first_start_if_all_agree(unanimous, own):
    """And neither log has a command: so nothing can have been acknowledged."""
    harness = Harness([(own, 1, 0)])
    harness.journal.joining = True
    question = {**vote_question(2, 1), "blank": True, "unanimous": unanimous}
    assert bool(harness.receive(question)) == (unanimous and own == b"\x01")


@pytest.mark.parametrize("kind", ["request_vote", "response_vote", "next_node_idx"])
def test_nothing_that_speaks_of_the_log_leaves_before_it_is_durable(harness, kind, monkeypatch):
    synced_at_send: list[int] = []
    monkeypatch.setattr(
        pysyncobj.transport.TCPTransport,
        "send",
        lambda *_: synced_at_send.append(harness.journal.syncs),
    )
    harness.transport.send(PEER, {"type": kind, "term": 2})
    harness.transport.send(PEER, {"type": "append_entries", "term": 2, "entries": []})
    assert synced_at_send == [1, 1], "once before it left; a leader's own entries may follow later"


def test_r53_a_leader_that_just_joined_stores_that_before_it_sends(harness, sent, monkeypatch):
    """Or a kill would leave a quorum that never elects."""
    harness.journal.joins = True
    assert harness.transport.send(PEER, append((1, 0))) and harness.journal.syncs == 1
    monkeypatch.setattr(harness.journal, "sync", lambda: False)
    assert not harness.transport.send(PEER, append((1, 0))) and len(sent) == 1


LOG = [(b"", 1, 0), (b"a", 2, 1), (b"b", 3, 2), (b"c", 4, 2)]


def append(previous: tuple[int, int], *entries: tuple[bytes, int, int]) -> dict[str, Any]:
    return {
        "type": "append_entries",
        "term": 2,
        "commit_index": 1,
        "prevLogIdx": previous[0],
        "prevLogTerm": previous[1],
        "entries": list(entries),
    }


def test_fault_b_entries_that_agree_are_not_truncated():
    """A leader that went back sends again what this log holds: only the new part gets through."""
    (seen,) = Harness(LOG).receive(append((1, 0), *LOG[1:], (b"d", 5, 2)))
    assert (seen["prevLogIdx"], seen["prevLogTerm"]) == (4, 2)
    assert seen["entries"] == [(b"d", 5, 2)]


def test_fault_b_a_late_message_cuts_nothing_off():
    """Of the same term, ending before this log does: it was sent before what came already."""
    harness = Harness(LOG)
    assert harness.receive(append((2, 1), (b"b", 3, 2))) == []
    assert harness.receive(append((2, 1))) == []


def test_entries_that_differ_are_left_to_raft():
    """This log ends with entries of term 1 that nobody else has; term 2 replaces them."""
    log = [(b"", 1, 0), (b"a", 2, 1), (b"old", 3, 1), (b"old", 4, 1)]
    (seen,) = Harness(log).receive(append((1, 0), (b"a", 2, 1), (b"b", 3, 2)))
    assert (seen["prevLogIdx"], seen["prevLogTerm"]) == (2, 1)
    assert seen["entries"] == [(b"b", 3, 2)]


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (append((3, 1), (b"", 4, 2)), "entries that the leader does not have"),
        (append((8, 1), (b"", 9, 2)), "differs after entry 8, and this node applied"),
    ],
)
@pytest.mark.parametrize("disk", ["room * ENOSPC", "rename * EIO"])
def test_r53_who_has_more_in_its_snapshot_than_the_leader_begins_again(
    tmp_path, message, what, disk
):
    harness = Harness([(b"", 8, 1), (b"", 9, 1)])
    journal: Any = harness.journal
    journal.snapshot_index = harness.transport._syncObj.raftLastApplied = 9
    journal.folder, journal.on_fatal = tmp_path / "raft", fatal
    journal.folder.mkdir()
    is_moved = disk.startswith("room")
    end = "the next start fetches the log again" if is_moved else "cannot move"
    with failing(disk), pytest.raises(AssertionError, match=f"{what}.*{end}"):
        harness.receive(message)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("raft.diverged-") == is_moved


def test_unknown_predecessor_is_left_to_raft():
    harness = Harness(LOG)
    for message in (append((9, 2), (b"x", 10, 2)), append((2, 7), (b"b", 3, 2), (b"c", 4, 2))):
        before = dict(message)
        assert harness.receive(message) == [before]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_restricted_loads_refuses_code_in_every_protocol(protocol):
    """Protocol 2 names `__builtin__`, later ones `builtins`: the sender chooses."""
    for value in (print, eval, getattr, SimpleNamespace(), pickle.Unpickler, ValueError()):
        with pytest.raises(pickle.UnpicklingError):
            restricted_loads(pickle.dumps(value, protocol=protocol))
    plain = {"a": [1, 2.5, None, True], "b": (b"\xff", b"", "é"), "c": 2**70}
    assert restricted_loads(pickle.dumps(plain, protocol=protocol)) == plain


@pytest.mark.parametrize("name", ["eval", "exec", "print", "open", "__import__", "getattr", "type"])
@pytest.mark.parametrize("module", ["builtins", "__builtin__", "os", "posix", "codecs"])
def test_no_name_but_those_of_bytes_is_found(module, name):
    for opcode in (
        f"c{module}\n{name}\n(S'1'\ntR.".encode(),
        b"\x80\x04\x8c%c%b\x8c%c%b\x93." % (len(module), module.encode(), len(name), name.encode()),
    ):
        with pytest.raises(pickle.UnpicklingError, match="is not allowed"):
            restricted_loads(opcode)


def test_install_puts_the_plain_reader_in_place(monkeypatch):
    for module, name in (
        (pysyncobj.pickle, "loads"),
        (pysyncobj.pickle, "load"),
        (pysyncobj.syncobj, "Serializer"),
        (pysyncobj.syncobj, "createJournal"),
        (pysyncobj.syncobj, "getEncryptor"),
        (pysyncobj.syncobj, "monotonicTime"),
        (pysyncobj.transport, "TcpConnection"),
        (pysyncobj.tcp_server, "TcpConnection"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    install()
    assert pysyncobj.pickle.loads is restricted_loads
    assert pysyncobj.transport.TcpConnection is pysyncobj.tcp_server.TcpConnection
    assert pysyncobj.tcp_server.TcpConnection is GuardedConnection
    assert pysyncobj.syncobj.monotonicTime is boot_s
    journal, snapshots = object(), object()
    assert pysyncobj.syncobj.createJournal(journal) is journal
    assert pysyncobj.syncobj.Serializer("name", 1, False, snapshots, None, None) is snapshots
    with pytest.raises(pickle.UnpicklingError):
        pysyncobj.pickle.load(None)


def test_r58_a_raft_port_that_cannot_accept_for_a_moment_listens_again():
    """Without a descriptor for what it accepts, pysyncobj closes the port."""
    transport: Any = GuardedTransport.__new__(GuardedTransport)
    conf = SimpleNamespace(bindRetryTime=0.0, maxBindRetries=10)
    transport.__dict__.update(
        _ready=True,
        _selfIsReadonlyNode=False,
        _lastBindAttemptTime=0.0,
        _bindAttempts=0,
        _bindOverEvent=threading.Event(),
        _syncObj=SimpleNamespace(conf=conf),
    )
    port = free_ports(1)
    server: Any = pysyncobj.tcp_server.TcpServer(Mock(), "127.0.0.1", port, Mock())
    transport._server = server
    server.bind()
    listening, server._TcpServer__socket = server._TcpServer__socket, Mock()
    server._TcpServer__socket.accept.side_effect = OSError(errno.EMFILE, "no descriptor")
    server._TcpServer__onNewConnection(0, POLL_EVENT_TYPE.READ)
    listening.close()
    transport._maybeBind()
    socket.create_connection(("127.0.0.1", port)).close()
    server.unbind()


def test_a_member_is_away_since_its_connection_broke_and_not_since_the_last_dial(monkeypatch):
    monkeypatch.setattr(pysyncobj.transport.TCPTransport, "_onDisconnected", lambda *_: None)
    transport: Any = GuardedTransport.__new__(GuardedTransport)
    dialled = Mock()
    transport.__dict__.update(
        _connections={PEER: dialled},
        _apart_since={PEER: 1.0},
        _nonces={},
        _greeted={},
        _syncObj=Mock(isNodeConnected=lambda node: False),
    )
    transport._onDisconnected(dialled)
    assert transport._apart_since == {PEER: 1.0}


def test_addresses_are_read_as_before_pysyncobj_was_imported():
    """psutil shows connections by it; pysyncobj leaves one that raises."""
    assert socket.inet_ntop(socket.AF_INET6, bytes(15) + b"\x01") == "::1"
