"""Asks what runs, and adds the answers to the evidence of files. Each source has its own limit of
time; one that does not answer is noted."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import masters_of
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.history.event import HistoryEvent
from batonmq.history.fold import stories
from batonmq.history.merge import merged
from batonmq.mqctl.context import reason
from batonmq.mqctl.health import Findings, poll, poll_classic
from batonmq.mqctl.refusals import may_not
from batonmq.mqctl.verdict.evidence import (
    BROKER,
    NAME_SERVER,
    AbsentSource,
    ConsumersEvidence,
    Evidence,
    GroupEvidence,
    NodeEvidence,
    recorded,
)
from batonmq.mqctl.verdict.files import due_ms
from batonmq.mqctl.verdict.gather import groups_of
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.errors import BatonError
from batonmq.protocol.topic_name import is_system_group
from batonmq.runtime.clock import wall_ms

HISTORY_EVENTS: Final = 500
# Each consumer group costs a request to every master: a thousand must not delay what is broken.
GROUPS_MAX: Final = 100
CONSUMERS_S: Final = 1.5


async def ask(
    evidence: Evidence,
    admin: Admin,
    controller: ControllerAdmin | None,
    expected: Sequence[tuple[str, str]],
    timeout_ms: int,
) -> Evidence:
    """The evidence with what answers now. `controller` None: a cluster without controllers.
    `timeout_ms`: of one answer. Raises BatonError if the user may not ask."""
    found = await (poll_classic(admin) if controller is None else poll(admin, controller, expected))
    _require_rights(found)
    absent: list[AbsentSource] = []
    routes, events, consumers = await asyncio.gather(
        _routes(admin, found, timeout_ms),
        _history(controller, absent),
        _consumers_in_time(admin, found, absent),
    )
    nodes = _nodes(evidence, found)
    answers = {
        a: reason(a, answer) if isinstance(answer, BatonError) else None
        for a, answer in found.controllers.items()
    }
    logs = [answer.log for answer in found.metadata.values() if answer.log is not None]
    problems = {problem for log in logs for problem in log.problems}
    is_live = bool(found.up or found.metadata)
    base = evidence.groups or groups_of(events, is_current=False)
    return replace(
        evidence,
        classic=controller is None,
        nodes=nodes,
        groups=_groups(found, base),
        stories=stories(events) if events else evidence.stories,
        routes=routes,
        leader=found.leader,
        controllers=answers,
        controller_problems=tuple(sorted(problems)),
        consumers=tuple(consumers) if consumers is not None else evidence.consumers,
        absent=(*evidence.absent, *absent),
        is_live=is_live,
        health=found.state if is_live or any(node.refuses_us for node in nodes) else "",
        start="" if is_live else evidence.start,
    )


def _require_rights(found: Findings) -> None:
    whys = (*found.name_servers.values(), *(answer.why for answer in found.brokers.values()))
    for why in filter(None, whys):
        if may_not(why):  # who answers so is not hung
            raise BatonError(
                f"{why}. With a user that may not ask the nodes only files can be judged:"
                " mqctl verdict DIR..."
            )


async def _consumers_in_time(
    admin: Admin, found: Findings, absent: list[AbsentSource]
) -> list[ConsumersEvidence] | None:
    """None, with the reason in `absent`, if they are not known within CONSUMERS_S."""
    try:
        async with asyncio.timeout(CONSUMERS_S):
            return await _consumers(admin, found, absent)
    except TimeoutError:
        absent.append(AbsentSource("consumer groups", f"no answer within {CONSUMERS_S:g} s"))
    except BatonError as error:
        absent.append(AbsentSource("consumer groups", str(error)))
    return None


async def _routes(admin: Admin, found: Findings, timeout_ms: int) -> dict[str, dict[str, str]]:
    """Which master each name server names, asked one by one."""
    options = admin.client.options

    async def one(address: str) -> tuple[str, dict[str, str]]:
        try:
            async with Admin((address,), timeout_ms=timeout_ms, client_options=options) as alone:
                table = (await alone.cluster.info()).broker_addr_table
        except BatonError:
            return address, {}
        return address, {n: data.broker_addrs.get(MASTER_ID, "") for n, data in table.items()}

    alive = [address for address, why in found.name_servers.items() if why is None]
    # They are asked to see whether they differ: one cannot.
    if len(alive) < 2:
        return {}
    return dict(await asyncio.gather(*map(one, alive)))


async def _history(
    controller: ControllerAdmin | None, absent: list[AbsentSource]
) -> tuple[HistoryEvent, ...]:
    if controller is None:
        return ()
    # From each: one that was cut off lacks events, and only one may be left that has the oldest.
    known = {}
    for address, answer in (await controller.histories(limit=HISTORY_EVENTS)).items():
        if isinstance(answer, BatonError):
            absent.append(AbsentSource(f"history of {address}", str(answer)))
        else:
            known[address] = answer
    return merged(known).events


async def _consumers(
    admin: Admin, found: Findings, absent: list[AbsentSource]
) -> list[ConsumersEvidence]:
    up = found.up
    if not up:
        return []
    routed, without = masters_of(found.routes)
    # One master that is away must not hide what the others know.
    masters = {name: address for name, address in routed.items() if address in up}
    for name in sorted({*routed, *without} - masters.keys()):
        absent.append(AbsentSource(f"consumer groups at {name}", "no master of it answers"))
    groups = admin.consumer_groups
    names = [n for n in await groups.names(masters) if not is_system_group(n)]
    asked = (groups.progress(name, None, masters) for name in names[:GROUPS_MAX])
    some = await asyncio.gather(*asked)
    consumers = []
    for progress in some:
        for topic in sorted({each.queue.topic for each in progress.queues}):
            queues = [each for each in progress.queues if each.queue.topic == topic]
            consumers.append(
                ConsumersEvidence(
                    progress.group,
                    topic,
                    sum(max(0, each.lag) for each in queues),
                    len(progress.members),
                    sum(each.in_flight for each in queues),
                    _idle_ms([each.last_consumed_ms for each in queues if each.lag > 0]),
                )
            )
    return consumers


def _idle_ms(times: Sequence[int]) -> int:
    known = [each for each in times if each > 0]
    return wall_ms() - max(known) if known else -1


def _nodes(evidence: Evidence, found: Findings) -> tuple[NodeEvidence, ...]:
    nodes = {node.address: node for node in evidence.nodes}
    group_of = {a: name for name, members in found.expected.items() for a in members} | {
        replica.broker_address: name
        for name, info in found.replicas.replicas_info_table.items()
        for replica in info.replicas
    }
    for name, data in found.routes.broker_addr_table.items():
        group_of |= dict.fromkeys(data.broker_addrs.values(), name)
    removed = {each.broker_address for name in found.groups for each in found.removed(name)}
    for address, why in found.name_servers.items():
        node = nodes.get(address, NodeEvidence(address, NAME_SERVER, address))
        nodes[address] = replace(node, asked=True, refused=why)
    for address, answer in found.brokers.items():
        if address in removed:  # its silence is no incident
            continue
        node = nodes.get(address, NodeEvidence(address, BROKER, address, group_of.get(address, "")))
        late = _undelivered(answer.figures)
        nodes[address] = replace(
            node,
            asked=True,
            refused=answer.why,
            report=answer.figures,
            answered_ms=answer.at_ms,
            due_ms=due_ms(Path(node.folder), late) if node.folder else 0,
            problems=answer.problems,
        )
    return tuple(nodes.values())


def _undelivered(report: Mapping[str, str]) -> dict[int, int]:
    """Delay level -> queue offset of its next message, of the levels that have one."""
    found = {}
    for name, value in report.items():
        level = name.removeprefix("scheduleMessageOffset_")
        offset, _, end = value.partition(",")
        is_level = level != name and all(each.isdigit() for each in (level, offset, end))
        if is_level and int(offset) < int(end):
            found[int(level)] = int(offset)
    return found


def _groups(found: Findings, known: Sequence[GroupEvidence]) -> tuple[GroupEvidence, ...]:
    """As the leading controller records them; without one as they were recorded last."""
    reports, up = {a: answer.figures for a, answer in found.brokers.items()}, found.up
    groups = {group.name: group for group in known}
    for name, info in found.replicas.replicas_info_table.items():
        before = groups.get(name, GroupEvidence(name))
        routed = found.routes.broker_addr_table.get(name)
        cluster = routed.cluster if routed is not None else before.cluster
        groups[name] = recorded(replace(before, cluster=cluster), info)
    for name, group in groups.items():
        addresses = set(group.replicas.values())
        ends = [int(r.get("confirmOffset") or -1) for a, r in reports.items() if a in addresses]
        if name not in found.replicas.replicas_info_table:
            # The record may be old: who serves now is who says so.
            alive = frozenset(i for i, a in group.replicas.items() if a in up)
            masters = {a for a, r in reports.items() if r.get("brokerRole", "").endswith("MASTER")}
            master = next((i for i, a in group.replicas.items() if a in masters), 0)
            group = replace(group, alive=alive, master=master)
        groups[name] = replace(group, confirmed=max([group.confirmed, *ends]))
    return tuple(groups[name] for name in sorted(groups))
