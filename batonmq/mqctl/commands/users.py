"""Users and what they may do: made, changed, explained. Origin: tools.command.auth."""

import os
import secrets
import sys
from pathlib import Path

import click

from batonmq.auth.policy import (
    ACTIONS,
    ALLOW,
    CUSTOM,
    DEFAULT,
    DENY,
    DISABLED,
    ENABLED,
    NORMAL,
    SUPER,
    AclInfo,
    Decision,
    KnownUser,
    Need,
    PolicyEntry,
    User,
    UserInfo,
    merged,
    pattern_of,
    subject_of,
)
from batonmq.auth.rights import publish_needs, topic_needs
from batonmq.client.admin.admin import Admin
from batonmq.client.errors import ClientError, UnsupportedByBrokerError
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.output import plain, when
from batonmq.mqctl.params import DURATION, command, option
from batonmq.mqctl.routes import check_masters, every_broker, masters_to_read
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import is_retry_or_dlq
from batonmq.runtime.clock import wall_ms

PASSWORD_VARIABLE = "BATONMQ_NEW_PASSWORD"
OLD_USED_MS = 60_000
"""Twice the heartbeat of stock clients."""


@command("user", writes=True)
@click.argument(
    "action", type=click.Choice(("list", "show", "create", "update", "delete", "rotate"))
)
@click.argument("name", required=False)
@option("-t", "--userType", type=click.Choice((NORMAL, SUPER)), help="What it may do.")
@option("-s", "--userStatus", type=click.Choice((ENABLED, DISABLED)), help="With update.")
@option("--passwordFile", metavar="FILE", help="A file with the password alone; - is stdin.")
@option("--oldFor", type=DURATION, metavar="24h", help="rotate: how long the old secret counts.")
@option("--finish", is_flag=True, help="rotate: only the new secret is left.")
@option("--cancel", is_flag=True, help="rotate: only the old secret is left.")
@option("--force", is_flag=True, help="With --finish: also if the old secret is in use.")
async def user(
    context: CommandContext,
    action: str,
    name: str | None,
    user_type: str | None,
    user_status: str | None,
    password_file: str | None,
    old_for: int | None,
    finish: bool,
    cancel: bool,
    force: bool,
) -> None:
    """A password comes from --passwordFile, else from BATONMQ_NEW_PASSWORD, never from the command
    line, which others can see.

    `rotate` gives the user a second secret, and prints it if none was given. The old one counts as
    well, for --oldFor or until `rotate NAME --finish`, which refuses while a broker still sees the
    old one; `show` says who uses it. `update` with a password replaces all secrets at once.

    JSON: the users with username, userType, userStatus; of show also rotation and policies; of
    rotate secretKey, if it was made."""
    if (name is None) != (action == "list"):
        raise click.UsageError(f"{action}: give NAME" if name is None else "list takes no NAME")
    if action != "rotate" and (old_for is not None or finish or cancel or force):
        raise click.UsageError("--oldFor, --finish, --cancel and --force belong to rotate")
    name = name or ""
    async with context.admin() as admin:
        if action not in ("list", "show"):
            await check_masters(context, admin)
        match action:
            case "list":
                users = await admin.users.users(await _one_master(context, admin))
                columns = {"username": "User", "userType": "Type", "userStatus": "Status"}
                context.out.records([plain(each) for each in users], columns)
            case "show":
                await _show_user(context, admin, name)
            case "delete":
                await admin.users.delete(name)
                _done(context, name, "deleted")
            case "rotate" if finish or cancel:
                if (finish and cancel) or old_for is not None or password_file is not None:
                    raise click.UsageError("--finish and --cancel go alone")
                await _end_rotation(context, admin, name, finish=finish, force=force)
            case "rotate":
                await _rotate(context, admin, name, _password(password_file), old_for)
            case _:
                info = UserInfo(username=name, user_type=user_type, user_status=user_status)
                info.password = _password(password_file)
                await _put(context, admin, action, info)


async def _put(context: CommandContext, admin: Admin, action: str, info: UserInfo) -> None:
    if action == "create" and not info.password:
        raise click.UsageError(f"give --passwordFile, or set {PASSWORD_VARIABLE}")
    await (admin.users.create(info) if action == "create" else admin.users.update(info))
    _done(context, info.username or "", f"{action}d")


def _done(context: CommandContext, name: str, done: str, secret: str | None = None) -> None:
    made = {} if secret is None else {"secretKey": secret}
    if context.out.wrote_json({"username": name, "done": done} | made):
        return
    context.out.line(f"user {name} {done}")
    if secret is not None:
        context.out.line(f"its new secret, shown only now: {secret}")


async def _rotate(
    context: CommandContext, admin: Admin, name: str, given: str | None, old_for: int | None
) -> None:
    secret = given or secrets.token_urlsafe(24)
    await admin.users.rotate(name, secret, 0 if old_for is None else wall_ms() + old_for)
    _done(context, name, "rotated: both secrets count", None if given else secret)


async def _end_rotation(
    context: CommandContext, admin: Admin, name: str, *, finish: bool, force: bool
) -> None:
    """A client that runs has signed within OLD_USED_MS."""
    if finish and not force:
        seen = await _seen(context, admin, name)
        # A silent broker may have seen the old secret a moment ago.
        if context.failed:
            raise CommandFailed("not finished: ask again when all brokers answer, or give --force")
        # One broker that still sees the old secret is enough to wait.
        at, info = max(seen.items(), key=_old_used)
        if info.rotation is not None and info.rotation.old_used > wall_ms() - OLD_USED_MS:
            raise CommandFailed(
                f"not finished: {info.rotation.old_used_by} signed with the old secret at {at} on"
                f" {when(info.rotation.old_used)}. Give it the new one, or give --force"
            )
    await admin.users.end_rotation(name, keep_new=finish)
    _done(context, name, "has its new secret only" if finish else "has its old secret only")


def _old_used(seen: tuple[str, UserInfo]) -> int:
    return seen[1].rotation.old_used if seen[1].rotation is not None else 0


async def _seen(context: CommandContext, admin: Admin, name: str) -> dict[str, UserInfo]:
    """The user as each broker knows it. Raises CommandFailed if none does."""
    addresses = await every_broker(context, admin)
    # Slaves, too: each broker notes only the signatures that it sees.
    answers = await context.ask_each(addresses, lambda at: admin.users.user(at, name))
    seen = {at: info for at, info in answers.items() if info is not None}
    if not seen:
        raise CommandFailed(f"there is no user {name}")
    return seen


async def _show_user(context: CommandContext, admin: Admin, name: str) -> None:
    seen = await _seen(context, admin, name)
    at, info = max(seen.items(), key=_old_used)
    acls = await admin.users.acls(await _one_master(context, admin))
    mine = [each for each in acls if each.subject == subject_of(name)]
    if context.out.wrote_json(plain(info) | {"policies": [plain(each) for each in mine]}):
        return
    context.out.line(f"user {name}: {info.user_type}, {info.user_status}")
    if (two := info.rotation) is None:
        context.out.line("one secret")
    else:
        end = f"until {when(two.old_until)}" if two.old_until else "until rotate --finish"
        used = f"{when(two.old_used)} by {two.old_used_by} at {at}" if two.old_used else "never"
        context.out.line(f"two secrets: the old one counts {end}; it was last used: {used}")
    _show_acls(context, mine)


def _password(file: str | None) -> str | None:
    if file is None:
        return os.environ.get(PASSWORD_VARIABLE)
    try:
        with disk_failures(file):
            text = sys.stdin.readline() if file == "-" else Path(file).read_text()
    except UnicodeDecodeError:
        raise CommandFailed(f"{file}: is no text") from None
    if not (password := text.rstrip("\n")):
        # `rotate` would otherwise make a secret of its own, and print it.
        raise CommandFailed(f"{file}: is empty, and the password is expected in it")
    return password


async def _one_master(context: CommandContext, admin: Admin) -> str:
    """All have the same users; a group that has lost its master must not hide them."""
    return next(iter((await masters_to_read(context, admin)).values()))


@command("acl", writes=True)
@click.argument(
    "action", type=click.Choice(("list", "create", "update", "delete", "explain", "import"))
)
@click.argument("names", nargs=-1, metavar="[USER] [ACTION RESOURCE] [FILE...]")
@option("-r", "--resource", help="Topic:NAME, Group:PREFIX*, Cluster:*, or *.")
@option("-a", "--actions", help="All, or of Pub,Sub,Create,Update,Delete,Get,List.")
@option("-d", "--decision", type=click.Choice((ALLOW, DENY)), default=ALLOW)
@option("-i", "--sourceIp", help="Addresses or CIDRs, separated by commas; by default all.")
@option("--policyType", type=click.Choice((CUSTOM, DEFAULT)), help="By default Custom.")
@option("--dryRun", is_flag=True, help="import: only show what it would do.")
@option("--yes", is_flag=True, help="import: do not ask.")
async def acl(
    context: CommandContext,
    action: str,
    names: tuple[str, ...],
    resource: str | None,
    actions: str | None,
    decision: str,
    source_ip: str | None,
    policy_type: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """`create` and `update` do the same: an entry with an equal resource is replaced. `delete`
    without -r deletes all entries. `explain USER ACTION RESOURCE` says which entry decides, from
    the address -i if it is given: `mqctl acl explain shop Pub Topic:Orders`.

    `import FILE...` makes users and entries of RocketMQ's ACL 1.0 (plain_acl.yml), and names what
    2.0 cannot say. Again, it changes nothing.

    JSON: of list RocketMQ's AclInfo; of explain allowed and reason; of import users and lost."""
    if action == "explain":
        await _explain(context, names, source_ip)
        return
    if action == "import":
        # It reads YAML, by a package of the extra `server`.
        from batonmq.mqctl.acl_import import import_plain_acl

        await import_plain_acl(context, names, dry_run=dry_run, yes=yes)
        return
    if len(names) != (action != "list"):
        raise click.UsageError("list takes no USER" if action == "list" else f"{action}: give USER")
    async with context.admin() as admin:
        if action == "list":
            _show_acls(context, await admin.users.acls(await _one_master(context, admin)))
            return
        (name,) = names
        await check_masters(context, admin)
        if action == "delete":
            await admin.users.delete_entries(name, policy_type, resource)
        elif not resource or not actions:
            raise click.UsageError(f"{action}: give -r and -a")
        else:
            entry = PolicyEntry(_parts(actions), decision, resource, _parts(source_ip or ""))
            await admin.users.put_entry(name, policy_type or CUSTOM, entry)
    done = {"subject": subject_of(name), "done": f"{action}d"}
    context.out.result(done, f"entry of {name} {action}d")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _show_acls(context: CommandContext, acls: list[AclInfo]) -> None:
    if context.out.wrote_json([plain(each) for each in acls]):
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
    if len(names) != 3 or names[1].capitalize() not in ACTIONS[1:]:
        raise click.UsageError("explain USER ACTION RESOURCE, as: explain shop Pub Topic:Orders")
    name, action, resource = names[0], names[1].capitalize(), names[2]
    try:
        kind, asked, is_prefix = pattern_of(resource)
    except BrokerRefusal as refusal:
        raise click.UsageError(refusal.remark) from None
    if not kind or is_prefix:
        raise click.UsageError("RESOURCE is one thing, as Topic:Orders: a request names one")
    # As the guard of a broker would ask: some topics stand for a group, or need nothing.
    needs = [Need(((kind, asked),), (action,))]
    if kind == "Topic" and action == "Pub":
        needs = list(publish_needs(asked))
    elif kind == "Topic" and is_retry_or_dlq(asked):
        needs = list(topic_needs(asked, action))
    async with context.admin() as admin:
        address = await _one_master(context, admin)
        found = _user(name, await admin.users.users(address), await admin.users.acls(address))
    decision = Decision(True, "every user may")
    if needs:
        decision = KnownUser(found).evaluate(needs[0], source or "", "")
    word = "allowed" if decision.allowed else "denied"
    asked = str(needs[0]) if needs else f"{action} on {resource}"
    context.out.result(
        {"allowed": decision.allowed, "reason": decision.reason},
        f"{asked}: {word}. {decision.reason}",
    )


def _user(name: str, users: list[UserInfo], acls: list[AclInfo]) -> User:
    info = next((each for each in users if each.username == name), None)
    if info is None:
        raise CommandFailed(f"there is no user {name}")
    user = User(
        username=name,
        # Brokers give no secret away, and which entry decides does not depend on it.
        password="not known here",
        user_type=info.user_type or NORMAL,
        user_status=info.user_status or ENABLED,
    )
    for each in acls:
        if each.subject == subject_of(name):
            user = merged(user, each)
    return user


@command("whoami")
async def whoami(context: CommandContext) -> None:
    """Any user may ask them.

    JSON: name server to username, userType, userStatus, peer."""
    async with context.admin() as admin:

        async def ask(address: str) -> tuple[UserInfo, str]:
            try:
                return await admin.users.who_am_i(address)
            except UnsupportedByBrokerError:
                raise ClientError(f"{address} checks no users: see docs/security.md") from None

        answers = await context.ask_each(context.name_servers, ask)
    seen = {at: {**plain(user), "peer": peer} for at, (user, peer) in answers.items()}
    if context.out.wrote_json(seen):
        return
    rows = [
        [name, one.get("username", ""), one.get("userType", ""), one["peer"]]
        for name, one in seen.items()
    ]
    context.out.table(["Name server", "User", "Type", "From"], rows)
