"""The slave's end of a classic HA connection: decides when to connect, what to append and report.
Pure.

IDLE (no address) -> WAIT -> DIALLING -> PROVING -> TRANSFER, and back to WAIT when the connection
ends. PROVING asks the master for the end of its log, if its remoting address is known. A master
whose log is shorter has lost its tail, and is not followed: once grown past this log it would send
other bytes at the same offsets. With a secret of the nodes the master proves in PROVING that it
knows it, at the same time. Origin: Java DefaultHAClient.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from batonmq.ha import slave_effects as fx
from batonmq.ha.classic.wire import Answer, FrameHead, Hello, encode_hello, encode_report
from batonmq.ha.node_secret import SWITCH, NodeSecret, SlaveProof, Unproven
from batonmq.ha.slave_policy import NEVER_MS, Redial, SlavePolicy
from batonmq.runtime.recent_events import RecentEvents, records_event


@dataclass(frozen=True, slots=True)
class AskLogEnd:
    """Ask the master at `address` for the end of its log (GET_BROKER_HA_STATUS, 907); then feed
    `log_end_received`, or `disconnected` if it does not answer."""

    address: str


ClassicSlaveEffect = (
    fx.AppendLog
    | AskLogEnd
    | fx.BeginAt
    | fx.Dial
    | fx.Diverged
    | fx.FlushTo
    | fx.Following
    | fx.Hangup
    | fx.SendToMaster
    | Unproven
)


@dataclass(frozen=True, slots=True)
class MasterAddresses:
    """`ha`: the address to connect to. `remoting`: "" if only haMasterAddress is known."""

    ha: str = ""
    remoting: str = ""


class ClassicPhase(Enum):
    IDLE = "idle"
    WAIT = "wait"
    DIALLING = "dialling"
    PROVING = "proving"
    TRANSFER = "transfer"
    STOPPED = "stopped"


class ClassicSlaveCore:
    """Feed it events and perform the effects in order. Offsets are exclusive ends, times are ms.
    `flushed`: only with haSyncFlush. `secret`: of the nodes; None: peers need no proof.
    """

    def __init__(self, policy: SlavePolicy, now_ms: int, secret: NodeSecret | None = None) -> None:
        self.policy = policy
        self._secret = secret
        self.unproven = ""
        """Why the last master that should have proved itself was refused; "" if it was not."""
        self._address = ""  # as it was dialled last
        self._no_hello_to = ""
        """Where no proof is required, the address of a master that answers no hello: it gets none
        the next time."""
        self._is_silent = False  # and did not close either, as Java
        self._proof: SlaveProof | None = None
        """Until the master has answered the hello."""
        self._is_unproven = False  # no hello was said to this master
        self._end_asked = False
        self.stage = ClassicPhase.IDLE
        self.master = MasterAddresses()
        self.read_ms = now_ms
        self.sent_ms = now_ms
        self.bytes_received = 0
        self.recent_events = RecentEvents()
        self._redial = Redial(policy, now_ms)
        self._since_ms = now_ms
        self._next = 0  # The offset of the next byte; ahead of the log's end during a read.
        self._reported = -1
        self._is_new = True

    @property
    def wakeup_ms(self) -> int:
        match self.stage:
            case ClassicPhase.IDLE | ClassicPhase.STOPPED:
                return self._since_ms + self.policy.housekeeping_ms
            case ClassicPhase.WAIT:
                return self._redial.at_ms
            case ClassicPhase.DIALLING | ClassicPhase.PROVING:
                return self._since_ms + self._stage_limit_ms
            case ClassicPhase.TRANSFER:
                return min(
                    self.sent_ms + self.policy.keepalive_ms,
                    self.read_ms + self.policy.housekeeping_ms,
                )

    # -- events

    @records_event
    def follow(self, master: MasterAddresses, now_ms: int) -> list[ClassicSlaveEffect]:
        """Sets the master's address. A working connection stays; the address is used for the next
        one."""
        if self.stage is ClassicPhase.STOPPED or master == self.master:
            return []
        self.master = master
        if self.stage not in (ClassicPhase.IDLE, ClassicPhase.WAIT):
            return []
        self.stage = ClassicPhase.WAIT
        return self.dial_now(now_ms)

    @records_event
    def dial_now(self, now_ms: int) -> list[ClassicSlaveEffect]:
        """The obstacle is gone: connects without waiting for the end of the pause."""
        if self.stage is not ClassicPhase.WAIT:
            return []
        self._redial.progress()
        self._redial.at_ms = now_ms
        return self.tick(now_ms)

    @records_event
    def connected(
        self, log_end: int, flushed: int, now_ms: int, *, certified: bool = False
    ) -> list[ClassicSlaveEffect]:
        """`certified`: the master has shown a certificate."""
        assert self.stage is ClassicPhase.DIALLING
        self.read_ms = self.sent_ms = now_ms
        self._reported = -1
        self._is_unproven, effects = False, list[ClassicSlaveEffect]()
        secret = self._secret
        if secret is None or certified:
            self.unproven = ""
        elif self._address != self._no_hello_to:
            self._proof = SlaveProof(secret, secret.name, "")
            hello = encode_hello(Hello(self._proof.nonce, int(secret.name[2])))
            effects.append(fx.SendToMaster(hello))
        else:
            self._no_hello_to = ""  # another process may be there the next time
            self._is_unproven = True
        self._end_asked = bool(self.master.remoting)
        if self._end_asked:
            effects.append(AskLogEnd(self.master.remoting))
        self._enter(ClassicPhase.PROVING, now_ms)
        return effects + self._begin_if_known(log_end, flushed, now_ms)

    @property
    def wants_proof(self) -> bool:
        """Whether `answer_received` comes next on this connection."""
        return self._proof is not None

    @records_event
    def answer_received(
        self, answer: Answer, log_end: int, flushed: int, now_ms: int
    ) -> list[ClassicSlaveEffect]:
        """The master's proof: until then nothing that it sends is kept."""
        proof, self._proof = self._proof, None
        if proof is None or self._secret is None or self.stage is not ClassicPhase.PROVING:
            return []
        effects: list[ClassicSlaveEffect] = []
        if proof.accepts(self._secret.named("0"), *answer):
            self.unproven = ""
        else:
            found = self._found(self._secret, "the master's proof is wrong")
            if not found.passes:
                return [found, *self._hang_up(found.reason, now_ms)]
            effects.append(found)
        effects.append(fx.SendToMaster(proof.proof))
        return effects + self._begin_if_known(log_end, flushed, now_ms)

    def _found(self, secret: NodeSecret, reason: str) -> Unproven:
        found = secret.unproven(self._address, reason)
        self.unproven = "" if found.passes else reason
        return found

    def _begin_if_known(self, log_end: int, flushed: int, now_ms: int) -> list[ClassicSlaveEffect]:
        if self._proof is not None or self._end_asked:
            return []
        effects: list[ClassicSlaveEffect] = []
        if self._is_unproven and self._secret is not None:  # not before: it may be no master
            reason = f"the master proves no secret of the nodes ({SWITCH})"
            effects.append(self._found(self._secret, reason))
        return effects + self._begin(log_end, flushed, now_ms)

    @records_event
    def log_end_received(
        self, master_end: int, log_end: int, flushed: int, now_ms: int
    ) -> list[ClassicSlaveEffect]:
        """The master's log ends at `master_end`."""
        if self.stage is not ClassicPhase.PROVING:
            return []
        if log_end <= master_end:
            self._end_asked = False
            return self._begin_if_known(log_end, flushed, now_ms)
        reason = (
            f"this log ends at {log_end}, above the end of its master's, {master_end}: it holds"
            " what the master has lost; make this broker the master, or empty its store"
        )
        return self._give_up(reason, now_ms)

    @records_event
    def log_end_unknown(self, reason: str, now_ms: int) -> list[ClassicSlaveEffect]:
        """The question for it failed, which says nothing about the master's proof."""
        return self._hang_up(reason, now_ms) if self.stage is ClassicPhase.PROVING else []

    @records_event
    def nonsense_received(self, reason: str, now_ms: int) -> list[ClassicSlaveEffect]:
        """Bytes that are no frame, or no answer to a hello."""
        return [*self._no_answer(reason), *self._hang_up(reason, now_ms)]

    @records_event
    def frame_received(
        self, head: FrameHead, log_end: int, now_ms: int
    ) -> list[ClassicSlaveEffect]:
        """The head of a frame. `log_end`: the end of the written bytes; `_next` includes those
        being written."""
        if self.stage is not ClassicPhase.TRANSFER:
            return self._hang_up("a frame before the first report", now_ms)
        self._next = max(self._next, log_end)
        if self._is_unproven and self._is_silent:
            self._no_hello_to = self._address  # each hello would cost `connect_ms`
        if head.offset == self._next:
            return [] if head.size == 0 else self._progressed()
        # An empty log begins where the master's log begins. A file of the log has its first offset
        # as its name, so that must be a multiple of the segment size.
        if self._next == 0 and head.size and head.offset % self.policy.segment_size == 0:
            self._next = head.offset
            return [fx.BeginAt(head.offset, "the master begins there"), *self._progressed()]
        if self._next == 0:
            what = "this empty log can begin where a segment begins only"
        else:
            what = f"this log ends at {self._next}"
        return self._give_up(f"the master continues at {head.offset}, but {what}", now_ms)

    def body_received(self, data: memoryview) -> fx.AppendLog:
        """A piece of the last frame's body."""
        append = fx.AppendLog(self._next, data)
        self._next += len(data)
        self.bytes_received += len(data)
        return append

    def turn_ended(self, log_end: int, flushed: int, now_ms: int) -> list[ClassicSlaveEffect]:
        """Everything read is written: reports once if the log has grown."""
        if self.stage is not ClassicPhase.TRANSFER:
            return []
        self._next = log_end
        reportable = min(log_end, flushed) if self.policy.sync_flush else log_end
        if self._reported < 0 and reportable < log_end:
            return [fx.FlushTo(log_end)]  # the first report says where the master starts
        effects: list[ClassicSlaveEffect] = []
        if reportable > self._reported:
            effects.append(self._report(reportable, now_ms))
        # With haSyncFlush the report waits until the flush calls `turn_ended` again.
        if reportable < log_end:
            effects.append(fx.FlushTo(log_end))
        return effects

    @records_event
    def append_failed(self, offset: int, reason: str, now_ms: int) -> list[ClassicSlaveEffect]:
        """Nothing can be written now: the disk is full, or the record at `offset` is damaged."""
        is_new = self._redial.stuck(offset, reason, now_ms)
        self._enter(ClassicPhase.WAIT, now_ms)
        effects: list[ClassicSlaveEffect] = [fx.Hangup(reason)]
        return [fx.Diverged(reason), *effects] if is_new else effects

    @records_event
    def disconnected(self, now_ms: int) -> list[ClassicSlaveEffect]:
        """The master ended the connection, or none could be made."""
        # Our own hang-up has already set the next attempt.
        if self.stage in (ClassicPhase.IDLE, ClassicPhase.WAIT, ClassicPhase.STOPPED):
            return []
        effects = self._no_answer(
            "the master closed the connection at the hello, as a slave does too"
        )
        self._enter(ClassicPhase.WAIT, now_ms)
        self._redial.later(now_ms)
        return effects

    def _no_answer(self, reason: str, *, silent: bool = False) -> list[ClassicSlaveEffect]:
        """The connection ends by the master's doing. Without effect after its answer."""
        if self._proof is None or self._secret is None:
            return []
        if not self._secret.required:
            self._no_hello_to, self._is_silent = self._address, silent
            return []
        return [self._found(self._secret, f"{reason} ({SWITCH})")]

    @records_event
    def stop(self, now_ms: int) -> list[ClassicSlaveEffect]:
        self._enter(ClassicPhase.STOPPED, now_ms)
        self._redial.at_ms = NEVER_MS
        return [fx.Hangup("the slave side ends")]

    def tick(self, now_ms: int) -> list[ClassicSlaveEffect]:
        if now_ms < self.wakeup_ms:
            return []
        match self.stage:
            case ClassicPhase.IDLE | ClassicPhase.STOPPED:
                self._since_ms = now_ms
                return []
            case ClassicPhase.WAIT:
                self._enter(ClassicPhase.DIALLING, now_ms)
                self._address = self.master.ha
                return [fx.Dial(self._address)]
            case ClassicPhase.DIALLING | ClassicPhase.PROVING:
                reason = f"no answer for {self._stage_limit_ms} ms"
                # A master that does not even say where its log ends may hang: it refuses no hello.
                refused = [] if self._end_asked else self._no_answer(reason, silent=True)
                return [*refused, *self._hang_up(reason, now_ms)]
            case ClassicPhase.TRANSFER:
                silent_ms = now_ms - self.read_ms
                if silent_ms >= self.policy.housekeeping_ms:
                    return self._hang_up(f"nothing was read for {silent_ms} ms", now_ms)
                # This report also keeps an idle connection alive.
                return [self._report(self._reported, now_ms)] if self._reported >= 0 else []

    # -- inside

    @property
    def _stage_limit_ms(self) -> int:
        dialling = self.stage is ClassicPhase.DIALLING
        return self.policy.dial_ms if dialling else self.policy.connect_ms

    def _enter(self, stage: ClassicPhase, now_ms: int) -> None:
        self.stage = stage
        if stage is not ClassicPhase.PROVING:
            self._proof = None
        self._since_ms = now_ms

    def _begin(self, log_end: int, flushed: int, now_ms: int) -> list[ClassicSlaveEffect]:
        self._enter(ClassicPhase.TRANSFER, now_ms)
        self._is_new = True
        self._next = log_end
        return self.turn_ended(log_end, flushed, now_ms)

    def _report(self, offset: int, now_ms: int) -> fx.SendToMaster:
        self._reported = offset
        self.sent_ms = now_ms
        return fx.SendToMaster(encode_report(offset))

    def _progressed(self) -> list[ClassicSlaveEffect]:
        # Not when the connection is made: a master that refuses each one would be dialled without a
        # pause.
        self._redial.served()
        if not self._is_new:
            return []
        self._is_new = False
        return [fx.Following(self._next)]

    def _hang_up(self, reason: str, now_ms: int) -> list[ClassicSlaveEffect]:
        self._enter(ClassicPhase.WAIT, now_ms)
        self._redial.later(now_ms)
        return [fx.Hangup(reason)]

    def _give_up(self, reason: str, now_ms: int) -> list[ClassicSlaveEffect]:
        """Ends the connection for a lasting reason: reports it once, retries after longer
        pauses."""
        is_new = self._redial.diverged(reason, now_ms)
        self._enter(ClassicPhase.WAIT, now_ms)
        return [fx.Hangup(reason), *([fx.Diverged(reason)] if is_new else [])]
