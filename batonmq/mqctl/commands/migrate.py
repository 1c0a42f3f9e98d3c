"""A group of Java brokers becomes one of ours, replica by replica under load, and back."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.mqctl.commands.election import elect
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.migration import (
    BATONMQ,
    JAVA,
    KIND_NAMES,
    KINDS,
    Member,
    MigratedGroup,
    lacking_offsets,
    lacking_tables,
    lasting_problems,
    next_steps,
    passing_problems,
    problems,
    problems_of_leave,
    problems_of_switch,
    too_few_without,
)
from batonmq.mqctl.output import BAD, GOOD, still_lacking, yes_or_no
from batonmq.mqctl.params import COUNT, SECONDS, command, option
from batonmq.protocol.bodies import PROBLEMS_KEY, ReplicaIdentity, ReplicasInfo
from batonmq.protocol.errors import BatonError
from batonmq.protocol.topic_name import is_system_topic

STEPS = ("plan", "status", "join", "switch", "leave")


@command("migrate", controllers=True, writes=True)
@click.argument("step", type=click.Choice(STEPS))
@option("-bn", "--brokerName", required=True, help="Broker group.")
@option("-b", "--broker", metavar="ID|HOST:PORT", help="join, switch, leave: the replica.")
@option("--to", type=click.Choice(KINDS), default=BATONMQ, help="What the group shall become.")
@option("--replicas", type=COUNT, help="How many replicas it shall have then.")
@option(
    "--wait", "wait_s", type=SECONDS, default=120.0, help="join, switch, leave: give up after that."
)
async def migrate(
    context: CommandContext,
    step: str,
    broker_name: str,
    broker: str | None,
    to: str,
    replicas: int | None,
    wait_s: float,
) -> None:
    """The group stays up and keeps at least two replicas in sync. Brokers are started and stopped
    by you, on their machines; each step checks first, waits, and changes nothing if it may not. The
    way back of each step is the same step for the other broker.

    \b
    plan    what is in the way, and the steps that are left
    status  who is in the group, and the steps that are left
    join    wait until a broker that you started is in sync and has the master's tables
    switch  make a replica the master, by a planned switch
    leave   wait until you have stopped a replica, then forget it

    Exit code 1: something is in the way, or it was not done in time.

    JSON: plan, status and leave: group, members (brokerId, address, kind, version, master, inSync,
    alive), problems, steps. join: brokerId, address. switch: as electMaster."""
    async with context.controller() as (admin, controller):
        run = Migration(context, admin, controller, broker_name, wait_s)
        if step in ("plan", "status"):
            await run.show(to, replicas, checked=step == "plan")
        elif broker is None:
            raise click.UsageError(f"{step} needs the replica: give -b ID or -b HOST:PORT")
        elif step == "join":
            await run.join(broker)
        elif step == "switch":
            await run.switch(broker)
        else:
            await run.leave(broker, to, replicas)


@dataclass(slots=True)
class Migration:
    """The steps on one group. Each raises CommandFailed with all that is in its way."""

    context: CommandContext
    admin: Admin
    controller: ControllerAdmin
    group: str
    wait_s: float
    begun: dict[str, dict[int, int]] | None = None

    async def show(self, to: str, replicas: int | None, *, checked: bool) -> None:
        """The group and what is left; `checked`: problems end with exit code 1."""
        group = await self._group()
        found, steps = problems(group), next_steps(group, to, replicas)
        members = [
            {
                "brokerId": m.broker_id,
                "address": m.address,
                "kind": m.kind or None,
                "version": m.version or None,
                "master": m.is_master,
                "inSync": m.in_sync,
                "alive": m.alive,
            }
            for m in group.members
        ]
        document = {"group": group.name, "members": members, "problems": found, "steps": steps}
        if not self.context.out.wrote_json(document):
            _show(self.context, group, found, steps, KIND_NAMES[to])
        self.context.failed = checked and bool(found)

    async def join(self, broker: str) -> None:
        """Waits until that replica could take over: in the set, with the master's tables."""

        async def lacks() -> str:
            group = await self._group()
            # What somebody has to end does not end by waiting.
            _refuse(lasting_problems(group))
            member = group.member(broker)
            if passing := passing_problems(group):
                return passing[0]
            if member is None:
                return f"the controllers do not know broker {broker} yet"
            if not member.alive or not member.kind:
                return f"{member.name} does not answer"
            master = group.master
            assert master is not None, "see `problems`"
            await self._note_offsets(master)
            if not member.in_sync:
                return f"{member.name} is not in the SyncStateSet yet"
            if member.is_master:
                return ""
            return await self._lacks_tables(master, member)

        await self._wait(f"broker {broker} to be in sync", lacks)
        member = self._known(await self._group(), broker)
        self.context.out.result(
            {"brokerId": member.broker_id, "address": member.address},
            f"{member.name} is in sync and has the tables of its master",
        )

    async def switch(self, broker: str) -> None:
        """A planned switch to a replica that has all that its master has."""
        group = await self._group()
        member = self._known(group, broker)
        if not member.is_master:
            _refuse(problems_of_switch(group, member))
            await self._await_tables(member)
            # The set may have changed while it waited.
            group = await self._group()
            _refuse(problems_of_switch(group, self._known(group, broker)))
        before = group.master
        await elect(self.context, self.admin, self.controller, ("", self.group, member.broker_id))
        if before and before.broker_id != member.broker_id:
            self.context.out.say(
                f"the way back: mqctl migrate switch -bn {self.group} -b {before.broker_id}"
            )

    async def leave(self, broker: str, to: str, replicas: int | None) -> None:
        """Tells whom to stop, waits for that, and makes the controllers forget it."""
        group = await self._group()
        member = self._known(group, broker)
        _refuse(problems_of_leave(group, member))

        async def too_few() -> str:
            group = await self._group()
            _refuse(problems_of_leave(group, self._known(group, str(member.broker_id))))
            return too_few_without(group, member)

        await self._wait("another replica to be in sync", too_few)
        if member.alive or member.kind:
            click.echo(f"stop {member.name} now", err=True)

        async def lacks() -> str:
            now = (await self._group()).member(str(member.broker_id))
            if now is not None and now.is_master:
                raise CommandFailed(f"{member.name} became the master meanwhile")
            # One that answers runs, whatever the controllers have noticed by now.
            if now is not None and now.kind:
                return f"{member.name} still answers"
            if now is None or not (now.alive or now.in_sync):
                return ""
            return f"{member.name} still runs" if now.alive else f"{member.name} is in the set yet"

        await self._wait(f"{member.name} to end", lacks)
        # Only now: the controllers keep a living replica.
        await self.controller.clean_broker_data("", self.group, (member.broker_id,))
        self.context.out.say(
            f"{member.name} has left. Before it is started again, delete brokerIdentity in its "
            "store: its id is forgotten"
        )
        await self.show(to, replicas, checked=False)

    # What is asked.

    async def _await_tables(self, member: Member) -> None:
        """What `join` waits for last; a member may lag behind again since then."""

        async def lacks() -> str:
            master = (await self._group()).master
            if master is None:
                return "there is no master"
            await self._note_offsets(master)
            return await self._lacks_tables(master, member)

        await self._wait(f"{member.name} to have the tables", lacks)

    def _known(self, group: MigratedGroup, broker: str) -> Member:
        member = group.member(broker)
        if member is None:
            known = ", ".join(f"{m.broker_id} ({m.address})" for m in group.members) or "none"
            raise CommandFailed(f"{self.group} has no broker {broker}; known are {known}")
        return member

    async def _wait(self, what: str, lacks: Callable[[], Awaitable[str]]) -> None:
        """Until nothing lacks; raises CommandFailed with what still does after the time."""
        if found := await still_lacking(lacks, self.wait_s, f"waiting for {what}"):
            raise CommandFailed(f"waited {self.wait_s:g} s for {what}: {found}")

    async def _group(self) -> MigratedGroup:
        found = await self.controller.sync_state_data([self.group])
        info = found.replicas_info_table.get(self.group)
        if info is None:
            raise CommandFailed(f"the controllers know no broker group named {self.group}")
        answers = await self.controller.all_metadata()
        # RocketMQ's controllers report no Raft log.
        own = any(not isinstance(a, BatonError) and a.log is not None for a in answers.values())
        asked = [self._member(info, r, r in info.in_sync_replicas) for r in info.replicas]
        members = sorted(await asyncio.gather(*asked), key=lambda each: each.broker_id)
        return MigratedGroup(self.group, members, own)

    async def _member(self, info: ReplicasInfo, replica: ReplicaIdentity, in_sync: bool) -> Member:
        member = Member(
            replica.broker_id,
            replica.broker_address,
            in_sync,
            replica.alive,
            replica.broker_id == info.master_broker_id and bool(info.master_address),
        )
        try:
            facts = await self.admin.brokers.runtime_info(member.address)
            settings = await self.admin.brokers.config(member.address)
        except BatonError:
            # `kind` stays empty: it does not answer.
            return member
        return replace(
            member,
            # Only our brokers report their problems.
            kind=BATONMQ if PROBLEMS_KEY in facts else JAVA,
            version=facts.get("brokerVersionDesc", ""),
            settings=settings,
        )

    async def _note_offsets(self, master: Member) -> None:
        """How far the groups were when the step began; a member has to know as much."""
        if self.begun is None:
            self.begun = await self.admin.consumer_groups.offsets(master.address)

    async def _lacks_tables(self, master: Member, member: Member) -> str:
        """What a member does not have yet of the tables that its master has, in words."""
        wanted, member_has = master.address, member.address
        topics = await self._topics(wanted), await self._topics(member_has)
        groups = await self._groups(wanted), await self._groups(member_has)
        now = await self.admin.consumer_groups.offsets(wanted)
        there = await self.admin.consumer_groups.offsets(member_has)
        lacks = (
            lacking_tables("topic", *topics)
            or lacking_tables("group", *groups)
            or lacking_offsets(self.begun or {}, now, there)
        )
        return f"{member.name} does not have {lacks} yet" if lacks else ""

    async def _topics(self, address: str) -> Mapping[str, object]:
        """What a client notices of each topic; those of the brokers' own are left out."""
        table = (await self.admin.topics.configs(address)).topic_config_table
        return {
            name: (topic.read_queue_nums, topic.write_queue_nums, topic.perm)
            for name, topic in table.items()
            if not is_system_topic(name)
        }

    async def _groups(self, address: str) -> Mapping[str, object]:
        table = (await self.admin.consumer_groups.settings(address)).subscription_group_table
        return {name: (g.consume_enable, g.retry_max_times) for name, g in table.items()}


def _refuse(found: list[str]) -> None:
    if found:
        raise CommandFailed("nothing was done: " + "; ".join(found))


def _show(
    context: CommandContext, group: MigratedGroup, found: list[str], steps: list[str], to: str
) -> None:
    rows = [
        [
            m.broker_id,
            m.address,
            KIND_NAMES[m.kind],
            "MASTER" if m.is_master else "SLAVE",
            yes_or_no(m.in_sync),
            yes_or_no(m.alive),
        ]
        for m in group.members
    ]
    out = context.out
    out.table(["ID", "Address", "Kind", "Role", "In Sync", "Alive"], rows, title=group.name)
    if found:
        out.line()
        out.line("In the way:", style=BAD)
        for each in found:
            out.line(f"  - {each}")
    out.line()
    if not steps:
        out.line(f"Nothing is left to do: all replicas are {to} brokers.", style=GOOD)
        return
    out.line(f"Left until all replicas are {to} brokers:")
    for number, step in enumerate(steps, 1):
        out.line(f"  {number}. {step}")
