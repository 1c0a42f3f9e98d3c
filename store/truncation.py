"""Cutting the log back to where it agrees with the master's, so that no crash brings bytes back.

R22, in this order, each step durable before the next: intent; checkpoint; consume queues and index;
log files from the top down; the rest of the last one zeroed; epoch file; intent removed. A crash
between any two leaves the intent, and the store repeats the whole at its next start before anything
else is read or written; every step can be repeated. Cut bytes are moved or copied aside (R23), a
bounded number of times.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from batonmq.process import disk
from batonmq.process.durable_file import remove_file, replace_file, sync_directory
from batonmq.store.store_files import StoreFiles

log = logging.getLogger(__name__)

STEPS: Final = (
    "intent",
    "checkpoint",
    "consume_queues",
    "index",
    "segments",
    "zero",
    "epochs",
    "done",
)
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class TruncationIntent:
    """Cut the log to `offset`. Nothing was ever written at or behind `end_offset`.

    `aside` is the folder for the cut bytes, empty if they are not kept.
    """

    offset: int
    end_offset: int
    aside: str
    version: int = _VERSION


class Truncation:
    """Carries a cut out, and finishes one that a crash interrupted."""

    def __init__(self, files: StoreFiles) -> None:
        root = files.config.root
        self._intent_path = root / "truncation.intent"
        self._aside_root = root / "truncated"
        self._files = files
        self._log = files.log
        self.after_step: Callable[[str], None] = lambda step: None  # where tests make it fail

    def cut(self, offset: int, end_offset: int, *, keep_aside: bool) -> None:
        """Cut the log, whose data ends at `end_offset`, back to `offset`, a record boundary.

        Raises OSError; then the store must be opened anew before it is used.
        """
        aside = ""
        if keep_aside:
            folder = self._new_aside_folder(offset, end_offset)
            aside = folder.name
            log.warning(
                "cut_bytes_kept folder=%s from_offset=%d to_offset=%d", folder, end_offset, offset
            )
        intent = TruncationIntent(offset, end_offset, aside)
        replace_file(self._intent_path, json.dumps(asdict(intent)).encode())
        self.after_step("intent")
        self._carry_out(intent)

    def resume(self) -> TruncationIntent | None:
        """Finish the cut of an intent on disk, if there is one: the first step of a start."""
        if not self._intent_path.exists():
            return None
        intent = TruncationIntent(**json.loads(disk.read_bytes(self._intent_path)))
        log.warning("truncation_resumed offset=%d end_offset=%d", intent.offset, intent.end_offset)
        self._carry_out(intent)
        return intent

    # The steps.

    def _carry_out(self, intent: TruncationIntent) -> None:
        offset = intent.offset
        aside = self._aside_root / intent.aside if intent.aside else None
        self._lower_checkpoint(offset)
        self.after_step("checkpoint")
        self._files.consume_queues.truncate_dirty(offset)
        self.after_step("consume_queues")
        self._files.index.truncate_to(offset)
        self.after_step("index")
        self._drop_segments(offset, aside)
        self.after_step("segments")
        self._zero_tail(offset, intent.end_offset, aside)
        self.after_step("zero")
        self._files.epochs.truncate_suffix_by_offset(offset)
        self.after_step("epochs")
        remove_file(self._intent_path)
        self.after_step("done")
        if aside is not None:
            self._prune_aside()

    def _lower_checkpoint(self, offset: int) -> None:
        checkpoint = self._files.checkpoint
        checkpoint.confirm_phy_offset = min(checkpoint.confirm_phy_offset, offset)
        if checkpoint.recovery_offset is not None:
            checkpoint.recovery_offset = min(checkpoint.recovery_offset, offset)
        checkpoint.flush()

    def _drop_segments(self, offset: int, aside: Path | None) -> None:
        self._log.drop_detached(aside)
        segments = self._log.segments
        while segments and segments[-1].start_offset >= offset:
            has_data = segments[-1].data_end() > 0
            self._log.drop_last_segment(aside if has_data else None)
        if aside is not None:
            sync_directory(aside)

    def _zero_tail(self, offset: int, end_offset: int, aside: Path | None) -> None:
        segment = self._log.segment_at(offset)
        if segment is None:
            return
        end = min(end_offset, segment.end_offset)
        if aside is not None and end > offset:
            copy = aside / f"{offset:020d}.tail"
            if not copy.exists():  # else a crash came after it, and part of it may be zero by now
                position = offset - segment.start_offset
                replace_file(copy, bytes(segment.buffer[position : end - segment.start_offset]))
        self._log.zero_from(offset, end)

    # What is kept aside.

    def _new_aside_folder(self, offset: int, end_offset: int) -> Path:
        disk.makedirs(self._aside_root)
        number = 1 + max(map(_number_of, self._aside_folders()), default=0)
        folder = self._aside_root / f"{number:06d}-{offset}-{end_offset}"
        disk.mkdir(folder)
        sync_directory(self._aside_root)
        return folder

    def _aside_folders(self) -> list[Path]:
        folders = [path for path in self._aside_root.iterdir() if path.is_dir()]
        return sorted(folders, key=_number_of)

    def _prune_aside(self) -> None:
        """Drop the oldest sets beyond the limits; the newest always stays."""
        folders = self._aside_folders()
        sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
        config = self._files.config
        while len(folders) > 1 and (
            len(folders) > config.truncated_log_max_sets
            or sum(sizes) > config.truncated_log_max_bytes
        ):
            disk.rmtree(folders.pop(0))
            sizes.pop(0)


def _number_of(folder: Path) -> int:
    number = folder.name.partition("-")[0]
    return int(number) if number.isdigit() else 0
