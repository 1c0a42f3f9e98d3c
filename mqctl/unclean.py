"""What an unclean election may lose, told before it is asked for (R7)."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from mqctl.session import CommandFailed, Session

if TYPE_CHECKING:
    from batonmq.admin import Admin
    from batonmq.controller_admin import ControllerAdmin


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as it tells of itself; offsets are None where it does not answer."""

    broker_id: int
    address: str
    in_sync: bool
    log_end: int | None
    confirm_offset: int | None


async def candidates(
    admin: Admin, controller: ControllerAdmin, broker_name: str
) -> list[Candidate]:
    """The replicas of the group, ascending by id. Raises CommandFailed if there is no such one."""
    from protocol.errors import BatonError

    found = await controller.sync_state_data([broker_name])
    info = found.replicas_info_table.get(broker_name)
    if info is None:
        raise CommandFailed(f"the controllers know no broker group named {broker_name}")

    async def one(broker_id: int, address: str, in_sync: bool) -> Candidate:
        try:
            facts = await admin.broker_runtime_info(address)
        except BatonError:
            facts = {}
        log_end, confirmed = facts.get("commitLogMaxOffset"), facts.get("confirmOffset")
        return Candidate(
            broker_id,
            address,
            in_sync,
            int(log_end) if log_end else None,
            int(confirmed) if confirmed else None,
        )

    asked = [one(r.broker_id, r.broker_address, True) for r in info.in_sync_replicas]
    asked += [one(r.broker_id, r.broker_address, False) for r in info.not_in_sync_replicas]
    return sorted(await asyncio.gather(*asked), key=lambda each: each.broker_id)


def check_known(all_of: list[Candidate], broker_name: str, broker_id: int) -> None:
    """Raises CommandFailed, naming the known ones, if there is no such broker."""
    known = [each.broker_id for each in all_of]
    if broker_id not in known:
        names = ", ".join(map(str, known)) or "none"
        raise CommandFailed(f"{broker_name} has no broker {broker_id}; known are {names}")


def what_may_be_lost(all_of: list[Candidate], broker_id: int) -> str:
    """In one sentence, by what those tell that answer."""
    named = next((each for each in all_of if each.broker_id == broker_id), None)
    if named is None or named.log_end is None:
        return f"broker {broker_id} does not tell where its log ends"
    silent = [str(each.broker_id) for each in all_of if each.in_sync and each.log_end is None]
    confirmed = max((each.confirm_offset or 0 for each in all_of), default=0)
    text = f"the log of broker {broker_id} ends at {named.log_end}, confirmed was {confirmed}"
    if confirmed > named.log_end:
        text += f": {confirmed - named.log_end} bytes of acknowledged messages are lost"
    if silent:
        text += (
            f"; in sync, but silent: broker {', '.join(silent)}. What only they hold, and what they"
            " still acknowledge, is lost, however much that is"
        )
    return text


def confirm_unclean(
    session: Session, broker_name: str, broker_id: int, all_of: list[Candidate], *, yes: bool
) -> None:
    """Shows the candidates on standard error and asks. Raises CommandFailed if the answer is no."""
    click.echo(f"unclean election of broker {broker_id} in {broker_name}:", err=True)
    for each in all_of:
        place = "in sync" if each.in_sync else "not in sync"
        told = (
            "does not answer"
            if each.log_end is None
            else f"log end {each.log_end}, confirmOffset {each.confirm_offset}"
        )
        click.echo(f"  {each.broker_id} {each.address}  {place}, {told}", err=True)
    click.echo(f"{what_may_be_lost(all_of, broker_id)}.", err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed("not asked for: there is no terminal to confirm it on, give --yes")
    if not click.confirm("Elect it all the same?", default=False, err=True):
        raise CommandFailed("not asked for")
