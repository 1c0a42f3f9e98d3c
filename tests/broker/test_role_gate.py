"""RoleGate: who may take writes, and what the others answer."""

from batonmq.broker.role_gate import RoleGate
from batonmq.protocol.codes import MASTER_ADDRESS_HINT, MASTER_EPOCH_HINT
from batonmq.protocol.role_view import Role


def opened(epoch: int = 1) -> RoleGate:
    gate = RoleGate()
    gate.opening(epoch)
    gate.open()
    return gate


def code(gate: RoleGate) -> int | None:
    return gate.refusal.code if gate.refusal else None


def test_only_an_opened_master_takes_writes():
    gate = RoleGate()
    assert code(gate) == 14
    gate.opening(3)
    assert (code(gate), gate.role, gate.master_epoch) == (14, Role.FENCED, 3)
    gate.open()
    assert (code(gate), gate.role) == (None, Role.MASTER)
    gate.follow(4)
    assert (code(gate), gate.role, gate.master_epoch) == (2, Role.SLAVE, 4)
    gate.fence()
    assert code(gate) == 14


def test_r36_a_master_without_lease_takes_writes_while_its_whole_set_follows():
    """1. The lease lapses (no controller majority), all followers are there: writes continue.
    2. A follower is gone too: 14 at once. 3. Either comes back: open again."""
    gate = opened()
    gate.update(lease=False, required_set_whole=True)
    assert code(gate) is None
    gate.update(lease=False, required_set_whole=False)
    assert code(gate) == 14
    gate.update(lease=True, required_set_whole=False)
    assert code(gate) is None
    gate.update(lease=False, required_set_whole=False)
    gate.update(lease=False, required_set_whole=True)
    assert code(gate) is None


def test_a_lapsed_lease_means_nothing_to_a_slave():
    gate = opened()
    gate.follow(2)
    gate.update(lease=False, required_set_whole=True)
    assert code(gate) == 2


def test_nothing_opens_a_stopping_broker_again():
    gate = opened()
    gate.close("stopping")
    gate.opening(9)
    gate.open()
    assert gate.refusal is not None and gate.refusal.remark == "stopping"


def test_r36_a_mastership_that_opens_again_is_judged_by_what_stands_now():
    """1. Lease and set are lost. 2. Another mastership opens, with a lease. 3. Both are lost again:
    14 again, though nothing differs from the last time."""
    gate = opened()
    gate.update(lease=False, required_set_whole=False)
    assert code(gate) == 14
    gate.opening(2)
    gate.open()
    assert code(gate) is None
    gate.update(lease=False, required_set_whole=False)
    assert code(gate) == 14


def test_r4_r33_who_leaves_its_role_names_the_new_master_unless_it_stops():
    gate, address = opened(7), "10.0.0.2:10911"
    gate.leave(8, address)
    assert (gate.role, gate.master_epoch, code(gate)) == (Role.FENCED, 8, 14)
    assert gate.refusal is not None and gate.refusal.master_epoch == 8
    assert gate.refusal.hint == {MASTER_ADDRESS_HINT: address, MASTER_EPOCH_HINT: "8"}
    gate.follow(8, address)
    assert (gate.role, code(gate), gate.refusal.master_epoch) == (Role.SLAVE, 2, 8)
    gate.close("this broker is stopping")
    gate.leave(9, "10.0.0.3:10911")
    assert gate.refusal.remark == "this broker is stopping"


def test_r36_that_writes_were_refused_for_want_of_lease_and_set_is_remembered():
    """For the history, which says how a mastership continued after its lease."""
    gate = opened()
    gate.update(lease=False, required_set_whole=True)
    assert not gate.was_cut_off
    gate.update(lease=False, required_set_whole=False)
    gate.update(lease=True, required_set_whole=True)
    assert code(gate) is None and gate.was_cut_off
