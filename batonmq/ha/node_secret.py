"""How the two ends of an HA connection without TLS prove that they know the secret of the nodes
(`innerClientAuthenticationCredentials`). Pure.

Each end sends a random number, then a proof: HMAC-SHA256 of both numbers, both names, the master's
address and the end that proves. So a proof cannot be replayed, sent back to its maker, or used at
another broker. The master proves first, because its answer needs no further round trip. TLS
protects what is sent afterwards; this does not.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from batonmq.runtime.secret_file import Secrets

PROOF_BYTES: Final = 32
NONCE_BYTES: Final = 16
PROVE_MS: Final = 5_000
"""From the connection to the slave's proof (R58)."""
SWITCH: Final = (
    "a broker without the secret, of an earlier version, or of Java: haAllowUnproven lets it in"
)
_MASTER: Final = "master"
_SLAVE: Final = "slave"

Name = tuple[str, ...]
"""Of one end: cluster, group, id, and with controllers the process."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """An effect: the peer at `address` did not prove itself. `passes`: it is let in anyway."""

    address: str
    reason: str
    passes: bool


@dataclass(frozen=True, slots=True)
class NodeSecret:
    """`secrets`: those of now, since they change while the process runs. `new_nonce`: NONCE_BYTES
    random bytes. `required`: a peer without a proof is refused. `address`: where slaves connect to
    this broker. `name`: this broker's without controllers; with them each connection says it."""

    secrets: Callable[[], Secrets]
    new_nonce: Callable[[], bytes]
    required: bool
    address: str
    name: tuple[str, str, str]

    def named(self, broker_id: str) -> Name:
        """The name of another broker of this group, without controllers."""
        return (*self.name[:2], broker_id)

    def unproven(self, address: str, reason: str) -> Unproven:
        return Unproven(address, reason, passes=not self.required)


class MasterProof:
    """The master's end of one connection. `nonce` and `proof` are its answer."""

    def __init__(
        self, secret: NodeSecret, slave: Name, master: Name, slave_nonce: bytes, address: str
    ) -> None:
        self._secret = secret
        self.nonce = secret.new_nonce()
        self._text = _text(slave, master, slave_nonce, self.nonce, address)
        self.proof = _proof(secret.secrets().used, _MASTER, self._text)

    def accepts(self, proof: bytes) -> bool:
        """Whether this is the slave's proof."""
        return _fits(self._secret, _SLAVE, self._text, proof)


class SlaveProof:
    """The slave's end of one connection. `proof` is there after `accepts`."""

    def __init__(self, secret: NodeSecret, slave: Name, address: str) -> None:
        """`address`: the one that it connects to."""
        self._secret = secret
        self._slave = slave
        self._address = address
        self.nonce = secret.new_nonce()
        self.proof = b""

    def accepts(self, master: Name, nonce: bytes, proof: bytes) -> bool:
        """Whether this is the proof of `master`."""
        text = _text(self._slave, master, self.nonce, nonce, self._address)
        self.proof = _proof(self._secret.secrets().used, _SLAVE, text)
        return _fits(self._secret, _MASTER, text, proof)


def _text(
    slave: Name, master: Name, slave_nonce: bytes, master_nonce: bytes, address: str
) -> bytes:
    parts = [b"BatonMQ HA 1", slave_nonce, master_nonce, address.encode()]
    for name in (slave, master):
        # Its number of parts is said, too: no other two names give this text.
        # Half of a surrogate pair in a name is wrong, not an error here (R46).
        parts += [b"%d" % len(name), *(part.encode(errors="surrogatepass") for part in name)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _proof(secret: str, end: str, text: bytes) -> bytes:
    return hmac.digest(secret.encode(), end.encode() + b"\0" + text, "sha256")


def _fits(secret: NodeSecret, end: str, text: bytes, given: bytes) -> bool:
    known = secret.secrets()
    found = False
    for each in (known.used, known.other):
        if each:
            found |= hmac.compare_digest(given, _proof(each, end, text))
    return found
