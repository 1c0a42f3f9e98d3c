"""The slave's end of its one HA connection: when to dial, what to cut, write and ack. Pure.

READY -> CONNECTING -> HANDSHAKE -> (PROVING, CUTTING) -> TRANSFER; every failure leads back to
READY with a short, growing delay. Invariants: an ack never exceeds the log (nor, under haSyncFlush,
what is flushed); nothing is acked to a peer whose history ends below the epoch this replica has
accepted (R2); an epoch is in the epoch file before its first byte is in the log.
Effects are to be performed in order, each completely, before the next event is fed.
Origin: Java AutoSwitchHAClient.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from epoch.entry import within_log
from ha.peer_proof import PeerIdentity, proof_fault
from ha.redial import Redial
from ha.slave_effects import (
    AdoptEpochs,
    AppendEpoch,
    AppendLog,
    BeginAt,
    Confirm,
    Dial,
    Diverged,
    FlushTo,
    Following,
    Hangup,
    ProveMaster,
    SendToMaster,
    SlaveEffect,
    TruncateTo,
)
from ha.slave_policy import SlavePolicy
from ha.truncation import BeginAnew, CutTo, LocalLog, Refuse, epochs_after, judge_log
from ha.wire import (
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_ack,
    encode_slave_handshake,
)
from protocol.role_view import RoleView


class Phase(Enum):
    READY = "ready"
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    PROVING = "proving"
    CUTTING = "cutting"
    TRANSFER = "transfer"


class SlaveCore:
    """Follows the master of one role view. `log` must be the store's state at each call."""

    def __init__(
        self, broker_id: int, view: RoleView, log: LocalLog, policy: SlavePolicy, now_ms: int
    ) -> None:
        assert view.master_broker_id is not None and view.master_broker_id != broker_id
        self.broker_id = broker_id
        self.view = view
        self.policy = policy
        self.phase = Phase.READY
        self.max_offset = log.max_offset
        self.last_epoch = log.last_epoch
        self.confirm_offset = log.confirm_offset
        self.bytes_received = 0
        self._filled_ms = -1 << 40
        self.read_ms = now_ms
        self.sent_ms = now_ms
        self._log = log
        self._peer: MasterHandshake | None = None
        self._proved = False
        self._fresh_until_ms = now_ms + policy.fresh_ms
        self._redial = Redial(policy.redial, now_ms)
        self._pending_epoch: tuple[int, int] | None = None
        self._first_frame = True
        self._ack_due = False
        self._first_ack_sent = False
        self._flush_asked = 0
        self._frame_confirm = -1
        self._beat_ms: int | None = None
        self._brisk = 0
        self._ticked_ms = now_ms

    # -- connection

    def begin(self, now_ms: int) -> list[SlaveEffect]:
        """Dials at once: a failover waits for this."""
        return self._dial(now_ms)

    def follow(self, view: RoleView, now_ms: int) -> list[SlaveEffect]:
        """A newer view. The connection stays if it leads to the same process."""
        old, self.view = self.view, view
        self._redial.progress()
        same = (old.master_broker_id, old.master_ha_address, old.master_incarnation) == (
            view.master_broker_id,
            view.master_ha_address,
            view.master_incarnation,
        )
        if not same or old.master_epoch != view.master_epoch:
            self._fresh_until_ms = now_ms + self.policy.fresh_ms
        if same and self.phase is not Phase.READY:
            return []
        effects: list[SlaveEffect] = []
        if self.phase is not Phase.READY:
            effects.append(Hangup("the group has another master"))
            self._reset()
        return effects + self._dial(now_ms)

    def connected(self, log: LocalLog, now_ms: int) -> list[SlaveEffect]:
        assert self.phase is Phase.CONNECTING
        self._take(log)
        self.phase = Phase.HANDSHAKE
        self.read_ms = self.sent_ms = now_ms
        handshake = SlaveHandshake(
            self.broker_id, self.policy.sync_from_last_file, self.policy.async_learner
        )
        return [SendToMaster(encode_slave_handshake(handshake))]

    def disconnected(self, now_ms: int) -> list[SlaveEffect]:
        """The dial failed, or the connection ended from the other side."""
        if self.phase is not Phase.READY:
            self._reset()
            self._redial.later(now_ms)
        return []

    def stop(self) -> list[SlaveEffect]:
        """Ends the slave side (R1: before this replica acts as master)."""
        connected = self.phase is not Phase.READY
        self._reset()
        self._redial.never()
        return [Hangup("the slave side ends")] if connected else []

    @property
    def _is_proved(self) -> bool:
        return self._proved or not self.policy.proof_needed

    @property
    def known_confirm(self) -> int:
        """As far as this log is confirmed by all that was heard, shown to readers or not."""
        return max(self.confirm_offset, min(self._frame_confirm, self.max_offset))

    @property
    def is_level(self) -> bool:
        """Whether this log holds all that was acknowledged to anybody before this moment.

        The master's confirmOffset of this connection is here, and so is the start of its own
        epoch: a new master's confirmOffset may still lag behind what its predecessor had
        acknowledged, which lies below that start. What it acknowledges later and this replica
        lacks, it acknowledged without this replica in the required set (R1).
        """
        return (
            self.phase is Phase.TRANSFER
            and 0 <= self._frame_confirm <= self.max_offset
            and self.last_epoch == self.view.master_epoch
            and self._pending_epoch is None
        )

    @property
    def wakeup_ms(self) -> int:
        """When `tick` is due."""
        if self.phase is Phase.READY:
            return self._redial.at_ms
        return self._ticked_ms + self.policy.tick_ms

    def tick(self, now_ms: int) -> list[SlaveEffect]:
        late_ms = now_ms - self._ticked_ms - self.policy.tick_ms
        self._ticked_ms = now_ms
        if self.phase is Phase.READY:
            return self._dial(now_ms) if now_ms >= self._redial.at_ms else []
        if late_ms > self.policy.stall_ms:
            self.read_ms += late_ms  # R8: what we did not look for has not been missing
        silent_ms = now_ms - self.read_ms
        if silent_ms >= self._patience_ms():
            was_dialling = self.phase is Phase.CONNECTING
            effects = self._hang_up(f"nothing read for {silent_ms} ms", now_ms)
            if was_dialling:
                self._redial.at(now_ms)
            return effects
        if (
            self.phase is Phase.TRANSFER
            and self._first_ack_sent
            and now_ms - self.sent_ms >= self.policy.keepalive_ms
        ):
            self._ack_due = True
        return []

    # -- handshake and truncation

    def handshake_received(
        self, peer: MasterHandshake, log: LocalLog, now_ms: int
    ) -> list[SlaveEffect]:
        """Compares histories. Nothing is cut or acked before the peer has the epoch for it."""
        assert self.phase is Phase.HANDSHAKE
        self.read_ms = now_ms
        self._take(log)
        self._peer = peer
        needed = max(self.view.master_epoch, log.last_epoch)
        if peer.last_epoch < needed:
            return self._hang_up(
                f"the peer's last epoch is {peer.last_epoch}, this replica has accepted {needed}",
                now_ms,
            )
        fresh = now_ms < self._fresh_until_ms
        self._fresh_until_ms = now_ms
        if self.policy.proof_needed and not fresh:
            # R21: whoever answers at this address by now, its history may fit ours by chance.
            return self._ask_proof(now_ms)
        return self._settle_history(log, now_ms)

    def _ask_proof(self, now_ms: int) -> list[SlaveEffect]:
        self.phase = Phase.PROVING
        self.read_ms = now_ms
        return [ProveMaster(self.view)]

    def peer_proved(self, identity: PeerIdentity, log: LocalLog, now_ms: int) -> list[SlaveEffect]:
        """The answer to ProveMaster."""
        if self.phase is not Phase.PROVING:
            return []
        assert self._peer is not None
        fault = proof_fault(identity, self.view, self._peer.last_epoch)
        if fault:
            return self._hang_up(fault, now_ms)
        self._proved = True
        return self._settle_history(log, now_ms)

    def peer_unproved(self, reason: str, now_ms: int) -> list[SlaveEffect]:
        if self.phase is not Phase.PROVING:
            return []
        return self._hang_up(f"no proof that the peer is the master: {reason}", now_ms)

    def log_changed(self, log: LocalLog, now_ms: int) -> list[SlaveEffect]:
        """The cut of TruncateTo is done and durable."""
        assert self.phase is Phase.CUTTING
        return self._settle_history(log, now_ms)

    def cut_refused(self, reason: str, now_ms: int) -> list[SlaveEffect]:
        """The store would not cut there (R23, or no record ends at that offset)."""
        assert self.phase is Phase.CUTTING
        return self._diverge(f"{reason}; compare both logs, or move this store aside", now_ms)

    def _settle_history(self, log: LocalLog, now_ms: int) -> list[SlaveEffect]:
        peer = self._peer
        assert peer is not None
        self._take(log)
        member = self.broker_id in self.view.sync_state_set
        # What was confirmed counts, though the store may still be busy showing it to readers.
        log = replace(log, confirm_offset=self.confirm_offset)
        verdict = judge_log(log, peer, member=member, unclean_epoch=self.view.unclean_epoch)
        if isinstance(verdict, Refuse):
            return self._diverge(verdict.reason, now_ms)
        if isinstance(verdict, BeginAnew | CutTo) and not self._is_proved:
            return self._ask_proof(now_ms)
        if isinstance(verdict, BeginAnew):
            return self._begin_anew(verdict.reason, now_ms)
        if isinstance(verdict, CutTo):
            assert self.phase is not Phase.CUTTING, "the cut did not reach the consistent point"
            self.phase = Phase.CUTTING
            # Only towards an unclean epoch is this below what was confirmed.
            self.confirm_offset = min(self.confirm_offset, verdict.offset)
            return [TruncateTo(log.max_offset, verdict.offset, verdict.unclean)]
        return self._start_transfer(log, peer, now_ms)

    def _start_transfer(
        self, log: LocalLog, peer: MasterHandshake, now_ms: int
    ) -> list[SlaveEffect]:
        self.phase = Phase.TRANSFER
        self._first_frame = True
        self._first_ack_sent = False
        effects: list[SlaveEffect] = []
        entries = epochs_after(log, peer)
        if [(e.epoch, e.start_offset) for e in entries] != [
            (e.epoch, e.start_offset) for e in log.entries
        ]:
            effects.append(AdoptEpochs(entries))
        self.last_epoch = entries[-1].epoch if entries else -1
        effects.append(Following(log.max_offset))
        self._ack_due = True
        if not self.policy.sync_flush:
            # At once, even if it is 0: Java waits up to 5 s here, and the master waits for it.
            self._acknowledge(log.max_offset, now_ms, effects)
        return effects

    def _begin_anew(self, reason: str, now_ms: int) -> list[SlaveEffect]:
        """R27: the old log goes aside and the next handshake finds an empty one."""
        effects = self._hang_up(reason, now_ms)
        self._redial.at(now_ms)
        self.max_offset = self.confirm_offset = 0
        return [BeginAt(0, reason), AdoptEpochs(()), *effects]

    def _diverge(self, reason: str, now_ms: int) -> list[SlaveEffect]:
        """Cannot follow. Said once, tried again ever more rarely, for ever."""
        return self._give_up(reason, is_new=self._redial.diverged(reason, now_ms))

    def _give_up(self, reason: str, *, is_new: bool) -> list[SlaveEffect]:
        self._reset()
        return [Hangup(reason), Diverged(reason)] if is_new else [Hangup(reason)]

    # -- transfer

    def frame_received(self, header: TransferHeader, now_ms: int) -> list[SlaveEffect]:
        """The head of a transfer frame; its body follows through `body_received`."""
        body_size, offset, epoch, epoch_start, confirm = header
        self.read_ms = now_ms
        if self.phase is not Phase.TRANSFER:
            if body_size:
                return self._hang_up("log bytes before our first ack", now_ms)
            return []  # Java heartbeats from its handshake on
        if not body_size:
            self._note_beat(now_ms)
            if offset < 0:
                self._ack_due = True  # Java, before it has chosen where to start
                return []
        effects: list[SlaveEffect] = []
        if offset != self.max_offset:
            if self.max_offset == 0:
                effects += self._begin_at(offset)
            elif self._first_frame and not body_size and offset > self.max_offset:
                return self._next_byte_gone(offset, now_ms)
            else:
                return self._hang_up(
                    f"a frame at offset {offset}, our log ends at {self.max_offset}", now_ms
                )
        if self._first_frame:
            self._first_frame = False
            self._redial.progress()
        self._ack_due = True
        self._frame_confirm = confirm
        if epoch != self.last_epoch:
            effects += self._enter_epoch(epoch, epoch_start, now_ms)
        return effects

    def body_received(self, data: memoryview) -> list[SlaveEffect]:
        """The next piece of the current frame's body."""
        offset = self.max_offset
        size = len(data)
        self._ack_due = True
        self.bytes_received += size
        pending = self._pending_epoch
        self.max_offset = offset + size
        if pending is None:
            return [AppendLog(offset, data)]
        # The last chunk of an epoch, which Java labels with the next one.
        epoch, start = pending
        if self.max_offset < start:
            return [AppendLog(offset, data)]
        self._pending_epoch = None
        self.last_epoch = epoch
        effects: list[SlaveEffect] = [AppendLog(offset, data[: start - offset])]
        effects.append(AppendEpoch(epoch, start))
        if self.max_offset > start:
            effects.append(AppendLog(start, data[start - offset :]))
        return effects

    def _enter_epoch(self, epoch: int, start: int, now_ms: int) -> list[SlaveEffect]:
        """The frame belongs to another epoch than the last one: durable before its first byte."""
        if epoch < self.last_epoch:
            return self._hang_up(
                f"a frame of epoch {epoch}, this replica has accepted {self.last_epoch}", now_ms
            )
        if start > self.max_offset:
            self._pending_epoch = (epoch, start)
            return []
        self._pending_epoch = None
        self.last_epoch = epoch
        return [AppendEpoch(epoch, start)]

    def _begin_at(self, offset: int) -> list[SlaveEffect]:
        """An empty log begins where the master's does, or at the master's last segment."""
        assert self._peer is not None
        self.max_offset = offset
        self.confirm_offset = 0
        entries = within_log(self._peer.entries, offset)
        self.last_epoch = entries[-1].epoch if entries else -1
        return [BeginAt(offset, "the master's log begins there"), AdoptEpochs(entries)]

    def _next_byte_gone(self, offset: int, now_ms: int) -> list[SlaveEffect]:
        reason = f"our log ends at {self.max_offset}, the master's begins at {offset}"
        if not self._is_proved:
            # The next connection asks who it is, for the view is no longer fresh then.
            return self._hang_up(f"{reason}: it has to prove that it is the master", now_ms)
        if self.broker_id in self.view.sync_state_set:
            return self._diverge(
                f"{reason}, yet this replica is in the SyncStateSet: nothing is dropped; compare "
                "both logs, or move this store aside and restart",
                now_ms,
            )
        return self._begin_anew(reason, now_ms)

    def record_refused(self, offset: int, reason: str, now_ms: int) -> list[SlaveEffect]:
        """The record at `offset` came damaged and was dropped. It may have been the way: we ask
        for it again, and ever more rarely as long as it is that same one."""
        why = f"the master sent a damaged record: {reason}"
        return self._give_up(why, is_new=self._redial.stuck(offset, why, now_ms))

    def disk_full(self, log_end: int, reason: str, now_ms: int) -> list[SlaveEffect]:
        """The log, which ends at `log_end`, could not grow. The disk may become empty again: we
        try, ever more rarely as long as not a byte could be appended."""
        why = f"cannot follow the master, the disk is full: {reason}"
        return self._give_up(why, is_new=self._redial.stuck(log_end, why, now_ms))

    def turn_ended(self, flushed_offset: int, now_ms: int) -> list[SlaveEffect]:
        """After all that one read brought: one ack for all of it, then what readers may see."""
        if self.phase is not Phase.TRANSFER:
            return []
        effects: list[SlaveEffect] = []
        if self._ack_due:
            self._acknowledge(flushed_offset, now_ms, effects)
        visible = min(self._frame_confirm, self.max_offset)
        if visible > self.confirm_offset and not self._flooded(now_ms):
            self.confirm_offset = visible
            effects.append(Confirm(visible))
        return effects

    def read_filled(self, now_ms: int) -> None:
        """A read filled its whole buffer: more is waiting."""
        self._filled_ms = now_ms

    def _flooded(self, now_ms: int) -> bool:
        """Whether bytes that were old when we connected pour in faster than they are read. Then
        being a copy comes first; showing messages to readers costs more, and follows. It follows
        closely: whoever is elected has all of it to show before it opens."""
        assert self._peer is not None
        if self.max_offset - self.confirm_offset > self.policy.flood_lag_bytes:
            return False
        filled = now_ms - self._filled_ms < self.policy.flood_ms
        return filled and self.max_offset < self._peer.max_offset

    def _acknowledge(self, flushed_offset: int, now_ms: int, effects: list[SlaveEffect]) -> None:
        ack = self.max_offset
        if self.policy.sync_flush and flushed_offset < ack:
            if self._flush_asked < ack:
                self._flush_asked = ack
                effects.append(FlushTo(ack))
            if not self._first_ack_sent:
                return  # the first ack chooses where the master starts: all or nothing
            ack = flushed_offset
        else:
            self._ack_due = False
        self._first_ack_sent = True
        self.sent_ms = now_ms
        effects.append(SendToMaster(encode_ack(ack)))

    # -- inside

    def _take(self, log: LocalLog) -> None:
        self._log = log
        self.max_offset = log.max_offset
        self.last_epoch = log.last_epoch
        self.confirm_offset = max(self.confirm_offset, log.confirm_offset)

    def _dial(self, now_ms: int) -> list[SlaveEffect]:
        if not self.view.master_ha_address:
            self._redial.later(now_ms)
            return []
        self.phase = Phase.CONNECTING
        self.read_ms = self._ticked_ms = now_ms
        return [Dial(self.view.master_ha_address)]

    def _hang_up(self, reason: str, now_ms: int) -> list[SlaveEffect]:
        self._reset()
        self._redial.later(now_ms)
        return [Hangup(reason)]

    def _reset(self) -> None:
        self.phase = Phase.READY
        self._peer = None
        self._proved = False
        self._pending_epoch = None
        self._ack_due = False
        self._flush_asked = 0
        self._frame_confirm = -1
        self._beat_ms = None
        self._brisk = 0

    def _note_beat(self, now_ms: int) -> None:
        if self._beat_ms is not None:
            self._brisk = self._brisk + 1 if now_ms - self._beat_ms <= 1_000 else 0
        self._beat_ms = now_ms

    def _patience_ms(self) -> int:
        policy = self.policy
        if self.phase is Phase.CONNECTING:
            return policy.dial_ms
        if self.phase in (Phase.HANDSHAKE, Phase.PROVING):
            return policy.connect_ms
        brisk = self.view.master_incarnation or self._brisk >= 2
        return policy.brisk_ms if brisk else policy.housekeeping_ms

    def check_invariants(self) -> None:
        """For tests and the simulation, after each step."""
        assert self.confirm_offset <= self.max_offset or self.max_offset == 0
        if self._pending_epoch is not None:
            assert self.phase is Phase.TRANSFER
            assert self._pending_epoch[1] > self.max_offset
        if self.phase is Phase.TRANSFER:
            assert self._peer is not None


__all__ = ["Phase", "SlaveCore"]
