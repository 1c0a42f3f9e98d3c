"""The slave's end of its HA connection: decides when to connect, and what to cut, append and ack.
Pure.

TRANSITIONS is the table of phases; any other step raises InvalidTransition, which shows the recent
events. Invariants: nothing is acked to a peer whose history ends below the epoch that this replica
has accepted (R2). Nothing is cut, appended or acked before the peer has proved to be the master
(R21, R41): a BatonMQ broker names itself before its handshake, a Java broker is asked. With a
secret of the nodes it also proves that it knows it.
`received_log` has the log's state. Each effect must be complete before the next event. Origin: Java
AutoSwitchHAClient.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final

from msgspec import structs

from batonmq.ha import slave_effects as fx
from batonmq.ha.java_peer import PeerIdentity, is_java_master, proof_fault, shared_with_java
from batonmq.ha.lineage import points_of
from batonmq.ha.node_secret import SWITCH, NodeSecret, SlaveProof
from batonmq.ha.proof import master_fault
from batonmq.ha.received_log import (
    BeginAgain,
    CutTo,
    LocalLog,
    ReceivedLog,
    Refuse,
    difference_of,
    epochs_after,
    judge_log,
)
from batonmq.ha.slave_policy import EPOCHS_AHEAD_MAX, NEVER_MS, MasterSilence, Redial, SlavePolicy
from batonmq.ha.wire import (
    HAIdentity,
    MasterHandshake,
    SlaveHandshake,
    TransferHeader,
    encode_proof,
    encode_slave_handshake,
    encode_tables_mark,
)
from batonmq.protocol.role_view import RoleView
from batonmq.runtime.recent_events import RecentEvents, records_event, shows_events


class SlavePhase(Enum):
    READY = "ready"  # no connection; `Redial` says when to connect
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"  # our handshake is sent, the master's is awaited
    PROVING = "proving"  # a Java master is asked for its identity (GET_BROKER_EPOCH_CACHE, 1007)
    CUTTING = "cutting"  # the store cuts the log to the consistent point
    TRANSFER = "transfer"  # our log is a prefix of the master's; its frames are appended and acked
    STOPPED = "stopped"  # the slave side has ended (R1)


class SlaveStep(Enum):
    DIAL = "dial"
    CONNECTED = "connected"
    PROOF_NEEDED = "proof needed"
    CUT_NEEDED = "cut needed"
    HISTORY_FITS = "history fits"
    HANG_UP = "hang up"
    STOP = "stop"


TRANSITIONS: Final[dict[SlavePhase, dict[SlaveStep, SlavePhase]]] = {
    SlavePhase.READY: {
        SlaveStep.DIAL: SlavePhase.CONNECTING,  # when a connection is due, or by a newer view
        SlaveStep.HANG_UP: SlavePhase.READY,  # a write from before the last hang-up failed
        SlaveStep.STOP: SlavePhase.STOPPED,
    },
    SlavePhase.CONNECTING: {
        SlaveStep.CONNECTED: SlavePhase.HANDSHAKE,
        SlaveStep.HANG_UP: SlavePhase.READY,  # refused, no answer, or another master was elected
        SlaveStep.STOP: SlavePhase.STOPPED,
    },
    SlavePhase.HANDSHAKE: {  # the master's handshake arrives
        SlaveStep.PROOF_NEEDED: SlavePhase.PROVING,
        SlaveStep.CUT_NEEDED: SlavePhase.CUTTING,
        SlaveStep.HISTORY_FITS: SlavePhase.TRANSFER,
        SlaveStep.HANG_UP: SlavePhase.READY,
        SlaveStep.STOP: SlavePhase.STOPPED,
    },
    SlavePhase.PROVING: {  # the peer is the view's master
        SlaveStep.CUT_NEEDED: SlavePhase.CUTTING,
        SlaveStep.HISTORY_FITS: SlavePhase.TRANSFER,
        SlaveStep.HANG_UP: SlavePhase.READY,
        SlaveStep.STOP: SlavePhase.STOPPED,
    },
    SlavePhase.CUTTING: {  # the log is cut; the first cut reaches the consistent point
        SlaveStep.HISTORY_FITS: SlavePhase.TRANSFER,
        SlaveStep.HANG_UP: SlavePhase.READY,
        SlaveStep.STOP: SlavePhase.STOPPED,
    },
    SlavePhase.TRANSFER: {
        SlaveStep.HANG_UP: SlavePhase.READY,
        SlaveStep.STOP: SlavePhase.STOPPED,
    },
    SlavePhase.STOPPED: {},
}


class InvalidTransition(AssertionError):
    """A step that is not in the table: a bug."""


class SlaveCore:
    """Follows the master of a role view. `LocalLog`: the store's present state. The first `tick`
    connects at once, because a failover waits for it."""

    def __init__(
        self,
        own: HAIdentity,
        view: RoleView,
        log: LocalLog,
        policy: SlavePolicy,
        now_ms: int,
        secret: NodeSecret | None = None,
    ) -> None:
        """`secret`: of the nodes; None: peers need no proof."""
        assert view.master_broker_id is not None and view.master_broker_id != own.broker_id
        self.recent_events = RecentEvents()
        self.own = own
        self.broker_id = own.broker_id
        self.view = view
        self.policy = policy
        self.phase = SlavePhase.READY
        self.log = ReceivedLog(log, policy, now_ms)
        self.silence = MasterSilence(policy, now_ms)
        self._redial = Redial(policy, now_ms)
        self._peer: MasterHandshake | None = None
        self._named = False  # whether the master is a BatonMQ broker: both ends name themselves
        self._secret = secret
        self._proof: SlaveProof | None = None  # until the master has answered it
        self._followed = (-1, -1)
        """Id and masterEpoch of the master whose log has this one as a prefix."""
        self._tables_epoch = -1
        self._first_frame = True
        self.fenced_epoch = -1
        """A view of this masterEpoch is being stored: no acks to older masters (R2)."""
        self._disputed: tuple[int, ...] = ()
        """Ends at which the master's bytes differed from ours; the master first checks its own copy
        (R47)."""

    # -- connection

    @records_event
    def follow(self, view: RoleView, now_ms: int) -> list[fx.SlaveEffect]:
        """Takes a newer view. A connection to the same process stays."""
        old, self.view = self.view, view
        self._redial.progress()
        same = (old.master_broker_id, old.master_ha_address, old.master_incarnation) == (
            view.master_broker_id,
            view.master_ha_address,
            view.master_incarnation,
        )
        if same and self.phase is not SlavePhase.READY:  # R20: only the set changed
            return []
        effects: list[fx.SlaveEffect] = []
        if self.phase is not SlavePhase.READY:
            self._move(SlaveStep.HANG_UP)
            effects.append(fx.Hangup("the group has another master"))
        return effects + self._dial(now_ms)

    @records_event
    def connected(
        self, log: LocalLog, now_ms: int, *, certified: bool = False
    ) -> list[fx.SlaveEffect]:
        """`certified`: the master has shown a certificate."""
        self._move(SlaveStep.CONNECTED)
        self.silence.read_ms = self.log.sent_ms = now_ms
        self._named = not is_java_master(self.view)
        self._proof, effects = None, list[fx.SlaveEffect]()
        if self._secret is not None and not certified:
            if self._named:
                self._proof = SlaveProof(self._secret, self.own.name, self.view.master_ha_address)
            else:
                reason = f"a master of Java cannot prove the nodes' secret ({SWITCH})"
                effects = self._unproven(self._secret, reason, now_ms)
                if self.phase is SlavePhase.READY:
                    return effects
        # R47: the master's handshake will include samples at these ends.
        points = points_of(log.entries, log.max_offset) if log.samples is not None else ()
        nonce = self._proof.nonce.hex() if self._proof is not None else ""
        introduced = structs.replace(self.own, points=points, disputed=self._disputed, nonce=nonce)
        handshake = SlaveHandshake(
            self.broker_id,
            self.policy.sync_from_last_file,
            self.policy.async_learner,
            introduced if self._named else None,
        )
        return [*effects, fx.SendToMaster(encode_slave_handshake(handshake))]

    @property
    def wants_proof(self) -> bool:
        """Whether `identity_received` comes next on this connection."""
        return self._proof is not None

    @records_event
    def identity_received(self, master: HAIdentity, now_ms: int) -> list[fx.SlaveEffect]:
        """The master named itself, before its handshake. It is asked for its proof first: until
        then nothing that it says is kept (R41)."""
        proof, self._proof = self._proof, None
        assert proof is not None and self._secret is not None
        if proof.accepts(master.name, *master.challenge):
            return [fx.SendToMaster(encode_proof(proof.proof))]
        what = "is wrong" if master.nonce else f"is missing ({SWITCH})"
        reason = f"the proof of master {self.view.master_ha_address} {what}"
        effects = self._unproven(self._secret, reason, now_ms)
        if self.phase is not SlavePhase.READY and master.nonce:
            effects.append(fx.SendToMaster(encode_proof(proof.proof)))
        return effects

    def _unproven(self, secret: NodeSecret, reason: str, now_ms: int) -> list[fx.SlaveEffect]:
        """Reports it; hangs up if the proof is required."""
        found = secret.unproven(self.view.master_ha_address or self.view.master_address, reason)
        return [found] if found.passes else [found, *self._hang_up(reason, now_ms)]

    @records_event
    def disconnected(self, now_ms: int) -> list[fx.SlaveEffect]:
        """The connection ended, could not be made, or was given up by the shell."""
        if self.phase not in (SlavePhase.READY, SlavePhase.STOPPED):
            self._move(SlaveStep.HANG_UP)
            self._redial.later(now_ms)
        return []

    @records_event
    def stop(self) -> list[fx.SlaveEffect]:
        """Ends the slave side before this replica acts as master (R1)."""
        connected = self.phase is not SlavePhase.READY
        self._move(SlaveStep.STOP)
        self._redial.at_ms = NEVER_MS
        return [fx.Hangup("the slave side ends")] if connected else []

    @property
    def wakeup_ms(self) -> int:
        if self.phase in (SlavePhase.READY, SlavePhase.STOPPED):
            return self._redial.at_ms
        return self.silence.wakeup_ms

    @records_event
    def tick(self, now_ms: int) -> list[fx.SlaveEffect]:
        if self.phase in (SlavePhase.READY, SlavePhase.STOPPED):
            return self._dial(now_ms) if now_ms >= self._redial.at_ms else []
        policy = self.policy
        silent_ms = self.silence.tick(now_ms)
        if self.phase is SlavePhase.CONNECTING:
            limit_ms = policy.dial_ms
        elif self.phase in (SlavePhase.HANDSHAKE, SlavePhase.PROVING):
            limit_ms = policy.connect_ms
        else:
            limit_ms = self.silence.limit_ms(beats_regularly=not is_java_master(self.view))
        if silent_ms >= limit_ms:
            was_dialling = self.phase is SlavePhase.CONNECTING
            effects = self._hang_up(f"nothing read for {silent_ms} ms", now_ms)
            if was_dialling:  # connecting took long enough: no further pause
                self._redial.at_ms = now_ms
            return effects
        is_quiet = now_ms - self.log.sent_ms >= policy.keepalive_ms
        if self.phase is SlavePhase.TRANSFER and is_quiet:
            self.log.ack_due = True
        return []

    # -- handshake and truncation

    @records_event
    def handshake_received(
        self, peer: MasterHandshake, log: LocalLog, now_ms: int
    ) -> list[fx.SlaveEffect]:
        """Compares the histories. Nothing is cut or acked before the peer has proved its epoch."""
        assert self.phase is SlavePhase.HANDSHAKE and not self.wants_proof
        self.silence.read_ms = now_ms
        self._peer = peer
        if not self._named:
            # R21: the history of any peer at this address may fit ours by chance, and a Java list
            # may lack the master's own epoch. So a Java peer is first asked for its identity.
            self._move(SlaveStep.PROOF_NEEDED)
            return [fx.ProveMaster(self.view)]
        # R2: this replica may have accepted an epoch newer than its view.
        needed = max(self.view.master_epoch, log.last_epoch)
        if peer.last_epoch < needed:
            return self._hang_up(
                f"the peer's last epoch is {peer.last_epoch}, this replica has accepted {needed}",
                now_ms,
            )
        if peer.last_epoch > self.view.master_epoch:
            # An epoch in between may still reach this replica, so acks need the epoch mark.
            return self._hang_up(
                f"the peer's last epoch is {peer.last_epoch}, the controllers have named"
                f" {self.view.master_epoch} to this replica",
                now_ms,
            )
        fault = master_fault(peer.identity, self.view)
        if fault:
            return self._hang_up(fault, now_ms)
        return self._settle_history(log, now_ms)

    @records_event
    def peer_proved(
        self, identity: PeerIdentity, log: LocalLog, now_ms: int
    ) -> list[fx.SlaveEffect]:
        """The reply to ProveMaster, on the same connection."""
        assert self.phase is SlavePhase.PROVING and self._peer is not None
        fault = proof_fault(identity, self.view, self._peer.last_epoch)
        if fault:
            return self._hang_up(fault, now_ms)
        return self._settle_history(log, now_ms)

    @records_event
    def log_changed(self, log: LocalLog, now_ms: int) -> list[fx.SlaveEffect]:
        """TruncateTo is durable."""
        assert self.phase is SlavePhase.CUTTING
        return self._settle_history(log, now_ms)

    @records_event
    def cut_refused(self, reason: str, now_ms: int) -> list[fx.SlaveEffect]:
        """The store refused TruncateTo (R23, or no record ends there)."""
        assert self.phase is SlavePhase.CUTTING
        return self._diverge(f"{reason}; compare both logs, or move this store aside", now_ms)

    def _settle_history(self, log: LocalLog, now_ms: int) -> list[fx.SlaveEffect]:
        peer = self._peer
        assert peer is not None
        self.log.reload(log)
        member = self.broker_id in self.view.sync_state_set
        # The store may lag in showing confirmed messages: they are protected nevertheless.
        log = replace(log, confirm_offset=self.log.confirm_offset)
        difference = difference_of(log, peer)
        # G8: one of the two copies is damaged. The master must check its own before ours is cut.
        if difference is not None and difference not in self._disputed:
            self._disputed = (*self._disputed, difference)[-8:]
            effects = self._hang_up(
                f"the master's bytes before {difference} are not ours: it checks its copy", now_ms
            )
            self._redial.at_ms = now_ms
            return effects
        decision = judge_log(log, peer, member=member, unclean_epoch=self.view.unclean_epoch)
        if isinstance(decision, Refuse):
            return self._diverge(decision.reason, now_ms)
        if isinstance(decision, BeginAgain):
            return self._begin_again(decision.reason, now_ms)
        if isinstance(decision, CutTo):
            self._move(SlaveStep.CUT_NEEDED)
            # R23: only an unclean election may cut below the confirmed end.
            self.log.confirm_offset = min(self.log.confirm_offset, decision.offset)
            return [fx.TruncateTo(log.max_offset, decision.offset, decision.unclean)]
        followed = (self.view.master_broker_id, self.view.master_epoch) == self._followed
        # Java's list lacks an epoch that begins where the one before began (`java_peer`).
        lacks_epoch = not self._named and peer.last_epoch < self.view.master_epoch
        shared = shared_with_java(log, peer)
        if lacks_epoch and not followed and shared < log.max_offset:
            if member:  # it may have acked those bytes in this mastership (R9)
                return self._hang_up(
                    f"the peer's list lacks epoch {self.view.master_epoch}, in which it acts: our "
                    f"bytes from {shared} on may be another master's; they are cut once this "
                    "replica has left the set",
                    now_ms,
                )
            self._move(SlaveStep.CUT_NEEDED)
            return [fx.TruncateTo(log.max_offset, shared, False)]
        return self._start_transfer(log, peer, now_ms)

    def _start_transfer(
        self, log: LocalLog, peer: MasterHandshake, now_ms: int
    ) -> list[fx.SlaveEffect]:
        self._move(SlaveStep.HISTORY_FITS)
        self._disputed = ()  # both copies were compared and agree
        assert self.view.master_broker_id is not None
        self._followed = (self.view.master_broker_id, self.view.master_epoch)
        self._first_frame = True
        effects: list[fx.SlaveEffect] = []
        entries = epochs_after(log, peer)
        if [(e.epoch, e.start_offset) for e in entries] != [
            (e.epoch, e.start_offset) for e in log.entries
        ]:
            effects.append(fx.AdoptEpochs(entries))
        named = peer.identity.lineage if peer.identity is not None else ""
        if named and log.samples is not None and log.samples.lineage != named:
            effects.append(fx.EnterLineage(named))
        effects.append(fx.Following(log.max_offset))
        self.log.begin_transfer(
            entries[-1].epoch if entries else -1, peer.max_offset, marks_epochs=self._named
        )
        # The tables may be older than the connection (R42).
        if self._tables_epoch >= 0:
            effects += self._mark_tables()
        if not self.policy.sync_flush and self.fenced_epoch <= self.view.master_epoch:
            # Send even an ack of 0: the master waits for it (Java up to 5 s).
            self.log.acknowledge(log.max_offset, now_ms, effects)
        return effects

    @records_event
    def tables_followed(self, master_epoch: int) -> list[fx.SlaveEffect]:
        """The tables (topics, groups, consumer offsets) of the master of that epoch are here (R42);
        -1: they are outdated."""
        self._tables_epoch = master_epoch
        return self._mark_tables() if self.phase is SlavePhase.TRANSFER else []

    def _mark_tables(self) -> list[fx.SlaveEffect]:
        if not self._named:
            return []
        return [fx.SendToMaster(encode_tables_mark(self._tables_epoch))]

    def _begin_again(self, reason: str, now_ms: int) -> list[fx.SlaveEffect]:
        """R27: sets the old log aside; the next handshake finds an empty one."""
        effects = self._hang_up(reason, now_ms)
        self._redial.at_ms = now_ms
        # now, before BeginAt is done: the next handshake must not claim these bytes
        self.log.max_offset = self.log.confirm_offset = 0
        return [fx.BeginAt(0, reason), fx.AdoptEpochs(()), *effects]

    def _diverge(self, reason: str, now_ms: int) -> list[fx.SlaveEffect]:
        """This replica cannot follow the master."""
        return self._give_up(reason, is_new=self._redial.diverged(reason, now_ms))

    def _give_up(self, reason: str, *, is_new: bool) -> list[fx.SlaveEffect]:
        """Reports a new reason once; `_redial` has set the next attempt."""
        self._move(SlaveStep.HANG_UP)
        return [fx.Hangup(reason), fx.Diverged(reason)] if is_new else [fx.Hangup(reason)]

    # -- transfer

    @records_event
    def frame_received(self, header: TransferHeader, now_ms: int) -> list[fx.SlaveEffect]:
        """The head of a transfer frame; pieces of its body follow by `log.append`."""
        body_size, offset, epoch, epoch_start, confirm = header
        log = self.log
        self.silence.read_ms = now_ms
        if self.phase is not SlavePhase.TRANSFER:
            if body_size:
                return self._hang_up("log bytes before our first ack", now_ms)
            return []  # Java sends heartbeats right after its handshake
        if not body_size:
            self.silence.note_beat(now_ms)
            if offset < 0:
                log.ack_due = True  # a Java master waits for the ack before it starts
                return []
        effects: list[fx.SlaveEffect] = []
        if offset != log.max_offset:
            if log.max_offset == 0:
                assert self._peer is not None
                # A file of the log is named after its first offset.
                if offset % self.policy.segment_size:
                    return self._diverge(_no_place(offset, self.policy.segment_size), now_ms)
                effects += log.begin_at(offset, self._peer)
            # R27: the heartbeat shows that our next byte has expired at the master.
            elif self._first_frame and not body_size and offset > log.max_offset:
                return self._next_byte_gone(offset, now_ms)
            else:
                return self._hang_up(
                    f"a frame at offset {offset}, our log ends at {log.max_offset}", now_ms
                )
        if self._first_frame:  # only now the master really serves us
            self._first_frame = False
            self._redial.served()
        # R2: a deposed master may still send.
        if epoch < log.last_epoch:
            reason = f"a frame of epoch {epoch}, this replica has accepted {log.last_epoch}"
            return effects + self._hang_up(reason, now_ms)
        # R47: elections count on from what replicas report, and an absurd epoch would end that.
        if epoch > self.view.master_epoch + EPOCHS_AHEAD_MAX:
            reason = f"a frame of epoch {epoch}, the controllers named {self.view.master_epoch}"
            return effects + self._hang_up(reason, now_ms)
        return effects + log.frame_begins(epoch, epoch_start, confirm)

    def _next_byte_gone(self, offset: int, now_ms: int) -> list[fx.SlaveEffect]:
        reason = f"our log ends at {self.log.max_offset}, the master's begins at {offset}"
        if self.broker_id in self.view.sync_state_set:
            reason += (
                ", yet this replica is in the SyncStateSet: nothing is dropped; compare both logs, "
                "or move this store aside and restart"
            )
            return self._diverge(reason, now_ms)
        return self._begin_again(reason, now_ms)

    @records_event
    def append_failed(
        self, log_end: int, offset: int, reason: str, now_ms: int
    ) -> list[fx.SlaveEffect]:
        """The record at `offset` is damaged, or the disk is full; the log ends at `log_end`. The
        bytes are requested again, less often while it is the same offset."""
        self.log.confirm_offset = min(self.log.confirm_offset, log_end)
        return self._give_up(reason, is_new=self._redial.stuck(offset, reason, now_ms))

    @records_event
    def turn_ended(self, flushed_offset: int, now_ms: int) -> list[fx.SlaveEffect]:
        """Call after each read: one ack for all of it, then the confirmed end."""
        if self.phase is not SlavePhase.TRANSFER:
            return []
        effects: list[fx.SlaveEffect] = []
        if self.log.ack_due and self.fenced_epoch <= self.view.master_epoch:
            self.log.acknowledge(flushed_offset, now_ms, effects)
        self.log.confirm(now_ms, effects)
        return effects

    @property
    def is_served(self) -> bool:
        """Whether the master sends this log's next bytes: not yet when only the histories fit, for
        the first of these bytes may have expired there."""
        return self.phase is SlavePhase.TRANSFER and not self._first_frame

    @property
    def is_caught_up(self) -> bool:
        """Whether this log has everything acknowledged up to now: it reaches the confirmOffset of
        this connection and the start of the master's epoch. A new master's confirmOffset may lag
        behind what its predecessor acknowledged, but that is below this start. For what it
        acknowledges later without this replica, this replica is not in the required set (R1)."""
        if self._peer is None:
            return False
        # A Java master's list may lack its own epoch.
        epoch = self.view.master_epoch
        return self.log.is_caught_up(
            epoch if self._named else max(self._peer.last_epoch, self.log.last_epoch)
        )

    # -- inside

    def _dial(self, now_ms: int) -> list[fx.SlaveEffect]:
        view = self.view
        if not view.master_ha_address and not (is_java_master(view) and view.master_address):
            self._redial.later(now_ms)
            return []
        self._move(SlaveStep.DIAL)
        self.silence.begin(now_ms)
        return [fx.Dial(view.master_ha_address)]

    def _hang_up(self, reason: str, now_ms: int) -> list[fx.SlaveEffect]:
        self._move(SlaveStep.HANG_UP)
        self._redial.later(now_ms)
        return [fx.Hangup(reason)]

    def _move(self, step: SlaveStep) -> None:
        phase = TRANSITIONS[self.phase].get(step)
        if phase is None:
            raise InvalidTransition(f"{step.value} in phase {self.phase.value}")
        self.phase = phase
        if phase in (SlavePhase.READY, SlavePhase.STOPPED):
            self._peer = None
            self.log.end_connection()
            self.silence.end_connection()

    @shows_events
    def check_invariants(self) -> None:
        """Called after each step of tests and simulation."""
        self.log.check_invariants()
        if self.phase is SlavePhase.TRANSFER:
            assert self._peer is not None


def _no_place(offset: int, segment_size: int) -> str:
    return (
        f"the master's log begins at {offset}, and an empty log here only at multiples of"
        f" mappedFileSizeCommitLog, {segment_size}: give all replicas the same"
    )
