"""Controllers: who leads, settings, elections, forgetting. Origin: tools.command.controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mqctl.commands.ha import show_replicas
from mqctl.controller_log import log_fields
from mqctl.output import BAD, GOOD, Cell, Progress
from mqctl.params import Ids, command, option
from mqctl.session import CommandFailed, Session, reason

if TYPE_CHECKING:
    from batonmq.admin import Admin
    from batonmq.admin_types import ControllerMetadata, ElectedMaster
    from batonmq.controller_admin import ControllerAdmin
    from batonmq.switch_story import SwitchStory
    from protocol.errors import BatonError

LOOK_S = 0.02
STORY_MS = 500
STORY_EVENTS = 60


@command("getControllerMetaData", controllers=True)
async def get_controller_meta_data(session: Session) -> None:
    """Who leads the controllers, and how far each one's log is.

    Every node is asked. Exit code 1 only if none answers.

    JSON: the header of RocketMQ's reply (group, controllerLeaderId, controllerLeaderAddress,
    isLeader, peers) from the leader, or else from the first that answers; and controllers: what
    each one says, with raftTerm, appliedIndex, committedIndex, journalBytes, journalEntries,
    snapshotBytes, snapshotIndex, digestIndex, stateDigest, problems from a BatonMQ controller.
    """
    async with session.controller() as (_, controller):
        answers = await controller.all_metadata()
    best = best_answer(answers)
    if session.out.as_json and best is not None:
        session.out.document(
            {
                **_header(best),
                "controllers": [_controller(address, a) for address, a in answers.items()],
            }
        )
    elif best is not None:
        session.out.fields(
            [
                ("Group", best.group),
                ("Leader", f"{best.leader_id} at {best.leader_address}"
                 if best.leader_address else "none, an election may be under way"),
                ("Peers", best.peers),
            ]
        )  # fmt: skip
        session.out.line()
        rows = [[address, *_columns(address, answer)] for address, answer in answers.items()]
        headings = ["Controller", "Leader", "Leader Known", "Term", "Applied", "Committed"]
        session.out.table([*headings, "Log KiB", "Snapshot KiB", "Note"], rows)
    if best is None:
        why = "; ".join(str(answer) for answer in answers.values())
        raise CommandFailed(f"no controller answers ({why}): check that they run")


def best_answer(
    answers: dict[str, ControllerMetadata | BatonError],
) -> ControllerMetadata | None:
    """Of the one that leads, else of one that knows a leader, else any; None if none answers."""
    given = [a for a in answers.values() if not isinstance(a, Exception)]
    given.sort(key=lambda a: (not a.is_leader, not a.leader_address))
    return given[0] if given else None


def _header(answer: ControllerMetadata) -> dict[str, Any]:
    return {
        "group": answer.group,
        "controllerLeaderId": answer.leader_id,
        "controllerLeaderAddress": answer.leader_address,
        "isLeader": answer.is_leader,
        "peers": answer.peers,
    }


def _controller(address: str, answer: ControllerMetadata | BatonError) -> dict[str, Any]:
    if isinstance(answer, Exception):
        return {"address": address, "alive": False, "error": reason(address, answer)}
    return {"address": address, "alive": True, **_header(answer), **log_fields(answer)}


def _columns(address: str, answer: ControllerMetadata | BatonError) -> list[object]:
    if isinstance(answer, Exception):
        return ["", "", "", "", "", "", "", Cell.of(f"no answer: {reason(address, answer)}", BAD)]
    leads = Cell.of("yes", GOOD) if answer.is_leader else "no"
    columns: list[object] = [leads, answer.leader_address or Cell.of("none", BAD)]
    log = answer.log
    if log is None:
        return [*columns, "", "", "", "", "", ""]
    note = Cell.of("; ".join(log.problems), BAD) if log.problems else ""
    sizes = [-(-size // 1024) for size in (log.journal_bytes, log.snapshot_bytes)]
    return [*columns, log.term, log.applied_index, log.committed_index, *sizes, note]


@command("getControllerConfig", controllers=True)
async def get_controller_config(session: Session) -> None:
    """Settings of each controller.

    JSON: address to settings.
    """
    async with session.controller() as (_, controller):
        found = await session.ask_each(controller.addresses, controller.config)
    if session.out.as_json:
        session.out.document(found)
        return
    for address, settings in found.items():
        session.out.line(address, style="bold")
        session.out.fields(sorted(settings.items()))
        session.out.line()


@command("updateControllerConfig", controllers=True)
@option("-k", "--key", "key", required=True, help="Setting.")
@option("-v", "--value", "value", required=True, help="Its new value.")
async def update_controller_config(session: Session, key: str, value: str) -> None:
    """Change a setting of the controllers.

    A setting is one controller's own: -a names all that shall have it.

    JSON: the setting, and addresses: where it was changed.
    """
    async with session.controller() as (_, controller):

        async def change(address: str) -> str | None:
            await controller.update_config({key: value}, address)
            return (await controller.config(address)).get(key)

        taken = await session.ask_each(controller.addresses, change)
    done = [address for address, now in taken.items() if now == value]
    for address, now in taken.items():
        if now is None:
            # Controllers pass over keys that they do not have, and say nothing.
            session.complain(f"{address} has no setting {key}: see `mqctl getControllerConfig`")
        elif now != value:
            session.complain(f"{address} keeps {key}={now}")
    if session.out.as_json:
        session.out.document({"key": key, "value": value, "addresses": done})
        return
    for address in done:
        session.out.line(f"{address}: {key}={value}")


@command("electMaster", controllers=True)
@option("-b", "--brokerId", "broker_id", type=click.IntRange(min=1),
        help="The replica to become master. Default: the controller chooses.")  # fmt: skip
@option("-bn", "--brokerName", "broker_name", required=True, metavar="NAME", help="Broker group.")
@option("-c", "--clusterName", "cluster_name", default="", metavar="NAME", help="Its cluster.")
@option("--unclean", "unclean", is_flag=True,
        help="Take the replica of -b though it may lack acknowledged messages.")  # fmt: skip
@option("-y", "--yes", "yes", is_flag=True, help="Do not ask for confirmation.")
async def elect_master(
    session: Session,
    broker_id: int | None,
    broker_name: str,
    cluster_name: str,
    unclean: bool,
    yes: bool,
) -> None:
    """Make a replica the master of its group.

    While the old master lives and the replica is in sync this is a planned switch: the old master
    holds its sends for some milliseconds, until the new one has its last byte, and hands over; no
    acknowledged message and no send is lost. If the replica does not get there in 0.5 s the old
    master goes on, and the reason is shown. Without -b, or with a dead master, it is an election.

    Waits until it serves and the name servers route to it. With --unclean the replica need not be
    in sync: what it lacks is lost to the group (the other replicas keep what they cut aside). It
    is elected only when the old master has been silent for longer than its lease; what may be lost
    is shown first, and confirmed.

    JSON: masterBrokerId, masterAddress, masterEpoch, syncStateSetEpoch, syncStateSet as in
    RocketMQ's reply, brokerName, and alreadyMaster where nothing had to change. Of a planned switch
    also masterBefore, heldMs and gapMs (ms, null where the history does not tell): how long the
    sends were held, and from then to the new master's first acknowledgement, or if no send waited
    for that to its opening.
    """
    if unclean and broker_id is None:
        raise click.UsageError("--unclean needs the replica named: give -b N")
    async with session.controller() as (admin, controller):
        if unclean and broker_id is not None:
            from mqctl.unclean import candidates, check_known, confirm_unclean

            found = await candidates(admin, controller, broker_name)
            check_known(found, broker_name, broker_id)
            confirm_unclean(session, broker_name, broker_id, found, yes=yes)
        with Progress(f"electing a master of {broker_name} ...") as progress:
            elected = await controller.elect_master(
                cluster_name, broker_name, broker_id, unclean=unclean
            )
            if broker_id is not None and elected.master_broker_id != broker_id:
                raise CommandFailed(
                    f"broker {broker_id} was not elected: {elected.master_broker_id} at"
                    f" {elected.master_address} is master of {broker_name}"
                )
            progress.say(f"waiting for {elected.master_address} to serve as master ...")
            lacks = await _served(session, admin, elected)
            story = None if elected.already_master else await _story(session, controller, elected)
        replicas = await controller.sync_state_data([broker_name])
    if session.out.as_json:
        session.out.document(
            {
                "brokerName": elected.broker_name,
                "masterBrokerId": elected.master_broker_id,
                "masterAddress": elected.master_address,
                "masterEpoch": elected.master_epoch,
                "syncStateSetEpoch": elected.sync_state_set_epoch,
                "syncStateSet": list(elected.sync_state_set),
                "alreadyMaster": elected.already_master,
                **(
                    {
                        "masterBefore": story.master_before,
                        "heldMs": story.held_ms,
                        "gapMs": story.gap_ms,
                    }
                    if story is not None
                    else {}
                ),
            }
        )
    else:
        if elected.already_master:
            session.out.line("nothing to change: this master stands")
        elif story is not None:
            session.out.line(_told(story, elected))
        show_replicas(session, replicas)
    if lacks:
        session.complain(f"elected, but after {session.timeout_ms / 1000:g} s {lacks}")


async def _served(session: Session, admin: Admin, elected: ElectedMaster) -> str:
    """Waits until the new master takes writes and is routed to; else says what is lacking."""
    import asyncio

    from batonmq.clock import boot_ms
    from protocol.errors import BatonError

    deadline_ms = boot_ms() + session.timeout_ms
    while True:
        lacks = f"{elected.master_address} does not yet serve as master"
        try:
            status = await admin.broker_ha_status(elected.master_address)
            if status.master:
                lacks = "the name server does not yet name it as master"
                if await _is_routed(session, admin, elected):
                    return ""
        except BatonError as error:
            lacks = str(error)
        if boot_ms() >= deadline_ms:
            return lacks
        await asyncio.sleep(LOOK_S)


async def _story(
    session: Session, controller: ControllerAdmin, elected: ElectedMaster
) -> SwitchStory | None:
    """What the controllers' history tells of it; the first acknowledgement may take a moment."""
    import asyncio

    from batonmq.clock import boot_ms
    from batonmq.switch_story import switch_story
    from protocol.errors import BatonError

    deadline_ms = boot_ms() + min(STORY_MS, session.timeout_ms)
    while True:
        try:
            events = await controller.history(elected.broker_name, limit=STORY_EVENTS)
        except BatonError:
            return None  # RocketMQ's own controllers keep no history
        story = switch_story(events, elected.master_epoch)
        if (story is not None and story.gap_ms is not None) or boot_ms() >= deadline_ms:
            return story
        await asyncio.sleep(LOOK_S)


def _told(story: SwitchStory, elected: ElectedMaster) -> str:
    who = f"broker {story.master_broker_id} at {elected.master_address}"
    if story.held_ms is None:
        was = f"broker {story.master_before}" if story.master_before else "nobody"
        return f"{who} is master of masterEpoch {story.master_epoch}, before it was {was}"
    line = (
        f"broker {story.master_before} handed over to {who} in masterEpoch {story.master_epoch}:"
        f" sends were held for {story.held_ms} ms"
    )
    if story.gap_ms is None:
        return f"{line}; none came since"
    if story.idle:
        return f"{line}; {story.gap_ms} ms from then to the new master's opening, no send waited"
    return f"{line}; {story.gap_ms} ms from then to the new master's first acknowledgement"


async def _is_routed(session: Session, admin: Admin, elected: ElectedMaster) -> bool:
    if not session.target.name_servers:
        return True
    info = await admin.cluster_info()
    data = info.broker_addr_table.get(elected.broker_name)
    return data is not None and data.broker_addrs.get(0) == elected.master_address


@command("cleanBrokerMetadata", controllers=True)
@option("-b", "--brokerControllerIdsToClean", "broker_ids", type=Ids(), default=(),
        metavar="IDS", help="Replicas to forget, 1;2. Default: the whole group.")  # fmt: skip
@option("-bn", "--brokerName", "broker_name", required=True, metavar="NAME", help="Broker group.")
@option("-c", "--clusterName", "cluster_name", default="", metavar="NAME", help="Its cluster.")
@option("-l", "--cleanLivingBroker", "clean_living", is_flag=True, help="Living ones as well.")
async def clean_broker_metadata(
    session: Session,
    broker_ids: tuple[int, ...],
    broker_name: str,
    cluster_name: str,
    clean_living: bool,
) -> None:
    """Make the controllers forget dead replicas.

    JSON: clusterName, brokerName, brokerControllerIdsToClean (empty: the whole group).
    """
    async with session.controller() as (_, controller):
        await controller.clean_broker_data(
            cluster_name, broker_name, broker_ids, clean_living_broker=clean_living
        )
    if session.out.as_json:
        session.out.document(
            {
                "clusterName": cluster_name,
                "brokerName": broker_name,
                "brokerControllerIdsToClean": list(broker_ids),
            }
        )
    else:
        what = f"brokers {', '.join(map(str, broker_ids))} of " if broker_ids else ""
        session.out.line(f"the controllers have forgotten {what}{broker_name}")
