"""What a cluster does now, on one screen."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from batonmq.client.admin.admin import Admin
from batonmq.mqctl.commands.cluster import first_rate, percent
from batonmq.mqctl.context import CommandContext, answered, ask_all, reason
from batonmq.mqctl.output import BAD, GOOD, Cell, when
from batonmq.mqctl.params import SECONDS, command, option
from batonmq.mqctl.refusals import is_silent, refuses_client
from batonmq.mqctl.routes import brokers_of, left_out, masters_and_others, not_registered
from batonmq.protocol.bodies import ClusterInfo
from batonmq.protocol.errors import BatonError
from batonmq.protocol.topic_name import is_brokers_own, is_system_group
from batonmq.runtime.clock import wall_ms

ASKED_MAX = 100
"""Topics and groups that one round looks at: each costs a request to every master."""
REASONS_SHOWN = 3
FIGURES = ("inPerSecond", "outPerSecond", "diskRatio", "behindBytes", "pendingAcks")
LINES_BESIDE = 8
"""Headings, blank lines and the first line."""


@command("top", controllers=True, timeout_s=2.0)
@option("-i", "--interval", "every_s", type=SECONDS, default=2.0, help="Between two rounds.")
@option("--once", is_flag=True, help="One round.")
async def top(context: CommandContext, every_s: float, once: bool) -> None:
    """A broker that is not there is `dead`, one that runs and does not answer `silent`; then the
    exit code is 1.

    JSON: one document a line: brokers, topics (topic, tps, day), groups (consumerGroup, diff,
    members), notKnown: why topics or groups are missing, such as a broker group without a master.
    """
    if not once:
        context.interval_s = every_s
    async with context.admin() as admin:
        await context.again_and_again(lambda: _round(context, admin))


async def _round(context: CommandContext, admin: Admin) -> None:
    info = await admin.cluster.info()
    away, unsure = await not_registered(context, admin, info)
    members = [each[1:] for each in (*brokers_of(info), *away, *unsure)]
    # By address, not by id: rows must not jump when the master changes.
    members.sort(key=lambda member: (member[0], member[2]))
    masters, without = masters_and_others(info, away)
    figures, (topics, no_topics), (groups, no_groups) = await asyncio.gather(
        ask_all([address for *_, address in members], admin.brokers.runtime_info),
        _topics(admin, info),
        _groups(admin, masters),
    )
    not_known = list(dict.fromkeys((*map(left_out, without), *no_topics, *no_groups)))
    brokers = [_broker(*each, figures[each[-1]]) for each in members]
    # Its row says what one that does not answer is: a line of an error would push the screen up.
    context.failed |= not all(broker["answers"] for broker in brokers)
    document = {"brokers": brokers, "topics": topics, "groups": groups, "notKnown": not_known}
    if context.out.wrote_json(document):
        return
    if len(not_known) > REASONS_SHOWN:
        not_known[REASONS_SHOWN:] = [f"… and {len(not_known) - REASONS_SHOWN} more (--json)"]
    columns, lines = shutil.get_terminal_size((80, 24))
    lines -= LINES_BESIDE + 2 * len(not_known)
    shown = max(3, lines - 2 * min(5, lines // 4)), max(2, min(5, lines // 4))
    context.out.line(f"{when(wall_ms())[:19]}  {context.target}"[:columns], style="bold")
    for why in not_known:
        context.out.line(why, style=BAD)
    # Those that do not answer are shown also where there is not space for all.
    chosen = sorted(brokers, key=lambda broker: broker["answers"])[: shown[0]]
    rows = [_row(broker) for broker in brokers if broker in chosen]
    headings = ["Broker", "ID", "Address", "Role", "In/s", "Out/s", "Disk", "Behind", "Waiting"]
    context.out.table(headings, rows)
    context.out.line()
    wide = columns - 40
    context.out.table(
        ["Topic", "In/s", "Last 24 h"],
        [[_short(t["topic"], wide), f"{t['tps']:.1f}", t["day"]] for t in topics[: shown[1]]],
    )
    context.out.line()
    context.out.table(
        ["Group", "Members", "Diff"],
        [[_short(g["consumerGroup"], wide), g["members"], g["diff"]] for g in groups[: shown[1]]],
    )


def _short(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def _broker(
    name: str, broker_id: int, address: str, found: Mapping[str, str] | BatonError
) -> dict[str, Any]:
    answers = not isinstance(found, BatonError)
    document: dict[str, Any] = {"brokerName": name, "address": address, "answers": answers}
    if isinstance(found, BatonError):
        return document | {"brokerId": str(broker_id or ""), "error": reason(address, found)}
    behind = int(found.get("commitLogMaxOffset", 0)) - int(found.get("confirmOffset", 0))
    return document | {
        "brokerId": found.get("brokerId", ""),
        "role": found.get("brokerRole", ""),
        "inPerSecond": first_rate(found.get("putTps", "")),
        "outPerSecond": first_rate(found.get("getTransferredTps", "")),
        "diskRatio": percent(found.get("commitLogDiskRatio", "")),
        "behindBytes": max(0, behind),
        "pendingAcks": int(found.get("pendingAcks", 0)),
    }


def _row(broker: Mapping[str, Any]) -> Sequence[object]:
    name, address = _short(broker["brokerName"], 14), broker["address"]
    if not broker["answers"]:
        # A process that has ended refuses the connection; one that hangs lets it wait.
        runs = refuses_client(broker["error"]) or is_silent(broker["error"])
        state = Cell.of("silent" if runs else "dead", BAD)
        return [name, broker["brokerId"], address, state, *("" for _ in FIGURES)]
    role = broker["role"].upper()
    state = Cell.of(role, GOOD) if role == "MASTER" else role
    return [name, broker["brokerId"], address, state, *(broker[each] for each in FIGURES)]


Rows = tuple[list[dict[str, Any]], list[str]]
"""And why some are missing."""


async def _topics(admin: Admin, info: ClusterInfo) -> Rows:
    """The busiest first."""
    own = {*info.broker_addr_table, *info.cluster_addr_table}

    async def one(name: str) -> dict[str, Any]:
        traffic = await admin.topics.traffic(name)
        return {"topic": name, "tps": traffic[0].tps, "day": traffic[0].day}

    found, whys = await _rows(admin.topics.names(), lambda name: is_brokers_own(name, own), one)
    return sorted(found, key=lambda each: (-each["tps"], -each["day"], each["topic"])), whys


async def _groups(admin: Admin, masters: Mapping[str, str]) -> Rows:
    """Those that wait for most first."""

    async def one(name: str) -> dict[str, Any]:
        progress = await admin.consumer_groups.progress(name, None, masters)
        return {"consumerGroup": name, "diff": progress.lag, "members": len(progress.members)}

    found, whys = await _rows(admin.consumer_groups.names(masters), is_system_group, one)
    return sorted(found, key=lambda each: (-each["diff"], each["consumerGroup"])), whys


async def _rows(
    names: Awaitable[list[str]],
    is_left_out: Callable[[str], bool],
    ask: Callable[[str], Awaitable[dict[str, Any]]],
) -> Rows:
    """A row for each name that answers: brokers and the others are shown also while one broker
    group has no master."""
    try:
        wanted = [name for name in await names if not is_left_out(name)]
    except BatonError as error:
        return [], [" ".join(str(error).split())]
    answers = await ask_all(wanted[:ASKED_MAX], ask)
    whys = [" ".join(str(a).split()) for a in answers.values() if isinstance(a, BatonError)]
    return [*answered(answers).values()], whys
