"""The members of a controller group, and how two nodes check that they agree on them.

Membership is static: each node reads the list at its start. Nodes with different lists would count
different majorities and could elect two leaders. Two checks prevent that:

- On each connection both sides send a `Greeting` with their cluster and members, and refuse each
  other if these differ.
- A node's folder keeps the ids of the members for whom its log was written (`check_members`).
  Without that, a node that starts on its old folder with a shorter list (a template, a default, a
  typo) could be a majority by itself. Addresses may change: the greeting checks who answers there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from batonmq.controller.config import Peer
from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk
from batonmq.runtime.durable_file import remove_file, replace_file

_VERSION: Final = 1
_FILE_NAME: Final = "members"
_CHANGE_NAME: Final = "members.change"
"""The name that an operator gives the file `members` to allow one id to be added or removed."""


class Greeting(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The first message of each side. JSON, not a pickle: it is read before the sender is known.

    `echo` is the `nonce` of the greeting that it answers, empty in the first one. The dialling side
    sends a third one: its `echo` proves that its first one was not a recording.
    """

    version: int = _VERSION
    address: str
    cluster: str
    members: tuple[str, ...]
    nonce: str
    echo: str = ""
    pre_vote: bool = False
    """Whether the sender answers pre-votes; earlier versions neither do nor send this."""
    rules: int = 0
    """The newest version of the rules that the sender knows; earlier versions do not send this."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def decode_greeting(data: bytes) -> Greeting:
    """Raises ValueError for anything but a greeting of this version."""
    greeting = msgspec.json.decode(data, type=Greeting)
    if greeting.version != _VERSION:
        raise ValueError(f"a greeting of version {greeting.version}, this node speaks {_VERSION}")
    if len(greeting.nonce) != 64 or not all(c in "0123456789abcdef" for c in greeting.nonce):
        raise ValueError("a greeting without a random number")
    return greeting


@dataclass(frozen=True, slots=True)
class Membership:
    """What a node puts into its greetings: the cluster's name, the members as `id@host:raftPort`,
    sorted, and the newest version of the rules that it knows."""

    cluster: str
    members: tuple[str, ...]
    rules: int = 0

    @classmethod
    def of(cls, cluster: str, peers: tuple[Peer, ...], rules: int = 0) -> "Membership":
        members = sorted(f"{p.node_id}@{p.raft_address}" for p in peers)
        return cls(cluster, tuple(members), rules)

    def difference(self, greeting: Greeting) -> str:
        """Why the two nodes may not form a quorum; empty if they agree."""
        if greeting.cluster != self.cluster:
            return f"it belongs to cluster {greeting.cluster!r}, this node to {self.cluster!r}"
        theirs = tuple(sorted(greeting.members))
        if theirs != self.members:
            return (
                f"its members are {', '.join(theirs)}, those of this node"
                f" {', '.join(self.members)}: controllerDLegerPeers must be the same everywhere"
            )
        return ""


def common_rules(own: int, others: Collection[int], members: int, in_force: int) -> int:
    """The newest version of the rules that all members know.

    `others`: what the connected members announced. `members`: the number of all of them.
    """
    lowest = min(own, *others) if others else own
    # While a member is away the rules do not rise: it may be of an earlier version when it returns,
    # and could not apply what was committed meanwhile.
    return lowest if 1 + len(others) >= members else min(lowest, in_force)


class _KeptMembers(msgspec.Struct, frozen=True):
    cluster: str
    ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.ids)} (cluster {self.cluster!r})"


class MembersChangedError(BatonError):
    """The folder belongs to a quorum of other members."""

    def __init__(self, path: Path, kept: _KeptMembers, configured: _KeptMembers) -> None:
        super().__init__(
            f"{path}: this node's log was written in a quorum of {kept}, now the members"
            f" are {configured}: two majorities could lead at once. If the members are meant"
            " to change, add or remove one at a time: a majority with more new ones may lack the"
            f" newest entries. Stop all controllers, rename this file to {_CHANGE_NAME} on each"
            " that keeps its folder, start them all with the same controllerDLegerPeers, and wait"
            " until mqctl health finds them well before you change the next one"
        )


def check_members(folder: Path, membership: Membership) -> None:
    """Compares the kept ids with the configured ones; stores them in a folder that has none.

    Raises MembersChangedError; BatonError for a file that cannot be read; OSError.
    """
    path = folder / _FILE_NAME
    ids = tuple(member.partition("@")[0] for member in membership.members)
    configured = _KeptMembers(membership.cluster, ids)
    change = folder / _CHANGE_NAME
    if not path.exists():
        if change.exists():
            kept = _read(change)
            # By one id only: then each majority of the new list has a member of each majority of
            # the old one, which knows what was committed.
            if kept.cluster != configured.cluster or len({*kept.ids} ^ {*ids}) > 1:
                raise MembersChangedError(change, kept, configured)
        # In this order: a crash in between leaves both, and then the new list counts.
        replace_file(path, msgspec.json.encode(configured))
        remove_file(change)
        return
    kept = _read(path)
    if kept != configured:
        raise MembersChangedError(path, kept, configured)


def _read(path: Path) -> _KeptMembers:
    try:
        return msgspec.json.decode(disk.read_bytes(path), type=_KeptMembers)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatonError(f"{path}: no list of members: {error}") from error
