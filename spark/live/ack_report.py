"""The list of acknowledged messages that tasks of the sink write into one folder.

Files of attempts are `acks-<job>-<batch>-<partition>-<attempt>.jsonl`; `message_audit --acked`
reads the folder. A whole write or batch leaves `_committed-<job>-<batch>.json`.
"""

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from batonmq.process.durable_file import replace_file

Ack = dict[str, str | int]
"""topic, broker, queue_id, queue_offset, unique_key, and msg_id if the broker sent it."""

_encode: Final = msgspec.json.encode


class AckFile:
    """One JSON line per acknowledged message, in a file of this attempt; made with the first.

    The lines of a request are there when `add` returns, and on the disk when it is closed.
    """

    def __init__(self, folder: str, prefix: str) -> None:
        """`folder` "": nothing is written, only counted."""
        self.count = 0
        self._path = Path(folder) / f"{prefix}{uuid.uuid4().hex[:8]}.jsonl" if folder else None
        self._file: int | None = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def add(self, acks: list[Ack]) -> None:
        """Raises OSError. Nothing is buffered: the file of a killed task is complete up to then."""
        if self._path is not None:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            lines = memoryview(b"".join(_encode(ack) + b"\n" for ack in acks))
            while lines:
                lines = lines[os.write(self._file, lines) :]
        self.count += len(acks)


def write_committed(folder: str, job: str, batch_id: int, told: Mapping[str, Any]) -> None:
    """What a whole write or batch came to; there as a whole, or not at all. Raises OSError."""
    path = Path(folder) / f"_committed-{job}-{batch_id}.json"
    replace_file(path, f"{json.dumps({'job': job, 'batch': batch_id, **told})}\n".encode())
