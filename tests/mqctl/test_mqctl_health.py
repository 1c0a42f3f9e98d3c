"""`mqctl health`: the judgement, the exit code, and watching until it is well."""

import inspect
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from batonmq.client.admin.types import ControllerLogStatus
from batonmq.mqctl.commands import health
from batonmq.mqctl.health import _ADVICE, BrokerAnswer, Findings
from batonmq.protocol.bodies import (
    BrokerData,
    BrokerReplicasInfo,
    ClusterInfo,
    ReplicaIdentity,
    ReplicasInfo,
)
from batonmq.protocol.errors import ConnectError, ResponseError
from tests.mqctl.conftest import (
    DEAD_PID,
    LEADER,
    MASTER,
    NS,
    OTHER,
    SLAVE,
    FakePart,
    FakeTopics,
    Run,
    write_cluster,
)


@pytest.fixture
def whole(fake: Any) -> Findings:
    return Findings(
        name_servers={NS: None},
        controllers=dict(fake.metadata),
        brokers={MASTER: BrokerAnswer(), SLAVE: BrokerAnswer()},
        routes=fake.info,
        replicas=fake.replicas,
    )


def test_a_whole_cluster_has_no_problem(whole: Findings) -> None:
    assert whole.problems() == []
    assert whole.leader == LEADER
    assert whole.document()["healthy"] is True


def test_a_replica_whose_store_was_replaced_is_named_to_be_forgotten(
    mqctl: Run, whole: Findings
) -> None:
    """`2 of 3 in sync`, "healthy", and no line said which id to forget."""
    info = whole.replicas.replicas_info_table["broker-a"]
    info.in_sync_replicas[1].broker_id = 3
    info.not_in_sync_replicas = [ReplicaIdentity(alive=False, broker_address=SLAVE, broker_id=2)]
    assert whole.problems() == []
    ran = mqctl("health")
    assert ran.code == 0 and "2 of 2 in sync" in ran.out
    assert "forget them: mqctl cleanBrokerMetadata -bn broker-a -b '2' -c C" in ran.out


def test_every_node_that_does_not_answer_is_named(whole: Findings) -> None:
    sick = replace(
        whole,
        name_servers={NS: "Connection refused"},
        controllers={**whole.controllers, OTHER: ConnectError(OTHER, "no connection")},
        brokers={MASTER: BrokerAnswer(), SLAVE: BrokerAnswer("Connection refused")},
    )
    assert sick.problems() == [
        f"name server {NS}: Connection refused",
        f"controller {OTHER}: no connection",
        f"broker {SLAVE}: Connection refused",
    ]


def test_without_controllers_a_master_in_the_routes_is_enough(whole: Findings) -> None:
    classic = replace(whole, controllers={}, replicas=BrokerReplicasInfo(), classic=True)
    assert classic.problems() == []
    answer = BrokerAnswer(problems=("its group is not well: two of one id",))
    told = replace(classic, brokers={SLAVE: answer})
    assert told.problems() == [f"broker {SLAVE}: its group is not well: two of one id"]
    (name,) = whole.groups
    for addresses, problems in (({0: MASTER}, []), ({1: SLAVE}, [f"{name}: no master"])):
        routes = ClusterInfo()
        routes.broker_addr_table[name] = BrokerData(broker_addrs=addresses, broker_name=name)
        assert replace(classic, routes=routes).problems() == problems


def test_no_leader_or_two_is_a_problem(whole: Findings, fake: Any) -> None:
    """Without one, it says what still works and what does not."""
    leaderless = {a: replace(m, is_leader=False) for a, m in fake.metadata.items()}
    sick = replace(whole, controllers=leaderless)
    (problem,) = sick.problems()
    assert "no leader, though 2 of 2 answer" in problem
    assert problem.next_step.startswith("wait a moment")  # none of them is away
    assert "masters continue to take writes" in problem and "none that fails is replaced" in problem
    assert sick.state == "degraded"
    assert replace(sick, routes=ClusterInfo(), replicas=BrokerReplicasInfo()).state == "down"
    ended = replace(sick, brokers={MASTER: BrokerAnswer("refused"), SLAVE: BrokerAnswer("refused")})
    assert not any("masters continue" in each for each in ended.problems())
    refused = {a: ConnectError(a, "refused") for a in leaderless}
    for too_few in (refused, {**leaderless, OTHER: refused[OTHER]}):
        assert "a majority of them must run" in replace(whole, controllers=too_few).problems()[-1]
    torn = {**fake.metadata, OTHER: replace(fake.metadata[OTHER], leader_address=OTHER)}
    assert "disagree" in replace(whole, controllers=torn).problems()[0]


def test_a_group_without_master_or_with_another_route_is_a_problem(
    whole: Findings, fake: Any
) -> None:
    info = fake.replicas.replicas_info_table["broker-a"]
    info.master_address = None
    assert whole.problems() == ["broker-a: no master"]
    info.master_address = SLAVE
    assert whole.problems() == [f"broker-a: name servers route to {MASTER}, the master is {SLAVE}"]
    info.master_address = MASTER
    info.in_sync_replicas[0].alive = False
    assert whole.problems() == [f"broker-a: its master {MASTER} is not alive"]


THIRD = "10.0.0.3:10911"


@pytest.mark.parametrize(
    ("in_set", "planned", "problem"),
    [
        (1, (), f"1 of 2 replicas in sync, not {SLAVE}"),
        (2, (MASTER, SLAVE, THIRD), f"2 of 3 replicas in sync, not {THIRD}"),  # never registered
        (1, (MASTER,), f"1 of 2 replicas in sync, not {SLAVE}"),
    ],
)
def test_a_set_that_lacks_a_known_or_planned_replica_is_a_problem(
    whole: Findings, fake: Any, in_set: int, planned: tuple[str, ...], problem: str
) -> None:
    info = fake.replicas.replicas_info_table["broker-a"]
    info.not_in_sync_replicas = info.in_sync_replicas[in_set:]
    del info.in_sync_replicas[in_set:]
    expected = {"broker-a": frozenset(planned)} if planned else {}
    assert replace(whole, expected=expected).problems() == [f"broker-a: {problem}"]


def test_an_empty_cluster_and_an_unknown_group_are_problems(whole: Findings) -> None:
    empty = replace(whole, routes=ClusterInfo(), replicas=type(whole.replicas)())
    assert empty.problems() == ["no broker group is registered"]
    unknown = replace(whole, replicas=type(whole.replicas)())
    assert unknown.problems() == ["broker-a: the controllers know no such group"]


def test_the_exit_code_tells(mqctl: Run, fake: Any) -> None:
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["healthy"], ran.json["problems"]) == (0, True, [])
    assert ran.json["controllerLeaderAddress"] == LEADER
    assert ran.json["replicasInfoTable"]["broker-a"]["masterBrokerId"] == 1
    assert [n["alive"] for n in ran.json["brokers"]] == [True, True]
    assert mqctl("health").out.splitlines()[-1] == "healthy"
    fake.dead = {SLAVE}
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["healthy"], ran.json["state"]) == (3, False, "degraded")
    ran = mqctl("health")
    assert ran.code == 3
    assert f"- broker {SLAVE}: Connection refused" in ran.out
    assert ran.out.splitlines()[-1] == "degraded: all groups take writes"
    fake.dead = {MASTER}
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["state"], ran.json["groupsDown"]) == (1, "down", ["broker-a"])


def test_without_controllers_master_and_slaves_are_named(mqctl: Run, fake: Any) -> None:
    ran = mqctl("health", "--classic")
    (row,) = [line for line in ran.out.splitlines() if line.startswith("group ")]
    assert row.split(maxsplit=3)[3] == f"master {MASTER}, slave 2 {SLAVE}"
    del fake.info.broker_addr_table["broker-a"].broker_addrs[2]
    assert f"master {MASTER}, no slave" in mqctl("health", "--classic").out


def test_every_node_that_anybody_knows_is_asked(mqctl: Run, fake: Any) -> None:
    """A slave that died is in no route any more; a name server is not asked for controllers."""
    del fake.info.broker_addr_table["broker-a"].broker_addrs[2]
    fake.dead = {SLAVE}
    assert mqctl("health", "--json").json["problems"] == [f"broker {SLAVE}: Connection refused"]
    fake.dead.clear()
    fake.name_server_error = f"{NS}: Connection refused"
    for how in ((), ("--classic",)):
        ran = mqctl("health", "--json", *how)
        assert ran.code == 1
        assert ran.json["problems"] == [f"name server {NS}: Connection refused"]


def test_every_run_asks_brokers_in_the_same_order(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life of the simulation in which an operator looks at health is the same in each process."""
    asked: list[str] = []
    monkeypatch.setattr(FakePart, "check", lambda _, address: asked.append(address))
    for number in range(9):
        fake.lose_group(f"broker-{number}", f"10.9.0.{number}:10911")
    mqctl("health")
    lost = [address for address in asked if address.startswith("10.9.")]
    assert len(lost) == 9 and lost == sorted(lost)


def test_a_java_broker_which_tells_nothing_of_itself_has_no_problem(mqctl: Run, fake: Any) -> None:
    fake.log_ends = {MASTER: (1, 1), SLAVE: (1, 1)}
    assert mqctl("health").code == 0


def test_a_leader_that_does_not_tell_the_roles_is_a_problem(mqctl: Run, fake: Any) -> None:
    fake.roles_error = ResponseError(1, "busy", LEADER)
    ran = mqctl("health", "--json")
    assert ran.code == 3
    (problem,) = ran.json["problems"]
    assert problem.startswith("the leading controller does not report the roles: ")
    assert "busy" in problem
    (row,) = [line for line in mqctl("health").out.splitlines() if "not known: " in line]
    assert row.split()[:3] == ["group", "broker-a", "FAILED"]


def test_no_controller_that_answers_is_said_and_not_raised(mqctl: Run, fake: Any) -> None:
    """And a group about which no controller could be asked is not called unknown."""
    fake.metadata.clear()
    ran = mqctl("health", "--json")
    assert ran.code == 3
    assert any("no leader" in problem for problem in ran.json["problems"])
    out = mqctl("health").out
    assert "not known: no controller leads" in out
    assert "unknown to the controllers" not in out


def test_the_one_controller_whose_state_differs_is_named(whole: Findings, fake: Any) -> None:
    """An old folder was put in its place."""
    leads = next(iter(fake.metadata.values()))
    controllers = {
        address: replace(
            leads,
            is_leader=address == "c:1",
            log=ControllerLogStatus("n", 1, 1, 50, 50, 1, 1, 0, 0, 40, digest * 64, ()),
        )
        for address, digest in (("c:1", "a"), ("c:2", "b"), ("c:3", "a"))
    }
    steps = [each.next_step for each in replace(whole, controllers=controllers).problems()]
    assert any("stop c:2, move its folder" in step for step in steps)


def test_health_fails_when_a_controllers_log_is_unwell(mqctl: Run, fake: Any) -> None:
    well = ControllerLogStatus("n0", 1, 1, 5000, 5000, 1, 1, 0, 0, 4000, "aa" * 32, ())
    leader, follower = list(fake.metadata)

    def told(**changed: Any) -> Any:
        fake.metadata[leader] = replace(fake.metadata[leader], log=well)
        fake.metadata[follower] = replace(
            fake.metadata[follower], log=structs.replace(well, **changed)
        )
        ran = mqctl("health", "--json")
        assert ran.code == (0 if ran.json["healthy"] else 3)
        return ran.json["problems"]

    assert told() == []
    assert told(digest_index=3000, state_digest="bb" * 32, applied_index=4000) == []
    (behind,) = told(applied_index=3999)
    assert behind == f"controller {follower}: 1001 entries behind the leader's log"
    (differ,) = told(state_digest="bb" * 32)
    assert differ.startswith("the controllers' states differ after entry 4000:")
    assert "aaaaaaaa" in differ and f"{follower} bbbbbbbb" in differ
    assert mqctl("health", "--json").json["nextSteps"] == ["mqctl getControllerMetaData"]
    assert told(state_digest="1:" + "bb" * 32) == [], "of other rules, in a rolling upgrade"
    (said,) = told(problems=("the Raft thread has ended",))
    assert said == f"controller {follower}: the Raft thread has ended"
    (row,) = [line for line in mqctl("health").out.splitlines() if "see below" in line]
    assert row.split()[:3] == ["controller", follower, "FAILED"]


def test_watch_looks_again_until_healthy(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks find a slave dead, the third one does not."""
    looks = 0
    real = health.poll

    async def counted(*arguments: Any) -> Findings:
        nonlocal looks
        looks += 1
        fake.dead = {SLAVE} if looks < 3 else set()
        return await real(*arguments)

    monkeypatch.setattr(health, "poll", counted)
    ran = mqctl("health", "--watch", "-i", "0.001", "--json")
    assert ran.code == 0
    assert [json.loads(line)["healthy"] for line in ran.out.splitlines()] == [False, False, True]
    looks = 0
    text = mqctl("health", "--watch", "-i", "0.001").out
    assert text.count("Connection refused") == 2, "a pipe gets only what changed"
    assert text.splitlines()[-1] == "healthy"


def test_watch_looks_until_its_time_is_over(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.dead = {SLAVE}
    now_ms = itertools.count(50_000, 100)
    monkeypatch.setattr("batonmq.mqctl.commands.health.boot_ms", lambda: next(now_ms))
    ran = mqctl("health", "--watch", "-i", "0.001", "--within", "1", "--json")
    assert (ran.code, len(ran.out.splitlines())) == (3, 10)
    assert mqctl("health", "--within", "1").code == 2


def test_a_cluster_that_has_ended_is_not_healthy_and_no_wrong_usage(
    mqctl: Run, local: Path
) -> None:
    write_cluster(local / "cluster.json", pid=DEAD_PID)
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["healthy"]) == (1, False)
    ended = f"the cluster of {local / 'cluster.json'} has ended"
    assert ran.json["problems"] == [f"{ended}; `batonmq up --data {local}` continues it"]
    assert ran.json["nextSteps"] == [f"batonmq up --data {local}"]
    ran = mqctl("health")
    assert ran.code == 1 and ran.out.startswith(ended)


def test_a_cluster_that_is_not_whole_yet_is_asked_where_it_will_listen(
    mqctl: Run, fake: Any, local: Path
) -> None:
    write_cluster(local / "conf" / "cluster.json", pid=os.getpid())
    fake.metadata.clear()
    ran = mqctl("health", "--json")
    assert ran.code == 3
    assert [node["address"] for node in ran.json["controllers"]] == [LEADER, OTHER]


def test_a_broker_that_only_cluster_json_names_is_asked_too(
    mqctl: Run, fake: Any, local: Path
) -> None:
    write_cluster(local / "cluster.json", pid=os.getpid())
    del fake.info.broker_addr_table["broker-a"].broker_addrs[2]
    fake.replicas.replicas_info_table["broker-a"].in_sync_replicas.pop()
    fake.dead = {SLAVE}
    assert mqctl("health", "--json").json["problems"] == [
        f"broker {SLAVE}: Connection refused",
        f"broker-a: 1 of 2 replicas in sync, not {SLAVE}",
    ]


def test_watch_waits_for_a_cluster_to_appear(
    mqctl: Run, fake: Any, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Nothing is there. 2. After two looks a cluster is. 3. It is looked at until healthy."""
    looks = 0
    real = health.no_cluster

    def counted(why: str) -> Findings:
        nonlocal looks
        looks += 1
        if looks == 2:
            write_cluster(local / "cluster.json", pid=os.getpid())
        return real(why)

    monkeypatch.setattr(health, "no_cluster", counted)
    ran = mqctl("health", "--watch", "-i", "0.001", "--json")
    assert (ran.code, looks) == (0, 2)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [one["problems"] for one in told] == [["no cluster runs here yet"]] * 2 + [[]]


def test_watch_gives_up_on_a_cluster_that_does_not_come(mqctl: Run, local: Path) -> None:
    ran = mqctl("health", "--watch", "-i", "0.001", "--within", "0.01")
    assert ran.code == 1
    assert "no cluster runs here yet" in ran.out
    assert mqctl("health").code == 2, "without --watch: where is it?"


def test_what_a_broker_tells_of_itself_is_a_problem(mqctl: Run, fake: Any) -> None:
    """Refused writes, a full disk, a suspect log, failed transfers: the broker says it in words;
    of a disk the path and the free bytes are shown, and one next step under each problem."""
    space = "Total : 4.0 GiB, Free : 0 B."
    fake.figures = {MASTER: {"commitLogDirCapacity": space}}
    fake.settings = {
        MASTER: {"storePathRootDir": "/data/broker", "mappedFileSizeCommitLog": str(1 << 30)}
    }
    full = "its disk is full: No space left on device"
    fake.problems = {MASTER: [full, "refuses writes: the disk is full"], SLAVE: []}
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["state"]) == (1, "down"), "its master refuses writes"
    where = "(/data/broker: Total : 4.0 GiB, Free : 0 B; a segment of the log takes 1.0 GiB)"
    assert ran.json["problems"][0] == f"broker {MASTER}: {full} {where}"
    assert f"updateBrokerConfig -b {MASTER} -k fileReservedTime" in ran.json["nextSteps"][0]
    assert ran.json["brokers"][0]["problems"][0] == f"{full} {where}"
    lines = mqctl("health").out.splitlines()
    at = lines.index(f"- broker {MASTER}: {full} {where}")
    assert lines[at + 1] == f"  {ran.json['nextSteps'][0]}"
    (row,) = [line.split() for line in lines if line.startswith("broker") and MASTER in line]
    assert row[2:] == ["FAILED", "see", "below"], "no row says ok above a problem"
    for broker, state in ((MASTER, (1, "down")), (SLAVE, (3, "degraded"))):
        fake.problems = {MASTER: [], broker: [full]}
        ran = mqctl("health", "--json")
        assert (ran.code, ran.json["state"]) == state, "a master that has refused no write yet"
    fake.problems = {SLAVE: ["its log is suspect: another boot"]}
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["state"]) == (3, "degraded")


@pytest.mark.parametrize(
    ("why", "step"),
    [
        ("Too many open files", r"raise its limit of open files \(LimitNOFILE, ulimit -n\)"),
        ("Disk quota exceeded", "raise the quota of its user, free disk space"),
    ],
)
def test_what_counts_as_a_full_disk_names_what_is_full(
    mqctl: Run, fake: Any, why: str, step: str
) -> None:
    """Free disk space does not help a process that has no file descriptors left."""
    fake.problems = {SLAVE: [f"its disk is full: /d/0: {why}"]}
    (told,) = mqctl("health", "--json").json["nextSteps"]
    assert re.match(step, told)


@pytest.mark.parametrize("what", ["has no index", "refuses writes"])
def test_a_disk_that_fails_needs_no_space(mqctl: Run, fake: Any, what: str) -> None:
    """Its path has the word, too."""
    fake.problems = {MASTER: [f"{what}: /data/disk1/index: Input/output error"]}
    (step,) = mqctl("health", "--json").json["nextSteps"]
    assert "fileReservedTime" not in step


def test_the_verdict_says_where_a_problem_is_for_which_it_has_no_incident(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batonmq.mqctl.verdict.ask.GROUPS_MAX", 0)  # of which one is stuck
    fake.problems = {MASTER: ["its log holds records for queues that cannot be: T"]}
    ran = mqctl("verdict")
    assert ran.code == 3 and "nothing is broken" not in ran.out
    assert "mqctl health names it" in ran.out.splitlines()[0]


def test_every_problem_that_a_broker_knows_has_a_next_step() -> None:
    """The two tables must not drift apart: what a broker says, and what to do about it."""
    from batonmq.broker.replication import classic, controlled, replication
    from batonmq.broker.status import BrokerStatus

    kinds = (
        BrokerStatus,
        replication.Replication,
        controlled.ControllerReplication,
        classic.ClassicReplication,
    )
    source = "".join(inspect.getsource(kind.problems) for kind in kinds)
    assert set(re.findall(r'[{ ]"([a-z][^"]+)": ', source)) == set(_ADVICE)


def test_replicas_that_were_removed_are_a_note_with_the_command_that_forgets_them(
    mqctl: Run, fake: Any, local: Path
) -> None:
    """After a shrink the controllers still know the others; by cluster.json they are no part of
    the cluster any more."""
    write_cluster(local / "cluster.json", pid=os.getpid())
    third = ReplicaIdentity(alive=False, broker_address="10.0.0.3:10911", broker_id=3)
    fake.replicas.replicas_info_table["broker-a"].not_in_sync_replicas.append(third)
    fake.dead = {third.broker_address}
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["problems"]) == (0, [])
    (note,) = ran.json["notes"]
    assert note.endswith("mqctl cleanBrokerMetadata -bn broker-a -b '3' -c C")
    out = mqctl("health").out
    assert third.broker_address not in out and "FAILED" not in out and note in out
    third.alive = True
    assert mqctl("health", "--json").json["problems"], "one that lives is no removed one"


def test_a_group_that_was_removed_is_a_note_with_the_command_that_forgets_it(
    mqctl: Run, fake: Any, local: Path
) -> None:
    """`batonmq up` was started again with fewer groups."""
    write_cluster(local / "cluster.json", pid=os.getpid())
    fake.lose_group("broker-z", "10.0.0.9:10911")
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["problems"]) == (0, [])
    (note,) = ran.json["notes"]
    assert note.endswith("mqctl cleanBrokerMetadata -bn broker-z --wholeGroup -c CLUSTER")
    assert "broker-z" not in mqctl("top", "--once").out + mqctl("verdict").out
    (lost,) = fake.replicas.replicas_info_table["broker-z"].in_sync_replicas
    lost.alive = True
    assert mqctl("health", "--json").json["problems"], "it is not planned, and runs"


def test_a_replica_at_the_address_of_a_removed_one_is_shown(
    mqctl: Run, fake: Any, local: Path
) -> None:
    """A machine whose disk was replaced: the address has a dead id and a living one."""
    write_cluster(local / "cluster.json", pid=os.getpid())
    address = "10.0.0.3:10911"
    info = fake.replicas.replicas_info_table["broker-a"]
    for alive, broker_id, members in (
        (False, 3, info.not_in_sync_replicas),
        (True, 4, info.in_sync_replicas),
    ):
        members.append(ReplicaIdentity(alive=alive, broker_address=address, broker_id=broker_id))
    rows = [line.split() for line in mqctl("health").out.splitlines()]
    assert ["broker", address, "ok"] in rows
    assert any(row[0:2] == ["group", "broker-a"] and "3" in row for row in rows)
    fake.dead = {address}
    ran = mqctl("health", "--json")
    assert [each for each in ran.json["problems"] if address in each]
    assert "-b '3'" in ran.json["notes"][0]


def test_a_replica_that_is_away_is_started_or_forgotten(whole: Findings, fake: Any) -> None:
    info = fake.replicas.replicas_info_table["broker-a"]
    info.not_in_sync_replicas.append(info.in_sync_replicas.pop())
    info.not_in_sync_replicas[0].alive = False
    (problem,) = whole.problems()
    assert "mqctl cleanBrokerMetadata -bn broker-a -b '2' -c C" in problem.next_step


def test_a_verdict_by_a_user_that_may_not_ask_calls_no_node_hung(mqctl: Run, fake: Any) -> None:
    fake.refuses.add(MASTER)
    ran = mqctl("verdict")
    assert ran.code == 1 and "shop lacks Get" in ran.err and "mqctl verdict DIR" in ran.err
    assert "hung" not in ran.out
    assert "mqctl acl create USER" in mqctl("health").out


@pytest.mark.parametrize(
    "why",
    ["the certificate of the peer is refused: it has expired", "connection ended: by the peer"],
)
def test_controllers_that_refuse_this_client_are_no_lost_majority(
    mqctl: Run, fake: Any, why: str
) -> None:
    """The clock of this host is wrong, or it does not use TLS: nothing is to be started."""
    for address in fake.metadata:
        fake.metadata[address] = ConnectError(address, why, sent=True)
    found = mqctl("health", "--json").json
    assert not any("majority" in each for each in found["problems"])
    assert not any("start the" in each for each in found["nextSteps"])


def test_a_wrong_secret_is_no_lost_majority_and_no_lack_of_rights(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise ResponseError(16, "user 'admin': unknown, or its signature is not right", NS)

    for address in fake.metadata:
        try:
            refuse()
        except ResponseError as error:
            fake.metadata[address] = error
    found = mqctl("health", "--json")
    assert (found.code, found.json["state"]) == (3, "degraded"), "its master answers"
    assert not any("majority" in each for each in found.json["problems"])
    assert all("BATONMQ_SECRET_KEY" in step for step in found.json["nextSteps"])
    assert "no controller leads" not in mqctl("health").out
    monkeypatch.setattr(FakeTopics, "names", refuse)
    assert "BATONMQ_SECRET_KEY" in mqctl("topicList").err
    fake.info = ClusterInfo()
    assert mqctl("health", "--json").json["state"] == "down", "nothing is known of any master"


def test_groups_that_take_no_writes_are_named_and_no_others(mqctl: Run, fake: Any) -> None:
    """By each way in which one is known: no master, a dead master, a master that refuses."""
    for n, name in enumerate(("broker-b", "broker-c", "broker-d"), 5):
        address = f"10.0.0.{n}:10911"
        member = ReplicaIdentity(alive=True, broker_address=address, broker_id=1)
        fake.replicas.replicas_info_table[name] = ReplicasInfo("C", [member], address, 1)
        routed = BrokerData(broker_addrs={0: address}, broker_name=name, cluster="C")
        fake.info.broker_addr_table[name] = routed
    fake.replicas.replicas_info_table["broker-b"].master_address = None
    fake.dead = {"10.0.0.6:10911", SLAVE}
    fake.problems = {"10.0.0.7:10911": ["refuses writes: its lease ended"]}
    last = mqctl("health").out.splitlines()[-1]
    assert last.startswith("down: broker-b, broker-c, broker-d: ")
    assert mqctl("health", "--json").json["groupsDown"] == ["broker-b", "broker-c", "broker-d"]
    fake.name_server_error = f"{NS}: Connection refused"
    assert mqctl("health").out.splitlines()[-1].startswith("down: broker-b, ")


EXPIRED = "the certificate of the peer is refused: certificate has expired"
STRANGE = "the certificate of the peer is refused: unable to get local issuer certificate"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("connection ended: closed by the peer", ("LimitNOFILE", "ulimit -n")),
        ("connection ended: lost: [Errno 104] Connection reset", ("LimitNOFILE", "ulimit -n")),
        (EXPIRED, ("mqctl secure status", "mqctl secure rotate", "clock")),
        ("sslv3 alert certificate expired", ("mqctl secure rotate",)),
        (STRANGE, ("ca.pem", "BATONMQ_TLS_TRUST")),
        ("no answer to GET_BROKER_RUNTIME_INFO (28) within 447 ms", ("hangs", "mqctl verdict")),
    ],
)
def test_a_process_that_runs_and_refuses_connections_is_not_to_be_started(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch, why: str, words: tuple[str, ...]
) -> None:
    """Recorded of a broker with `ulimit -n 64` that had 42 descriptors open, and of certificates
    that had ended."""

    def check(_: Any, address: str) -> None:
        if address == SLAVE:
            raise ConnectError(address, why, sent=True)

    monkeypatch.setattr(FakePart, "check", check)
    (step,) = mqctl("health", "--json").json["nextSteps"]
    assert all(word in step for word in words) and "start it again" not in step
    assert ("rotate" in step) == ("expired" in why), "new certificates are no help otherwise"
    assert " silent" in mqctl("top", "--once").out
