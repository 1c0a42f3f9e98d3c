"""Errors that stop the start of a broker in controller mode."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import BatonError


class IdentityError(BatonError):
    """The identity kept on disk is not the one that the configuration describes, or is unreadable.

    `file` names it, `found` and `configured` are the two sides, `advice` says what can be done.
    """

    def __init__(self, file: Path, found: str, configured: str, advice: str) -> None:
        super().__init__(str(file), found, configured, advice)
        self.file = file
        self.found = found
        self.configured = configured
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.file}: holds {self.found}, configured is {self.configured}: {self.advice}"


class RoleFileError(BatonError):
    """The file of the highest accepted masterEpoch cannot be read (R2): going on could feed a
    master of the past, so the broker does not start."""

    def __init__(self, file: Path, what: str) -> None:
        super().__init__(str(file), what)
        self.file = file
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.what}; it holds the highest masterEpoch that this replica "
            f"accepted. Restore it, or empty this replica's data folder and let it copy its master"
        )
