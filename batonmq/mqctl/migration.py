"""How a group goes from Java brokers to ours and back, one replica at a time. Pure.

`Member` and `MigratedGroup` are what was found; `problems` is what stands in the way of a step,
`next_steps` what is left to do. A group never has fewer than two replicas in sync on its way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

BATONMQ: Final = "batonmq"
JAVA: Final = "java"
KINDS: Final = (BATONMQ, JAVA)
KIND_NAMES: Final = {BATONMQ: "BatonMQ", JAVA: "Java", "": "unknown"}
REPLICAS_MIN: Final = 2
"""In sync at each moment: with one alone a failure in the middle of a step would lose the group."""
SEGMENT_KEY: Final = "mappedFileSizeCommitLog"
ALL_ACK_KEY: Final = "allAckInSyncStateSet"


@dataclass(frozen=True, slots=True)
class Member:
    """One replica. `kind` is one of KINDS, empty if it does not answer; `settings` are its own
    (26), empty then."""

    broker_id: int
    address: str
    in_sync: bool
    alive: bool
    is_master: bool
    kind: str = ""
    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"broker {self.broker_id} at {self.address}"


@dataclass(frozen=True, slots=True)
class MigratedGroup:
    """A group as its controllers and members tell it; members ascending by id."""

    name: str
    members: Sequence[Member]
    own_controllers: bool

    @property
    def master(self) -> Member | None:
        return next((each for each in self.members if each.is_master), None)

    def member(self, broker: str) -> Member | None:
        """By its id, or its address; None if the controllers know no such one. Of two with one
        address the living one: the other is what an emptied store was before."""
        found = [m for m in self.members if broker in (str(m.broker_id), m.address)]
        return next((m for m in found if m.alive), next(iter(found), None))

    def in_sync(self, kind: str | None = None) -> list[Member]:
        """Who is in the SyncStateSet, of that kind or of any."""
        return [m for m in self.members if m.in_sync and kind in (None, m.kind)]


def problems(group: MigratedGroup) -> list[str]:
    """What forbids any change of this group, one sentence each with what to do about it."""
    return lasting_problems(group) + passing_problems(group)


def passing_problems(group: MigratedGroup) -> list[str]:
    """Those that may end by themselves: `join` waits for that."""
    found = []
    master = group.master
    if master is None:
        found.append("it has no master: see `mqctl health`")
    elif not master.kind:
        found.append(f"its master, {master.name}, does not answer")
    dead = [m for m in group.members if m.in_sync and not m.alive]
    return found + [f"{m.name} is in the SyncStateSet, but does not live" for m in dead]


def lasting_problems(group: MigratedGroup) -> list[str]:
    """Those that somebody has to end."""
    found = []
    if not group.own_controllers:
        found.append(
            "its controllers are RocketMQ's, where brokers of ours cannot register: move the group "
            "to controllers of ours first (docs/migrate.md)"
        )
    # A replica copies the log file by file: a file of another size could not follow its master's.
    sizes = {m.name: m.settings[SEGMENT_KEY] for m in group.members if SEGMENT_KEY in m.settings}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{size} at {name}" for name, size in sizes.items())
        found.append(f"{SEGMENT_KEY} differs: {each}. All replicas of a group need the same")
    found += [
        f"{m.name} as master acknowledges what it alone has: `mqadmin updateBrokerConfig -b "
        f"{m.address} -k {ALL_ACK_KEY} -v true`"
        for m in group.members
        if m.kind == JAVA and m.settings.get(ALL_ACK_KEY) != "true"  # Java's default is false
    ]
    return found


def problems_of_switch(group: MigratedGroup, to: Member) -> list[str]:
    found = problems(group)
    if not to.alive:
        found.append(f"{to.name} does not live")
    elif not to.in_sync:
        found.append(
            f"{to.name} is not in the SyncStateSet: {_command(group, 'join', to.broker_id)} waits"
        )
    return found


def problems_of_leave(group: MigratedGroup, who: Member) -> list[str]:
    """What forbids that `who` leaves for good."""
    # What is wrong with `who` itself ends with its leaving: it must not keep it in the group.
    found = [each for each in problems(group) if not each.startswith(who.name)]
    if who.is_master:
        found.append(f"{who.name} is the master: make another one master first (switch)")
    return found


def too_few_without(group: MigratedGroup, who: Member) -> str:
    """Why the group would lack a second replica in sync; empty if it would not."""
    # By id: an emptied store has two members at one address.
    rest = [m.name for m in group.in_sync() if m.broker_id != who.broker_id and m.alive]
    if len(rest) >= REPLICAS_MIN:
        return ""
    return f"without {who.name} only {' and '.join(rest) or 'none'} would be in sync"


def next_steps(group: MigratedGroup, to: str, replicas: int | None = None) -> list[str]:
    """What is left until the group has `replicas` members, all of kind `to`; empty when it is done.

    `replicas`: by default as many as there are of the kind that has more now, at least two. The
    commands carry a number that was given, or is above two, on: with each one that leaves the group
    could no more tell it."""
    name = KIND_NAMES[to]
    ours = [m for m in group.members if m.kind == to and m.alive]
    others = [m for m in group.members if m.kind != to]
    wanted = replicas or max(REPLICAS_MIN, len(others), len(ours))
    number = f" --to {to} --replicas {wanted}" if replicas or wanted > REPLICAS_MIN else ""
    # The master leaves last: it stays until one of the wanted kind can take over.
    others.sort(key=lambda m: (m.in_sync, m.is_master))
    there, steps = len(ours), []

    def join() -> None:
        then = _command(group, "join", "ITS_HOST:PORT")
        steps.append(f"start a {name} broker of {group.name}, then: {then}")

    steps += [_command(group, "join", m.broker_id) for m in ours if not m.in_sync]
    # Before the switch: it needs somebody to switch to.
    if not there:
        join()
        there = 1
    if group.master is not None and group.master.kind != to:
        first = str(ours[0].broker_id) if ours else "ITS_HOST:PORT"
        steps.append(_command(group, "switch", first))
    while others or there < wanted:
        # Leaving comes first while two stay: then one spare machine is enough for all replicas.
        if others and there + len(others) > REPLICAS_MIN:
            leaves = others.pop(0)
            leave = _command(group, "leave", leaves.broker_id) + number
            steps.append(f"{leave}, and stop it when the command says so")
        else:
            join()
            there += 1
    return steps


def _command(group: MigratedGroup, step: str, broker: object) -> str:
    return f"mqctl migrate {step} -bn {group.name} -b {broker}"


def lacking_tables(what: str, master: Mapping[str, object], member: Mapping[str, object]) -> str:
    """Which entries of the master's table another one does not have, or has otherwise."""
    missing = sorted(key for key, value in master.items() if member.get(key) != value)
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{what} {missing[0]}{more}"


Offsets = Mapping[str, Mapping[int, int]]


def lacking_offsets(begun: Offsets, now: Offsets, member: Offsets) -> str:
    """Which groups of consumers stood further at the master when the step began than they do at
    this member. One that was set back since (`now`) need not."""
    for key, queues in begun.items():
        for queue, offset in queues.items():
            # A slave asks for the offsets every few seconds: those of this moment are never there.
            wanted = min(offset, now.get(key, {}).get(queue, offset))
            if member.get(key, {}).get(queue, 0) < wanted:
                return f"the offsets of {key}"
    return ""
