"""Before the start of a local cluster: its ports and folder are checked, its files written."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from batonmq.launcher.forks import ForkServer
from batonmq.launcher.layout import (
    CLUSTER_NAME,
    LastPlan,
    Layout,
    LayoutError,
    Node,
    Settings,
    config_of,
    tls_folder_of,
)
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import replace_file
from batonmq.runtime.lock_file import FolderLock, FolderLockedError
from batonmq.runtime.secret_file import make_password
from batonmq.runtime.settings import ENVIRONMENT_PREFIX
from batonmq.runtime.sockets import check_port_free, holder_of
from batonmq.runtime.tls import DAY_MS, MODES, Mode

MIN_FREE_BYTES: Final = 1 << 30
"""With segments of the usual size, which are sparse at first."""
_LAST_SETTINGS: Final = Path("conf", "settings.yaml")
_SPARE_BYTES: Final = 64 << 20
_RENEWED_BEFORE_MS: Final = 30 * DAY_MS
HOSTS: Final = ("127.0.0.1", "localhost")


class StartError(Exception):
    """Exit code 2: what the user gave is wrong."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def ports_taken(taken: Sequence[str]) -> StartError:
    """Names all ports of the cluster that others hold, and who has them."""
    count = "a port is" if len(taken) == 1 else f"{len(taken)} ports are"
    lines = "\n".join(f"  {one}" for one in taken)
    advice = "end what listens there, or choose another --base-port"
    return StartError(f"{count} not free:\n{lines}\n{advice}", exit_code=2)


async def check_settings(layout: Layout, fork_server: ForkServer) -> None:
    """Has one process of each kind read the settings that its first start would get, before
    anything is written to the data folder. Raises StartError that names the first wrong one."""
    from_environment = any(n.startswith(ENVIRONMENT_PREFIX) and "__" in n for n in os.environ)
    if not layout.overrides and not from_environment:
        return
    with tempfile.TemporaryDirectory(prefix="batonmq-check-") as folder:
        for node in (layout.name_servers[0], layout.brokers[0]):
            file, log = Path(folder) / node.config.name, Path(folder) / "check.log"
            file.write_text(yaml.safe_dump(config_of(layout, node), sort_keys=False))
            # By the processes themselves: only they know which settings they take.
            argv = [str(file) if part == str(node.config) else part for part in node.argv]
            process = await fork_server.start([*argv, "--check"], log, os.environ, [])
            if await process.wait() != 0:
                *_, last = log.read_text(errors="replace").splitlines() or [""]
                where = re.compile(rf"\w+: {re.escape(str(file))}(:\d+)?")
                raise StartError(where.sub("--config", last), exit_code=2)


def lock_folder(layout: Layout) -> FolderLock:
    """Takes the folder for this process until the lock is released.

    Raises StartError if another supervisor has it, OSError."""
    lock = FolderLock(layout.lock_file)
    layout.lock_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except FolderLockedError as exc:
        raise StartError(
            f"--data {layout.data_dir}: a cluster is run from this folder already"
            f"{f' (pid {exc.pid})' if exc.pid else ''}: end that first or choose another --data"
        ) from exc
    return lock


def check_ports(layout: Layout) -> None:
    """Raises StartError with every port that is not free."""
    taken = [text for node in layout.nodes for text in taken_ports(node)]
    if taken:
        raise ports_taken(taken)


def taken_ports(node: Node) -> list[str]:
    """The ports of a node on which it could not listen now, each with who has it."""
    found = []
    for port in node.ports:
        try:
            check_port_free(node.host, port)
        except OSError as exc:
            who = holder_of(port) if exc.errno == errno.EADDRINUSE else ""
            found.append(f"{port} of {node.name}: {who or exc.strerror}")
    return found


def needed_bytes_of(layout: Layout) -> int:
    """The disk space that a start asks for: small segments need less."""
    segment = layout.overrides.get("store", {}).get("mappedFileSizeCommitLog")
    if segment is None:
        return MIN_FREE_BYTES
    # Two of each broker: the one that is written, and the next one, which is made ahead.
    return min(MIN_FREE_BYTES, 2 * int(str(segment)) * len(layout.brokers) + _SPARE_BYTES)


def check_folder(layout: Layout) -> None:
    """Makes the data folder. Raises StartError for a full disk, OSError."""
    folder: Path = layout.data_dir
    needed_bytes = needed_bytes_of(layout)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StartError(
            f"--data {folder}: the disk has {free >> 20} MiB left,"
            f" {needed_bytes >> 20} MiB are needed"
        )


def _sections_in(path: Path) -> Settings | None:
    """A YAML file by section; None if there is none. Raises LayoutError, OSError."""
    try:
        loaded = yaml.safe_load(disk.read_bytes(path))
    except FileNotFoundError:
        return None
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise LayoutError(f"{path}{line}: not YAML: {exc.problem}") from exc
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise LayoutError(f"{path}: {exc}") from exc
    if loaded is None:
        return {}
    if not isinstance(loaded, dict) or not all(isinstance(v, dict) for v in loaded.values()):
        raise LayoutError(f"{path}: one mapping of settings per section is needed")
    return loaded


def settings_of(data_dir: Path, config: Path | None) -> Settings:
    """Those of `config`; None: of this folder's last start, if any. Raises LayoutError, OSError."""
    if config is not None:
        found = _sections_in(config)
    else:
        found = _last_sections(data_dir / _LAST_SETTINGS, "give --config, which replaces this file")
    return {
        section: {key: _absolute(key, value) for key, value in values.items()}
        for section, values in (found or {}).items()
    }


def _last_sections(path: Path, way_out: str, section: str = "") -> Settings | None:
    """What the last start wrote, if it did. Raises OSError, and LayoutError with the `way_out` of a
    damaged file, or of one without `section`: read as nothing, it would change the cluster."""
    try:
        found = _sections_in(path)
        if section and found is not None and section not in found:
            raise LayoutError(f"{path}: no section {section}")
    except LayoutError as exc:
        raise LayoutError(f"{exc}; {way_out}") from exc
    return found


def _absolute(key: object, value: object) -> object:
    # It is kept, and the next start may be made in another folder.
    if not isinstance(key, str) or not isinstance(value, str):  # a check refuses it by name
        return value
    if value and ("Path" in key or key.endswith("File")):
        return value if value[0] == "~" else str(Path(value).absolute())
    return value


def folder_owners(data_dir: Path) -> dict[int, str]:
    """Number of each broker folder of this cluster -> its group, as its configuration says. Raises
    LayoutError, OSError."""
    found: dict[int, str] = {}
    for file in (data_dir / "conf").glob("broker-*.yaml"):
        number = file.stem.removeprefix("broker-")
        # Without the file another group could get its number, and its store.
        identity = data_dir / file.stem / "brokerIdentity"
        way_out = f"write `broker: {{brokerName: GROUP}}` to it; the GROUP is the 2nd in {identity}"
        if number.isdecimal() and (kept := _last_sections(file, way_out, "broker")):
            found[int(number)] = str(kept["broker"].get("brokerName", ""))
    return found


def last_plan(data_dir: Path) -> LastPlan:
    """The size of this folder's cluster, changes while it ran included; the default if none is
    there. Raises OSError, and LayoutError for a damaged one: of another size, the cluster would
    have other controllers."""
    path = data_dir / "conf" / "cluster.json"
    try:
        document = json.loads(disk.read_bytes(path))
        servers = document["nameServers"]
        brokers = tuple(
            (int(Path(each["config"]).stem.removeprefix("broker-")), str(each["name"]))
            for each in document["brokers"]
        )
        return LastPlan(len(servers), int(servers[0]["address"].rpartition(":")[2]), brokers)
    except FileNotFoundError:
        return LastPlan()
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise LayoutError(
            f"{path}: no plan of a cluster; remove it, and give --controllers, --replicas,"
            " --groups and --base-port as they were"
        ) from exc


def secured(data_dir: Path) -> Mode:
    """The mode that this folder's cluster had at its last start. Raises LayoutError, OSError."""
    way_out = "give --secure MODE as it was, which replaces this file"
    path = data_dir / "conf" / "namesrv-0.yaml"
    kept = _last_sections(path, way_out, "namesrv")
    authority = tls_folder_of(data_dir)
    if kept is None and authority.exists():
        # Removed by hand, or never written by a first start that was killed.
        raise LayoutError(f"{path} is missing, and {authority} is of a cluster with TLS; {way_out}")
    mode = (kept or {}).get("tls", {}).get("serverMode")
    return next((known for known in MODES if known == mode), "disabled")


def make_certificates(layout: Layout) -> None:
    """The authority of a secure cluster, and certificates that lack or end within a month. Raises
    OSError, TlsError."""
    from batonmq.runtime.authority import Authority, read_certificate

    authority = Authority(layout.tls_folder)
    if not authority.trust.exists():
        authority.make(CLUSTER_NAME)
    soon_ms = wall_ms() + _RENEWED_BEFORE_MS
    named = [
        (layout.certificate_of(node), node.names, (node.host, *HOSTS)) for node in layout.nodes
    ]
    for path, names, hosts in (*named, (layout.tls_folder / "admin.pem", ("admin",), ())):
        if not path.exists() or read_certificate(path).ends_ms < soon_ms:
            authority.issue(path.name, names, hosts)


def write_configs(layout: Layout) -> None:
    """Writes every node's file, and the controllers' password and certificates where there are none
    yet.

    Raises OSError (no right, no disk space) as it comes, and TlsError."""
    if layout.secure != "disabled":
        make_certificates(layout)
    for node in layout.nodes:
        node.python_file.unlink(missing_ok=True)  # a new start is of this installation
        write_config(layout, node)
    if not layout.raft_password_file.exists():
        make_password(layout.raft_password_file)
    # For a start without --config: no store opens with segments of another size.
    _keep(layout.data_dir / _LAST_SETTINGS, layout.overrides)


def write_config(layout: Layout, node: Node) -> None:
    """Raises OSError."""
    node.data_dir.mkdir(parents=True, exist_ok=True)
    _keep(node.config, config_of(layout, node))


def _keep(path: Path, sections: Settings) -> None:
    # Durable: empty after a power loss, they would start a cluster without users or TLS.
    text = yaml.safe_dump(sections, sort_keys=False)
    replace_file(path, text.encode(), mode=0o600)  # the section auth has secrets
