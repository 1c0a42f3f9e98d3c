"""The members of a controller group, and how two nodes check that they agree on them.

Membership is static: each node reads the list at its start. Nodes with different lists would count
different majorities and could elect two leaders. Two checks prevent that:

- On each connection both sides send a `Greeting` with their cluster and members, and refuse each
  other if these differ.
- A node's folder keeps the ids of the members for whom its log was written (`check_members`).
  Without that, a node that starts on its old folder with a shorter list (a template, a default, a
  typo) could be a majority by itself. Addresses may change: the greeting checks who answers there.

The folder also keeps the random name of its log (`keep_log`), and greetings have it: clusters often
have the same name and member ids, and a folder of another one could have the newest term, lead, and
replace the log of all.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from batonmq.controller.config import Peer
from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk
from batonmq.runtime.durable_file import remove_file, replace_file

log = logging.getLogger(__name__)

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
    log: str = ""
    """The name of the sender's log; "" if it has none yet, and from earlier versions."""

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


@dataclass(slots=True)
class Membership:
    """What a node puts into its greetings: the cluster's name, the members as `id@host:raftPort`,
    sorted, the newest version of the rules that it knows, and the name of its log, once it has one
    (`keep_log`)."""

    cluster: str
    members: tuple[str, ...]
    rules: int = 0
    log: str = ""

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
        if greeting.log and self.log and greeting.log != self.log:
            return (
                f"its log is {greeting.log}, that of this node {self.log}: one of the folders is"
                " of another group of controllers. Move that one aside, and start its node again"
            )
        return ""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.partition("@")[0] for member in self.members)


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
    log: str = ""

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
    """Compares the kept ids with the configured ones; stores them in a folder that has none. Sets
    the name of the log, if the folder knows it.

    Raises MembersChangedError; BatonError for a file that cannot be read; OSError.
    """
    path = folder / _FILE_NAME
    configured = _KeptMembers(membership.cluster, membership.ids)
    change = folder / _CHANGE_NAME
    if not path.exists():
        if change.exists():
            kept = _read(change)
            # By one id only: then each majority of the new list has a member of each majority of
            # the old one, which knows what was committed.
            if kept.cluster != configured.cluster or len({*kept.ids} ^ {*configured.ids}) > 1:
                raise MembersChangedError(change, kept, configured)
            configured = msgspec.structs.replace(configured, log=kept.log)
            membership.log = kept.log
        # In this order: a crash in between leaves both, and then the new list counts.
        replace_file(path, msgspec.json.encode(configured))
        remove_file(change)
        return
    kept = _read(path)
    if (kept.cluster, kept.ids) != (configured.cluster, configured.ids):
        raise MembersChangedError(path, kept, configured)
    membership.log = kept.log


def keep_log(folder: Path, membership: Membership, name: str) -> None:
    """Stores the log's name, once. If the disk refuses that, the next call tries again."""
    if membership.log or not name:
        return
    kept = _KeptMembers(membership.cluster, membership.ids, name)
    try:
        replace_file(folder / _FILE_NAME, msgspec.json.encode(kept))
    except OSError as error:
        log.warning("raft_log_name_not_kept reason=%r", disk.described(error))
    else:
        membership.log = name


def _read(path: Path) -> _KeptMembers:
    try:
        return msgspec.json.decode(disk.read_bytes(path), type=_KeptMembers)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatonError(f"{path}: no list of members: {error}") from error
