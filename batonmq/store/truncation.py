"""Cuts the log back to where it agrees with the master's, so that no crash brings bytes back.

First the bytes to be zeroed are copied aside (R23); a disk without space for them refuses the cut.
Then R22, each step durable before the next: intent; checkpoint; consume queues and index; log files
from the last down; the rest of the last one zeroed; epoch file; intent removed. After the intent
there is no way back: after an error or a crash the store does nothing more (R37), and its next
start repeats the cut first. Every step can be repeated and needs hardly any space. A limited number
of cut tails is kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.numbers import natural_number
from batonmq.runtime import disk
from batonmq.runtime.durable_file import remove_file, replace_file, sync_directory
from batonmq.store.errors import CutUnfinishedError
from batonmq.store.store_files import StoreFiles

log = logging.getLogger(__name__)

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class TruncationIntent:
    """Cut the log to `offset`; nothing was ever written from `end_offset` on. `aside`: the folder
    for the cut bytes, "" if they are not kept."""

    offset: int
    end_offset: int
    aside: str
    version: int = _VERSION


class LogTruncation:
    """Carries a cut out, and finishes one that a crash interrupted."""

    def __init__(self, files: StoreFiles) -> None:
        root = files.config.root
        self._intent_path = root / "truncation.intent"
        self._aside_root = root / "truncated"
        self._files = files
        self._log = files.log
        self.after_step: Callable[[str], None] = lambda step: None  # a hook for tests

    def cut(self, offset: int, end_offset: int, *, keep_aside: bool) -> None:
        """Cuts the log, whose data ends at `end_offset`, to `offset`, a record boundary. Raises
        OSError if the bytes cannot be kept aside; then nothing changed. Raises CutUnfinishedError
        for later errors: the store must be opened again."""
        aside = self._keep_aside(offset, end_offset) if keep_aside else ""
        intent = TruncationIntent(offset, end_offset, aside)
        try:
            # From here on it only goes forward: after an error the intent may be on disk or not.
            replace_file(self._intent_path, json.dumps(asdict(intent)).encode())
        except OSError as error:
            raise CutUnfinishedError(offset, self._intent_path, self._intent_path, error) from error
        self.after_step("intent")
        self._carry_out(intent)

    def resume(self) -> TruncationIntent | None:
        """Finishes the cut of an intent on disk, if any: the first step of a start. Raises
        CutUnfinishedError if that fails again, CorruptLogError for an unreadable intent."""
        if not self._intent_path.exists():
            return None
        try:
            data = disk.read_bytes(self._intent_path)
            intent = msgspec.json.decode(data, type=TruncationIntent)
            if intent.version != _VERSION:
                raise ValueError(f"its version is {intent.version}, {_VERSION} is known here")
        except (ValueError, msgspec.DecodeError) as error:
            raise CorruptLogError(
                str(self._intent_path), 0, f"no intent of a cut: {error}"
            ) from error
        log.warning("truncation_resumed offset=%d end_offset=%d", intent.offset, intent.end_offset)
        self._carry_out(intent)
        return intent

    def lower_checkpoint(self, offset: int) -> None:
        """Nothing behind `offset` counts as confirmed or recovered any more. Durable on return;
        raises OSError."""
        checkpoint = self._files.checkpoint
        # R22: first, so that a crash leaves no checkpoint that covers bytes which are being cut.
        checkpoint.confirm_phy_offset = min(checkpoint.confirm_phy_offset, offset)
        checkpoint.lower_recovery(offset)
        checkpoint.flush()

    # The steps.

    def _carry_out(self, intent: TruncationIntent) -> None:
        files, offset = self._files, intent.offset
        aside = self._aside_root / intent.aside if intent.aside else None
        root = files.config.root
        steps: tuple[tuple[str, Path, Callable[[], object]], ...] = (
            ("checkpoint", root / "checkpoint", lambda: self.lower_checkpoint(offset)),
            (
                "consume_queues",
                root / "consumequeue",
                lambda: files.consume_queues.truncate_dirty(offset),
            ),
            ("index", root / "index", lambda: files.index.truncate_to(offset)),
            ("segments", self._log.folder, lambda: self._drop_segments(offset, aside)),
            ("zero", Path(self._log.file_of(offset)), lambda: self._zero_tail(intent)),
            ("epochs", files.epochs.path, lambda: files.epochs.truncate_suffix_by_offset(offset)),
            ("done", self._intent_path, lambda: remove_file(self._intent_path)),
        )
        for name, place, step in steps:
            try:
                step()
            except Exception as error:
                # Whatever the error is: one part of the store is cut, another is not.
                raise CutUnfinishedError(offset, place, self._intent_path, error) from error
            self.after_step(name)
        if aside is not None:
            self._prune_aside()

    def _drop_segments(self, offset: int, aside: Path | None) -> None:
        if aside is not None:
            disk.makedirs(aside)  # an operator may have deleted it to free space
        self._log.drop_detached(aside)  # files behind a gap are beyond any cut
        segments = self._log.segments
        while segments and segments[-1].start_offset >= offset:
            # an empty segment made ahead is not worth keeping
            has_data = segments[-1].data_end() > 0
            self._log.drop_last_segment(aside if has_data else None)
        if aside is not None:
            sync_directory(aside)

    def _zero_tail(self, intent: TruncationIntent) -> None:
        segment = self._log.segment_at(intent.offset)
        if segment is not None:
            self._log.zero_from(intent.offset, min(intent.end_offset, segment.end_offset))

    # What is kept aside.

    def _keep_aside(self, offset: int, end_offset: int) -> str:
        """A new folder for the cut bytes, by name. What will be zeroed is copied into it, durably;
        whole files are moved there later. Raises OSError and leaves nothing."""
        disk.makedirs(self._aside_root)
        number = 1 + max(map(_number_of, self._aside_folders()), default=0)
        folder = self._aside_root / f"{number:06d}-{offset}-{end_offset}"
        try:
            disk.mkdir(folder)
            self._copy_tail(offset, end_offset, folder / f"{offset:020d}.tail")
            sync_directory(self._aside_root)
        except OSError:
            with suppress(OSError):  # what stays is pruned like other sets
                disk.rmtree(folder)
            raise
        log.warning(
            "cut_bytes_kept folder=%s from_offset=%d to_offset=%d", folder.name, end_offset, offset
        )
        return folder.name

    def _copy_tail(self, offset: int, end_offset: int, path: Path) -> None:
        segment = self._log.segment_at(offset)
        if segment is None or offset == segment.start_offset:
            return  # the whole file is moved instead
        start, end = offset - segment.start_offset, end_offset - segment.start_offset
        with segment.buffer[start:end] as tail:
            if tail:
                replace_file(path, tail)

    def _aside_folders(self) -> list[Path]:
        folders = [path for path in self._aside_root.iterdir() if path.is_dir()]
        return sorted(folders, key=_number_of)

    def _prune_aside(self) -> None:
        """Drops the oldest sets beyond the limits, never the newest. If that fails, the next cut
        tries again."""
        try:
            self._drop_oldest_aside()
        except OSError as error:
            log.warning("old_cut_bytes_kept folder=%s reason=%s", self._aside_root, error)

    def _drop_oldest_aside(self) -> None:
        folders = self._aside_folders()
        sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
        config = self._files.config
        # The newest stays at any size: it may hold the only copy of acknowledged bytes.
        while len(folders) > 1 and (
            len(folders) > config.truncated_log_max_sets
            or sum(sizes) > config.truncated_log_max_bytes
        ):
            disk.rmtree(folders.pop(0))
            sizes.pop(0)


def _number_of(folder: Path) -> int:
    return natural_number(folder.name.partition("-")[0]) or 0
