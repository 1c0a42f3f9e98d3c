"""electMaster: a planned switch, an election, or one that is unclean and shows what it may lose."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.client.admin.types import ElectedMaster
from batonmq.history.fold import failovers
from batonmq.history.story import Story
from batonmq.mqctl.commands.ha import show_replicas
from batonmq.mqctl.context import CommandContext, CommandFailed, ask_all
from batonmq.mqctl.output import WaitLine, still_lacking
from batonmq.mqctl.params import COUNT, command, complete, option, yes_option
from batonmq.protocol.bodies import BrokerReplicasInfo, ReplicasInfo
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.errors import BatonError
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.words import counted, named

POLL_S = 0.02
STORY_MS = 500
"""For the first acknowledgement to be recorded; a group without producers has none."""
STORY_EVENTS = 60


@command("electMaster", controllers=True, writes=True)
@option(
    "-b",
    "--brokerId",
    type=COUNT,
    help="The replica to become master. Default: the controller chooses.",
)
@option("-bn", "--brokerName", required=True, help="Broker group.")
@option("-c", "--clusterName", default="", help="Its cluster.")
@option(
    "--unclean",
    is_flag=True,
    help="Take the replica of -b though it may lack acknowledged messages.",
)
@option(
    "--cut-later-acks",
    is_flag=True,
    help="With --unclean: though the old master is out of sight and may still acknowledge.",
)
@yes_option
async def elect_master(
    context: CommandContext,
    broker_id: int | None,
    broker_name: str,
    cluster_name: str,
    unclean: bool,
    cut_later_acks: bool,
    yes: bool,
) -> None:
    """With a living master and an in-sync replica it is a planned switch: the old master holds its
    sends for some milliseconds, until the new one has its last byte, and hands over; nothing
    acknowledged and no send is lost. If the replica does not have it within 0.5 s, the old master
    continues, and the reason is shown. Without -b, or with a dead master, it is an election. Waits
    until the new master serves and the name servers route to it.

    With --unclean the replica need not be in sync: what it lacks is lost to the group (others keep
    aside what they cut). What that may be is shown first, and confirmed. It is elected when the old
    master was silent for longer than its lease. If the whole SyncStateSet is out of the
    controllers' sight, its master may be alive and acknowledge without them: none is elected
    (exit code 1), and the error says when each member was last heard, its log end and what is
    confirmed. Stop the old master, or give --cut-later-acks: what it acknowledges is cut, too.

    JSON: brokerName, alreadyMaster where nothing had to change, and as in RocketMQ's reply
    masterBrokerId, masterAddress, masterEpoch, syncStateSetEpoch, syncStateSet. Of an unclean
    election unclean, cutLaterAcks, logEnd and confirmed (bytes), offsetsClamped (offsets of groups
    above the new end of their queue). Of a planned switch masterBefore, heldMs, and gapMs: from the
    end of the hold to the first acknowledgement, or if no send waited to the opening. Null if
    unknown."""
    if unclean and broker_id is None:
        raise click.UsageError("--unclean needs the replica named: give -b N")
    if cut_later_acks and not unclean:
        raise click.UsageError("--cut-later-acks belongs to --unclean")
    how = None
    async with context.controller() as (admin, controller):
        if unclean and broker_id is not None:
            # Asked before, and kept: after the election the loser has cut what it had.
            found = await candidates(admin, controller, broker_name)
            confirm_unclean(context, broker_name, broker_id, found, yes=yes)
            how = UncleanElection(found, cut_later_acks)
        await elect(context, admin, controller, (cluster_name, broker_name, broker_id), how)


@command("drain", controllers=True, writes=True)
@click.argument("broker_addr", metavar="HOST:PORT", shell_complete=complete("addresses"))
async def drain(context: CommandContext, broker_addr: str) -> None:
    """Exit code 1, and nothing is changed, if no other living member of its set has everything.

    JSON: brokerName, brokerId, wasMaster, masterBrokerId, others (ids of the living members of the
    set without this one)."""
    async with context.controller() as (admin, controller):
        moved = await move_away(context, admin, controller, broker_addr)
    if context.out.wrote_json(moved):
        return
    broker_id, master, others = moved["brokerId"], moved["masterBrokerId"], moved["others"]
    what = f"broker {master} is master now" if moved["wasMaster"] else "it is no master"
    context.out.line(f"broker {broker_id} of {moved['brokerName']}: {what}")
    context.out.line(
        f"it may be stopped (SIGTERM); everything is also on {named('broker', others)}"
    )
    if len(others) == 1:
        context.out.line("until it is back there is one copy; with minInSyncReplicas 2 writes wait")


async def move_away(
    context: CommandContext, admin: Admin, controller: ControllerAdmin, address: str
) -> dict[str, Any]:
    """Hands the mastership of the broker at `address` over, if it has it; returns the document of
    `drain`. Raises CommandFailed, with nothing changed, if no other living member of its set has
    everything."""
    name, me, group = await _replica(admin, controller, address)
    others = [r.broker_id for r in group.in_sync_replicas if r.alive and r.broker_id != me]
    if not others:
        raise CommandFailed(f"only this broker of {name} has everything: no other one is in sync")
    was_master, master = group.master_broker_id == me, group.master_broker_id
    if was_master:
        # Only living members of the set: another one may lack what was acknowledged.
        ends = [e for e in await candidates(admin, controller, name) if e.broker_id in others]
        # The longest log: the least is left to copy while sends are held.
        master = max(ends, key=lambda each: each.log_end or 0).broker_id
        await _hand_over(context, admin, controller, name, master)
    return {
        "brokerName": name,
        "brokerId": me,
        "wasMaster": was_master,
        "masterBrokerId": master,
        "others": others,
    }


async def _hand_over(
    context: CommandContext, admin: Admin, controller: ControllerAdmin, name: str, heir: int
) -> None:
    """Waits until the heir serves. Raises CommandFailed if another one became master."""
    routed = (await admin.cluster.info()).broker_addr_table.get(name)
    elected = await controller.elect_master(routed.cluster if routed else "", name, heir)
    check_elected(elected, heir)
    await _await_service(context, admin, elected)


@command("undrain", controllers=True, writes=True, timeout_s=60.0)
@click.argument("broker_addr", metavar="HOST:PORT", shell_complete=complete("addresses"))
@option("--master", "wants_lead", is_flag=True, help="Make it master again.")
async def undrain(context: CommandContext, broker_addr: str, wants_lead: bool) -> None:
    """With --master it becomes master then. --timeout says how long; exit code 1 if that was too
    short.

    JSON: brokerName, brokerId, masterBrokerId."""
    async with context.controller() as (admin, controller):

        async def lacks() -> str:
            name, me, group = await _replica(admin, controller, broker_addr)
            in_sync = any(r.broker_id == me and r.alive for r in group.in_sync_replicas)
            return "" if in_sync else f"broker {me} of {name} is not in its set yet"

        within_s = context.timeout_ms / 1000
        if found := await still_lacking(lacks, within_s, f"waiting for {broker_addr}", POLL_S):
            raise CommandFailed(f"{found}: `mqctl health` says why")
        name, me, group = await _replica(admin, controller, broker_addr)
        master = group.master_broker_id
        if wants_lead and master != me:
            await _hand_over(context, admin, controller, name, me)
            master = me
    role = "and master" if master == me else f"broker {master} is master"
    context.out.result(
        {"brokerName": name, "brokerId": me, "masterBrokerId": master},
        f"broker {me} of {name} is in the SyncStateSet, {role}",
    )


async def _replica(
    admin: Admin, controller: ControllerAdmin, address: str
) -> tuple[str, int, ReplicasInfo]:
    """(group, broker id, what is recorded of the group). Raises CommandFailed."""
    names = sorted((await admin.cluster.info()).broker_addr_table)
    known = await controller.sync_state_data(names)
    name, me = replica_at(known, address)
    return name, me, known.replicas_info_table[name]


def replica_at(known: BrokerReplicasInfo, address: str) -> tuple[str, int]:
    """(group, broker id) of the broker at an address. Raises CommandFailed if there is none."""
    for name, group in known.replicas_info_table.items():
        for replica in group.replicas:
            if replica.broker_address == address:
                return name, replica.broker_id
    raise CommandFailed(f"the controllers know no broker at {address}")


@dataclass(frozen=True, slots=True)
class UncleanElection:
    """`found`: what the replicas reported before it."""

    found: list[Candidate]
    cut_later_acks: bool


async def elect(
    context: CommandContext,
    admin: Admin,
    controller: ControllerAdmin,
    who: tuple[str, str, int | None],
    how: UncleanElection | None = None,
) -> None:
    """Elects `who` (cluster, group, id), waits until it serves, and shows the outcome."""
    _, broker_name, broker_id = who
    with WaitLine(f"electing a master of {broker_name} ..."):
        elected = await controller.elect_master(
            *who, unclean=how is not None, cut_later_acks=how is not None and how.cut_later_acks
        )
        check_elected(elected, broker_id)
        story = None
        await _await_service(context, admin, elected)
        if not elected.already_master:
            story = await _story(context, controller, elected)
    replicas = await controller.sync_state_data([broker_name])
    unclean = _unclean_document(elected, story, how) if how is not None else {}
    if context.out.wrote_json(_document(elected, story) | unclean):
        return
    if outcome := _outcome(elected, story):
        context.out.line(outcome)
    show_replicas(context, replicas)


def check_elected(elected: ElectedMaster, broker_id: int | None) -> None:
    """Raises CommandFailed if another replica than the wanted one is master."""
    # A controller answers with the master that is there, if the wanted one may not be elected.
    if broker_id is not None and elected.master_broker_id != broker_id:
        raise CommandFailed(
            f"broker {broker_id} was not elected: {elected.master_broker_id} at"
            f" {elected.master_address} is master of {elected.broker_name}"
        )


def _document(elected: ElectedMaster, story: Story | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "brokerName": elected.broker_name,
        "masterBrokerId": elected.master_broker_id,
        "masterAddress": elected.master_address,
        "masterEpoch": elected.master_epoch,
        "syncStateSetEpoch": elected.sync_state_set_epoch,
        "syncStateSet": list(elected.sync_state_set),
        "alreadyMaster": elected.already_master,
    }
    if story is not None:
        document["masterBefore"] = story.master_before
        document["heldMs"] = story.held_ms if story.held_ms >= 0 else None
        document["gapMs"] = story.handover_ms
    return document


def _unclean_document(
    elected: ElectedMaster, story: Story | None, how: UncleanElection
) -> dict[str, Any]:
    ends = [each.log_end for each in how.found if each.broker_id == elected.master_broker_id]
    confirmed = [each.confirm_offset for each in how.found if each.confirm_offset is not None]
    opened = story is not None and story.opened_ms > 0
    return {
        "unclean": True,
        "cutLaterAcks": how.cut_later_acks,
        "logEnd": next(iter(ends), None),
        "confirmed": max(confirmed, default=None),
        "offsetsClamped": story.offsets_clamped if story is not None and opened else None,
    }


async def _await_service(context: CommandContext, admin: Admin, elected: ElectedMaster) -> None:
    """Waits until the new master takes writes and is routed to; complains if it does not."""
    address, within_s = elected.master_address, context.timeout_ms / 1000

    async def lacks() -> str:
        if not (await admin.brokers.ha_status(address)).master:
            return f"{address} does not yet serve as master"
        if not context.target.name_servers:  # `-a` alone is enough: no route can be looked at then
            return ""
        data = (await admin.cluster.info()).broker_addr_table.get(elected.broker_name)
        is_routed = data is not None and data.broker_addrs.get(MASTER_ID) == address
        return "" if is_routed else "the name server does not yet name it as master"

    doing = f"waiting for {address} to serve as master"
    if found := await still_lacking(lacks, within_s, doing, POLL_S):
        # It is elected, whatever is late: the command still shows by whom the group is led.
        context.complain(f"elected, but after {within_s:g} s {found}")


async def _story(
    context: CommandContext, controller: ControllerAdmin, elected: ElectedMaster
) -> Story | None:
    """The election in the controllers' history; its first acknowledgement may take a moment."""
    deadline_ms = boot_ms() + min(STORY_MS, context.timeout_ms)
    while True:
        try:
            events = await controller.history(elected.broker_name, limit=STORY_EVENTS)
        except BatonError:
            return None  # RocketMQ's own controllers keep no history
        found = [each for each in failovers(events) if each.master_epoch == elected.master_epoch]
        story = found[-1] if found else None
        if (story is not None and story.handover_ms is not None) or boot_ms() >= deadline_ms:
            return story
        await asyncio.sleep(POLL_S)


def _outcome(elected: ElectedMaster, story: Story | None) -> str:
    """What changed, and how long sends waited; "" if the history lacks it."""
    if elected.already_master:
        return "nothing to change: this broker is the master already"
    if story is None:
        return ""
    who = f"broker {story.winner} at {elected.master_address}"
    if story.held_ms < 0:
        was = f"broker {story.master_before}" if story.master_before else "none"
        line = f"{who} is master of masterEpoch {story.master_epoch}, before it was {was}"
        if story.offsets_clamped:
            line += (
                f"; {story.offsets_clamped} offsets of groups lay above the end of their queue and"
                " were set to it"
            )
        return line
    line = (
        f"broker {story.master_before} handed over to {who} in masterEpoch {story.master_epoch}:"
        f" sends were held for {story.held_ms} ms"
    )
    if story.handover_ms is None:
        return f"{line}; none came since"
    until = "opening, no send waited" if story.is_idle else "first acknowledgement"
    return f"{line}; {story.handover_ms} ms from then to the new master's {until}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as it reports itself; offsets are None where it does not reply."""

    broker_id: int
    address: str
    in_sync: bool
    log_end: int | None
    confirm_offset: int | None


async def candidates(
    admin: Admin, controller: ControllerAdmin, broker_name: str
) -> list[Candidate]:
    """The replicas of the group, ascending by id. Raises CommandFailed if there is no such one."""
    found = await controller.sync_state_data([broker_name])
    info = found.replicas_info_table.get(broker_name)
    if info is None:
        raise CommandFailed(f"the controllers know no broker group named {broker_name}")
    addresses = [replica.broker_address for replica in info.replicas]
    answers = await ask_all(addresses, admin.brokers.runtime_info)

    def offset(address: str, name: str) -> int | None:
        answer = answers[address]
        value = None if isinstance(answer, BatonError) else answer.get(name)
        return int(value) if value else None

    all_of = [
        Candidate(
            replica.broker_id,
            replica.broker_address,
            replica in info.in_sync_replicas,
            offset(replica.broker_address, "commitLogMaxOffset"),
            offset(replica.broker_address, "confirmOffset"),
        )
        for replica in info.replicas
    ]
    return sorted(all_of, key=lambda each: each.broker_id)


def what_may_be_lost(all_of: list[Candidate], broker_id: int) -> str:
    """One sentence, from the reports of the replicas that reply."""
    named = next((each for each in all_of if each.broker_id == broker_id), None)
    if named is None or named.log_end is None:
        return f"broker {broker_id} does not report its log end"
    silent = [str(each.broker_id) for each in all_of if each.in_sync and each.log_end is None]
    confirmed = max((each.confirm_offset or 0 for each in all_of), default=0)
    text = f"the log of broker {broker_id} ends at {named.log_end}, confirmed was {confirmed}"
    if confirmed > named.log_end:
        text += f": {counted(confirmed - named.log_end, 'byte')} of acknowledged messages lost"
    if silent:
        text += (
            f"; in sync, but silent: broker {', '.join(silent)}. What only they hold, and what they"
            " still acknowledge, is lost, however much that is"
        )
    return text


def confirm_unclean(
    context: CommandContext, broker_name: str, broker_id: int, all_of: list[Candidate], *, yes: bool
) -> None:
    """Shows the candidates on standard error and asks. Raises CommandFailed if the answer is no, or
    if there is no such broker."""
    known = [each.broker_id for each in all_of]
    if broker_id not in known:
        names = ", ".join(map(str, known)) or "none"
        raise CommandFailed(f"{broker_name} has no broker {broker_id}; known are {names}")
    # On standard error: with --json standard output has one document.
    click.echo(f"unclean election of broker {broker_id} in {broker_name}:", err=True)
    for each in all_of:
        place = "in sync" if each.in_sync else "not in sync"
        state = "does not answer"
        if each.log_end is not None:
            state = f"log end {each.log_end}, confirmOffset {each.confirm_offset}"
        click.echo(f"  {each.broker_id} {each.address}  {place}, {state}", err=True)
    lost = f"{what_may_be_lost(all_of, broker_id)}."
    context.confirm(lost, yes=yes, question="Elect it all the same?")
