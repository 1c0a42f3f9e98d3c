"""`mqctl up`: adds, removes and restarts processes of a cluster that `batonmq up` runs."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import click

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.launcher import control
from batonmq.mqctl.commands.election import move_away, replica_at
from batonmq.mqctl.commands.roll import restart_one
from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import still_lacking
from batonmq.mqctl.params import COUNT, SECONDS, command, option, yes_option
from batonmq.mqctl.target import data_of
from batonmq.protocol.bodies import BrokerReplicasInfo
from batonmq.protocol.errors import ResponseError
from batonmq.runtime.words import counted


@command("up", controllers=True, writes=True)
@click.argument("action", type=click.Choice(["add", "remove", "restart"]))
@click.argument("what", required=False, metavar="[GROUP|HOST:PORT]")
@option("--count", type=COUNT, default=1, help="With add: so many replicas.")
@option("--newGroup", is_flag=True, help="With add: they are a new group.")
@option("--wholeGroup", is_flag=True, help="With remove: every replica of GROUP.")
@option("--within", "within_s", type=SECONDS, default=60.0, help="How long it waits to be well.")
@yes_option
async def up(
    context: CommandContext,
    action: str,
    what: str | None,
    count: int,
    new_group: bool,
    whole_group: bool,
    within_s: float,
    yes: bool,
) -> None:
    """\b
    mqctl up add broker-a                 a replica more; it waits until that is in the set
    mqctl up add --newGroup --count 3     a group more
    mqctl up remove HOST:PORT             this replica goes; its master moves away before
    mqctl up remove GROUP --wholeGroup    the whole group goes
    mqctl up restart HOST:PORT            a broker, or a name server with its controller

    The next start of that folder has the new size. A folder of a removed replica stays: add uses it
    again. A replica is removed only if others of its set have everything, and as many as
    minInSyncReplicas asks for.

    JSON: action, brokers (name, address, group); of restart as `mqctl roll`."""
    if new_group == bool(what) if action == "add" else what is None or new_group:
        form = {"add": "GROUP, or --newGroup", "remove": "HOST:PORT, or GROUP --wholeGroup"}
        raise click.UsageError(f"up {action} needs {form.get(action, 'HOST:PORT')}")
    context.local_cluster()
    if action == "restart":
        await restart_one(context, what or "", within_s)
        return
    async with context.controller() as (admin, controller):
        work = _Change(context, admin, controller, within_s)
        if action == "add":
            await work.add(what or "", count)
        elif whole_group:
            await work.remove_group(what or "", yes=yes)
        else:
            await work.remove(what or "", yes=yes)
    context.out.wrote_json({"action": action, "brokers": work.done})


async def ask_supervisor(context: CommandContext, **asked: str) -> Mapping[str, str]:
    """What the `batonmq up` of this cluster answers. Raises CommandFailed with what it says."""
    try:
        answer = await control.ask(data_of(context.local_cluster().path) / "run", asked)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"`batonmq up` does not answer: {error}") from error
    if "error" in answer:
        raise CommandFailed(answer["error"])
    return answer


@dataclass(slots=True)
class _Change:
    """One run of the command. `done`: the brokers that were added or removed."""

    context: CommandContext
    admin: Admin
    controller: ControllerAdmin
    within_s: float
    done: list[Mapping[str, str]] = field(default_factory=list)

    async def add(self, group: str, count: int) -> None:
        """Raises CommandFailed."""
        # All are started before it waits: they copy side by side.
        for _ in range(count):
            added = await ask_supervisor(self.context, do="add", group=group)
            group = added["group"]
            self.done.append(added)
            self.context.out.say(f"{added['name']} at {added['address']} is started")
        addresses = {added["address"] for added in self.done}

        async def missing() -> str:
            info = (await self.controller.sync_state_data([group])).replicas_info_table.get(group)
            in_sync = info.in_sync_replicas if info is not None else ()
            late = sorted(addresses - {r.broker_address for r in in_sync if r.alive})
            return f"{', '.join(late)} of {group} not in sync" if late else ""

        await self._until(missing, "it continues; see `mqctl health --watch`")
        self.context.out.say(f"{group}: {', '.join(sorted(addresses))} in the SyncStateSet")

    async def remove(self, address: str, *, yes: bool) -> None:
        """Raises CommandFailed."""
        known = await self._known()
        group, broker_id = replica_at(known, address)
        info = known.replicas_info_table[group]
        left = [r for r in info.in_sync_replicas if r.alive and r.broker_address != address]
        # The master's setting: it is the one whose writes wait for so many members.
        config = await self.admin.brokers.config(info.master_address) if info.master_address else {}
        least = max(1, int(config.get("minInSyncReplicas", "1")))
        if len(left) < least:
            raise CommandFailed(
                f"{group} would keep {counted(len(left), 'replica')} in sync, and needs {least}:"
                f" add one first, mqctl up add {group}"
            )
        self.context.confirm(
            f"broker {broker_id} of {group} at {address} is removed; everything stays on"
            f" {counted(len(left), 'replica')} in sync, and its folder stays",
            yes=yes,
        )
        # Away before it is stopped: a planned switch loses no send, a failover makes clients retry.
        await move_away(self.context, self.admin, self.controller, address)
        await self._remove(address)
        await self._forget(group, [broker_id])
        self.context.out.say(f"{self.done[-1]['name']} at {address} is removed and forgotten")

    async def remove_group(self, group: str, *, yes: bool) -> None:
        """Raises CommandFailed."""
        known = await self._known()
        if group not in known.replicas_info_table:
            raise CommandFailed(f"there is no group {group!r}; there is {', '.join(self._groups)}")
        if len(self._groups) == 1:
            raise CommandFailed(f"{group} is the only group: stop `batonmq up` instead")
        addresses = [at for name, at in self.context.local_cluster().brokers if name == group]
        self.context.confirm(
            f"{group} is removed with its {counted(len(addresses), 'replica')}. Folders stay, but"
            f" no client can read them until `mqctl up add {group}`. First take away the right to"
            " write (mqctl updateTopic -t TOPIC -b HOST:PORT -p 4), and wait until"
            " mqctl consumerProgress shows no diff",
            yes=yes,
        )
        for address in addresses:
            await self._remove(address)
        await self._forget(group, [])
        self.context.out.say(f"{group} is removed: {counted(len(addresses), 'replica')}")

    @property
    def _groups(self) -> list[str]:
        return sorted({name for name, _ in self.context.local_cluster().brokers})

    async def _remove(self, address: str) -> None:
        self.done.append(await ask_supervisor(self.context, do="remove", address=address))

    async def _known(self) -> BrokerReplicasInfo:
        return await self.controller.sync_state_data(self._groups)

    async def _forget(self, group: str, ids: list[int]) -> None:
        """Makes the controllers forget it; they notice the end of a process a moment later."""
        routes = (await self.admin.cluster.info()).broker_addr_table
        cluster = routes[group].cluster if group in routes else ""

        async def refused() -> str:
            try:
                await self.controller.clean_broker_data(cluster, group, ids)
            except ResponseError as error:
                return str(error)
            return ""

        await self._until(refused, "`mqctl health` shows how they forget it")

    async def _until(self, missing: Callable[[], Awaitable[str]], advice: str) -> None:
        """Raises CommandFailed if something is still missing at the end of `--within`."""
        if lacks := await still_lacking(missing, self.within_s, "waiting"):
            raise CommandFailed(f"after {self.within_s:g} s: {lacks}; {advice}")
