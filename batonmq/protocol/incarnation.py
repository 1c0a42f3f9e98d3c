"""The name of a broker process, its incarnation, the owner of its id, and the secrets that prove
them.

Views, routes and histories show incarnations, so everybody knows them. A request in the name of a
process counts only with the secret whose hash the incarnation is (R59). The secret goes to the
controllers that are configured, and nowhere else: they compare it and drop it. Incarnations of
earlier versions are random; they have another form, and nothing proves them.

An id belongs to the data folder to which it was given. Its owner is the hash of a secret that stays
there over restarts, so the next process is known to be the same replica's, whatever controllers
have heard of the one before.
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
    """`secret` is empty where `incarnation` has the form of earlier versions.

    `requests` begins the ids of its requests. It is as secret: controllers answer a repeated id
    with the outcome of the first one.
    """

    incarnation: str
    secret: str = field(default="", repr=False)
    requests: str = field(default="", repr=False)


def new_process_name() -> ProcessName:
    secret = secrets.token_hex(32)
    return ProcessName(incarnation_of(secret), secret, _hash("requests", secret))


def incarnation_of(secret: str) -> str:
    return "h1-" + _hash("incarnation", secret)


def owner_of(folder_secret: str) -> str:
    """ "" without a secret."""
    return "o1-" + _hash("owner", folder_secret) if folder_secret else ""


def owns(owner: str, folder_secret: str) -> bool:
    """Whether that secret proves this owner."""
    return hmac.compare_digest(owner_of(folder_secret).encode(), owner.encode())


def is_hash(incarnation: str) -> bool:
    """Whether it counts only with its secret."""
    return _FORM.fullmatch(incarnation) is not None


def is_proven(incarnation: str, secret: str) -> bool:
    """Whether a request with this secret may act in the name of that process."""
    if not is_hash(incarnation):
        return True
    return hmac.compare_digest(incarnation_of(secret).encode(), incarnation.encode())


def _hash(purpose: str, secret: str) -> str:
    return hashlib.sha256(f"{purpose}:{secret}".encode()).hexdigest()[:32]
