"""Users, their policies, and what these decide. Pure.

A user has two policies at most, Custom and Default; Default counts only where no entry of Custom
matches. Of the entries that match, the most specific decides: a type before any type; a name
before a prefix, a long prefix before a short one, a prefix before any name; then Deny before Allow.
The order in which entries were made never matters. Nothing matches: denied. A super user may do
everything, a disabled one nothing.

Origin: DefaultAuthorizationProvider, UserAuthorizationHandler, AclAuthorizationHandler. RocketMQ
5.3.3 sorts a short prefix first and Deny behind Allow, which later versions have fixed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple

import msgspec

from batonmq.auth.signature import SigningKey
from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.json_body import Body

SUPER: Final = "Super"
NORMAL: Final = "Normal"
ENABLED: Final = "enable"
DISABLED: Final = "disable"
CUSTOM: Final = "Custom"
DEFAULT: Final = "Default"
ALLOW: Final = "Allow"
DENY: Final = "Deny"
ACTIONS: Final = ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")
CLUSTER: Final = "Cluster"
RESOURCES: Final = ("Topic", "Group", CLUSTER, "Namespace")
NODES: Final = "Node"
"""A type that no policy can name, and no star matches."""
ANY: Final = "*"
NAME_MAX: Final = 128
ENTRIES_MAX: Final = 1024
"""Of one user."""
RESOURCE_MAX: Final = 300
SOURCES_MAX: Final = 64
_TIME_MAX: Final = 1 << 53  # what every reader of JSON takes for an integer
_RESOURCE_OF: Final = {name.lower(): name for name in RESOURCES}
_SUBJECT: Final = "User:"


class Rotation(Body):
    """Of a user with two secrets: until when the old one counts (wall clock, ms; 0: until the
    rotation is finished), and who signed with it last, as far as this node knows."""

    old_until: int = 0
    old_used: int = 0
    old_used_by: str = ""


class UserInfo(Body):
    """A user, as `mqadmin` sends it. Without `password` in answers."""

    password: str | None = None
    rotation: Rotation | None = None
    user_status: str | None = None
    user_type: str | None = None
    username: str | None = None

    def __repr__(self) -> str:
        return f"UserInfo({self.username!r})"


class PolicyEntry(Body):
    """`resource`: `Topic:name`, `Group:prefix*`, `Cluster:*` or `*`. `source_ips` empty: any."""

    actions: list[str] = msgspec.field(default_factory=list)
    decision: str = ALLOW
    resource: str = ""
    source_ips: list[str] = msgspec.field(default_factory=list)


class PolicyInfo(Body):
    entries: list[PolicyEntry] = msgspec.field(default_factory=list)
    policy_type: str | None = None


class AclInfo(Body):
    """The policies of one user; `subject` is `User:name`."""

    policies: list[PolicyInfo] = msgspec.field(default_factory=list)
    subject: str | None = None


class User(Body):
    """A user with its policies, as brokers keep and replicate it. `policies`: policy type ->
    resource -> entry. `next_password`: the new secret of a rotation, else ""; `password` counts
    beside it until `old_until` (wall clock, ms; 0: until the rotation is finished)."""

    username: str
    password: str
    next_password: str = ""
    old_until: int = 0
    user_type: str = NORMAL
    user_status: str = ENABLED
    policies: dict[str, dict[str, PolicyEntry]] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"User({self.username!r})"

    @property
    def is_super(self) -> bool:
        """A disabled one is none."""
        return self.user_type == SUPER and self.user_status != DISABLED

    def info(self) -> UserInfo:
        """What others may see of it: no secret."""
        return UserInfo(
            username=self.username,
            user_type=self.user_type,
            user_status=self.user_status,
            rotation=Rotation(old_until=self.old_until) if self.next_password else None,
        )

    def acl(self) -> AclInfo:
        policies = [
            PolicyInfo(policy_type=kind, entries=list(entries.values()))
            for kind, entries in sorted(self.policies.items())
            if entries
        ]
        return AclInfo(subject=subject_of(self.username), policies=policies)


class UserWrapper(Body):
    """The whole table, secrets included: for the file, for slaves and name servers only."""

    data_version: DataVersion = DataVersion()
    users: dict[str, User] = msgspec.field(default_factory=dict)


class Pattern(NamedTuple):
    """`kind` "" is any type. `is_prefix`: names that begin with `name`."""

    kind: str
    name: str
    is_prefix: bool

    def matches(self, kind: str, name: str) -> bool:
        if self.kind and self.kind != kind:
            return False
        return name.startswith(self.name) if self.is_prefix else name == self.name

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The smallest is the most specific."""
        if not self.is_prefix:
            return not self.kind, 0, 0
        return not self.kind, 1 if self.name else 2, -len(self.name)


@lru_cache(maxsize=4096)
def pattern_of(resource: str) -> Pattern:
    """Raises BrokerRefusal(INVALID_PARAMETER). A name that ends with a star is cut at its first
    star, as in Java; a star elsewhere is an ordinary character."""
    if resource == ANY:
        return Pattern("", "", True)
    kind_text, separator, name = resource.partition(":")
    kind = _RESOURCE_OF.get(kind_text.lower())
    if not separator or kind is None or not name:
        raise _invalid(
            f"resource {resource[:NAME_MAX]!r}: allowed are * and TYPE:NAME, with a type of"
            f" {', '.join(RESOURCES)}"
        )
    if name.endswith(ANY):
        return Pattern(kind, name[: name.index(ANY)], True)
    return Pattern(kind, name, False)


class Need(NamedTuple):
    """One thing that a request needs: one of `actions` on one of `resources` (type, name)."""

    resources: tuple[tuple[str, str], ...]
    actions: tuple[str, ...]

    def __str__(self) -> str:
        names = " or ".join(f"{kind}:{name}" if name else kind for kind, name in self.resources)
        return f"{'/'.join(self.actions)} on {names}"


class Decision(NamedTuple):
    allowed: bool
    reason: str


class _Rule(NamedTuple):
    rank: tuple[bool, int, int, bool]
    entry: PolicyEntry
    pattern: Pattern
    actions: frozenset[str]
    networks: tuple[IPv4Network | IPv6Network, ...]

    def matches(self, kind: str, name: str, actions: Iterable[str], source: str) -> bool:
        return (
            self.pattern.matches(kind, name)
            and ("All" in self.actions or not self.actions.isdisjoint(actions))
            and (not self.networks or _is_in(source, self.networks))
        )


def _is_in(source: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    try:
        address = ip_address(source)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any((mapped or address) in network for network in networks)


def _rules(entries: Iterable[PolicyEntry]) -> tuple[_Rule, ...]:
    made = []
    for entry in entries:
        pattern = pattern_of(entry.resource)
        networks = tuple(ip_network(text, strict=False) for text in entry.source_ips)
        rank = (*pattern.rank, entry.decision != DENY)
        made.append(_Rule(rank, entry, pattern, frozenset(entry.actions), networks))
    return tuple(sorted(made, key=lambda rule: rule.rank))


@dataclass(slots=True)
class KnownUser:
    """A user, ready to check its requests."""

    user: User
    old_used: tuple[int, str] = (0, "")
    """When, and by which peer, the old of two secrets was used last."""
    key: SigningKey = field(init=False)
    """Of the secret that counts, of two the new one."""
    _old_key: SigningKey | None = field(init=False)
    _rules: dict[str, tuple[_Rule, ...]] = field(init=False)

    def __post_init__(self) -> None:
        old, new = self.user.password, self.user.next_password
        self.key = SigningKey(new or old)
        self._old_key = SigningKey(old) if new else None
        self._rules = {
            kind: _rules(self.user.policies.get(kind, {}).values()) for kind in (CUSTOM, DEFAULT)
        }

    @property
    def name(self) -> str:
        return self.user.username

    @property
    def is_super(self) -> bool:
        return self.user.is_super

    @property
    def is_enabled(self) -> bool:
        return self.user.user_status != DISABLED

    def signed(self, proves: Callable[[SigningKey], bool], now_ms: int, peer: str) -> bool:
        """Whether one of its secrets signed a request of `peer`; notes the use of an old one."""
        if proves(self.key):
            return True
        old, until = self._old_key, self.user.old_until
        if old is None or (until and now_ms >= until) or not proves(old):
            return False
        self.old_used = (now_ms, peer)
        return True

    def info(self) -> UserInfo:
        """As `User.info`, with the last use of an old secret."""
        info = self.user.info()
        if info.rotation is not None:
            info.rotation.old_used, info.rotation.old_used_by = self.old_used
        return info

    def evaluate(self, need: Need, source: str, cluster: str) -> Decision:
        """Whether the user may do it from the address `source`, and what decided. `cluster`: the
        name for a need that leaves out its cluster."""
        if not self.is_enabled:
            return Decision(False, f"user {self.name} is disabled")
        if self.is_super:
            return Decision(True, f"{self.name} is a super user")
        decided = [
            # Requests leave out the name of the cluster only: a group without a name must not
            # count as one that is named like the cluster.
            self._of_one(kind, name or cluster * (kind == CLUSTER), need.actions, source)
            for kind, name in need.resources
        ]
        # One of several is enough, as for a dead-letter topic or its group.
        return next((each for each in decided if each.allowed), decided[0])

    def _of_one(self, kind: str, name: str, actions: tuple[str, ...], source: str) -> Decision:
        if kind == NODES:
            return Decision(False, "only super users may, as the nodes of the cluster are")
        for policy in (CUSTOM, DEFAULT):
            for rule in self._rules[policy]:
                if rule.matches(kind, name, actions, source):
                    entry = rule.entry
                    ips = f" from {','.join(entry.source_ips)}" if entry.source_ips else ""
                    return Decision(
                        entry.decision == ALLOW,
                        f"{policy} policy: {entry.decision} {','.join(entry.actions)}"
                        f" on {entry.resource}{ips}",
                    )
        return Decision(False, f"no policy of {self.name} matches")


def _known(user: User, before: KnownUser | None) -> KnownUser:
    if before is None:
        return KnownUser(user)
    secrets = user.password, user.next_password
    same = secrets == (before.user.password, before.user.next_password)
    return KnownUser(user, before.old_used if same else (0, ""))


class Rulebook:
    """All users of one cluster. `changed` is called after each change, for what was decided before
    counts no longer."""

    def __init__(self, cluster: str, changed: Callable[[], None] = lambda: None) -> None:
        self.cluster = cluster
        self._changed = changed
        self._users: dict[str, User] = {}
        self._known: dict[str, KnownUser] = {}
        """Those of the table that were asked for."""
        self._fixed: dict[str, KnownUser] = {}

    def fix(self, user: User) -> None:
        """A user of this node's own configuration: no change of the table takes it away."""
        self._fixed[user.username] = KnownUser(user)
        self._changed()

    def replace(self, users: Mapping[str, User]) -> None:
        """Takes over a whole table."""
        # R58: to prepare all of 10,000 users would take half a second.
        self._users = dict(users)
        self._known = {name: known for name, known in self._known.items() if name in users}
        self._changed()

    def get(self, name: str) -> KnownUser | None:
        if (fixed := self._fixed.get(name)) is not None:
            return fixed
        user, known = self._users.get(name), self._known.get(name)
        if user is not None and (known is None or known.user is not user):
            known = self._known[name] = _known(user, known)
        return known


def subject_of(name: str) -> str:
    """The subject of a user's policies."""
    return _SUBJECT + name


def subject_name(subject: str | None) -> str:
    """The user of `User:name`. Raises BrokerRefusal(INVALID_PARAMETER)."""
    name = (subject or "").removeprefix(_SUBJECT)
    if not subject or not name or name == subject:
        raise _invalid(f"subject {(subject or '')[:NAME_MAX]!r}: allowed is User:NAME")
    return name


def check_user(user: User) -> User:
    """The user with the spelling of RocketMQ. Raises BrokerRefusal(INVALID_PARAMETER); no text has
    the secret."""
    name = user.username
    # Clients of gRPC put the name between commas and slashes, files are named by it.
    if not name or len(name) > NAME_MAX or not all(c.isalnum() or c in "_-.@|%" for c in name):
        raise _invalid(
            f"username {name[:NAME_MAX]!r}: allowed are 1 to {NAME_MAX} letters, digits and _-.@|%"
        )
    if not name.isascii() or name in (".", ".."):
        raise _invalid(f"username {name!r}: allowed are ASCII letters")
    if not user.password or max(len(user.password), len(user.next_password)) > NAME_MAX:
        raise _invalid(f"password of {name}: 1 to {NAME_MAX} characters are needed")
    return msgspec.structs.replace(
        user,
        user_type=_one_of("userType", user.user_type, (SUPER, NORMAL)),
        user_status=_one_of("userStatus", user.user_status, (ENABLED, DISABLED)),
    )


def rotated(user: User, secret: str, old_until: int) -> User:
    """The user with a second secret. The same one again only changes the end of the old one.
    Raises BrokerRefusal."""
    if user.next_password and user.next_password != secret:
        raise BrokerRefusal(
            ResponseCode.NO_PERMISSION,
            f"{user.username} has two secrets already: finish or cancel that rotation first",
        )
    if secret == user.password:
        raise _invalid(f"the new secret of {user.username} is the old one")
    until = min(max(old_until, 0), _TIME_MAX)
    return check_user(msgspec.structs.replace(user, next_password=secret, old_until=until))


def with_one_secret(user: User, *, new: bool) -> User:
    """The user with the new one of its secrets, or else with the old one."""
    kept = user.next_password if new and user.next_password else user.password
    return msgspec.structs.replace(user, password=kept, next_password="", old_until=0)


def merged(user: User, acl: AclInfo) -> User:
    """The user with the entries of `acl`; one with an equal resource is replaced, the others are
    kept. Raises BrokerRefusal(INVALID_PARAMETER)."""
    policies = {kind: dict(entries) for kind, entries in user.policies.items()}
    for policy in acl.policies:
        kind = _one_of("policyType", policy.policy_type or CUSTOM, (CUSTOM, DEFAULT))
        for entry in policy.entries:
            checked = _checked(entry)
            policies.setdefault(kind, {})[checked.resource] = checked
    if sum(map(len, policies.values())) > ENTRIES_MAX:
        raise _invalid(f"a user has at most {ENTRIES_MAX} entries")
    return msgspec.structs.replace(user, policies=policies)


def without(user: User, kind: str | None, resource: str | None) -> User:
    """The user without the entry of `resource`: of policy type `kind`, or of both. Without
    `resource`: the user without any entry."""
    if not resource:
        return msgspec.structs.replace(user, policies={})
    wanted = _canonical(resource)
    chosen = _one_of("policyType", kind, (CUSTOM, DEFAULT)) if kind else None
    policies = {
        policy: {
            name: entry
            for name, entry in entries.items()
            if name != wanted or (chosen is not None and chosen != policy)
        }
        for policy, entries in user.policies.items()
    }
    return msgspec.structs.replace(user, policies=policies)


def _checked(entry: PolicyEntry) -> PolicyEntry:
    if len(entry.resource) > RESOURCE_MAX or len(entry.source_ips) > SOURCES_MAX:
        raise _invalid(
            f"resource {entry.resource[:NAME_MAX]!r}: an entry has at most {RESOURCE_MAX}"
            f" characters and {SOURCES_MAX} addresses"
        )
    if not entry.actions:
        raise _invalid(f"{entry.resource}: no action is given")
    for text in entry.source_ips:
        try:
            ip_network(text, strict=False)
        except ValueError:
            raise _invalid(f"sourceIp {text[:NAME_MAX]!r} is no address and no CIDR") from None
    return PolicyEntry(
        resource=_canonical(entry.resource),
        actions=[_one_of("action", text, ACTIONS) for text in entry.actions],
        source_ips=list(entry.source_ips),
        decision=_one_of("decision", entry.decision, (ALLOW, DENY)),
    )


def _canonical(resource: str) -> str:
    pattern = pattern_of(resource)
    if not pattern.kind:
        return ANY
    return f"{pattern.kind}:{pattern.name}{ANY if pattern.is_prefix else ''}"


def _one_of(what: str, text: str | None, allowed: tuple[str, ...]) -> str:
    """In any case, as Java reads them."""
    for name in allowed:
        if text is not None and text.lower() == name.lower():
            return name
    raise _invalid(f"{what} {(text or '')[:NAME_MAX]!r}: allowed are {', '.join(allowed)}")


def _invalid(why: str) -> BrokerRefusal:
    return BrokerRefusal(ResponseCode.INVALID_PARAMETER, why)
