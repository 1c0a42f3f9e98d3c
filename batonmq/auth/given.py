"""Reads the user that signs a client's requests, from its keys or a file that has them, and the
files by which it connects with TLS. No error shows a secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from batonmq.auth.signature import Credentials
    from batonmq.runtime.tls import ClientTls

FILE_VARIABLE: Final = "BATONMQ_CREDENTIALS"
KEY_VARIABLES: Final = {
    "accessKey": "BATONMQ_ACCESS_KEY",
    "secretKey": "BATONMQ_SECRET_KEY",
    "securityToken": "BATONMQ_SECURITY_TOKEN",
}
TLS_VARIABLES: Final = {"trust": "BATONMQ_TLS_TRUST", "cert": "BATONMQ_TLS_CERT"}
_NULLS: Final = ("", "~", "null")


def credentials_of(environ: Mapping[str, str]) -> Credentials | None:
    """The user that the environment names: its keys by themselves, or a file that has them. Raises
    ValueError."""
    keys = {key: environ[name] for key, name in KEY_VARIABLES.items() if environ.get(name)}
    if keys:
        return made_of(keys, " and ".join(list(KEY_VARIABLES.values())[:2]))
    file = environ.get(FILE_VARIABLE)
    return credentials_in(Path(file)) if file else None


def credentials_in(file: Path) -> Credentials:
    """The user in a file as mqadmin's `conf/tools.yml`: YAML with accessKey, secretKey and maybe
    securityToken. Raises ValueError, which never shows what is in the file."""
    import yaml

    try:
        # Only this loader keeps `0123`, `yes` and `1e3` as the texts that they are.
        found = yaml.load(file.read_text(), yaml.BaseLoader)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError):
        raise ValueError(f"{file} is not YAML") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} has no accessKey and secretKey")
    keys = {key: value for key in KEY_VARIABLES if isinstance(value := found.get(key), str)}
    return made_of({key: value for key, value in keys.items() if value not in _NULLS}, file)


def environment_of(user: Credentials) -> dict[str, str]:
    """What `credentials_of` reads as this user."""
    values = (user.access_key, user.secret_key, user.security_token)
    return dict(zip(KEY_VARIABLES.values(), values, strict=True))


def made_of(keys: Mapping[str, str], where: object) -> Credentials:
    """`keys`: those of KEY_VARIABLES; `where` they are from. Raises ValueError if one is
    missing."""
    from batonmq.auth.signature import Credentials  # commands that ask nothing load nothing

    try:
        return Credentials(
            access_key=keys.get("accessKey", ""),
            secret_key=keys.get("secretKey", ""),
            security_token=keys.get("securityToken", ""),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def tls_of(files: Mapping[str, str]) -> ClientTls | None:
    """`trust`: the authority, None without it; `cert`: certificate and key of this user, if servers
    ask for one. Paths of PEM files."""
    if not files.get("trust"):
        return None
    from batonmq.runtime.tls import ClientTls

    cert = files.get("cert", "")
    return ClientTls(trust_cert_path=files["trust"], cert_path=cert, key_path=cert)


def tls_environment(tls: ClientTls) -> dict[str, str]:
    """What `tls_in_environment` reads as these files."""
    values = (tls.trust_cert_path, tls.cert_path)
    return dict(zip(TLS_VARIABLES.values(), values, strict=True))


def tls_in_environment(environ: Mapping[str, str]) -> ClientTls | None:
    return tls_of({key: environ.get(name, "") for key, name in TLS_VARIABLES.items()})
