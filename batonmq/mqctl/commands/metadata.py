"""Topics, groups, offsets, settings and users of a cluster as one file, and back."""

import json
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from batonmq.auth.policy import AclInfo, UserInfo, subject_of
from batonmq.client.admin.admin import Admin
from batonmq.mqctl.context import CommandContext, CommandFailed, disk_failures
from batonmq.mqctl.output import note, plain
from batonmq.mqctl.params import FILE, command, dry_run_option, option, yes_option
from batonmq.mqctl.routes import check_masters, masters_to_read
from batonmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.topic_name import SYSTEM_GROUPS, is_brokers_own
from batonmq.runtime.durable_file import write_named
from batonmq.runtime.words import counted

FORM = 1


@command("exportMetadata", timeout_s=10.0)
@option("-f", "--file", "file", metavar="FILE", help="Write it there; default: standard output.")
@option("-c", "--clusterName", help="Only this cluster.")
async def export_metadata(
    context: CommandContext, file: str | None, cluster_name: str | None
) -> None:
    """Without the brokers' own topics and groups, without messages, and without secrets: brokers
    never give those away. `mqctl importMetadata` reads the file.

    JSON: form, and brokers: name to topics, groups, offsets ("topic@group" to queue to offset),
    settings, users and acls."""
    async with context.admin() as admin:
        masters = await masters_to_read(context, admin, cluster_name)
        if file is not None and context.failed:
            raise CommandFailed(f"{file} was not written: it would lack what was left out")
        brokers = {name: await _of_broker(admin, name, a) for name, a in masters.items()}
    document = {"form": FORM, "brokers": brokers}
    if file is None:
        context.out.document(document)
        return
    with disk_failures(file):
        write_named(Path(file), json.dumps(document, indent=2, sort_keys=True) + "\n")
    counts = {what: sum(len(each[what]) for each in brokers.values()) for what in _COUNTED}
    context.out.result({"file": file, **counts}, f"{file}: {_contents(brokers, _COUNTED)}")


_PARTS = ("topics", "groups", "offsets")
_HELD = (*_PARTS, "settings")
_COUNTED = (*_PARTS, "users")


def _contents(brokers: dict[str, dict[str, Any]], parts: Iterable[str]) -> str:
    """What a file holds, in a line; a file of an earlier version has no users."""
    counts = ((sum(len(b.get(part, ())) for b in brokers.values()), part) for part in parts)
    return ", ".join(counted(count, part.removesuffix("s")) for count, part in counts)


async def _of_broker(admin: Admin, name: str, address: str) -> dict[str, Any]:
    settings = await admin.brokers.config(address)
    own = {name, settings.get("brokerClusterName", "")}
    topics = {
        topic: plain(config)
        for topic, config in (await admin.topics.configs(address)).topic_config_table.items()
        if not is_brokers_own(topic, own)
    }
    groups = (await admin.consumer_groups.settings(address)).subscription_group_table
    offsets = await admin.consumer_groups.offsets(address)
    return {
        "topics": topics,
        "groups": {each: plain(groups[each]) for each in groups if each not in SYSTEM_GROUPS},
        "offsets": {
            key: {str(queue_id): offset for queue_id, offset in queues.items()}
            for key, queues in offsets.items()
            if key.partition("@")[0] in topics
        },
        "settings": settings,
        **await _users_of(admin, name, address),
    }


async def _users_of(admin: Admin, name: str, address: str) -> dict[str, Any]:
    """Empty where the broker keeps no users. Whether it does, only its refusal says."""
    try:
        users, acls = await admin.users.users(address), await admin.users.acls(address)
    except ResponseError as error:
        note(f"note: without users of {name}: {error}")
        return {"users": {}, "acls": []}
    return {
        "users": {
            user.username: {"userType": user.user_type, "userStatus": user.user_status}
            for user in users
        },
        "acls": [plain(acl) for acl in acls],
    }


@command("importMetadata", writes=True, timeout_s=10.0)
@click.argument("file", type=FILE)
@option("--settings", "with_settings", is_flag=True, help="Settings that may change now, too.")
@option("--users", "with_users", is_flag=True, help="Users and rights, too.")
@dry_run_option
@yes_option
async def import_metadata(
    context: CommandContext,
    file: Path,
    with_settings: bool,
    with_users: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Brokers are found by name; one broker of the file and one of the cluster need no equal name.
    What is there already is changed to what the file says; nothing is deleted. An offset behind the
    end of its queue here is reported and left out. A group that has offsets and no settings gets
    the default ones.

    With --users, a user that is not there is made with a new secret, which is shown once; one that
    is there keeps its secret, type, status and rights, and is named if the rights differ.

    JSON: topics, groups, offsets, settings, users: how many were written; newSecrets: by user;
    refused: texts."""
    brokers = _read(file)
    refused: list[str] = []
    done: Counter[str] = Counter()
    secrets: dict[str, str] = {}
    async with context.admin() as admin:
        await check_masters(context, admin)
        masters = await admin.cluster.masters()
        places = _places(brokers, masters)
        what = _contents(brokers, _COUNTED if with_users else _PARTS)
        if not dry_run:
            context.confirm(f"import {what} into {', '.join(places.values())}", yes=yes)
        for name, wanted in brokers.items():
            writer = _GroupWriter(admin, masters[places[name]], done, refused)
            if not dry_run:
                await writer.write(wanted, with_settings=with_settings)
            if with_users and not dry_run:
                await writer.write_users(wanted, secrets)
    counts = {part: done[part] for part in (*_HELD, "users")}
    outcome = {"newSecrets": secrets, "refused": refused, "dryRun": dry_run}
    if context.out.wrote_json({**counts, **outcome}):
        pass
    elif dry_run:
        context.out.line(f"would import {what}; nothing was changed")
    else:
        parts = (counted(n, part.removesuffix("s")) for part, n in counts.items())
        context.out.line(f"imported {', '.join(parts)}")
        for name, secret in secrets.items():
            context.out.line(f"secret of {name}, shown only now: {secret}")
    for text in refused:
        context.complain(text)


def _entries(acl: AclInfo | None) -> dict[tuple[str | None, str], tuple[object, ...]]:
    """Sorted by policy and resource: two brokers may have them in different orders."""
    return {
        (policy.policy_type, entry.resource): (
            entry.decision,
            frozenset(entry.actions),
            frozenset(entry.source_ips),
        )
        for policy in (acl.policies if acl is not None else ())
        for entry in policy.entries
    }


@dataclass(slots=True)
class _GroupWriter:
    """Writes what a file has of one broker to one master."""

    admin: Admin
    address: str
    done: Counter[str]
    refused: list[str]

    async def write(self, wanted: dict[str, Any], *, with_settings: bool) -> None:
        admin, address = self.admin, self.address
        for config in wanted["topics"].values():
            topic = TopicConfig.decode(msgspec.json.encode(config))
            await admin.topics.create_or_update(topic, broker=address)
            self.done["topics"] += 1
        for config in wanted["groups"].values():
            group = SubscriptionGroupConfig.decode(msgspec.json.encode(config))
            group.attributes = {}  # brokers refuse them in a request, as Java does
            await admin.consumer_groups.update(group, broker=address)
            self.done["groups"] += 1
        await self._make_groups_of(wanted["offsets"])
        for key, queues in wanted["offsets"].items():
            topic_name, _, group_name = key.partition("@")
            for queue_id, offset in queues.items():
                where = f"offset {offset} of {group_name} in {topic_name}:{queue_id}"
                work = admin.consumer_groups.commit(
                    address, group_name, topic_name, int(queue_id), int(offset)
                )
                await self._try("offsets", where, work)
        if with_settings:
            await self._change_settings(wanted["settings"])

    async def write_users(self, wanted: dict[str, Any], secrets: dict[str, str]) -> None:
        """`secrets`: what users got in another group of this run; the same here. Gets those of the
        users that are made."""
        from secrets import token_urlsafe

        users = self.admin.users
        there = {user.username for user in await users.users(self.address)}
        rights = {acl.subject: acl for acl in await users.acls(self.address)}
        acls = [AclInfo.decode(msgspec.json.encode(each)) for each in wanted.get("acls", ())]
        given = {acl.subject: acl for acl in acls}
        for subject in given.keys() - set(map(subject_of, wanted.get("users", {}))):
            self.refused.append(f"rights of {subject}: its user is not in the file")
        for name, of in wanted.get("users", {}).items():
            subject = subject_of(name)
            acl = given.get(subject)
            if name in there:
                # The file may be older: a right that was taken away since must not come back.
                if _entries(acl) != _entries(rights.get(subject)):
                    self.refused.append(f"{subject} has other rights: they stay as they are")
                continue
            info = UserInfo(username=name, user_type=of["userType"], user_status=of["userStatus"])
            info.password = secrets.get(name) or token_urlsafe(24)
            if await self._try("users", f"user {name}", users.create_at(self.address, info)):
                # Only now: a user that was refused has no secret to show.
                secrets[name] = info.password
            if acl is not None and acl.policies:
                await self._try(
                    "rights", f"rights of {subject}", users.put_acl_at(self.address, acl)
                )

    async def _make_groups_of(self, offsets: Iterable[str]) -> None:
        """Those that have offsets and no settings: brokers refuse offsets of unknown groups."""
        groups = self.admin.consumer_groups
        known = (await groups.settings(self.address)).subscription_group_table
        named = {key.partition("@")[2] for key in offsets}
        for name in sorted(named - known.keys() - set(SYSTEM_GROUPS)):
            config = SubscriptionGroupConfig(group_name=name)
            work = groups.update(config, broker=self.address)
            await self._try("groups", f"group {name}", work)

    async def _try(self, part: str, what: str, work: Awaitable[object]) -> bool:
        """Does and counts it, or notes why the broker refused."""
        try:
            await work
        except ResponseError as error:
            self.refused.append(f"{what}: {error}")
            return False
        self.done[part] += 1
        return True

    async def _change_settings(self, wanted: dict[str, str]) -> None:
        now = await self.admin.brokers.config(self.address)
        for key, value in wanted.items():
            if key not in now or now[key] == value:
                continue
            try:
                await self.admin.brokers.update_config(self.address, {key: value})
                self.done["settings"] += 1
            except ResponseError as error:
                if error.code != ResponseCode.NO_PERMISSION:  # of a file or a machine: not to copy
                    self.refused.append(f"{key}={value}: {error}")


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Raises CommandFailed for what exportMetadata did not write."""
    try:
        with disk_failures(file):
            document = json.loads(file.read_text())
        brokers: dict[str, dict[str, Any]] = document["brokers"]
        is_ours = document["form"] == FORM and all(
            isinstance(each[part], dict) for each in brokers.values() for part in _HELD
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise CommandFailed(f"{file}: it is no file of `mqctl exportMetadata`")
    return brokers


def _places(brokers: dict[str, Any], masters: dict[str, str]) -> dict[str, str]:
    """Broker of the file -> broker here. Raises CommandFailed."""
    if len(brokers) == len(masters) == 1:
        return dict(zip(brokers, masters, strict=True))
    if missing := sorted(set(brokers) - set(masters)):
        raise CommandFailed(f"no broker {', '.join(missing)} here: there are {', '.join(masters)}")
    return {name: name for name in brokers}
