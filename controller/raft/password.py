"""The password of the Raft port as a key: see `settings.password_file` for the file."""

import base64
import hashlib

from cryptography.fernet import Fernet

__all__ = ["encryptor"]


def encryptor(password: bytes) -> Fernet:
    """Fernet (AES-128-CBC, HMAC-SHA256) under the password. Stands where pysyncobj stretches it."""
    key = hashlib.sha256(b"BatonMQ Raft port\0" + password).digest()
    return Fernet(base64.urlsafe_b64encode(key))
