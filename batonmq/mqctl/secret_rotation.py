"""`mqctl secure rotate --secrets`: the secrets that nodes share are replaced while nodes run."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from batonmq.auth.config import CREDENTIALS_FILE, read_node_user
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.output import GOOD, still_lacking
from batonmq.mqctl.target import data_of
from batonmq.runtime.durable_file import replace_file
from batonmq.runtime.followed_files import changed_ms
from batonmq.runtime.secret_file import (
    SecretFileError,
    Secrets,
    passwords_text,
    read_passwords,
    read_private,
)
from batonmq.runtime.tls import TlsState

KEYS: Final = {"auth": CREDENTIALS_FILE, "controller": "raftPasswordFile"}
"""Section of a server's file -> its key for a file of secrets."""
DONE: Final = {
    "next": "a new secret is believed, and not used yet",
    "former": "the new secret is used, and the former one still believed",
    "done": "only the new secret counts",
}


def advance(path: Path, wanted: str = "") -> str:
    """Takes one of the three steps (`secret_file`) and says which: a key of DONE. `wanted`: only
    this one; nothing is changed where the file is there already. Raises SecretFileError and
    OSError."""
    # A file that is replaced belongs to who replaces it: its owner could not read it any more.
    if path.stat().st_uid != os.geteuid():
        raise SecretFileError(path, "it belongs to another user, who has to rotate it")
    # The two kinds tell themselves apart: a password of Raft is no JSON.
    if read_private(path).lstrip().startswith(b"{"):
        node = read_node_user(path)
        before = node.secrets
        text = msgspec.json.encode(node.with_secrets(secrets := before.step())) + b"\n"
    else:
        before = read_passwords(path)
        text = passwords_text(secrets := before.step()).encode("latin-1")
    now, then = _step_of(before), _step_of(secrets)
    if wanted == now:
        return now
    if wanted not in ("", then):
        raise SecretFileError(path, f"it is at step {now}, and {then} is next, not {wanted}")
    replace_file(path, text, mode=0o600)
    return then


def _step_of(secrets: Secrets) -> str:
    return "next" if secrets.next else "former" if secrets.former else "done"


async def rotate_secrets(
    context: CommandContext, file: Path | None, step: str, within_s: float
) -> None:
    """One step of `file`, the next one where `step` is ""; without `file` all steps of all files of
    the local cluster, whose processes say what they have taken. Raises CommandFailed."""
    steps: list[dict[str, str]] = []

    def take_step(path: Path) -> str:
        taken = advance(path, step)
        steps.append({"file": str(path), "step": taken})
        context.out.say(f"{path}: {DONE[taken]}", GOOD)
        return taken

    with disk_failures("secrets"):
        if file is not None:
            more = "" if take_step(file) == "done" else ", then the same command"
            context.out.say(f"  next: copy it to every server{more}")
        else:
            for path, key in sorted(_local_files(context).items()):
                await _wait_file_taken(context, path, key, within_s)  # of an interrupted run
                while take_step(path) != "done":
                    await _wait_file_taken(context, path, key, within_s)
                await _wait_file_taken(context, path, key, within_s)
    context.out.wrote_json(steps)


def _local_files(context: CommandContext) -> dict[Path, str]:
    """The files that the processes of the local cluster name, each with its key."""
    import yaml  # of the extra `server`, which a host with a local cluster has

    local = context.target.local
    if local is None or context.target.by_hint:
        raise click.UsageError("which file? give FILE")
    found: dict[Path, str] = {}
    for config in sorted((data_of(local.path) / "conf").glob("*.yaml")):
        try:
            sections = yaml.safe_load(config.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError):
            raise CommandFailed(f"{config}: is not YAML: which secrets?") from None
        for section, key in KEYS.items():
            if name := (sections.get(section) or {}).get(key):
                found[Path(name).expanduser()] = key
    if not found:
        raise CommandFailed("no process of this cluster has a file of secrets")
    return found


async def _wait_file_taken(context: CommandContext, path: Path, key: str, within_s: float) -> None:
    local = context.target.local
    assert local is not None
    # Controllers are in the name servers; brokers know no password of Raft.
    brokers = [address for _, address in local.brokers] if key == CREDENTIALS_FILE else []
    written_ms = changed_ms([str(path)])
    await wait_taken(
        context,
        [*local.name_servers, *brokers],
        lambda state: state.taken.get(key) == written_ms,
        str(path),
        within_s,
    )


async def wait_taken(
    context: CommandContext,
    addresses: Sequence[str],
    has_taken: Callable[[TlsState], bool],
    what: str,
    within_s: float,
) -> None:
    """Raises CommandFailed if a process has not taken the files in time: after the next step its
    requests would be refused."""

    async def lacking() -> str:
        for address in addresses:
            async with context.admin() as admin:  # it dials with the files as they are
                state = await admin.cluster.tls(address)
            if not has_taken(state):
                return f"{address} has not taken {what} {state.refusal}".rstrip()
        return ""

    if lacks := await still_lacking(lacking, within_s, "waiting"):
        raise CommandFailed(f"{lacks}; then the same command continues")
