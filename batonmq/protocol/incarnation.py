"""The name of a broker process (its incarnation), the owner of its id, and the secrets that prove
them.

Incarnations are public. An incarnation is the hash of a secret, and a request in the name of a
process counts only with that secret (R59). The secret is sent only to the configured controllers,
which compare and forget it. Incarnations of earlier versions are random, have another form and
prove nothing. An id belongs to a data folder: its owner is the hash of a secret that stays in the
folder over restarts.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

_FORM: Final = re.compile(r"h1-[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ProcessName:
    """`secret`: "" if `incarnation` has the earlier form. `requests`: the prefix of its request
    ids; as secret, because controllers answer a repeated id with the first outcome."""

    incarnation: str
    secret: str = field(default="", repr=False)
    requests: str = field(default="", repr=False)


def new_process_name() -> ProcessName:
    secret = secrets.token_hex(32)
    return ProcessName(incarnation_of(secret), secret, _hash("requests", secret))


def incarnation_of(secret: str) -> str:
    return "h1-" + _hash("incarnation", secret)


def owner_of(folder_secret: str) -> str:
    """The owner for a secret; "" without one."""
    return "o1-" + _hash("owner", folder_secret) if folder_secret else ""


def owns(owner: str, folder_secret: str) -> bool:
    """Whether the secret proves this owner."""
    return hmac.compare_digest(owner_of(folder_secret).encode(), owner.encode())


def is_hash(incarnation: str) -> bool:
    """Whether this incarnation counts only with its secret."""
    return _FORM.fullmatch(incarnation) is not None


def is_proven(incarnation: str, secret: str) -> bool:
    """Whether a request with this secret may act for that process."""
    if not is_hash(incarnation):
        return True
    return hmac.compare_digest(incarnation_of(secret).encode(), incarnation.encode())


def _hash(purpose: str, secret: str) -> str:
    return hashlib.sha256(f"{purpose}:{secret}".encode()).hexdigest()[:32]
