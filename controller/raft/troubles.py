"""What is unwell between this node and the others: said once in the log, and kept for who asks."""

import logging
from typing import Final

__all__ = ["Troubles"]

log = logging.getLogger(__name__)

_STRANGER_PAUSE_S: Final = 10.0


class Troubles:
    """One text for each subject. Written by the tick thread; `texts` may be read by any."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._said_s = -_STRANGER_PAUSE_S
        self._unsaid = 0

    def note(self, subject: str, text: str, level: int = logging.ERROR) -> None:
        """Says it when it is new, or another than before."""
        if self._texts.get(subject) != text:
            self._texts[subject] = text
            log.log(level, "raft_trouble subject=%s what=%r", subject, text)

    def note_missing(self, subject: str, text: str) -> None:
        """`note`, unless more than that is known already."""
        if subject not in self._texts:
            self.note(subject, text, logging.WARNING)

    def clear(self, subject: str) -> None:
        if self._texts.pop(subject, None) is not None:
            log.info("raft_trouble_over subject=%s", subject)

    def stranger(self, address: str, why: str, now_s: float) -> None:
        """A connection that was cut off. Said, but no trouble: who knocks is not our doing."""
        if now_s - self._said_s < _STRANGER_PAUSE_S:
            self._unsaid += 1
            return
        log.warning("raft_stranger address=%s why=%r unsaid_before=%d", address, why, self._unsaid)
        self._said_s, self._unsaid = now_s, 0

    def texts(self) -> dict[str, str]:
        """Subject -> what is wrong, in order."""
        return dict(sorted(self._texts.copy().items()))
