"""How two nodes meet: each names its cluster and the members it knows, and they must agree.

Membership is static: every node reads the same list at its start. Two nodes with different lists
would count different majorities, and could elect two leaders; so they refuse each other, and each
says which two lists there are.

A greeting is JSON, not a pickle: it is read before anything is known of who sent it.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from controller.config import Peer

__all__ = ["Greeting", "Membership", "decode_greeting"]

_VERSION: Final = 1


class Greeting(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The first word of each side. `echo` is the `nonce` of what it answers, empty in the first.

    A third one, whose `echo` proves that the dialling side is there now and not a recording, ends
    the greeting.
    """

    version: int = _VERSION
    address: str
    cluster: str
    members: tuple[str, ...]
    nonce: str
    echo: str = ""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def decode_greeting(data: bytes) -> Greeting:
    """Raises ValueError for what is no greeting of this version."""
    greeting = msgspec.json.decode(data, type=Greeting)
    if greeting.version != _VERSION:
        raise ValueError(f"a greeting of version {greeting.version}, this node speaks {_VERSION}")
    if len(greeting.nonce) != 64 or not all(c in "0123456789abcdef" for c in greeting.nonce):
        raise ValueError("a greeting without a random number")
    return greeting


@dataclass(frozen=True, slots=True)
class Membership:
    """The cluster's name and its members as `id@host:raftPort`, sorted."""

    cluster: str
    members: tuple[str, ...]

    @classmethod
    def of(cls, cluster: str, peers: tuple[Peer, ...]) -> "Membership":
        return cls(cluster, tuple(sorted(f"{p.node_id}@{p.raft_address}" for p in peers)))

    def difference(self, greeting: Greeting) -> str:
        """Why the two may not form a quorum; empty if they agree."""
        if greeting.cluster != self.cluster:
            return f"it belongs to cluster {greeting.cluster!r}, this node to {self.cluster!r}"
        theirs = tuple(sorted(greeting.members))
        if theirs != self.members:
            return (
                f"it knows the members {', '.join(theirs)}, this node knows"
                f" {', '.join(self.members)}: controllerDLegerPeers must be the same everywhere"
            )
        return ""
