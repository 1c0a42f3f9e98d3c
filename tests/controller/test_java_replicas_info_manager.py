"""The scenarios of RocketMQ's ReplicasInfoManagerTest and DLedgerControllerTest, as rules of state.

Three replicas, master 1, set {1,2,3}, epochs 1/2. We differ from Java on purpose in two ways: after
an election the live old members stay in the set (R9), and an epoch is spent only by an
election that succeeds or that deposes a master.
"""

import pytest

from batonmq.controller.rules.commands import HistoryAppended, RoleChanged
from batonmq.protocol.codes import ResponseCode as Code


def test_register_broker_success(script):
    """Ids 1..3; the first elector wins, the others hear 2011 with the full answer."""
    assert [script.register().broker_id for _ in range(3)] == [1, 2, 3]
    assert script.elect(1).ok
    for other in (2, 3):
        result = script.elect(other)
        assert result.code is Code.CONTROLLER_MASTER_STILL_EXIST
        assert result.master_alive
        assert result.view.master_broker_id == 1
        assert result.view.master_address == "10.0.0.1:10911"
        assert result.view.sync_state_set == {1}
    assert script.alter(1, 2, 3).view.sync_state_set == {1, 2, 3}
    assert script.epochs == (1, 2)


def test_register_with_master_exist_resp(script):
    """A third registrant is told master 1 and set {1} with setEpoch 1."""
    script.register()
    script.register()
    script.elect(1)
    result = script.register()
    assert result.broker_id == 3
    assert result.master_alive
    assert (result.view.master_broker_id, result.view.key) == (1, (1, 1))
    assert result.view.sync_state_set == {1}


def test_registered_is_told_no_master_that_is_dead(trio):
    """5631: 1003 names a master only while it lives."""
    trio.die(1)
    result = trio.register(3)
    assert result.ok
    assert not result.master_alive
    assert result.view.master_broker_id == 1


def test_register_with_old_master_inactive(trio):
    """Only 3 lives and asks: master 3, epochs 2/3, set {3}."""
    trio.die(1, 2)
    result = trio.elect(3)
    assert result.ok
    assert result.view.master_broker_id == 3
    assert result.view.key == (2, 3)
    assert result.view.sync_state_set == {3}


@pytest.mark.parametrize(
    ("facts", "winner"),
    [
        ({2: {"epoch": 1, "max_offset": 10}, 3: {"epoch": 0, "max_offset": 100}}, 2),
        ({2: {"epoch": 1, "max_offset": 10}, 3: {"epoch": 1, "max_offset": 11}}, 3),
        (
            {
                2: {"epoch": 1, "max_offset": 10, "election_priority": 2},
                3: {"epoch": 1, "max_offset": 10, "election_priority": 1},
            },
            3,
        ),
    ],
    ids=["higher epoch", "higher offset when epochs equal", "smaller priority when both equal"],
)
def test_elect_master_preference(trio, facts, winner):
    """The expired master is excluded though its log is the longest."""
    trio.tell(1, epoch=1, max_offset=1_000)
    trio.die(1)
    for broker_id, told in facts.items():
        trio.tell(broker_id, **told)
    result = trio.elect()
    assert result.ok
    assert result.view.master_broker_id == winner
    assert result.view.master_epoch == 2


def test_elect_master_by_name(trio):
    """Dead named: 2012. The current one named: 2011. 1 named while 3 is dead: 1, one epoch on."""
    trio.die(1)
    assert trio.elect().ok
    master = trio.group.master_broker_id
    assert trio.group.master_epoch == 2
    refused = trio.elect(1, designate=True)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert trio.elect(master, designate=True).code is Code.CONTROLLER_MASTER_STILL_EXIST
    trio.revive(1)
    assert trio.alter(1, 2, 3).ok
    trio.die(master)
    result = trio.elect(1, designate=True)
    assert result.ok
    assert (result.view.master_broker_id, result.view.master_epoch) == (1, 3)


@pytest.mark.parametrize("unclean", [False, True])
def test_an_election_of_an_unknown_broker_names_the_known_ones(trio, unclean):
    for dead in ((), (1,)):
        trio.die(*dead)
        refused = trio.elect(9, designate=True, unclean=unclean)
        assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
        assert refused.remark == "broker set broker-a has no broker 9; known are 1, 2, 3"


def test_an_election_of_a_dead_broker_does_not_advise_an_unclean_one(trio):
    trio.die(2)
    assert trio.elect(2, designate=True).remark == "broker 2 does not live"


def test_a_wrong_cluster_name_is_refused_and_none_is_not(trio):
    for refused in (
        trio.elect(2, designate=True, cluster_name="Other"),
        trio.elect(cluster_name="Other"),
        trio.clean(3, cluster_name="Other", clean_living_broker=True),
        trio.register(cluster_name="Other"),
    ):
        assert refused.code is Code.CONTROLLER_BROKER_ID_INVALID
        assert "broker-a belongs to cluster DefaultCluster, not to Other" in refused.remark
    assert trio.epochs == (1, 2)
    assert trio.elect(2, designate=True, cluster_name="DefaultCluster").ok


def test_all_replicas_shutdown_and_restart(trio):
    """Set {1}, 1 dead: one "not elected" event, no master, epoch 2; 2 is refused, 1 returns."""
    trio.alter(1)
    trio.die(1)
    result = trio.elect()
    assert result.code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert result.view.master_broker_id is None
    assert trio.epochs == (2, 3)
    assert trio.group.sync_state_set == (1,)
    assert [type(effect) for effect in trio.effects] == [RoleChanged, HistoryAppended]
    for _ in range(2):
        assert trio.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert trio.epochs == (2, 3), "failed elections spend one epoch, not one each as in Java"
    assert trio.kinds.count("election_failed") == 1
    assert trio.elect(2).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    trio.register(1, incarnation="life-1-again")
    assert trio.elect(1).ok
    assert trio.group.master_broker_id == 1
    assert trio.epochs == (3, 4)


def test_clean_broker_data(trio):
    """A live id, or no id while there is a master: 2009. Dead ids go; forced takes everything."""
    invalid = Code.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    assert trio.clean(2).code is invalid
    assert trio.clean().code is invalid
    assert trio.clean(broker_name="broker-x", clean_living_broker=True).code is invalid
    trio.die(2)
    assert trio.clean(2).ok
    assert [record.broker_id for record in trio.group.replicas] == [1, 3]
    assert trio.group.sync_state_set == (1, 3)
    assert trio.clean(clean_living_broker=True).ok
    assert trio.state.group("broker-a") is None
    assert trio.state.next_broker_id("broker-a") == 1


def test_clean_without_ids_when_nobody_is_master(trio):
    trio.die(1, 2, 3)
    trio.elect()
    assert trio.group.master_broker_id == 0
    assert trio.clean().ok
    assert trio.state.group("broker-a") is None


def test_apply_broker_id_as_java_brokers_do(script):
    """1012, 1013, 1003: the first id is 1, a taken one is refused, the same code is welcome."""
    assert script.state.next_broker_id("broker-a") == 1
    assert script.apply_id(2).code is Code.CONTROLLER_BROKER_ID_INVALID
    assert script.apply_id(1, "10.0.0.1:10911;7").ok
    assert script.apply_id(1, "10.0.0.9:10911;8").code is Code.CONTROLLER_BROKER_ID_INVALID
    assert script.apply_id(1, "10.0.0.1:10911;7").ok
    record = script.group.replica(1)
    assert record.address == "10.0.0.1:10911"
    result = script.register(1, incarnation="", register_check_code="", address="h:1")
    assert result.ok
    assert script.group.replica(1).address == "h:1"
    assert script.register(2, incarnation="").code is Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED


def test_unknown_group_is_named_by_each_commands_own_code(script):
    assert script.elect(1).code is Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    unknown = script.register(1, incarnation="", register_check_code="")
    assert unknown.code is Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    script.register()
    script.elect(1)
    altered = script.alter(1, 2, broker_name="broker-x")
    assert altered.code is Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    assert altered.view is None
