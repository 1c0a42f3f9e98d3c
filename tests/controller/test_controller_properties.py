"""Random sequences of commands against what must always hold of the controller's state."""

import hypothesis.strategies as st
from hypothesis import given, settings

from batonmq.controller.rules.commands import (
    AlterSyncStateSet,
    ApplyBrokerId,
    BecomeController,
    CleanBrokerData,
    ElectMaster,
    HistoryAppended,
    LiveBroker,
    NewMember,
    NoteEvent,
    RegisterBroker,
    ReportEvent,
    RoleChanged,
    SetChanged,
    decode,
    encode,
)
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import ResponseCode

NAMES = st.sampled_from(["a", "b"])
IDS = st.integers(0, 5)
LIVES = st.sampled_from(["", "x", "y"])
LOGS = st.sampled_from(["", "log-1", "log-2"])
EPOCHS = st.integers(-1, 6)
OFFSETS = st.sampled_from([-1, 0, 1, 2**31, 2**40])
REQUEST_IDS = st.sampled_from(["", "", "", "q1", "q2"])
LIVE = st.lists(
    st.builds(
        LiveBroker,
        broker_id=IDS,
        incarnation=LIVES,
        epoch=EPOCHS,
        max_offset=OFFSETS,
        confirm_offset=OFFSETS,
        election_priority=st.sampled_from([-(2**31), 0, 2**31 - 1]),
        min_offset=OFFSETS,
        master_epoch=EPOCHS,
    ),
    max_size=6,
).map(tuple)
COMMON = {
    "request_id": REQUEST_IDS,
    "controller_epoch": st.just(99),
    "now_ms": st.integers(0, 10_000),
    "broker_name": NAMES,
}
REGISTER = st.builds(
    RegisterBroker,
    **COMMON,
    cluster_name=st.sampled_from(["c", "c", "c", "d"]),
    broker_id=IDS,
    register_check_code=st.sampled_from(["", "k1", "k2", "k3"]),
    address=LIVES,
    incarnation=LIVES,
    log_id=LOGS,
    learner=st.booleans(),
    epoch=EPOCHS,
    max_offset=OFFSETS,
    live=LIVE,
)
ELECT = st.builds(
    ElectMaster,
    **COMMON,
    broker_id=IDS,
    designate=st.booleans(),
    unclean=st.booleans(),
    expected_master_epoch=st.sampled_from([-1, -1, 0, 1, 2]),
    confirm_floor=OFFSETS,
    live=LIVE,
)
ALTER = st.builds(
    AlterSyncStateSet,
    **COMMON,
    master_broker_id=IDS,
    master_incarnation=LIVES,
    master_epoch=EPOCHS,
    sync_state_set_epoch=EPOCHS,
    new_set=st.lists(st.builds(NewMember, broker_id=IDS, incarnation=LIVES), max_size=4).map(tuple),
    confirm_offset=OFFSETS,
    live=LIVE,
)
APPLY = st.builds(
    ApplyBrokerId, **COMMON, broker_id=IDS, register_check_code=st.sampled_from(["k1;1", "k2"])
)
CLEAN = st.builds(
    CleanBrokerData,
    **COMMON,
    broker_ids=st.lists(IDS, max_size=3).map(tuple),
    clean_living_broker=st.booleans(),
    live=LIVE,
)
REPORT = st.builds(
    ReportEvent, **COMMON, broker_id=IDS, kind=st.sampled_from(["opened", "elected", "?"])
)
NOTE = st.builds(
    NoteEvent, **COMMON, kind=st.sampled_from(["pushed", "elected", "?"]), node=st.just("n0")
)
BECOME = st.builds(BecomeController, node=NAMES, nonce=st.sampled_from(["n1", "n2", "n3"]))


class Plausible:
    """A command that fits the state it meets (real ids, lives, epochs), of a few small choices."""

    def __init__(self, what, name, nth, ids, dead, facts, flag):
        self.what, self.name, self.nth, self.ids = what, name, nth, ids
        self.dead, self.facts, self.flag = dead, facts, flag

    def __repr__(self):
        return f"Plausible{(self.what, self.name, self.nth, self.ids, self.dead, self.flag)!r}"

    def command(self, state):
        group = state.group(self.name)
        records = group.replicas if group else ()
        if self.what == "join" or not records:
            return RegisterBroker(
                broker_name=self.name,
                register_check_code=f"code-{self.nth}",
                incarnation="x",
                learner=self.flag and self.nth == 3,
                controller_epoch=99,
            )
        live = tuple(
            LiveBroker(
                record.broker_id,
                record.incarnation,
                epoch=min(self.facts[place % len(self.facts)], group.master_epoch),
                max_offset=10 * self.facts[(place + 1) % len(self.facts)],
            )
            for place, record in enumerate(records)
            if record.broker_id not in self.dead
        )
        target = records[self.nth % len(records)]
        common = {"broker_name": self.name, "controller_epoch": 99, "live": live, "now_ms": 9_000}
        match self.what:
            case "restart":
                return RegisterBroker(
                    broker_id=target.broker_id,
                    incarnation=target.incarnation + "y",
                    log_id="log-2" if self.flag else "log-1",
                    **{**common, "live": ()},
                )
            case "elect":
                return ElectMaster(**common, expected_master_epoch=group.master_epoch)
            case "designate":
                return ElectMaster(
                    **common, broker_id=target.broker_id, designate=True, unclean=self.flag
                )
            case "clean":
                ids = (target.broker_id,)
                return CleanBrokerData(**common, broker_ids=ids, clean_living_broker=self.flag)
            case "report":
                return ReportEvent(
                    broker_name=self.name,
                    broker_id=target.broker_id,
                    kind="opened",
                    controller_epoch=99,
                )
        lives = {record.broker_id: record.incarnation for record in records}
        ids = sorted({each for each in self.ids if each in lives} | {group.master_broker_id})
        return AlterSyncStateSet(
            **common,
            master_broker_id=group.master_broker_id,
            master_incarnation=group.master_incarnation,
            master_epoch=group.master_epoch,
            sync_state_set_epoch=group.sync_state_set_epoch,
            new_set=tuple(NewMember(each, lives.get(each, "")) for each in ids),
        )


WHAT = ["join", "restart", "restart", "elect", "elect", "elect", "designate", "clean", "report"]
PLAUSIBLE = st.builds(
    Plausible,
    st.sampled_from(WHAT + ["alter"] * 6),
    st.sampled_from(["a", "a", "a", "b"]),
    st.integers(0, 3),
    st.sampled_from([{1, 2}, {1, 2, 3}, {1, 3}, {2, 3}, {1}, {2}, {1, 2, 3, 4}]),
    st.sampled_from([set(), {1}, {2}, {3}, {1, 2}, {2, 3}, {1, 2, 3, 4}]),
    st.lists(st.integers(0, 3), min_size=3, max_size=4),
    st.booleans(),
)
ANYTHING = st.one_of(REGISTER, ELECT, ALTER, APPLY, CLEAN, REPORT, NOTE, BECOME)
MOSTLY_PLAUSIBLE = st.integers(0, 6).flatmap(lambda n: ANYTHING if n == 6 else PLAUSIBLE)
JOINED = [Plausible("join", "a", nth, set(), set(), [0], False) for nth in range(3)]
FOUNDED = [*JOINED, Plausible("elect", "a", 0, set(), set(), [0, 0, 0], False)]
COMMANDS = st.lists(MOSTLY_PLAUSIBLE, min_size=5, max_size=30).map(lambda more: FOUNDED + more)


def fill_in(command, state):
    return command.command(state) if isinstance(command, Plausible) else command


def check_step(before, after, command, transition):
    """What one command may and may not change, for every group."""
    may_go = {command.broker_name} if isinstance(command, CleanBrokerData) else set()
    assert set(before.groups) - set(after.groups) <= may_go
    for name, group in after.groups.items():
        group.check()
        old = before.groups.get(name)
        if old is None:
            continue
        assert group.next_broker_id >= old.next_broker_id
        old_ids = {record.broker_id for record in old.replicas}
        for record in group.replicas:
            if record.broker_id not in old_ids and record.broker_id < old.next_broker_id:
                # only a replica that brings its own id, cleaned before, may use one that is passed
                assert getattr(command, "broker_id", 0) == record.broker_id
        assert group.master_epoch >= old.master_epoch
        assert group.sync_state_set_epoch >= old.sync_state_set_epoch
        role = (old.master_broker_id, old.master_incarnation)
        if role != (group.master_broker_id, group.master_incarnation):
            assert group.master_epoch > old.master_epoch
        if old.sync_state_set != group.sync_state_set:
            assert group.sync_state_set_epoch > old.sync_state_set_epoch
    for effect in transition.effects:
        if isinstance(effect, RoleChanged | SetChanged):
            old = before.groups.get(effect.view.broker_name)
            assert old is None or effect.view.key > (old.master_epoch, old.sync_state_set_epoch)
    if isinstance(command, ElectMaster) and transition.result.ok and transition.effects:
        check_election(
            before.groups[command.broker_name], after.groups[command.broker_name], command
        )


def check_election(before, after, command):
    lives = {record.broker_id: record.incarnation for record in before.replicas}
    alive = {
        seen.broker_id for seen in command.live if lives.get(seen.broker_id) == seen.incarnation
    }
    winner = after.master_broker_id
    assert winner in lives
    assert not before.replica(winner).learner
    if before.master_epoch == 0:
        return
    assert winner in alive
    if not command.unclean:
        assert winner in before.sync_state_set
    assert set(after.sync_state_set) <= {winner} | (set(before.sync_state_set) & alive)


@settings(max_examples=120, deadline=None)
@given(COMMANDS)
def test_any_sequence_of_commands_keeps_the_invariants(commands):
    """Epochs only grow, the master is in the set, the set is registered, no learner is in it."""
    state = ControllerState()
    for index, template in enumerate(commands, start=1):
        command = fill_in(template, state)
        assert decode(encode(command, 3)) == (command, 3)
        before = state
        digest_before = before.digest() if index % 7 == 0 else ""
        transition = state.apply(command, index)
        state = transition.state
        state.check_invariants()
        check_step(before, state, command, transition)
        if digest_before:
            assert before.digest() == digest_before, "apply changed the state it was called on"
        if not transition.result.ok and transition.result.code != (
            ResponseCode.CONTROLLER_MASTER_NOT_AVAILABLE
        ):
            assert transition.effects == ()


@settings(max_examples=60, deadline=None)
@given(COMMANDS, st.integers(0, 30))
def test_r20_replaying_or_restoring_midway_gives_the_same_state(commands, cut):
    """Two nodes, one of which restores a snapshot taken at `cut`, end with equal digests."""
    one = two = ControllerState()
    for index, template in enumerate(commands, start=1):
        command = fill_in(template, one)
        if index == cut:
            two = ControllerState.from_snapshot(two.to_snapshot())
        first, second = one.apply(command, index), two.apply(command, index)
        assert first.result == second.result
        assert first.effects == second.effects
        one, two = first.state, second.state
    assert one.digest() == two.digest()
    assert ControllerState.from_snapshot(one.to_snapshot()) == one


@settings(max_examples=60, deadline=None)
@given(COMMANDS)
def test_the_history_names_every_new_epoch_once(commands):
    """Each masterEpoch that a group reaches stands in exactly one elected or failed election, or
    beside the registration or clean that deposed the master; keys never repeat."""
    state = ControllerState()
    events = []
    for index, template in enumerate(commands, start=1):
        transition = state.apply(fill_in(template, state), index)
        state = transition.state
        new = [e.event for e in transition.effects if isinstance(e, HistoryAppended)]
        assert [event.raft_index for event in new] == [index] * len(new)
        assert [event.part for event in new] == list(range(len(new)))
        bumped = {e.view.master_epoch for e in transition.effects if isinstance(e, RoleChanged)}
        assert bumped <= {event.master_epoch for event in new}
        events += new
    assert tuple(events) == state.history
