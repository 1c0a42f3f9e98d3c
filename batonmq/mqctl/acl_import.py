"""`mqctl acl import`: accounts of RocketMQ's ACL 1.0 become users, in every broker group.

A second run changes nothing. A user that is there with another secret or type is left alone and
named: who changed it since knows why.
"""

from pathlib import Path
from typing import Any

import click

from batonmq.auth.plain_acl import PlainAcl, PlainAclError, entry_changes, read_plain_acl
from batonmq.auth.policy import SUPER, AclInfo, User, UserInfo, subject_of
from batonmq.client.admin.admin import Admin
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.routes import check_masters
from batonmq.protocol.errors import ResponseError
from batonmq.runtime.words import counted

TOOLS_NOTE = (
    "reads by tools (clusterList, topicList and so on) needed a signature only; now they need"
    " Cluster:* Get, or a super user"
)


async def import_plain_acl(
    context: CommandContext, files: tuple[str, ...], *, dry_run: bool, yes: bool
) -> None:
    """Raises CommandFailed for files that cannot be read as a whole: nothing was changed then."""
    if not files:
        raise click.UsageError("import: give FILE, as conf/plain_acl.yml")
    found = _read(files)
    async with context.admin() as admin:
        await check_masters(context, admin)
        masters = await admin.cluster.masters()
        if not dry_run:
            context.confirm(
                f"import {counted(len(found.users), 'user')} into {', '.join(sorted(masters))}",
                yes=yes,
            )
        rows: list[dict[str, Any]] = []
        # Each group has users of its own, in its log: they may differ.
        for group, address in masters.items():
            there = {each.username: each for each in await admin.users.users(address)}
            acls = {each.subject: each for each in await admin.users.acls(address)}
            for user in found.users.values():
                acl = acls.get(subject_of(user.username), AclInfo())
                row = _row(group, user, there.get(user.username), acl)
                if not dry_run and row["user"] != "differs":
                    await _write(admin, address, user, row)
                rows.append(row)
    _show(context, rows, found, dry_run)


def _read(files: tuple[str, ...]) -> PlainAcl:
    try:
        with disk_failures(", ".join(files)):
            return read_plain_acl({file: Path(file).read_text("utf-8") for file in files})
    except UnicodeDecodeError:
        raise CommandFailed("a file is not UTF-8") from None
    except PlainAclError as error:
        raise CommandFailed("nothing imported:\n  " + "\n  ".join(error.problems)) from None


def _row(group: str, user: User, there: UserInfo | None, acl: AclInfo) -> dict[str, Any]:
    """Whether the secret of a user that is there is the same, only its master knows."""
    state = "new" if there is None else "there"
    if there is not None and (there.user_type, there.user_status) != (
        user.user_type,
        user.user_status,
    ):
        state = "differs"
    return {
        "brokerName": group,
        "username": user.username,
        "userType": user.user_type,
        "user": state,
        "entries": [
            {
                "policyType": change.policy_type,
                "resource": change.entry.resource,
                "actions": change.entry.actions,
                "decision": change.entry.decision,
                "state": change.state,
            }
            for change in entry_changes(user, acl)
        ],
    }


async def _write(admin: Admin, address: str, user: User, row: dict[str, Any]) -> None:
    """A user of another secret is refused by the master, and its entries stay as they are."""
    made = user.info()
    made.password = user.password
    try:
        await admin.users.create_at(address, made)
    except ResponseError as error:
        # Whether a secret is the same, only the master can say: by refusing.
        if row["user"] == "new" or "differs" not in str(error):
            raise
        row["user"] = "differs"
        return
    if any(entry["state"] != "same" for entry in row["entries"]):
        await admin.users.put_acl_at(address, user.acl())


def _show(
    context: CommandContext, rows: list[dict[str, Any]], found: PlainAcl, dry_run: bool
) -> None:
    lost = list(found.lost)
    # A super user may do everything, in both versions.
    if any(row["userType"] != SUPER for row in rows):
        lost.append(TOOLS_NOTE)
    if not context.out.wrote_json({"users": rows, "lost": lost, "dryRun": dry_run}):
        lines = []
        for row in rows:
            who = [row["brokerName"], row["username"], row["userType"], row["user"]]
            for entry in row["entries"] or [{}]:
                actions = f"{entry['decision']} {','.join(entry['actions'])}" if entry else ""
                policy, resource = entry.get("policyType", ""), entry.get("resource", "")
                lines.append([*who, policy, resource, actions, entry.get("state", "")])
        heads = ["Group", "User", "Type", "State", "Policy", "Resource", "Rights", "Entry"]
        context.out.table(heads, lines)
        for text in lost:
            context.out.line(f"not imported: {text}")
        if dry_run:
            context.out.line("nothing was changed")
    for row in rows:
        if row["user"] == "differs":
            context.complain(
                f"{row['username']} in {row['brokerName']} differs and was left alone:"
                f" mqctl user update {row['username']}"
            )
