"""Users and what they may do: made, changed, explained. Origin: tools.command.auth."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batonmq.mqctl.context import CommandContext, CommandFailed
from batonmq.mqctl.output import plain
from batonmq.mqctl.params import command, option

if TYPE_CHECKING:
    from batonmq.auth.policy import AclInfo, User, UserInfo
    from batonmq.client.admin.admin import Admin

PASSWORD_VARIABLE = "BATONMQ_NEW_PASSWORD"


@command("user", writes=True)
@click.argument("action", type=click.Choice(("list", "create", "update", "delete")))
@click.argument("name", required=False)
@option("-t", "--userType", type=click.Choice(("Normal", "Super")), help="What it may do.")
@option("-s", "--userStatus", type=click.Choice(("enable", "disable")), help="With update.")
@option("--passwordFile", metavar="FILE", help="A file with the password alone; - is stdin.")
async def user(
    context: CommandContext,
    action: str,
    name: str | None,
    user_type: str | None,
    user_status: str | None,
    password_file: str | None,
) -> None:
    """List users; create, update or delete NAME.

    In every broker group. A password comes from --passwordFile, else from BATONMQ_NEW_PASSWORD,
    never from the command line, which others can see.

    JSON: the users with username, userType, userStatus.
    """
    from batonmq.auth.policy import UserInfo

    if (name is None) != (action == "list"):
        raise click.UsageError(f"{action}: give NAME" if name is None else "list takes no NAME")
    async with context.admin() as admin:
        if action == "list":
            _show_users(context, await admin.users.users(await _one_master(admin)))
            return
        if action == "delete":
            await admin.users.delete(name or "")
        else:
            password = _password(password_file)
            if action == "create" and not password:
                raise click.UsageError(f"give --passwordFile, or set {PASSWORD_VARIABLE}")
            info = UserInfo(
                username=name, password=password, user_type=user_type, user_status=user_status
            )
            await (admin.users.create(info) if action == "create" else admin.users.update(info))
    done = {"create": "created", "update": "updated", "delete": "deleted"}[action]
    if context.out.as_json:
        context.out.document({"username": name, "done": done})
    else:
        context.out.line(f"user {name} {done}")


def _password(file: str | None) -> str | None:
    try:
        if file == "-":
            return sys.stdin.readline().rstrip("\n")
        if file is not None:
            return Path(file).read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError):
        raise CommandFailed(f"{file}: cannot be read") from None
    return os.environ.get(PASSWORD_VARIABLE)


def _show_users(context: CommandContext, users: list[UserInfo]) -> None:
    if context.out.as_json:
        context.out.document([plain(each) for each in users])
        return
    rows = [[each.username, each.user_type, each.user_status] for each in users]
    context.out.table(["User", "Type", "Status"], rows)


async def _one_master(admin: Admin) -> str:
    return next(iter((await admin.cluster.masters()).values()))


@command("acl", writes=True)
@click.argument("action", type=click.Choice(("list", "create", "update", "delete", "explain")))
@click.argument("names", nargs=-1, metavar="[USER] [ACTION RESOURCE]")
@option("-r", "--resource", help="Topic:NAME, Group:PREFIX*, Cluster:*, or *.")
@option("-a", "--actions", help="All, or of Pub,Sub,Create,Update,Delete,Get,List.")
@option("-d", "--decision", type=click.Choice(("Allow", "Deny")), default="Allow")
@option("-i", "--sourceIp", help="Addresses or CIDRs, separated by commas; by default all.")
@option("--policyType", type=click.Choice(("Custom", "Default")), help="By default Custom.")
async def acl(
    context: CommandContext,
    action: str,
    names: tuple[str, ...],
    resource: str | None,
    actions: str | None,
    decision: str,
    source_ip: str | None,
    policy_type: str | None,
) -> None:
    """What users may do: list, change, explain.

    `create` and `update` do the same: an entry with an equal resource is replaced. `delete` without
    -r deletes all entries. `explain USER ACTION RESOURCE` says which entry decides, from the
    address -i if it is given: `mqctl acl explain shop Pub Topic:Orders`.

    JSON: of list RocketMQ's AclInfo; of explain allowed and reason.
    """
    from batonmq.auth.policy import PolicyEntry

    if action == "explain":
        await _explain(context, names, source_ip)
        return
    if len(names) != (action != "list"):
        raise click.UsageError("list takes no USER" if action == "list" else f"{action}: give USER")
    async with context.admin() as admin:
        if action == "list":
            _show_acls(context, await admin.users.acls(await _one_master(admin)))
            return
        (name,) = names
        if action == "delete":
            await admin.users.delete_entries(name, policy_type, resource)
        else:
            if not resource or not actions:
                raise click.UsageError(f"{action}: give -r and -a")
            entry = PolicyEntry(
                resource=resource,
                actions=_parts(actions),
                source_ips=_parts(source_ip or ""),
                decision=decision,
            )
            await admin.users.put_entry(name, policy_type or "Custom", entry)
    done = {"create": "created", "update": "updated", "delete": "deleted"}[action]
    if context.out.as_json:
        context.out.document({"subject": f"User:{name}", "done": done})
    else:
        context.out.line(f"entry of {name} {done}")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _show_acls(context: CommandContext, acls: list[AclInfo]) -> None:
    if context.out.as_json:
        context.out.document([plain(each) for each in acls])
        return
    rows = [
        [
            each.subject,
            policy.policy_type,
            entry.resource,
            ",".join(entry.actions),
            ",".join(entry.source_ips),
            entry.decision,
        ]
        for each in acls
        for policy in each.policies
        for entry in policy.entries
    ]
    context.out.table(["Subject", "Policy", "Resource", "Actions", "Source", "Decision"], rows)


async def _explain(context: CommandContext, names: tuple[str, ...], source: str | None) -> None:
    from batonmq.auth.policy import ACTIONS, KnownUser, Need, pattern_of
    from batonmq.auth.rights import topic_needs
    from batonmq.protocol.errors import BrokerRefusal
    from batonmq.protocol.topic_name import is_retry_or_dlq

    if len(names) != 3 or names[1].capitalize() not in ACTIONS[1:]:
        raise click.UsageError("explain USER ACTION RESOURCE, as: explain shop Pub Topic:Orders")
    name, action, resource = names[0], names[1].capitalize(), names[2]
    try:
        kind, asked, is_prefix = pattern_of(resource)
    except BrokerRefusal as refusal:
        raise click.UsageError(refusal.remark) from None
    if not kind or is_prefix:
        raise click.UsageError("RESOURCE is one thing, as Topic:Orders: a request names one")
    needs = [Need(((kind, asked),), (action,))]
    if kind == "Topic" and is_retry_or_dlq(asked):
        needs = list(topic_needs(asked, "", action))
    async with context.admin() as admin:
        address = await _one_master(admin)
        found = _user(name, await admin.users.users(address), await admin.users.acls(address))
    decision = KnownUser(found).evaluate(needs[0], source or "", "")
    if context.out.as_json:
        context.out.document({"allowed": decision.allowed, "reason": decision.reason})
    else:
        word = "allowed" if decision.allowed else "denied"
        context.out.line(f"{needs[0]}: {word}. {decision.reason}")


def _user(name: str, users: list[UserInfo], acls: list[AclInfo]) -> User:
    from batonmq.auth.policy import User, merged

    info = next((each for each in users if each.username == name), None)
    if info is None:
        raise CommandFailed(f"there is no user {name}")
    user = User(
        username=name,
        password="not known here",
        user_type=info.user_type or "Normal",
        user_status=info.user_status or "enable",
    )
    for each in acls:
        if each.subject == f"User:{name}":
            user = merged(user, each)
    return user


@command("whoami")
async def whoami(context: CommandContext) -> None:
    """The user that signs here, as name servers see it.

    Any user may ask them.

    JSON: name server to username, userType, userStatus, peer.
    """
    async with context.admin() as admin:
        answers = await context.ask_each(context.name_servers, admin.users.who_am_i)
    seen = {at: {**plain(user), "peer": peer} for at, (user, peer) in answers.items()}
    if context.out.as_json:
        context.out.document(seen)
        return
    rows = [
        [name, one.get("username", ""), one.get("userType", ""), one["peer"]]
        for name, one in seen.items()
    ]
    context.out.table(["Name server", "User", "Type", "From"], rows)
