"""Accounts of RocketMQ's ACL 1.0 (`plain_acl.yml`) as users and policies of ACL 2.0. Pure.

An admin becomes a super user. `topicPerms` and `groupPerms` become entries of the Custom policy,
defaults entries of the Default policy. Requests from a white address need neither signature nor
right in 1.0: 2.0 has nothing like it, so white addresses are named and left out.
Origin: PlainAccessConfig, PlainPermissionManager (5.2.0), AuthMigrator.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from batonmq.auth.policy import (
    ALLOW,
    CUSTOM,
    DEFAULT,
    DENY,
    NORMAL,
    SUPER,
    AclInfo,
    PolicyEntry,
    PolicyInfo,
    User,
    check_user,
    merged,
)
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import RETRY_PREFIX

_PERMS: Final = {"PUB": ["Pub"], "SUB": ["Sub"], "PUB|SUB": ["Pub", "Sub"], "ANY": ["Pub", "Sub"]}
_PERMS["SUB|PUB"] = _PERMS["PUB|SUB"]
_KNOWN: Final = frozenset(
    {
        "accessKey", "secretKey", "whiteRemoteAddress", "admin", "defaultTopicPerm",
        "defaultGroupPerm", "topicPerms", "groupPerms",
    }
)  # fmt: skip
_NULLS: Final = ("", "~", "null")


@dataclass(slots=True)
class PlainAcl:
    """`lost`: what users and policies cannot say, for people. No text has a secret."""

    users: dict[str, User] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


_WHITE_LIST: Final = "globalWhiteRemoteAddresses"


class PlainAclError(ValueError):
    """What cannot be read. Each of `problems` names its account."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_plain_acl(texts: Mapping[str, str]) -> PlainAcl:
    """Of all files (name -> text) together. Raises PlainAclError."""
    found, problems = PlainAcl(), []
    for name, text in texts.items():
        try:
            # All scalars as text, as the Java server compares them: secretKey: 12345678.
            root = yaml.load(text, yaml.BaseLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f" at line {mark.line + 1}" if mark is not None else ""
            problems.append(f"{name} is not YAML{line}")
            continue
        if not isinstance(root, dict):
            problems.append(f"{name} has neither accounts nor globalWhiteRemoteAddresses")
            continue
        problems += _file(name, root, found)
    if problems:
        raise PlainAclError(problems)
    return found


def _file(name: str, root: dict[Any, Any], found: PlainAcl) -> Iterator[str]:
    """Adds the accounts of one file to `found`; yields what is wrong with them."""
    for key in sorted(map(str, root.keys() - {"accounts", "dataVersion", _WHITE_LIST})):
        found.lost.append(f"{name}: {key[:64]!r} is no key of ACL 1.0")
    try:
        addresses = _list(root.get(_WHITE_LIST))
    except ValueError as error:
        yield f"{name}: {_WHITE_LIST}: {error}"
        return
    if addresses:
        found.lost.append(
            f"{_WHITE_LIST} {', '.join(map(str, addresses))}: requests from there passed without a"
            " signature; from now on each is signed by a user with that right"
        )
    accounts = root.get("accounts") or []
    if not isinstance(accounts, list):
        yield f"{name}: accounts is no list"
        return
    for number, account in enumerate(accounts, 1):
        if not isinstance(account, dict):
            yield f"{name}: account {number} is no mapping"
            continue
        key = _text(account, "accessKey")
        where = f"account {key}" if key else f"{name}: account {number}"
        try:
            user = _user(where, account, found.lost)
        except (BrokerRefusal, ValueError) as error:
            yield f"{where}: {getattr(error, 'remark', '') or error}"
            continue
        if user.username in found.users:
            yield f"{where} is there twice"
        found.users[user.username] = user


def _user(where: str, account: dict[Any, Any], lost: list[str]) -> User:
    """Raises BrokerRefusal, ValueError."""
    lost += [
        f"{where}: {str(key)[:64]!r} is no field of an account"
        for key in account
        if key not in _KNOWN
    ]
    user = check_user(
        User(
            username=_text(account, "accessKey"),
            password=_text(account, "secretKey"),
            user_type=SUPER if _text(account, "admin").lower() == "true" else NORMAL,
        )
    )
    if address := _text(account, "whiteRemoteAddress"):
        lost.append(
            f"{where}: whiteRemoteAddress {address}: requests from there passed with any secret and"
            " to any topic; from now on they need their signature and the rights below"
        )
    custom: dict[str, PolicyEntry] = {}
    for kind, perms in (("Topic", "topicPerms"), ("Group", "groupPerms")):
        for name, perm in _perms(account, perms):
            # 1.0 keeps a group as its retry topic; rights of 2.0 are asked of the group.
            group = kind == "Group" or name.startswith(RETRY_PREFIX)
            entry = _entry("Group" if group else kind, name.removeprefix(RETRY_PREFIX), perm)
            if (before := custom.setdefault(entry.resource, entry)) != entry:
                raise ValueError(f"{before.resource} has two different rights")
    default = []
    for kind, key in (("Topic", "defaultTopicPerm"), ("Group", "defaultGroupPerm")):
        if (perm := _text(account, key)) and perm != "DENY":  # what nothing matches is denied
            every = _entry(kind, "*", perm)
            default += [every, *_without_default(every, custom.values())]
    policies = [
        PolicyInfo(policy_type=CUSTOM, entries=list(custom.values())),
        PolicyInfo(policy_type=DEFAULT, entries=default),
    ]
    return merged(user, AclInfo(policies=policies))


def _without_default(every: PolicyEntry, custom: Iterable[PolicyEntry]) -> Iterator[PolicyEntry]:
    """In 1.0 a right of its own replaces the default one; in 2.0 the default policy would add what
    it lacks."""
    kind, _ = every.resource.split(":")
    for entry in custom:
        rest = [action for action in every.actions if action not in entry.actions]
        if entry.decision == ALLOW and rest and entry.resource.startswith(f"{kind}:"):
            yield PolicyEntry(resource=entry.resource, actions=rest, decision=DENY)


def _perms(account: dict[Any, Any], key: str) -> Iterator[tuple[str, str]]:
    for text in _list(account.get(key)):
        name, separator, perm = str(text).partition("=")
        if not separator or not name.strip() or not isinstance(text, str):
            raise ValueError(f"{key} has {str(text)[:64]!r}: allowed is NAME=PERM")
        if "*" in name or ":" in name:  # a star would mean more than it did
            raise ValueError(f"{key} has {name.strip()[:64]!r}, which is no name")
        yield name.strip(), perm.strip()


def _entry(kind: str, name: str, perm: str) -> PolicyEntry:
    if perm == "DENY":
        return PolicyEntry(resource=f"{kind}:{name}", actions=["All"], decision=DENY)
    actions = _PERMS.get(perm.replace(" ", ""))
    if actions is None:
        raise ValueError(f"{perm[:64]!r}: allowed are DENY, ANY, {', '.join(_PERMS)}")
    return PolicyEntry(resource=f"{kind}:{name}", actions=list(actions), decision=ALLOW)


def _text(account: Mapping[Any, Any], key: str) -> str:
    value = account.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key} is no text")
    return "" if value.strip() in _NULLS else value.strip()


def _list(value: object) -> list[Any]:
    if value is None or (isinstance(value, str) and value.strip() in _NULLS):
        return []
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    return value


@dataclass(frozen=True, slots=True)
class EntryChange:
    policy_type: str
    entry: PolicyEntry
    before: PolicyEntry | None

    @property
    def state(self) -> str:
        if self.before is None:
            return "new"
        return "same" if self.before == self.entry else "changed"


def entry_changes(user: User, there: AclInfo) -> list[EntryChange]:
    """What becomes of each entry of the user, where it has the policies `there`."""
    before = {
        (policy.policy_type or CUSTOM, entry.resource): entry
        for policy in there.policies
        for entry in policy.entries
    }
    return [
        EntryChange(kind, entry, before.get((kind, entry.resource)))
        for kind, entries in user.policies.items()
        for entry in entries.values()
    ]
