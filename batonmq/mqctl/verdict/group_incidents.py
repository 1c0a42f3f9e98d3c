"""Incidents of the whole cluster, of broker groups and of clients. Pure."""

from collections.abc import Iterator
from typing import Final

from batonmq.launcher.layout import CLUSTER_NAME
from batonmq.mqctl.refusals import refuses_client
from batonmq.mqctl.verdict.evidence import Evidence, GroupEvidence, NodeEvidence
from batonmq.mqctl.verdict.incidents import (
    LOOP_MS,
    REFILL_BYTES_S,
    SKEW_MS,
    START_S,
    Finding,
    Recogniser,
    Repair,
    of_node,
    serving_again,
    since,
)
from batonmq.protocol.topic_name import DLQ_PREFIX, TRANS_CHECK_MAX_TIME_TOPIC, is_system_topic
from batonmq.runtime.words import counted

STUCK_MS: Final = 60_000
TOLD_SKEW_MS: Final = 10_000
"""An answer may have waited for some seconds since the broker looked at its clock."""
LAG_MANY: Final = 10_000


def _whole(evidence: Evidence) -> Iterator[Finding]:
    local = [node for node in evidence.nodes if node.process is not None]
    # Of another host no process is known: its silence proves nothing.
    if not local or any(node.has_process for node in local) or evidence.is_live:
        return
    well = all(n.log.ended_well or (n.store and n.store.clean) for n in local)
    last = max((node.log.last_ms for node in local), default=0)
    how = "was stopped" if well else "was killed: no process said that it stops"
    if well and evidence.is_orphaned:
        well, how = False, "was killed: `batonmq up` ended before its processes"
    repairs = (Repair("start the cluster again", evidence.start, START_S * 2),)
    groups = tuple(evidence.group_names)
    name = "cluster-stopped" if well else "cluster-killed"
    yield Finding(name, evidence.cluster, f"the whole cluster {how}", last, groups, repairs)


def _quorum(evidence: Evidence) -> Iterator[Finding]:
    answers = evidence.controllers
    # Who refuses this client serves all others, and may lead.
    refusing = sum(refuses_client(why or "") for why in answers.values())
    up = sum(why is None for why in answers.values()) + refusing
    if evidence.is_live and answers and up * 2 <= len(answers):
        servers = [n for n in evidence.name_servers() if n.controller]
        away = [n for n in servers if not n.runs and not n.refuses_us]
        orphans = [group.name for group in evidence.groups if not _has_master(group)]
        what = "masters continue to take writes, and none that fails is replaced"
        if orphans:
            what = f"{', '.join(orphans)} cannot get a master before a majority runs"
        cause = f"{up} of {len(answers)} controllers run: {what}"
        repairs = tuple(_serving_again(evidence, away[:2]))
        began = max((since(evidence, n) for n in away), default=0)
        groups = tuple(evidence.group_names)
        yield Finding("quorum-lost", "controllers", cause, began, groups, repairs)
    elif evidence.is_live and answers and not evidence.leader and not refusing:
        cause = "a majority of the controllers answers, and none leads"
        look = Repair("see which of them cannot reach the others", "mqctl getControllerMetaData")
        yield Finding("no-leader", "controllers", cause, 0, (), (look,))
    # Each controller says it in its own words: three of them are enough.
    for problem in evidence.controller_problems[:3]:
        if "differ" in problem:
            fix = Repair("empty the folder of the one that is wrong, and start it")
            yield Finding("controllers-differ", "controllers", problem, 0, (), (fix,))
        elif "of another group of controllers" in problem:
            fix = Repair("move the foreign folder aside, and start that controller")
            yield Finding("controllers-differ", "controllers", problem, 0, (), (fix,))
        elif "does not answer on its Raft port" in problem and up == len(answers):
            look = Repair("look at the network between the controllers", "mqctl health")
            yield Finding("controllers-cut", "controllers", problem, 0, (), (look,))


def _serving_again(evidence: Evidence, nodes: list[NodeEvidence]) -> list[Repair]:
    # Once each: several may need the same one, to wait.
    return list(dict.fromkeys(r for node in nodes for r in serving_again(evidence, node)))


def _has_master(group: GroupEvidence) -> bool:
    # By who hears it: a master that does not answer this host may serve all others.
    return bool(group.master) and group.master in group.alive


def _masterless(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.is_live or evidence.classic:
        return
    for group in evidence.groups:
        if _has_master(group) or not group.members:
            continue
        away = [i for i in group.members if i not in group.alive]
        suspects = [
            n.name for n in evidence.brokers(group.name) if any("suspect" in t for t in n.problems)
        ]
        nodes = [n for i in away if (n := evidence.node_of(group.name, i)) is not None]
        silent = [node for node in nodes if not node.runs]
        repairs = _serving_again(evidence, silent)
        ids = ", ".join(map(str, group.members))
        if not any(n.runs for n in evidence.brokers(group.name)):
            name, why = "group-down", "none of its brokers runs"
        elif suspects:
            name, why = "only-suspects", f"the logs of {', '.join(suspects)} are suspect"
        elif away and (evidence.leader or len(away) == len(group.members)):
            who = ", ".join(f"broker {each}" for each in away)
            name, why = "members-away", f"of the SyncStateSet {{{ids}}} {who} cannot be reached"
        elif evidence.leader:
            name, why = "no-master", "an election is under way"
        else:
            # Members that could be elected are alive. Until a controller leads, neither a started
            # broker nor an unclean election can help.
            name, why, repairs = "no-master", "no controller leads to elect one", []
        if name != "no-master":
            repairs += _unclean(evidence, group.name)
        cause = f"{group.name} has no master: {why}"
        began = max((s.began_ms for s in evidence.stories_of(group.name)), default=0)
        yield Finding(name, group.name, cause, began, (group.name,), tuple(repairs))


def _unclean(evidence: Evidence, name: str) -> list[Repair]:
    """What each election of a replica that may lack messages would cost."""
    group = evidence.group(name)
    repairs = []
    for node in evidence.brokers(name):
        end = int(node.report.get("commitLogMaxOffset") or -1)
        if not node.runs or end < 0:
            continue
        me = evidence.id_of(node)
        lacks = max(group.confirmed, *(s.end for s in evidence.stores(name)), 0) - end
        lost = (
            f"up to {counted(lacks, 'byte')} that were acknowledged"
            if lacks > 0
            else "what only others have"
        )
        cluster = group.cluster or CLUSTER_NAME
        command = f"mqctl electMaster -bn {name} -b {me} -c {cluster} --unclean"
        repairs.append(
            Repair(f"only if the others are gone for good: {node.name}", command, 2, lost, 1)
        )
    return repairs


def _slaves(evidence: Evidence) -> Iterator[Finding]:
    """Replicas that run but are not in the SyncStateSet, or cannot follow."""
    for node in evidence.brokers():
        group, me = evidence.group(node.group), evidence.id_of(node)
        if not node.runs or not node.report or not group.master or me == group.master:
            continue
        stuck = next((t for t in node.problems if t.startswith(STUCK)), "")
        if stuck:
            name = "peers-cut" if "connect" in stuck or "answer" in stuck else "slave-stuck"
            cause = f"{node.name} runs and cannot follow its master: {stuck.partition(': ')[2]}"
            look = Repair("look at the way from it to its master", "mqctl haStatus")
            yield of_node(node, name, cause, look)
        elif me not in group.members:
            master = evidence.node_of(node.group, group.master)
            ends = [int(n.report.get("commitLogMaxOffset") or 0) for n in (master, node) if n]
            behind = max(0, ends[0] - ends[-1]) if len(ends) == 2 else 0
            cause = (
                f"{node.name} runs and is not in the SyncStateSet: {counted(behind, 'byte')} behind"
            )
            seconds = 1 + behind // REFILL_BYTES_S
            wait = Repair("wait: it copies its master", "mqctl health --watch", seconds)
            yield of_node(node, "slave-behind", cause, wait)


STUCK: Final = ("cannot follow its master", "gets no tables", "does not join yet")


def _reported(evidence: Evidence) -> Iterator[Finding]:
    """What running brokers report of themselves, where no recogniser above says more."""
    for node in evidence.brokers():
        for problem in node.problems:
            for begin, word, name, advice, command in REPORTED:
                if problem.startswith(begin) and word in problem:
                    fix = Repair(advice, command.format(node.address))
                    yield of_node(node, name, f"{node.name}: {problem}", fix)
                    break


_STATUS: Final = "mqctl brokerStatus -b {}"
_WAITS: Final = "see what it waits for"
REPORTED: Final = (
    ("refuses writes", "lease", "lease-lost", _WAITS, _STATUS),
    ("refuses writes", "minInSyncReplicas", "too-few-in-sync", _WAITS, _STATUS),
    ("refuses writes", "", "refuses-writes", _WAITS, _STATUS),
    ("is not registered", "", "not-registered", "see who has its id", "mqctl getSyncStateSet"),
    ("its log is suspect", "", "log-suspect", "nothing while its group has a master", ""),
    ("has no index", "", "index-failed", "restart it: it builds the index again", ""),
    ("cannot read a queue", "", "queue-unreadable", "restart it: it builds the queue again", ""),
    ("has set messages aside", "", "messages-aside", "read the reason", _STATUS),
    ("its audit log", "", "audit-failed", "remove the cause; it tries again each second", ""),
    ("its group is not well", "", "classic-group", "see who is there", "mqctl clusterList"),
    ("acts for its master", "", "classic-master-away", "start the master", ""),
)
"""How a report begins, a word in it, incident, advice, command."""


def _routes(evidence: Evidence) -> Iterator[Finding]:
    names = sorted({name for routes in evidence.routes.values() for name in routes})
    for name in names:
        known = {ns: routes.get(name, "") for ns, routes in evidence.routes.items()}
        if len(set(known.values())) > 1:
            text = ", ".join(f"{ns} names {to or 'no master'}" for ns, to in sorted(known.items()))
            cause = f"{name}: the name servers differ: {text}"
            wait = Repair("wait for the next registration", "mqctl health --watch", 30)
            yield Finding("routes-differ", name, cause, 0, (name,), (wait,))


def _cut_off(evidence: Evidence) -> Iterator[Finding]:
    """A broker that answers here, and that the controllers call dead."""
    if not evidence.leader:
        return
    for node in evidence.brokers():
        group, me = evidence.group(node.group), evidence.id_of(node)
        if node.runs and node.asked and me in group.replicas and me not in group.alive:
            cause = f"{node.name} answers here, and the controllers do not hear it: a cut network"
            status = _STATUS.format(node.address)
            look = Repair("look at the way from it to the controllers", status)
            yield of_node(node, "controllers-unreached", cause, look)


def _stories(evidence: Evidence) -> Iterator[Finding]:
    for story in evidence.stories:
        name = story.broker_name
        if story.unclean:
            cause = (
                f"{name}: an operator elected broker {story.winner}, which may have"
                f" lacked messages (masterEpoch {story.master_epoch})"
            )
            kept = Repair("what others cut is in their truncated/: compare", "mqctl messageAudit")
            yield Finding("unclean-election", name, cause, story.began_ms, (name,), (kept,))
        elif story.kind == "switch_failed" and evidence.now_ms - story.ended_ms < LOOP_MS:
            cause = f"{name}: a planned switch did not happen: {story.reason}"
            again = Repair("try it again when the set is full", "mqctl health --watch")
            yield Finding("switch-failed", name, cause, story.began_ms, (name,), (again,))
        elif story.kind == "diverged" and not story.complete and evidence.is_live:
            cause = f"{name}: a replica cannot follow: {story.reason}"
            look = Repair("see what it says", "mqctl haStatus")
            yield Finding("slave-stuck", name, cause, story.began_ms, (name,), (look,))


# Clients.


def _consumers(evidence: Evidence) -> Iterator[Finding]:
    for each in evidence.consumers:
        look = Repair("see queue by queue", f"mqctl consumerProgress -g {each.group}")
        base = f"group {each.group} is {counted(each.lag, 'message')} behind on {each.topic}"
        if each.lag <= 0:  # who has consumed everything may have left
            continue
        if each.members == 0:
            yield Finding("consumers-gone", each.group, f"{base}: it has no member", 0, (), (look,))
        elif each.members > 0 and each.in_flight and each.idle_ms > STUCK_MS:
            cause = f"{base}: members hold {counted(each.in_flight, 'message')} and finish none"
            yield Finding("consumers-stuck", each.group, cause, 0, (), (look,))
        elif each.members > 0 and each.lag >= LAG_MANY:
            yield Finding("consumers-behind", each.group, f"{base}", 0, (), (look,))
    for topic, count in sorted(_topics(evidence).items()):
        # The topic has an offset for each letter that ever came, read or not.
        if topic.startswith(DLQ_PREFIX) and count:
            group = topic.removeprefix(DLQ_PREFIX)
            cause = f"{counted(count, 'message')} of group {group} went to its dead-letter topic"
            look = Repair("read them", f"mqctl consumeMessage -t {topic}")
            yield Finding("dead-letters", group, cause, 0, (), (look,))
        elif topic == TRANS_CHECK_MAX_TIME_TOPIC and count:
            cause = f"given up: {counted(count, 'half message')}, no producer said how they end"
            look = Repair("read them", f"mqctl consumeMessage -t {topic}")
            yield Finding("transactions-given-up", topic, cause, 0, (), (look,))


def _topics(evidence: Evidence) -> dict[str, int]:
    found: dict[str, int] = {}
    for store in (n.store for n in evidence.brokers() if n.store is not None):
        for topic, count in store.topics.items():
            found[topic] = max(count, found.get(topic, 0))
    return found


def _waiting(evidence: Evidence) -> Iterator[Finding]:
    """Timers, delays and half messages that a serving master does not work off."""
    now_ms = evidence.now_ms
    for node in evidence.brokers():
        # A slave holds the same queues, and delivers nothing from them.
        if not node.runs or node.report.get("brokerRole") == "SLAVE":
            continue
        look = Repair("see whether that falls", _STATUS.format(node.address))
        behind = int(node.report.get("timerOffsetBehind") or 0)
        if behind >= LAG_MANY:
            cause = f"{node.name}: {counted(behind, 'timed message')} not read yet"
            yield of_node(node, "timers-behind", cause, look)
        if node.due_ms and now_ms - node.due_ms > STUCK_MS:
            late = (now_ms - node.due_ms) // 1000
            cause = f"{node.name}: a delayed message was due {late} s ago, and is not delivered"
            yield of_node(node, "delays-stopped", cause, look, since_ms=node.due_ms)
        line = node.log.latest(UNCHECKED)
        if line and node.log.age_ms(line, now_ms) < LOOP_MS:
            group = line.partition("group=")[2].partition(":")[0] or "?"
            cause = f"half messages of producer group {group} wait: no producer of it is connected"
            start = Repair("start a producer of that group: it is asked for each of them")
            yield Finding("transactions-unchecked", group, cause, 0, node.groups, (start,))


UNCHECKED: Final = "transaction_not_checked "
"""What a broker logs if no producer of the group is there to be asked about a half message."""


def _topics_missing(evidence: Evidence) -> Iterator[Finding]:
    """Topics with messages that no table lists. A broker that runs may be deleting them."""
    for name in evidence.group_names:
        stores = evidence.stores(name)
        tables = [store.listed for store in stores if store.listed is not None]
        if not tables or any(node.runs for node in evidence.brokers(name)):
            continue
        listed = frozenset().union(*tables)
        for topic in sorted({t for s in stores for t, n in s.topics.items() if n} - listed):
            if is_system_topic(topic):
                continue
            count = max(store.topics.get(topic, 0) for store in stores)
            queues = max(store.queues.get(topic, 0) for store in stores)
            cluster = evidence.group(name).cluster or CLUSTER_NAME
            cause = f"{name}: no table lists topic {topic}, which has {counted(count, 'message')}"
            again = Repair(
                "start the cluster and create it again: its messages are in the log",
                f"mqctl updateTopic -c {cluster} -t {topic} -r {queues} -w {queues}",
                START_S,
            )
            yield Finding("topic-missing", topic, cause, 0, (name,), (again,))


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.nodes:
        now_ms = evidence.now_ms
        stored_ms = node.store.newest_ms if node.store else 0
        ahead = max(node.log.last_ms, stored_ms, now_ms) - now_ms
        answered_ms = node.answered_ms or now_ms
        skew_ms = int(node.report.get("wallClockMs", answered_ms)) - answered_ms
        if abs(skew_ms) > TOLD_SKEW_MS:
            ahead = skew_ms
        if not -TOLD_SKEW_MS <= ahead <= SKEW_MS:
            off = f"{ahead // 1000} s ahead of" if ahead > 0 else f"{-ahead // 1000} s behind"
            cause = f"{node.name}: its clock is {off} this host's"
            fix = Repair("set the clock: no message is lost by it", "timedatectl; chronyc tracking")
            yield Finding("clock-skew", node.name, cause, 0, (), (fix,))
    # The newest only: a clock that was wrong last week is no cause.
    for story in evidence.stories[-8:]:
        for wrong in list(story.out_of_order().values())[:1]:
            behind = [int(w) for w in wrong.split() if w.isdigit()]
            if max(behind, default=0) > SKEW_MS and evidence.now_ms - story.ended_ms < LOOP_MS:
                fix = Repair("set the clock: no message is lost by it", "chronyc tracking")
                who = story.broker_name or "controllers"
                yield Finding("clock-skew", who, wrong, story.began_ms, (), (fix,))


OF_GROUPS: Final[tuple[Recogniser, ...]] = (
    _whole,
    _quorum,
    _masterless,
    _slaves,
    _cut_off,
    _reported,
    _routes,
    _stories,
    _clocks,
    _topics_missing,
    _consumers,
    _waiting,
)
