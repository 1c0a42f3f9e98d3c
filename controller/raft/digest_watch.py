"""`DigestWatch`: nodes that applied the same entries must hold the same state, and it is checked.

Now and then, when something was applied since, the leader sends the digest of its state and the
index of the entry that made it. A node that is at that index, or was there a moment ago, compares
and answers with its own. A difference is an alarm at both: this must not happen, no command heals
it, and an operator has to empty the folder of the node that is wrong.

Pure: the tick thread tells what happens and the time. `report` may be read by any thread.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from controller.raft.troubles import Troubles

__all__ = ["DigestReport", "DigestWatch"]

INTERVAL_S: Final = 5.0
_KEPT_STATES: Final = 16


class Digested(Protocol):
    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The newest digest taken here; index 0: none yet."""

    index: int = 0
    digest: str = ""


class DigestWatch:
    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
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
                    self.heard(peer, at, digest)

    def restored(self, index: int, state: Digested) -> None:
        """A snapshot took the state's place: what was before it does not count any more."""
        self._states.clear()
        self.applied(index, state)

    def due(self, now_s: float) -> tuple[int, str] | None:
        """What to send to the others, if it is time to."""
        if now_s < self._next_s or not self._states or self._states[-1][0] == self.report.index:
            return None
        self._next_s = now_s + INTERVAL_S
        return self._states[-1][0], self._digest(*self._states[-1])

    def heard(self, peer: str, index: int, digest: str) -> str | None:
        """Compares; the own digest at that index, None if this node is not there (yet)."""
        state = next((kept for at, kept in self._states if at == index), None)
        if state is None:
            if not self._states or index > self._states[-1][0]:
                self._waiting[peer] = (index, digest)
            return None
        own = self._digest(index, state)
        subject = f"state of {peer}"
        if own == digest:
            self._troubles.clear(subject)
        else:
            self._troubles.note(
                subject,
                f"differs from this node's after entry {index}: {digest[:16]}, here {own[:16]};"
                " empty the folder of the node that is wrong while all others are healthy",
            )
        return own

    def _digest(self, index: int, state: Digested) -> str:
        if self.report.index != index:
            self.report = DigestReport(index, state.digest())
        return self.report.digest
