"""What a cluster does now, on one screen."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batonmq.mqctl.commands.cluster import (
    brokers_of,
    cluster_of,
    first_rate,
    not_registered,
    percent,
)
from batonmq.mqctl.context import CommandContext, reason
from batonmq.mqctl.output import BAD, GOOD, Cell, when
from batonmq.mqctl.params import SECONDS, command, option

if TYPE_CHECKING:
    from batonmq.client.admin.admin import Admin
    from batonmq.protocol.bodies import ClusterInfo
    from batonmq.protocol.errors import BatonError

ASKED_MAX = 100
"""Topics and groups that one round looks at: each costs a request to every master."""
AT_ONCE = 16
LINES_BESIDE = 8
"""Headings, blank lines and the first line."""


@command("top", controllers=True, timeout_s=2.0)
@option("-i", "--interval", "every_s", type=SECONDS, default=2.0, help="Between two rounds.")
@option("--once", is_flag=True, help="One round.")
async def top(context: CommandContext, every_s: float, once: bool) -> None:
    """The rates of brokers, topics and groups, live until ctrl-C.

    A broker that is not there is `dead`, one that runs and does not answer `silent`; then the exit
    code is 1.

    JSON: one document a line: brokers, topics (topic, tps, day), groups (consumerGroup, diff,
    members), notKnown: why topics or groups are missing, such as a broker group without a master.
    """
    if not once:
        context.interval_s = every_s
    async with context.admin() as admin:
        await context.again_and_again(lambda: _round(context, admin))


async def _round(context: CommandContext, admin: Admin) -> None:
    import asyncio

    from batonmq.runtime.clock import wall_ms

    info = await cluster_of(admin)
    members = [
        each[1:] for each in (*brokers_of(info), *await not_registered(context, admin, info))
    ]
    members.sort(key=lambda member: (member[0], member[2]))
    figures, (topics, no_topics), (groups, no_groups) = await asyncio.gather(
        asyncio.gather(*(_figures(admin, address) for *_, address in members)),
        _or_why(_topics(admin, info)),
        _or_why(_groups(admin)),
    )
    not_known = list(dict.fromkeys(filter(None, (no_topics, no_groups))))
    brokers = [_broker(*each, found) for each, found in zip(members, figures, strict=True)]
    # Its row says what one that does not answer is: a line of an error would push the screen up.
    context.failed |= not all(broker["answers"] for broker in brokers)
    if context.out.as_json:
        document = {"brokers": brokers, "topics": topics, "groups": groups, "notKnown": not_known}
        context.out.document(document)
        return
    lines = shutil.get_terminal_size((80, 24)).lines - LINES_BESIDE - 2 * len(not_known)
    shown = max(3, lines - 2 * min(5, lines // 4)), max(2, min(5, lines // 4))
    context.out.line(f"{when(wall_ms())[:19]}  {context.target}"[: _width()], style="bold")
    for why in not_known:
        context.out.line(why, style=BAD)
    # Those that do not answer are shown also where there is not space for all.
    chosen = sorted(brokers, key=lambda broker: broker["answers"])[: shown[0]]
    rows = [_row(broker) for broker in brokers if broker in chosen]
    headings = ["Broker", "ID", "Address", "Role", "In/s", "Out/s", "Disk", "Behind", "Waiting"]
    context.out.table(headings, rows)
    context.out.line()
    wide = _width() - 40
    context.out.table(
        ["Topic", "In/s", "Last 24 h"],
        [[_short(t["topic"], wide), f"{t['tps']:.1f}", t["day"]] for t in topics[: shown[1]]],
    )
    context.out.line()
    context.out.table(
        ["Group", "Members", "Diff"],
        [[_short(g["consumerGroup"], wide), g["members"], g["diff"]] for g in groups[: shown[1]]],
    )


async def _figures(admin: Admin, address: str) -> Mapping[str, str] | BatonError:
    from batonmq.protocol.errors import BatonError

    try:
        return await admin.brokers.runtime_info(address)
    except BatonError as error:
        return error


async def _or_why(
    asked: Awaitable[list[dict[str, Any]]],
) -> tuple[list[dict[str, Any]], str]:
    """Its rows, or none and why: brokers are shown also while a group has no master."""
    from batonmq.protocol.errors import BatonError

    try:
        return await asked, ""
    except BatonError as error:
        return [], " ".join(str(error).split())


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _short(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def _broker(
    name: str, broker_id: int, address: str, found: Mapping[str, str] | BatonError
) -> dict[str, Any]:
    answers = not isinstance(found, Exception)
    document: dict[str, Any] = {"brokerName": name, "address": address, "answers": answers}
    if isinstance(found, Exception):
        document |= {"brokerId": str(broker_id or ""), "error": reason(address, found)}
    else:
        behind = int(found.get("commitLogMaxOffset", 0)) - int(found.get("confirmOffset", 0))
        document |= {
            "brokerId": found.get("brokerId", ""),
            "role": found.get("brokerRole", ""),
            "inPerSecond": first_rate(found.get("putTps", "")),
            "outPerSecond": first_rate(found.get("getTransferredTps", "")),
            "diskRatio": percent(found.get("commitLogDiskRatio", "")),
            "behindBytes": max(0, behind),
            "pendingAcks": int(found.get("pendingAcks", 0)),
        }
    return document


def _row(broker: Mapping[str, Any]) -> Sequence[object]:
    from batonmq.mqctl.health import closes, distrusts, may_not

    name, address = _short(broker["brokerName"], 14), broker["address"]
    if not broker["answers"]:
        runs = any(is_so(broker["error"]) for is_so in (closes, distrusts, may_not))
        runs = runs or "no answer" in broker["error"]
        state = Cell.of("silent" if runs else "dead", BAD)
        return [name, broker["brokerId"], address, state, "", "", "", "", ""]
    role = broker["role"].upper()
    return [
        name,
        broker["brokerId"],
        address,
        Cell.of(role, GOOD) if role == "MASTER" else role,
        broker["inPerSecond"],
        broker["outPerSecond"],
        broker["diskRatio"],
        broker["behindBytes"],
        broker["pendingAcks"],
    ]


async def _topics(admin: Admin, info: ClusterInfo) -> list[dict[str, Any]]:
    """The busiest first."""
    from batonmq.protocol.topic_name import is_brokers_own

    own = {*info.broker_addr_table, *info.cluster_addr_table}
    names = [name for name in await admin.topics.names() if not is_brokers_own(name, own)]

    async def one(name: str) -> dict[str, Any]:
        traffic = await admin.topics.traffic(name)
        return {"topic": name, "tps": traffic[0].tps, "day": traffic[0].day}

    found = await _a_few_at_once(one, names)
    return sorted(found, key=lambda each: (-each["tps"], -each["day"], each["topic"]))


async def _a_few_at_once(
    ask: Callable[[str], Awaitable[dict[str, Any]]], names: Sequence[str]
) -> list[dict[str, Any]]:
    import asyncio

    limit = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> dict[str, Any]:
        async with limit:
            return await ask(name)

    return await asyncio.gather(*map(one, names[:ASKED_MAX]))


async def _groups(admin: Admin) -> list[dict[str, Any]]:
    """Those that wait for most first."""
    from batonmq.protocol.topic_name import is_system_group

    names = [name for name in await admin.consumer_groups.names() if not is_system_group(name)]

    async def one(name: str) -> dict[str, Any]:
        progress = await admin.consumer_groups.progress(name)
        return {"consumerGroup": name, "diff": progress.lag, "members": len(progress.members)}

    found = await _a_few_at_once(one, names)
    return sorted(found, key=lambda each: (-each["diff"], each["consumerGroup"]))
