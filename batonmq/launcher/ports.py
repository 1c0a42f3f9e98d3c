"""Finding out before the start whether the ports and the folder of a cluster can be had."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Final

from batonmq.launcher.layout import HOST, Layout

MIN_FREE_BYTES: Final = 1 << 30


class StartError(Exception):
    """One line that says what keeps the cluster from starting."""


def lock_folder(layout: Layout) -> int:
    """Takes the folder for this process until the descriptor given back is closed.

    Raises StartError if another supervisor has it: two would each take the processes of the other
    for their own.
    """
    try:
        layout.lock_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(layout.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise StartError(f"--data {layout.data_dir}: {os.strerror(exc.errno or 0)}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        holder = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise StartError(
            f"--data {layout.data_dir}: a cluster is run from this folder already"
            f"{f' (pid {holder})' if holder else ''}: end that first or choose another --data"
        ) from exc
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def check_ports(layout: Layout) -> None:
    """Raises StartError that names the first port somebody else holds."""
    for node in layout.nodes:
        for port in node.ports:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except OSError as exc:
                    if exc.errno not in (errno.EADDRINUSE, errno.EACCES):
                        raise
                    raise StartError(
                        f"port {port} of {node.name} is"
                        f" {'taken' if exc.errno == errno.EADDRINUSE else 'not allowed'}:"
                        " end what listens there or choose another --base-port"
                    ) from exc


def check_folder(layout: Layout, needed_bytes: int = MIN_FREE_BYTES) -> None:
    """Makes the data folder. Raises StartError for a missing right or a full disk."""
    folder: Path = layout.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StartError(f"--data {folder}: {os.strerror(exc.errno or 0)}") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartError(f"--data {folder}: no right to write there")
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StartError(
            f"--data {folder}: the disk has {free >> 20} MiB left,"
            f" {needed_bytes >> 20} MiB are needed"
        )
