"""The members that a node's folder was written under: another list on the same log is refused.

A majority is counted among the members that a node was told. Started with fewer of them on its old
folder (a template, a default, a typo), a node could be a majority by itself and lead beside the
others, with the same epochs. So the ids are kept in `folder/members`. Addresses may change: whoever
answers there must name the same list in its greeting.
"""

from pathlib import Path
from typing import Final

import msgspec

from controller.raft.greeting import Membership
from epoch.durable_file import replace_file
from protocol.errors import BatonError

__all__ = ["MembersChangedError", "check_members"]

_NAME: Final = "members"


class MembersChangedError(BatonError):
    """The folder belongs to a quorum of other members."""

    def __init__(self, path: Path, kept: "Members", told: "Members") -> None:
        super().__init__(path, kept, told)
        self.path, self.kept, self.told = path, kept, told

    def __str__(self) -> str:
        return (
            f"{self.path}: this node's log was written in a quorum of {self.kept}, now it is told"
            f" of {self.told}: two majorities could lead at once. If the members are meant to"
            " change, stop all controllers, delete this file on each that keeps its folder, and"
            " start them all with the same controllerDLegerPeers"
        )


class Members(msgspec.Struct, frozen=True):
    cluster: str
    ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.ids)} (cluster {self.cluster!r})"


def check_members(folder: Path, membership: Membership) -> None:
    """Compares, and keeps the list of a folder that has none yet.

    Raises MembersChangedError; BatonError for a file that cannot be read; OSError.
    """
    path = folder / _NAME
    told = Members(membership.cluster, tuple(m.partition("@")[0] for m in membership.members))
    if not path.exists():
        replace_file(path, msgspec.json.encode(told))
        return
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Members)
    except msgspec.MsgspecError as error:
        raise BatonError(f"{path}: no list of members: {error}") from error
    if kept != told:
        raise MembersChangedError(path, kept, told)
