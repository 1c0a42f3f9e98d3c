"""Controllers: who leads, settings, clean-up. Origin: tools.command.controller."""

from typing import Any

import click

from batonmq.client.admin.types import ControllerMetadata
from batonmq.mqctl.context import CommandContext, CommandFailed, answered, reason
from batonmq.mqctl.health import controller_document
from batonmq.mqctl.output import BAD, GOOD, Cell
from batonmq.mqctl.params import IDS, command, option, yes_option
from batonmq.protocol.errors import BatonError
from batonmq.runtime.words import named


@command("getControllerMetaData", controllers=True)
async def get_controller_meta_data(context: CommandContext) -> None:
    """Every node is asked. Exit code 1 only if none answers.

    JSON: the header of RocketMQ's reply (group, controllerLeaderId, controllerLeaderAddress,
    isLeader, peers) from the leader, or else from the first that answers; and controllers: what
    each one says, with raftTerm, appliedIndex, committedIndex, journalBytes, journalEntries,
    snapshotBytes, snapshotIndex, digestIndex, stateDigest, rules,
    problems from a BatonMQ controller."""
    async with context.controller() as (_, controller):
        answers = await controller.all_metadata()
    # Of the one that leads, else of one that knows a leader, else any.
    known = answered(answers).values()
    best = min(known, key=lambda a: (not a.is_leader, not a.leader_address), default=None)
    if best is None:
        why = "; ".join(str(answer) for answer in answers.values())
        raise CommandFailed(f"no controller answers ({why}): check that they run")
    nodes = [_controller(address, answer) for address, answer in answers.items()]
    if context.out.wrote_json(_header(best) | {"controllers": nodes}):
        return
    leader = "none, an election may be under way"
    if best.leader_address:
        leader = f"{best.leader_id} at {best.leader_address}"
    context.out.fields([("Group", best.group), ("Leader", leader), ("Peers", best.peers)])
    context.out.line()
    rows = [[address, *_columns(address, answer)] for address, answer in answers.items()]
    headings = ["Controller", "Leader", "Leader Known", "Term", "Applied", "Committed"]
    context.out.table([*headings, "Log KiB", "Snapshot KiB", "Note"], rows)


def _header(answer: ControllerMetadata) -> dict[str, Any]:
    return {
        "group": answer.group,
        "controllerLeaderId": answer.leader_id,
        "controllerLeaderAddress": answer.leader_address,
        "isLeader": answer.is_leader,
        "peers": answer.peers,
    }


def _controller(address: str, answer: ControllerMetadata | BatonError) -> dict[str, Any]:
    header = {} if isinstance(answer, Exception) else _header(answer)
    return header | controller_document(address, answer)


def _columns(address: str, answer: ControllerMetadata | BatonError) -> list[object]:
    if isinstance(answer, Exception):
        return ["", "", "", "", "", "", "", Cell.of(f"no answer: {reason(address, answer)}", BAD)]
    leads = Cell.of("yes", GOOD) if answer.is_leader else "no"
    columns: list[object] = [leads, answer.leader_address or Cell.of("none", BAD)]
    log = answer.log
    if log is None:
        return [*columns, "", "", "", "", "", ""]
    note = Cell.of("; ".join(log.problems), BAD) if log.problems else ""
    # Rounded up: 0 would look like a lost file.
    sizes = [-(-size // 1024) for size in (log.journal_bytes, log.snapshot_bytes)]
    return [*columns, log.term, log.applied_index, log.committed_index, *sizes, note]


@command("getControllerConfig", controllers=True)
async def get_controller_config(context: CommandContext) -> None:
    """JSON: address to settings."""
    async with context.controller() as (_, controller):
        found = await context.ask_each(controller.addresses, controller.config)
    context.out.settings(found)


@command("updateControllerConfig", controllers=True, writes=True)
@option("-k", "--key", required=True, help="Setting.")
@option("-v", "--value", required=True, help="Its new value.")
async def update_controller_config(context: CommandContext, key: str, value: str) -> None:
    """A setting is one controller's own: -a names all that shall have it.

    JSON: the setting, and addresses: where it was changed."""
    async with context.controller() as (_, controller):

        async def change(address: str) -> str | None:
            await controller.update_config({key: value}, address)
            # Its answer is the same for a key that it does not know: what it has now says more.
            return (await controller.config(address)).get(key)

        taken = await context.ask_each(controller.addresses, change)
    done = [address for address, now in taken.items() if now == value]
    for address, now in taken.items():
        if now is None:
            # Controllers pass over keys that they do not have, and say nothing.
            context.complain(f"{address} has no setting {key}: see `mqctl getControllerConfig`")
        elif now != value:
            context.complain(f"{address} keeps {key}={now}")
    if context.out.wrote_json({"key": key, "value": value, "addresses": done}):
        return
    for address in done:
        context.out.line(f"{address}: {key}={value}")


@command("cleanBrokerMetadata", controllers=True, writes=True)
@option(
    "-b",
    "--brokerControllerIdsToClean",
    "broker_ids",
    type=IDS,
    default=(),
    metavar="IDS",
    help="Replicas to forget, 1;2.",
)
@option("--wholeGroup", is_flag=True, help="Every replica of the group, and the group itself.")
@option("-bn", "--brokerName", required=True, help="Broker group.")
@option("-c", "--clusterName", default="", help="Its cluster.")
@option("-l", "--cleanLivingBroker", "clean_living", is_flag=True, help="Living ones as well.")
@yes_option
async def clean_broker_metadata(
    context: CommandContext,
    broker_ids: tuple[int, ...],
    broker_name: str,
    cluster_name: str,
    whole_group: bool,
    clean_living: bool,
    yes: bool,
) -> None:
    """For replicas that are gone for good. The data folder stays: started from it, a replica joins
    again.

    JSON: clusterName, brokerName, brokerControllerIdsToClean (empty: the whole group)."""
    # No ids mean the whole group to a controller: an empty variable in a script must not do that.
    if whole_group == bool(broker_ids):
        raise click.UsageError("which replicas? give -b IDS, or --wholeGroup for all of the group")
    which = named("broker", broker_ids) if broker_ids else "every replica"
    context.confirm(f"the controllers forget {which} of {broker_name}", yes=yes)
    async with context.controller() as (_, controller):
        await controller.clean_broker_data(
            cluster_name, broker_name, broker_ids, clean_living_broker=clean_living
        )
    what = f"{named('broker', broker_ids)} of " if broker_ids else ""
    document = {
        "clusterName": cluster_name,
        "brokerName": broker_name,
        "brokerControllerIdsToClean": list(broker_ids),
    }
    context.out.result(document, f"the controllers have forgotten {what}{broker_name}")
