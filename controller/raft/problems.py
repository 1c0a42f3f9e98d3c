"""`RaftProblems`: what is wrong between this node and the others; `DigestWatch`: whether all nodes
that applied the same entries hold the same state.

From time to time, if something was applied since, the leader sends the digest of its state and the
index of the last entry in it. A node that is at that index, or was there a moment ago, compares and
answers with its own digest. Both sides report a difference. It must never happen and no command
repairs it: an operator has to empty the folder of the node that is wrong.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

log = logging.getLogger(__name__)

_STRANGER_PAUSE_S: Final = 10.0
_DIGEST_INTERVAL_S: Final = 5.0
_KEPT_STATES: Final = 16


class RaftProblems:
    """One text for each subject. Written by the tick thread; any thread may read `texts`."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._stranger_logged_s = -_STRANGER_PAUSE_S
        self._strangers_not_logged = 0

    def note(self, subject: str, text: str, level: int = logging.ERROR) -> None:
        """Keeps the text, and logs it if it is new."""
        if self._texts.get(subject) != text:
            self._texts[subject] = text
            log.log(level, "raft_problem subject=%s what=%r", subject, text)

    def note_missing(self, subject: str, text: str) -> None:
        """`note`, unless a problem of the subject is known already."""
        if subject not in self._texts:
            self.note(subject, text, logging.WARNING)

    def clear(self, subject: str) -> None:
        if self._texts.pop(subject, None) is not None:
            log.info("raft_problem_over subject=%s", subject)

    def stranger(self, address: str, why: str, now_s: float) -> None:
        """Logs a refused connection of no known member, at most once in 10 s. No problem of this
        node: anyone may dial its port."""
        if now_s - self._stranger_logged_s < _STRANGER_PAUSE_S:
            self._strangers_not_logged += 1
            return
        log.warning(
            "raft_stranger address=%s why=%r not_logged=%d",
            address,
            why,
            self._strangers_not_logged,
        )
        self._stranger_logged_s, self._strangers_not_logged = now_s, 0

    def texts(self) -> dict[str, str]:
        """Subject -> what is wrong, ordered by subject."""
        return dict(sorted(self._texts.copy().items()))


class Digested(Protocol):
    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The newest digest taken here; index 0: none yet."""

    index: int = 0
    digest: str = ""


class DigestWatch:
    """Used by the tick thread, which passes the time in; any thread may read `report`."""

    def __init__(self, problems: RaftProblems) -> None:
        self._problems = problems
        self._states: deque[tuple[int, Digested]] = deque(maxlen=_KEPT_STATES)
        self._waiting: dict[str, tuple[int, str]] = {}
        self._next_s = 0.0
        self.report = DigestReport()

    def applied(self, index: int, state: Digested) -> None:
        """States are values: one that is kept never changes."""
        self._states.append((index, state))
        for peer, (at, digest) in list(self._waiting.items()):
            if at <= index:
                del self._waiting[peer]
                if at == index:
                    self.compare(peer, at, digest)

    def restored(self, index: int, state: Digested) -> None:
        """A snapshot replaced the state: earlier states do not count any more."""
        self._states.clear()
        self.applied(index, state)

    def due(self, now_s: float) -> tuple[int, str] | None:
        """(index, digest) to send to the others, None if it is not time."""
        if now_s < self._next_s or not self._states or self._states[-1][0] == self.report.index:
            return None
        self._next_s = now_s + _DIGEST_INTERVAL_S
        return self._states[-1][0], self._digest(*self._states[-1])

    def compare(self, peer: str, index: int, digest: str) -> str | None:
        """Compares the peer's digest; the own one at that index, None if this node has no state of
        that index (yet)."""
        state = next((kept for at, kept in self._states if at == index), None)
        if state is None:
            if not self._states or index > self._states[-1][0]:
                self._waiting[peer] = (index, digest)
            return None
        own = self._digest(index, state)
        subject = f"state of {peer}"
        if own == digest:
            self._problems.clear(subject)
        else:
            self._problems.note(
                subject,
                f"differs from this node's after entry {index}: {digest[:16]}, here {own[:16]};"
                " empty the folder of the node that is wrong while all others are healthy",
            )
        return own

    def _digest(self, index: int, state: Digested) -> str:
        if self.report.index != index:
            self.report = DigestReport(index, state.digest())
        return self.report.digest
