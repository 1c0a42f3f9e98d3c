"""The end of a slave's log: what a frame appends, what is acked, what readers may see. Pure.

Invariants: an ack never exceeds the log (nor, under haSyncFlush, what is flushed); an epoch is in
the epoch file before its first byte is in the log; what readers may see is confirmed and here.
Effects are to be performed in order, each completely, before the next event is fed.
Origin: Java AutoSwitchHAClient (dispatchReadRequest, reportSlaveOffset).
"""

from __future__ import annotations

from batonmq.epoch.entry import within_log
from batonmq.ha.slave_effects import (
    AdoptEpochs,
    AppendEpoch,
    AppendLog,
    BeginAt,
    Confirm,
    FlushTo,
    SendToMaster,
    SlaveEffect,
)
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.truncation import LocalLog
from batonmq.ha.wire import MasterHandshake, encode_ack, encode_epoch_mark


class ReceivedLog:
    """Offsets are exclusive ends. `end_connection` drops all that only one connection knows."""

    def __init__(self, log: LocalLog, policy: SlavePolicy, now_ms: int) -> None:
        self.max_offset = log.max_offset
        self.last_epoch = log.last_epoch
        self.confirm_offset = log.confirm_offset
        """Of what readers may see. The store may lag behind it, never lead."""
        self.bytes_received = 0
        self.sent_ms = now_ms
        """When the handshake or the newest ack was sent."""
        self.first_ack_sent = False
        self.ack_due = False
        self._policy = policy
        self._flush_requested = 0
        self._master_confirm = -1
        """confirmOffset by the newest frame; -1 before the first one."""
        self._marks_epochs = False
        """The master wants to see in which epoch an ack was made."""
        self._pending_epoch: tuple[int, int] | None = None
        """(epoch, start) of a frame that begins before that start."""
        self._backlog_end = 0
        """Bytes below were in the master's log when we connected."""
        self._filled_ms = -1 << 40

    @property
    def known_confirm(self) -> int:
        """How far this log is confirmed by all frames, shown to readers or not."""
        return max(self.confirm_offset, min(self._master_confirm, self.max_offset))

    def is_level(self, master_epoch: int) -> bool:
        """Whether the newest confirmOffset and the start of the master's own epoch are here."""
        return (
            0 <= self._master_confirm <= self.max_offset
            and self.last_epoch == master_epoch
            and self._pending_epoch is None
        )

    def reload(self, log: LocalLog) -> None:
        """The store's state, after a connection was made or the log was cut."""
        self.max_offset = log.max_offset
        self.last_epoch = log.last_epoch
        self.confirm_offset = max(self.confirm_offset, log.confirm_offset)

    def begin_transfer(
        self, last_epoch: int, backlog_end: int, *, marks_epochs: bool = False
    ) -> None:
        self.last_epoch = last_epoch
        self._marks_epochs = marks_epochs
        self._backlog_end = backlog_end
        self.first_ack_sent = False
        self.ack_due = True

    def end_connection(self) -> None:
        self.ack_due = False
        self._pending_epoch = None
        self._flush_requested = 0
        self._master_confirm = -1

    def begin_at(self, offset: int, peer: MasterHandshake) -> list[SlaveEffect]:
        """An empty log begins where the master's does, or at the master's last segment."""
        self.max_offset = offset
        self.confirm_offset = 0
        entries = within_log(peer.entries, offset)
        self.last_epoch = entries[-1].epoch if entries else -1
        return [BeginAt(offset, "the master's log begins there"), AdoptEpochs(entries)]

    def frame_begins(self, epoch: int, epoch_start: int, confirm: int) -> list[SlaveEffect]:
        """A frame at `max_offset`. Its epoch, not below ours, is durable before its first byte."""
        self.ack_due = True
        self._master_confirm = confirm
        if epoch == self.last_epoch:
            return []
        if epoch_start > self.max_offset:
            # The last chunk of an epoch, which Java labels with the next one.
            self._pending_epoch = (epoch, epoch_start)
            return []
        self._pending_epoch = None
        return self._enter(epoch, epoch_start)

    def append(self, data: memoryview) -> list[SlaveEffect]:
        """The next piece of the current frame's body."""
        offset = self.max_offset
        size = len(data)
        pending = self._pending_epoch
        self.ack_due = True
        self.bytes_received += size
        self.max_offset = offset + size
        if pending is None:
            return [AppendLog(offset, data)]
        epoch, start = pending
        if self.max_offset < start:
            return [AppendLog(offset, data)]
        self._pending_epoch = None
        effects: list[SlaveEffect] = [AppendLog(offset, data[: start - offset])]
        effects += self._enter(epoch, start)
        if self.max_offset > start:
            effects.append(AppendLog(start, data[start - offset :]))
        return effects

    def _enter(self, epoch: int, start: int) -> list[SlaveEffect]:
        self.last_epoch = epoch
        effects: list[SlaveEffect] = [AppendEpoch(epoch, start)]
        if self._marks_epochs:
            effects.append(SendToMaster(encode_epoch_mark(epoch)))
        return effects

    def acknowledge(self, flushed_offset: int, now_ms: int, effects: list[SlaveEffect]) -> None:
        """Adds the ack of all that is here or, under haSyncFlush, of all that is flushed."""
        ack = self.max_offset
        if self._policy.sync_flush and flushed_offset < ack:
            if self._flush_requested < ack:
                self._flush_requested = ack
                effects.append(FlushTo(ack))
            if not self.first_ack_sent:
                return  # the first ack chooses where the master starts: all or nothing
            ack = flushed_offset
        else:
            self.ack_due = False
        self.first_ack_sent = True
        self.sent_ms = now_ms
        effects.append(SendToMaster(encode_ack(ack)))

    def confirm(self, now_ms: int, effects: list[SlaveEffect]) -> None:
        """Adds what readers may see from now on."""
        visible = min(self._master_confirm, self.max_offset)
        if visible > self.confirm_offset and not self._is_flooded(now_ms):
            self.confirm_offset = visible
            effects.append(Confirm(visible))

    def read_filled(self, now_ms: int) -> None:
        """A read filled its whole buffer: more is waiting."""
        self._filled_ms = now_ms

    def _is_flooded(self, now_ms: int) -> bool:
        """Whether bytes that were old when we connected come in faster than they are handled.

        Then being a copy comes first, and showing messages to readers, which costs more, follows.
        It follows closely: an elected replica must show all of it before it opens.
        """
        if self.max_offset - self.confirm_offset > self._policy.flood_lag_bytes:
            return False
        filled = now_ms - self._filled_ms < self._policy.flood_ms
        return filled and self.max_offset < self._backlog_end

    def check_invariants(self) -> None:
        assert self.confirm_offset <= self.max_offset or self.max_offset == 0
        assert self._pending_epoch is None or self._pending_epoch[1] > self.max_offset
