"""What seals the frames of the Raft port: Fernet under the passwords of `raftPasswordFile`."""

import base64
import hashlib
from pathlib import Path

from cryptography.fernet import Fernet, MultiFernet

from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.secret_file import read_passwords


def read_cipher(path: Path) -> MultiFernet:
    """Fernet (AES-128-CBC, HMAC-SHA256) under the passwords of the file: seals with the first,
    opens with each. Raises SecretFileError."""
    secrets = read_passwords(path)
    return MultiFernet([_fernet(each) for each in (secrets.used, secrets.other) if each])


def _fernet(password: str) -> Fernet:
    # A prefix of its own: the same password elsewhere gives no key of this port. No slow hash: the
    # password is a random one, as `batonmq raftPassword` makes it.
    key = hashlib.sha256(b"BatonMQ Raft port\0" + password.encode("latin-1")).digest()
    return Fernet(base64.urlsafe_b64encode(key))


class Cipher:
    """Replaces pysyncobj's encryptor and its key derivation. A new password counts for the next
    frame, also of an open connection."""

    def __init__(self, password: FollowedFiles[MultiFernet]) -> None:
        self._password = password

    def encrypt(self, plain: bytes) -> bytes:
        return self._password.value.encrypt(plain)

    def decrypt(self, sealed: bytes) -> bytes:
        return self._password.value.decrypt(sealed)
