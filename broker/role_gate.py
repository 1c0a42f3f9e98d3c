"""The role of this broker, and the refusal for writes that it does not take. Pure.

`RoleGate` owns the role: `RoleActions` changes it, everything else reads it. (The ReplicasManager
keeps role views, which may be ahead of this role.) Writes are safe because of confirmOffset (R1),
not because of the gate: it only saves clients a wait that cannot succeed (R36).
"""

from collections.abc import Callable
from dataclasses import dataclass

from batonmq.protocol.codes import MASTER_ADDRESS_HINT, MASTER_EPOCH_HINT, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.role_view import Role


@dataclass(frozen=True, slots=True)
class Refusal:
    code: int
    remark: str
    master_address: str = ""
    """The master of `master_epoch`, if its address is known."""
    master_epoch: int = 0

    @property
    def hint(self) -> dict[str, str]:
        """Address and epoch of the master as extFields; empty if unknown."""
        if not self.master_address:
            return {}
        return {MASTER_ADDRESS_HINT: self.master_address, MASTER_EPOCH_HINT: str(self.master_epoch)}


class GateClosedError(BrokerRefusal):
    """The gate refuses the write."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code, refusal.remark)
        self.refusal = refusal


_FENCED = Refusal(
    ResponseCode.SERVICE_NOT_AVAILABLE,
    "this broker has no role yet or lost it: ask the name server for the master",
)
_SLAVE_REMARK = "this broker is a slave: ask the name server for the master"
_LEFT_REMARK = "this broker is no longer the master: ask the name server for the new one"
_OPENING = Refusal(
    ResponseCode.SERVICE_NOT_AVAILABLE, "this broker is becoming master, it opens in a moment"
)
_CUT_OFF = Refusal(
    ResponseCode.SERVICE_NOT_AVAILABLE,
    "this master holds no lease and not all of its required replicas follow it",
)


class RoleGate:
    """Role, masterEpoch, and the refusal of writes: None while they are taken."""

    def __init__(self) -> None:
        self.role = Role.FENCED
        self.master_epoch = 0
        # Kept ready, not computed: each send reads this one attribute.
        self.refusal: Refusal | None = _FENCED
        self._lease = False
        self._whole = False
        self.was_cut_off = False
        """Whether writes were refused for lack of lease and required set since this was reset."""
        self._stopping: Refusal | None = None
        self._takes_offsets: Callable[[], bool] | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called after each change of the role or of the master's address."""
        self.after_unclean = False
        """The group had an unclean election, maybe with clean ones after it: clients may have read
        more than this master has (R44)."""

    def opening(self, master_epoch: int) -> None:
        """This broker becomes master of `master_epoch`; it takes no writes before `open`."""
        # Fenced, not master: a late ack of the old role must release nothing (R4).
        self.role, self.master_epoch, self.refusal = Role.FENCED, master_epoch, _OPENING
        self.changed()

    def open(self) -> None:
        """The store is ready for this epoch's writes."""
        self.role = Role.MASTER
        self._lease = True  # an election begins a lease
        self._judge()
        self.changed()

    def leave(self, master_epoch: int, master_address: str) -> None:
        """Another broker is master of `master_epoch`; this one will follow it."""
        self.role, self.master_epoch = Role.FENCED, master_epoch
        self._refuse(ResponseCode.SERVICE_NOT_AVAILABLE, _LEFT_REMARK, master_address)

    def follow(self, master_epoch: int, master_address: str = "") -> None:
        self.role, self.master_epoch = Role.SLAVE, master_epoch
        self._refuse(ResponseCode.SYSTEM_BUSY, _SLAVE_REMARK, master_address)

    def fence(self) -> None:
        """This broker loses its role and has none."""
        self.role, self.refusal = Role.FENCED, _FENCED
        self.changed()

    def close(self, remark: str) -> None:
        """The process stops, or its disk failed: the gate stays closed."""
        # With the master's address: requests that wait here are still sent there.
        known = self.refusal
        self._stopping = Refusal(
            ResponseCode.SERVICE_NOT_AVAILABLE,
            remark,
            known.master_address if known is not None else "",
            known.master_epoch if known is not None else 0,
        )
        self.refusal = self._stopping
        self.changed()

    def act(self, takes_offsets: Callable[[], bool] | None) -> None:
        """In classic mode: this slave begins to serve groups in place of the master, and takes
        their offsets while `takes_offsets()`. None: it stops doing so."""
        self._takes_offsets = takes_offsets

    @property
    def is_acting(self) -> bool:
        return self._takes_offsets is not None

    @property
    def takes_offsets(self) -> bool:
        """Whether groups may commit their offsets here."""
        return self.refusal is None or (self._takes_offsets is not None and self._takes_offsets())

    def _refuse(self, code: int, remark: str, master_address: str) -> None:
        # A broker that stops keeps its remark, whatever role views still arrive.
        if self._stopping is not None:
            code, remark = self._stopping.code, self._stopping.remark
        self.refusal = Refusal(code, remark, master_address, self.master_epoch)
        self.changed()

    def update(self, *, lease: bool, required_set_whole: bool) -> None:
        """Updates lease and required set (R36)."""
        # Called several times a second: almost always nothing has changed.
        if (lease, required_set_whole) != (self._lease, self._whole):
            self._lease, self._whole = lease, required_set_whole
            self._judge()

    def require_open(self) -> None:
        """Raises GateClosedError while writes are refused."""
        if self.refusal is not None:
            raise GateClosedError(self.refusal)

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None

    @property
    def is_master(self) -> bool:
        return self.role is Role.MASTER

    def _judge(self) -> None:
        if self._stopping is not None:
            self.refusal = self._stopping
        elif self.role is Role.MASTER:
            # Either is enough: each ack needs the whole required set anyway (R1).
            self.refusal = None if self._lease or self._whole else _CUT_OFF
            self.was_cut_off = self.was_cut_off or self.refusal is _CUT_OFF
