"""The pure routes: registrations, connection losses and silences, and what routes show then."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.namesrv.state import (
    GROUP_REPLICAS_MAX,
    LOST_AT_ONCE,
    BrokerRegistration,
    Registered,
    RegisterOutcome,
    RouteInfoManager,
)
from batonmq.namesrv.topics import Parts
from batonmq.protocol.bodies import (
    DataVersion,
    QueueData,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.register_body import RegisterBrokerBody

M1, M2, S3 = "10.0.0.1:10911", "10.0.0.2:10911", "10.0.0.3:10911"


def body(
    *topics: str, epoch: int = 1, counter: int = 1, perm: int = 6, queues: int = 4
) -> RegisterBrokerBody:
    names = topics or ("TopicA", "TopicB")
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=DataVersion(counter=counter, state_version=epoch, timestamp=1),
            topic_config_table={
                name: TopicConfig(
                    topic_name=name, perm=perm, read_queue_nums=queues, write_queue_nums=queues
                )
                for name in names
            },
        )
    )


class Routes:
    """A RouteInfoManager with short words for what happens to it."""

    def __init__(self) -> None:
        self.core = RouteInfoManager()
        self.now_ms = 1_000

    def register(
        self,
        addr: str,
        broker_id: int,
        what: RegisterBrokerBody | None = None,
        *,
        connection: str = "",
        name: str = "broker-a",
        cluster: str = "C",
        acting: bool | None = False,
        timeout_ms: int | None = None,
        partial: bool = False,
        relays: bool = True,
        relayed: bool = False,
        zone: str | None = None,
    ) -> Registered:
        registration = BrokerRegistration(
            cluster_name=cluster,
            broker_name=name,
            broker_id=broker_id,
            broker_addr=addr,
            ha_server_addr=addr.replace("10911", "10912"),
            connection=connection or f"socket of {addr}",
            heartbeat_timeout_ms=timeout_ms,
            enable_acting_master=acting,
            is_partial=partial,
            relays=relays,
            is_relayed=relayed,
            zone_name=zone,
        )
        result = self.core.register(registration, what or body(), self.now_ms)
        self.core.check_invariants()
        return result

    def addrs(self, topic: str = "TopicA") -> dict[int, str]:
        route = self.core.route(topic)
        return route.broker_datas[0].broker_addrs if route is not None else {}

    def perm(self, topic: str = "TopicA") -> int:
        route = self.core.route(topic)
        assert route is not None
        return route.queue_datas[0].perm


@pytest.fixture
def routes() -> Iterator[Routes]:
    made = Routes()
    yield made
    made.core.check_invariants()


def test_a_registration_is_in_the_route_at_once(routes: Routes) -> None:
    assert routes.register(M1, 0) == Registered(RegisterOutcome.TAKEN)
    assert routes.addrs() == {0: M1}
    slave = routes.register(M2, 2)
    assert (slave.master_addr, slave.ha_server_addr) == (M1, "10.0.0.1:10912")
    assert routes.addrs() == {0: M1, 2: M2}
    assert routes.core.clusters() == {"C": ["broker-a"]}
    routes.register(M1, 0, zone="north")
    (_, shown) = next(routes.core.brokers())
    assert shown.zone_name == "north"


def test_r32_a_slave_registers_the_master_that_is_not_answered(routes: Routes) -> None:
    """Its session and its silence end that; the master itself replaces it."""
    routes.register(M1, 0, body(epoch=1))
    routes.register(M2, 2, body(epoch=1))
    routes.core.connection_lost(f"socket of {M1}")
    assert routes.addrs() == {2: M2}
    way = {"connection": f"socket of {M2}", "timeout_ms": 10_000, "relayed": True}
    routes.register(M1, 0, body(epoch=1), **way)
    assert routes.addrs() == {0: M1, 2: M2}
    assert routes.core.data_version("C", M1) is None
    routes.core.refresh("C", M1, routes.now_ms + 9_000)  # the master did not ask by itself
    assert list(routes.core.scan(routes.now_ms + 10_001)) == [(M1, None)]
    assert routes.addrs() == {2: M2}
    routes.register(M1, 0, body(epoch=1), **way)
    routes.core.connection_lost(f"socket of {M2}")
    assert routes.addrs() == {}
    routes.register(M2, 2, body(epoch=1))
    routes.register(M1, 0, body(epoch=1), **way)
    routes.register(M1, 0, body(epoch=1), connection="a new socket of M1")
    routes.core.connection_lost(f"socket of {M2}")
    assert routes.addrs() == {0: M1}


def test_r32_what_a_slave_says_of_its_master_replaces_nothing_better(routes: Routes) -> None:
    way = {"connection": f"socket of {M2}", "timeout_ms": 10_000, "relayed": True}
    routes.register(M1, 0, body(epoch=1), timeout_ms=10_000)
    routes.register(M2, 2, body(epoch=1))
    routes.now_ms += 9_000
    routes.register(M1, 0, body(epoch=1), **way)
    assert list(routes.core.scan(routes.now_ms + 9_000)) == [], "it shows that the master lives"
    routes.core.connection_lost(f"socket of {M1}")  # a late answer must not keep it
    assert routes.addrs() == {2: M2}
    routes.register(M1, 1, body(epoch=2))  # it follows the next master
    assert routes.register(M1, 0, body(epoch=1), **way).outcome is RegisterOutcome.IGNORED
    assert routes.addrs() == {1: M1, 2: M2}
    routes.register(S3, 0, body(epoch=2))
    assert routes.register(M1, 0, body(epoch=1), **way).outcome is RegisterOutcome.IGNORED
    assert routes.addrs()[0] == S3
    routes.register(M1, 0, body(epoch=3), **way)
    assert routes.addrs() == {0: M1, 2: M2}
    assert routes.register(S3, 0, body(epoch=2)).outcome is RegisterOutcome.IGNORED


def test_a_first_registration_with_one_topic_fails(routes: Routes) -> None:
    assert routes.register(M1, 0, body("Only")).outcome is RegisterOutcome.FAILED
    assert dict(routes.core.brokers()) == {}
    assert routes.core.route("Only") is None
    routes.register(M1, 0)
    assert routes.register(M1, 0, body("Only", counter=2)).outcome is RegisterOutcome.TAKEN
    assert routes.addrs("Only") == {0: M1}


def test_r32_a_failover_moves_id_0_and_a_late_close_of_the_dead_master_changes_nothing(
    routes: Routes,
) -> None:
    """1. M1 is master of epoch 1, M2 its slave. 2. M1 dies, M2 registers as id 0 with epoch 2
    before the name server sees M1's socket end. 3. Now it does: M2 stays."""
    routes.register(M1, 0, body(epoch=1))
    routes.register(M2, 2, body(epoch=1))
    routes.register(M2, 0, body(epoch=2))
    assert routes.addrs() == {0: M2}
    assert routes.core.connection_lost(f"socket of {M1}") == [M1]
    assert routes.addrs() == {0: M2}


def test_r32_a_zombie_of_a_lower_epoch_does_not_take_id_0(routes: Routes) -> None:
    routes.register(M2, 0, body(epoch=2))
    assert routes.register(M1, 0, body(epoch=1)) == Registered(RegisterOutcome.IGNORED)
    assert routes.addrs() == {0: M2}
    assert routes.register(M1, 0, body(epoch=2)).outcome is RegisterOutcome.TAKEN
    assert routes.addrs() == {0: M1}, "one of the same epoch does"


def test_r32_nor_while_the_new_master_is_away_but_its_slaves_know_the_epoch(routes: Routes) -> None:
    """The new master's socket to this name server broke for a moment: id 0 is free, yet S3, which
    follows epoch 2, is registered. The zombie of epoch 1 is ignored, the master comes back."""
    routes.register(M2, 0, body(epoch=2))
    routes.register(S3, 3, body(epoch=2))
    routes.core.connection_lost(f"socket of {M2}")
    assert routes.addrs() == {3: S3}
    assert routes.register(M1, 0, body(epoch=1)).outcome is RegisterOutcome.IGNORED
    assert routes.register(M2, 0, body(epoch=2)).outcome is RegisterOutcome.TAKEN
    assert routes.addrs() == {0: M2, 3: S3}


def test_r32_unregistering_the_old_master_leaves_the_new_one(routes: Routes) -> None:
    routes.register(M1, 0, body(epoch=1))
    routes.register(M2, 0, body(epoch=2))
    routes.core.unregister("C", M1, "broker-a")
    assert routes.addrs() == {0: M2}


def test_the_close_of_an_older_connection_of_a_broker_removes_nothing(routes: Routes) -> None:
    routes.register(M1, 0, connection="first")
    routes.register(M1, 0, connection="second")
    assert routes.core.connection_lost("first") == []
    assert routes.addrs() == {0: M1}
    assert routes.core.connection_lost("second") == [M1]
    assert routes.core.all_topics() == []


def test_the_same_address_under_another_id_is_removed_first(routes: Routes) -> None:
    """A deposed master comes back as a slave with the same address."""
    routes.register(M1, 0, body(epoch=1))
    routes.register(M1, 1, body(epoch=2))
    assert routes.addrs() == {1: M1}


def test_topics_count_only_from_id_0(routes: Routes) -> None:
    routes.register(M1, 0)
    routes.register(M2, 2, body("SlaveOnly", "TopicA", queues=9))
    assert routes.core.route("SlaveOnly") is None
    route = routes.core.route("TopicA")
    assert route is not None and route.queue_datas[0].read_queue_nums == 4


def test_the_lowest_id_sets_topics_where_acting_masters_were_named_at_all(routes: Routes) -> None:
    """With enableActingMaster=true its topics lose the write bit; an old broker, which sends no
    such field, is not listened to."""
    routes.register(S3, 3, acting=None)
    assert routes.core.route("TopicA") is None
    routes.register(S3, 3, body(counter=2), acting=True)
    assert routes.perm() == 4


def test_queues_change_only_on_a_new_version_or_a_new_topic(routes: Routes) -> None:
    routes.register(M1, 0, body(queues=4))
    routes.core.wipe_write_perm("broker-a")
    routes.register(M1, 0, body(queues=4))
    assert routes.perm() == 4
    routes.register(M1, 0, body("TopicA", "TopicB", "TopicC", queues=4))
    assert (routes.perm(), routes.perm("TopicC")) == (4, 6)
    routes.register(M1, 0, body(queues=8, counter=2))
    route = routes.core.route("TopicA")
    assert route is not None and route.queue_datas[0].write_queue_nums == 8
    assert routes.perm() == 6


def test_omitted_topics_stay_unless_told_otherwise(routes: Routes) -> None:
    routes.register(M1, 0)
    routes.register(M1, 0, body("TopicA", "TopicC", counter=2))
    assert routes.addrs("TopicB") == {0: M1}
    routes.core.delete_topic_with_broker_registration = True
    routes.register(M1, 0, body("TopicA", "TopicC", counter=3))
    assert routes.core.route("TopicB") is None
    routes.register(M1, 0, body("TopicD", counter=4), partial=True)
    assert routes.addrs("TopicA") == routes.addrs("TopicD") == {0: M1}


def test_silent_brokers_are_dropped_after_their_own_timeout(routes: Routes) -> None:
    routes.register(M1, 0, timeout_ms=10_000)
    routes.register(M2, 2)
    routes.core.refresh("C", M1, routes.now_ms + 9_000)
    assert list(routes.core.scan(routes.now_ms + 19_000)) == []
    routes.now_ms += 19_001
    assert list(routes.core.scan(routes.now_ms)) == [(M1, f"socket of {M1}")]
    assert routes.addrs() == {2: M2}
    routes.core.refresh("C", M2, routes.now_ms)
    assert list(routes.core.scan(routes.now_ms + 120_000)) == []
    assert list(routes.core.scan(routes.now_ms + 120_001)) == [(M2, f"socket of {M2}")]
    assert routes.core.all_topics() == []


def test_losing_id_0_with_an_acting_master_strips_the_write_bit(routes: Routes) -> None:
    routes.register(M1, 0, acting=True)
    routes.register(M2, 2, acting=True)
    routes.core.connection_lost(f"socket of {M1}")
    assert routes.perm() == 4
    assert routes.addrs() == {2: M2}
    acting = routes.core.route("TopicA", support_acting_master=True)
    assert acting is not None and acting.broker_datas[0].broker_addrs == {0: M2}


def test_a_new_lowest_id_is_told_to_the_others(routes: Routes) -> None:
    """905, with slaves that may act for their master; a higher id changes nothing."""
    routes.register(M2, 2, acting=True)
    routes.register("m9:1", 9, acting=True)
    assert routes.core.min_id_changes.taken() == []
    routes.register(M1, 0, acting=True)
    came = routes.core.min_id_changes.taken()
    assert [(one.min_id, one.min_addr, one.to) for one in came] == [(0, M1, (M2, "m9:1"))]
    assert came[0].ha_addr
    assert came[0].offline_addr is None
    routes.register(M1, 0, acting=True)
    assert routes.core.min_id_changes.taken() == []
    routes.core.connection_lost(f"socket of {M1}")
    went = routes.core.min_id_changes.taken()
    assert [(one.min_id, one.min_addr, one.offline_addr) for one in went] == [(2, M2, M1)]
    assert went[0].to == (M2, "m9:1")


def test_without_acting_master_nobody_is_told_and_the_write_bit_stays(routes: Routes) -> None:
    routes.register(M2, 2)
    routes.register(M1, 0)
    routes.core.connection_lost(f"socket of {M1}")
    assert routes.core.min_id_changes.taken() == []
    assert routes.perm() == 6


def test_topics_by_hand_and_by_cluster(routes: Routes) -> None:
    routes.register(M1, 0)
    routes.register(M2, 0, name="broker-b", cluster="D")
    queue = QueueData(broker_name="broker-a", read_queue_nums=2, write_queue_nums=2)
    assert routes.core.register_topic("Manual", [queue])
    assert not routes.core.register_topic("Nowhere", [QueueData(broker_name="broker-x")])
    assert set().union(*routes.core.topics_of_cluster("C")) == {"TopicA", "TopicB", "Manual"}
    routes.core.delete_topic("TopicA", "D")
    route = routes.core.route("TopicA")
    assert route is not None and [q.broker_name for q in route.queue_datas] == ["broker-a"]
    routes.core.delete_topic("TopicA")
    assert routes.core.route("TopicA") is None


def test_a_returned_route_is_a_copy(routes: Routes) -> None:
    routes.register(M1, 0)
    route = routes.core.route("TopicA")
    assert route is not None
    route.queue_datas[0].perm = 0
    route.broker_datas[0].broker_addrs.clear()
    assert routes.perm() == 6
    assert routes.addrs() == {0: M1}


def ways(routes: Routes) -> dict[str, dict[int, str]]:
    """What a route shows with its replica routes, without the group itself."""
    route = routes.core.route("TopicA", replica_routes=True)
    assert route is not None
    added = route.queue_datas[1:]
    assert all((queue.perm, queue.write_queue_nums) == (2, 1) for queue in added)
    assert [queue.broker_name for queue in added] == [d.broker_name for d in route.broker_datas[1:]]
    return {data.broker_name: data.broker_addrs for data in route.broker_datas[1:]}


def test_replica_routes_lead_through_the_living_slaves_under_names_that_stay(
    routes: Routes,
) -> None:
    routes.register(M1, 0)
    assert ways(routes) == {}, "a lone master has no other member"
    routes.register(M2, 2)
    routes.register(S3, 3)
    assert ways(routes) == {"broker-a%1": {0: M2}, "broker-a%2": {0: S3}}
    routes.core.connection_lost(f"socket of {M1}")
    assert routes.addrs() == {2: M2, 3: S3}
    assert ways(routes) == {"broker-a%1": {0: M2}, "broker-a%2": {0: S3}}
    routes.register(M2, 0, body(epoch=2))
    assert ways(routes) == {"broker-a%1": {0: S3}, "broker-a%2": {0: S3}}
    routes.core.connection_lost(f"socket of {S3}")
    assert ways(routes) == {"broker-a%1": {0: M2}, "broker-a%2": {0: M2}}, "the list stays"


def test_replica_routes_lead_to_nobody_who_does_not_pass_on(routes: Routes) -> None:
    """A Java slave refuses what only its master may do: a retry there would fail."""
    routes.register(M1, 0, relays=False)
    routes.register(M2, 2, relays=False)
    assert ways(routes) == {}
    routes.register(S3, 3)
    assert ways(routes) == {"broker-a%1": {0: S3}, "broker-a%2": {0: S3}}
    routes.register(S3, 0, body(epoch=2))
    assert ways(routes) == {"broker-a%1": {0: S3}, "broker-a%2": {0: S3}}


def test_a_group_that_may_not_be_written_has_no_replica_routes(routes: Routes) -> None:
    routes.register(M1, 0)
    routes.register(M2, 2)
    routes.core.wipe_write_perm("broker-a")
    assert ways(routes) == {}


def test_a_broker_that_is_heard_again_while_silent_ones_go_stays(routes: Routes) -> None:
    for addr, broker_id in ((M1, 0), (M2, 2), (S3, 3)):
        routes.register(addr, broker_id, timeout_ms=10_000)
    routes.now_ms += 10_001
    scan = routes.core.scan(routes.now_ms)
    assert next(scan)[0] == M1
    routes.core.refresh("C", M2, routes.now_ms)
    routes.register(S3, 3)
    assert list(scan) == [] and routes.addrs() == {2: M2, 3: S3}


def test_a_namesake_in_another_cluster_takes_nothing_along(routes: Routes) -> None:
    """1 M1 of cluster C moves to D; its epoch there begins anew. 2 C's M1 is unregistered late."""
    routes.register(M1, 0, body(epoch=5))
    routes.register(M2, 0, body(epoch=5), cluster="D")
    assert routes.register(M2, 0, body(epoch=4), cluster="D").outcome is RegisterOutcome.TAKEN
    routes.core.unregister("C", M2, "broker-a")
    assert routes.addrs() == {0: M2}


def test_filter_servers_are_those_of_the_last_registration(routes: Routes) -> None:
    for servers in (["10.0.0.9:1"], []):
        what = body()
        what.filter_server_list = servers
        routes.register(M1, 0, what)
        route = routes.core.route("TopicA")
        assert route is not None
        assert route.filter_server_table == ({M1: servers} if servers else {})


# -- groups with many topics (R58)


def forget_all(core: RouteInfoManager) -> None:
    while core.forget():
        pass
    core.check_invariants()


def test_r58_what_comes_and_goes_leaves_no_more_behind_than_it_brought() -> None:
    """Also if no turn of the loop is free for it."""
    core = RouteInfoManager()
    for number in range(20):
        group = BrokerRegistration("C", f"g{number}", 0, M1, "", "stranger")
        core.register(group, body(*(f"{number}-{topic}" for topic in range(5_000))), 0)
        core.unregister("C", M1, f"g{number}")
        assert len(core.all_topics()) <= 10_000


def test_r58_a_closed_connection_takes_its_brokers_along_some_at_once(routes: Routes) -> None:
    for number in range(3 * LOST_AT_ONCE):
        routes.register(f"h:{number}", 0, connection="one", name=f"broker-{number}")
    lost = [routes.core.connection_lost("one") for _ in range(4)]
    assert [len(some) for some in lost] == [LOST_AT_ONCE] * 3 + [0]
    assert dict(routes.core.brokers()) == {}


@pytest.mark.parametrize("deletes", [True, False])
def test_r58_a_topic_that_is_made_between_the_parts_of_a_known_registration_deletes_none(
    routes: Routes, deletes: bool
) -> None:
    """A broker of ours says that it names only that topic, one of Java does not."""
    routes.core.delete_topic_with_broker_registration = deletes
    routes.register(M1, 0, body("A", "B", "C"))
    known = BrokerRegistration("C", "broker-a", 0, M1, "", M1, parts=Parts(is_new=False))
    assert known.parts is not None
    routes.core.register(known, body("A", "B"), 0)
    routes.register(M1, 0, body("D", counter=2), partial=deletes)
    known.parts.ends = True
    assert routes.core.register(known, body("C"), 0).outcome is RegisterOutcome.TAKEN
    assert set(routes.core.all_topics()) == set("ABCD")
    assert routes.core.is_changed(
        "C", M1, body(counter=2).topic_config_serialize_wrapper.data_version
    )


STEPS = st.tuples(
    st.sampled_from(["register", "partial", "part", "last part", "unregister", "delete", "forget"]),
    st.sampled_from(["g", "h"]),
    st.frozensets(st.sampled_from("abcdef"), min_size=2),
)


@given(st.lists(STEPS, max_size=25))
def test_r58_routes_are_those_of_a_table_that_forgets_at_once(
    steps: list[tuple[str, str, frozenset[str]]],
) -> None:
    """Registrations that delete, in any order with what is removed and forgotten."""
    core = RouteInfoManager(delete_topic_with_broker_registration=True)
    model: dict[str, set[str]] = {}
    parts: dict[str, tuple[Parts, set[str]]] = {}
    with (
        patch("batonmq.namesrv.state.FORGOTTEN_AT_ONCE", 2),
        patch("batonmq.namesrv.topics.SMALL", 0),
        patch.object(core._topics, "forget", lambda count: count == 2 and forget(count)),
    ):
        forget = type(core._topics).forget.__get__(core._topics)
        for number, (what, name, topics) in enumerate(steps):
            group = BrokerRegistration("C", name, 0, f"{name}:1", "", name)
            if what in ("register", "partial"):
                whole = what == "register"
                group = replace(group, is_partial=not whole)
                core.register(group, body(*topics, counter=number), 0)
                model[name] = set(topics) | (set() if whole else model.get(name, set()))
                if whole:
                    parts.pop(name, None)
                elif name in parts:
                    parts[name][1].update(topics)
            elif what in ("part", "last part"):
                its, named = parts.get(name, (Parts(is_new=True), set()))
                its.ends = what == "last part"
                core.register(replace(group, parts=its), body(*topics, counter=number), 0)
                assert its.under_way
                named |= topics
                parts[name] = (its, named)
                model.setdefault(name, set()).update(topics)
                if its.ends:
                    model[name] = parts.pop(name)[1]
            elif what == "unregister":
                core.unregister("C", f"{name}:1", name)
                model.pop(name, None)
                if name in parts:
                    its, _ = parts.pop(name)
                    late = core.register(replace(group, parts=its), body(*topics), 0)
                    assert late.outcome is RegisterOutcome.OVERTAKEN
            elif what == "delete":
                for topic in topics:
                    core.delete_topic(topic)
                    for each in (*model.values(), *(named for _, named in parts.values())):
                        each.discard(topic)
            else:
                core.forget()
            core.check_invariants()
            for topic in "abcdef":
                route = core.route(topic)
                groups = {queue.broker_name for queue in route.queue_datas} if route else set()
                assert groups == {each for each, its_topics in model.items() if topic in its_topics}
    forget_all(core)
    assert set(core.all_topics()) == set().union(*model.values())


# -- what strangers register (R58)


def flood(
    core: RouteInfoManager, group: str, topics: int, peer: str = "10.6.6.6:1"
) -> RegisterOutcome:
    names = [f"{group}-T{number}" for number in range(topics)]
    address = f"10.6.6.6:{crc32(group.encode()) % 60_000}"
    registration = BrokerRegistration("C", group, 0, address, "", "stranger", peer=peer)
    return core.register(registration, body(*names), 0).outcome


def test_r58_groups_of_a_stranger_push_out_his_own_and_no_other() -> None:
    """A broker that was there keeps its place, and one that comes behind the flood gets its."""
    core = RouteInfoManager(entries_max=1_000)
    for number, addr in enumerate((M1, M2)):
        known = BrokerRegistration("C", f"broker-{number}", 0, addr, "", addr, peer=addr)
        if number == 1:
            for flooded in range(200):
                assert flood(core, f"stranger-{flooded}", 10) is RegisterOutcome.TAKEN
        assert core.register(known, body(), 0).outcome is RegisterOutcome.TAKEN
    groups = dict(core.brokers())
    assert {"broker-0", "broker-1", "stranger-199"} <= groups.keys() and len(groups) <= 15
    assert core.crowded_out[0] == "stranger-0"
    core.check_invariants()


def test_r58_a_group_with_more_topics_than_there_is_room_for_is_refused() -> None:
    core = RouteInfoManager(entries_max=1_000)
    assert flood(core, "huge", 1_001) is RegisterOutcome.CROWDED
    for first in range(0, 2_000, 100):  # by parts, as by 217 or batonPartial
        names = [f"T{number}" for number in range(first, first + 100)]
        registration = BrokerRegistration("C", "grows", 0, M1, "", M1, is_partial=True)
        core.register(registration, body(*names, counter=first), 0)
        forget_all(core)
        assert len(core.all_topics()) <= 1_000
        core.check_invariants()
    core = RouteInfoManager(entries_max=100)
    flood(core, "by 217", 2)
    while core.register_topic(f"T{len(core.all_topics())}", [QueueData(broker_name="by 217")]):
        assert len(core.all_topics()) <= 100
    assert core.crowded_out == ["by 217"]


def test_r58_what_left_gives_its_room_back() -> None:
    core = RouteInfoManager(entries_max=1_000)
    for _ in range(5):
        assert flood(core, "comes and goes", 900) is RegisterOutcome.TAKEN
        core.connection_lost("stranger")
    assert not core.crowded_out and core._entries.taken == 0


def test_r58_a_group_has_a_limited_number_of_members() -> None:
    core = RouteInfoManager()
    for broker_id in range(GROUP_REPLICAS_MAX + 5):
        addr = f"10.0.0.1:{broker_id}"
        registration = BrokerRegistration("C", "broker-a", broker_id, addr, "", addr)
        outcome = core.register(registration, body(), 0).outcome
        assert outcome is (
            RegisterOutcome.TAKEN if broker_id < GROUP_REPLICAS_MAX else RegisterOutcome.CROWDED
        )
    registration = BrokerRegistration("C", "broker-a", 3, "10.0.0.1:3", "", "again")
    assert core.register(registration, body(), 1).outcome is RegisterOutcome.TAKEN
