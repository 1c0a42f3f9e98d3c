"""If a page of a memory map cannot be read, the process ends; this module notes which page it was.

A bad sector or a shortened file causes SIGBUS. Python's handlers run later, in a thread that never
gets past the load. So ctypes sets a C handler, which runs in the faulting thread, finds the address
in the list of maps, writes file and position into a note, and restores the previous handler
(faulthandler's), which ends the process. It costs nothing while all pages can be read. Linux only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from batonmq.runtime import disk
from batonmq.runtime.durable_file import write_all

_MAPS: Final = Path("/proc/self/maps")
_SA_SIGINFO: Final = 4
_ADDRESS_AT: Final = 16  # si_addr in siginfo_t, where pointers have 8 bytes
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class ReadFault:
    """The byte at `position` of `file` could not be read."""

    file: str
    position: int

    @classmethod
    def read(cls, note: Path) -> ReadFault | None:
        """Reads the note; None if it is missing or incomplete."""
        try:
            return cls(**json.loads(disk.read_bytes(note)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, OSError) as error:
            disk.check_unreadable(error)
            return None

    def write(self, note: Path) -> None:
        """Durable on return. Raises OSError."""
        fd = disk.open(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, json.dumps(asdict(self)).encode(), 0)
            disk.fsync(fd)
        finally:
            disk.close(fd)


_kept: list[Any] = []  # C may call them as long as the process lives


def watch(note: Path) -> None:
    """Makes each SIGBUS write its ReadFault to `note` before the process ends."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    libc = ctypes.CDLL(None)
    before = _SigAction()

    def on_fault(number: int, info: int, context: int) -> None:
        libc.sigaction(signal.SIGBUS, ctypes.byref(before), None)
        address = ctypes.c_void_p.from_address(info + _ADDRESS_AT).value or 0
        fault = _locate(address)
        if fault is not None:
            fault.write(note)
        # On return the load is repeated and faults again, with the previous handler.

    handler = _Handler(on_fault)
    pointer = ctypes.cast(handler, ctypes.c_void_p)
    action = _SigAction(handler=pointer, flags=_SA_SIGINFO)
    libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(before))
    _kept.append(handler)


def _locate(address: int) -> ReadFault | None:
    """The file and position that are mapped at `address`."""
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(text, 16) for text in fields[0].split("-"))
        if start <= address < end and len(fields) == 6:
            return ReadFault(fields[5], int(fields[2], 16) + address - start)
    return None
