"""Where the cluster is: what the user gave, or else the cluster that `batonmq up` runs here.

Order: options, environment (NAMESRV_ADDR, CONTROLLER_ADDR), what `mqctl contexts` keeps under the
name in BATONMQ_CONTEXT, then the `cluster.json` in BATONMQ_DATA, else in `./batonmq-data`, else the
one that `~/.batonmq/current` names; before such a cluster is whole, its `conf/cluster.json`. If the
first of these is of a cluster that has ended, that is an error: no other cluster answers for it.
Name servers given by hand are never mixed with the controllers of another cluster.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batonmq.auth.given import credentials_in, credentials_of, tls_in_environment, tls_of
from batonmq.launcher.current import current_cluster_file, hint_file, serves
from batonmq.runtime.disk import reason

if TYPE_CHECKING:
    from batonmq.auth.signature import Credentials
    from batonmq.runtime.tls import ClientTls

NAMESRV_VARIABLE = "NAMESRV_ADDR"
CONTROLLER_VARIABLE = "CONTROLLER_ADDR"
DATA_VARIABLE = "BATONMQ_DATA"
CONTEXT_VARIABLE = "BATONMQ_CONTEXT"
DEFAULT_DATA_DIR = "batonmq-data"
CONTEXT_FILES = ("trust", "cert", "credentials")


class TargetError(click.UsageError):
    """An address is wrong or cannot be found; the text says what to give."""

    def __init__(self, text: str) -> None:
        super().__init__(text, click.get_current_context(silent=True))


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """The content of `cluster.json`. `brokers`: (broker name, address)."""

    path: Path
    name_servers: tuple[str, ...]
    controllers: tuple[str, ...]
    brokers: tuple[tuple[str, str], ...]
    supervisor_pid: int
    tls: ClientTls | None = None

    @property
    def supervised(self) -> bool:
        return Path(f"/proc/{self.supervisor_pid}").exists()

    @property
    def running(self) -> bool:
        """Whether its supervisor or any of its processes runs: those that a user started by hand
        outlive it."""
        return self.supervised or any(map(serves, (data_of(self.path) / "run").glob("*.pid")))


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses as `host:port`; empty where unknown. `local`: the local cluster they are from."""

    name_servers: tuple[str, ...] = ()
    controllers: tuple[str, ...] = ()
    local: RunningCluster | None = None
    ended: Path | None = None
    """The cluster.json of a cluster that was meant and has ended."""
    by_hint: bool = False
    """`local` is only the cluster that was started last: good enough to look, not to write."""
    nothing_in: Path | None = None
    """The folder that BATONMQ_DATA names, if no cluster was ever started in it."""
    context: str = ""
    """The name of the context that the addresses are from."""
    tls: ClientTls | None = None
    """How its nodes are dialled; None: without TLS."""
    credentials: Credentials | None = None
    """The user that signs the requests; None: they are not signed."""

    def __str__(self) -> str:
        """Which cluster a command asks, for people."""
        asked = ";".join(self.name_servers or self.controllers)
        if self.context:
            return f"{self.context} ({asked})"
        return f"{data_of(self.local.path)} ({asked})" if self.local is not None else asked

    def name_servers_or_advice(self) -> tuple[str, ...]:
        """Raises TargetError that says what to give."""
        if self.name_servers:
            return self.name_servers
        raise TargetError(
            f"no name server: give -n host:port, set {NAMESRV_VARIABLE}, or start a local cluster "
            f"with `batonmq up`{self._why_none()}"
        )

    def controllers_or_advice(self) -> tuple[str, ...]:
        """Raises TargetError that says what to give."""
        if self.controllers:
            return self.controllers
        why = ""
        if self.name_servers:
            why = " (name servers do not list controllers)"
        raise TargetError(
            f"no controller: give -a host:port[;host:port] or set {CONTROLLER_VARIABLE}{why}; the "
            f"port is a controller's remoting port, such as 9878{self._why_none()}"
        )

    def _why_none(self) -> str:
        if self.ended is not None:
            return f"; {has_ended(self.ended)}"
        if self.nothing_in is not None:
            return f"; {DATA_VARIABLE} is {self.nothing_in}, and no cluster is in that folder"
        return ""


def has_ended(cluster_file: Path) -> str:
    folder = data_of(cluster_file)
    return f"the cluster of {cluster_file} has ended; `batonmq up --data {folder}` continues it"


def data_of(cluster_file: Path) -> Path:
    """The data folder of a `cluster.json`, or of a `conf/cluster.json`."""
    folder = cluster_file.parent
    return folder.parent if folder.name == "conf" else folder


def find_target(namesrv_addr: str | None, controller_addr: str | None) -> Target:
    """With TLS and the user of the environment, which come before those of the place. Raises
    TargetError for an address that is none, and for a context that is not kept."""
    found = _find_addresses(namesrv_addr, controller_addr)
    given = tls_in_environment(os.environ)
    if given is not None:
        found = replace(found, tls=given)
    try:
        user = credentials_of(os.environ)
    except ValueError as error:
        raise TargetError(str(error)) from None
    return replace(found, credentials=user) if user is not None else found


def _find_addresses(namesrv_addr: str | None, controller_addr: str | None) -> Target:
    environ = os.environ
    name_servers = addresses(namesrv_addr or environ.get(NAMESRV_VARIABLE), "-n")
    controllers = addresses(controller_addr or environ.get(CONTROLLER_VARIABLE), "-a")
    # An address that is given counts more than a name that the shell may have kept from yesterday.
    if (name := environ.get(CONTEXT_VARIABLE)) and not name_servers and not controllers:
        return _target_of_context(name)
    if name_servers and controllers:
        return Target(name_servers, controllers)
    given, chosen = bool(name_servers or controllers), environ.get(DATA_VARIABLE)
    ended: Path | None = None
    for path in _places():
        # Not whole yet: there is the plan only.
        local = read_cluster_file(path) or read_cluster_file(path.parent / "conf" / path.name)
        if local is None:
            continue
        if not local.running:
            ended = ended or path
            if given:
                continue
            break  # another cluster must not answer for it
        # Its controllers would be another cluster's.
        if name_servers and not set(name_servers) & set(local.name_servers):
            continue
        if controllers and not set(controllers) & set(local.controllers):
            continue
        return Target(
            name_servers or local.name_servers,
            controllers or local.controllers,
            local,
            tls=local.tls,
            by_hint=not given and not chosen and path.parent != Path.cwd() / DEFAULT_DATA_DIR,
        )
    nothing_in = Path.cwd() / chosen if chosen and ended is None else None
    return Target(name_servers, controllers, None, ended, nothing_in=nothing_in)


def _target_of_context(name: str) -> Target:
    known = kept_contexts()
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        raise TargetError(f"{CONTEXT_VARIABLE} is {name!r}; `mqctl contexts` keeps {names}")
    kept = known[name]
    name_servers = addresses(kept["namesrv"], "-n")
    controllers = addresses(kept["controller"], "-a")
    file = kept.get("credentials")
    try:
        user = credentials_in(Path(file)) if file else None
    except ValueError as error:
        raise TargetError(str(error)) from None
    return Target(name_servers, controllers, context=name, tls=tls_of(kept), credentials=user)


def contexts_file() -> Path | None:
    hint = hint_file()
    return hint.with_name("contexts.json") if hint is not None else None


def kept_contexts() -> dict[str, dict[str, str]]:
    """What `mqctl contexts` keeps: name -> `namesrv` and `controller`, each `host:port;host:port`
    or empty. With TLS `trust`, too, and maybe `cert`: paths of PEM files. `credentials`: path of a
    file as `credentials_in` reads. Raises TargetError for a file that cannot be used: taken for an
    empty one, the next context would replace all others."""
    file = contexts_file()
    try:
        found = json.loads(file.read_text()) if file is not None else {}
        return {
            str(name): {"namesrv": str(at["namesrv"]), "controller": str(at["controller"])}
            | {key: str(at[key]) for key in CONTEXT_FILES if at.get(key)}
            for name, at in found.items()
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TargetError(f"{file}: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{file} is not what `mqctl contexts` wrote: correct it, or move it aside"
        raise TargetError(text) from error


def addresses(text: str | None, option: str) -> tuple[str, ...]:
    """`host:port` parts of a list separated by `;` or `,`. Raises TargetError naming a bad one."""
    parts = [part.strip() for part in (text or "").replace(",", ";").split(";")]
    for part in filter(None, parts):
        host, separator, port = part.rpartition(":")
        if not (host and separator and port.isdecimal() and 0 < int(port) < 65536):
            raise TargetError(f"{option} {part!r} is no address: host:port is needed")
    return tuple(dict.fromkeys(filter(None, parts)))


def data_folder() -> Path | None:
    """The data folder of the local cluster, running or ended; None if there is none.

    The order of places is that of `find_target`; a folder counts if a cluster was planned in it."""
    for path in _places():
        if path.exists() or (path.parent / "conf" / path.name).exists():
            return path.parent
    return None


def _places() -> list[Path]:
    """Where a cluster.json may be, best first."""
    places = [Path.cwd() / DEFAULT_DATA_DIR / "cluster.json", current_cluster_file()]
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:  # a folder that is named is meant, and no other one
        places = [Path.cwd() / chosen / "cluster.json"]
    return list(dict.fromkeys(place for place in places if place is not None))


def read_cluster_file(path: Path) -> RunningCluster | None:
    """None if it is not there or no description of a cluster."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        return RunningCluster(
            path,
            tuple(str(node["address"]) for node in document["nameServers"]),
            tuple(str(node["address"]) for node in document["controllers"]),
            tuple((str(node["name"]), str(node["address"])) for node in document["brokers"]),
            int(document["supervisorPid"]),
            tls_of(document.get("tls", {})),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
