"""How a running cluster gets TLS on every port, and back: one stage after the other, so that
processes before and after a restart always understand each other. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from batonmq.launcher.layout import STAGES, Stage
from batonmq.mqctl.roll import Doubt
from batonmq.runtime.tls import TlsState

RANK: Final = {stage: rank for rank, stage in enumerate(STAGES)}
WHAT: Final[Mapping[Stage, str]] = {
    "disabled": "no port takes TLS",
    "accept": "ports take TLS as well",
    "dial": "processes dial with TLS",
    "permissive": "nodes take TLS only",
    "enforcing": "every port takes TLS only",
}


@dataclass(frozen=True, slots=True)
class Step:
    """`names`: the processes that are restarted with the settings of `stage`. gRPC takes TLS or
    plain connections, not both, and only brokers try both: so `controllers_first` on the way up."""

    stage: Stage
    names: frozenset[str]
    controllers_first: bool


def stages_of(states: Mapping[str, TlsState]) -> dict[str, Stage]:
    """By name of the process. Raises Doubt for modes that this command does not set."""
    found: dict[str, Stage] = {}
    for name, state in states.items():
        modes = state.server_mode, state.node_mode, state.dials
        stage = next((known for known, wanted in STAGES.items() if wanted == modes), None)
        if stage is None:
            raise Doubt(
                f"{name} has serverMode {state.server_mode}, nodeMode {state.node_mode},"
                f" tlsEnable {str(state.dials).lower()}: this command did not set that",
                "change its section tls by hand",
            )
        found[name] = stage
    return found


def steps(stages: Mapping[str, Stage], target: Stage) -> Iterator[Step]:
    """What is left to do. A command that was interrupted leaves processes at two stages: what is
    ahead of its step already is left as it is."""
    up = target != "disabled"
    # On the way up all nodes accept TLS before the first one dials with it. On the way down all
    # have stopped dialling with it before the first one refuses it.
    way: tuple[Stage, ...] = ("accept", "dial", target) if up else ("dial", "accept", target)
    for stage in way:
        rank = RANK[stage]
        names = frozenset(
            name
            for name, at in stages.items()
            # The target counts also from beyond it: from enforcing back to permissive.
            if (RANK[at] < rank if up else RANK[at] > rank) or (stage == target != at)
        )
        if names:
            yield Step(stage, names, up)


def refused(states: Mapping[str, TlsState], stage: Stage) -> str:
    """Which clients that are connected now would be refused at that stage, "" for none."""
    found = []
    for name, state in states.items():
        count, peers = state.encrypted, state.encrypted_peers
        if stage == "enforcing":
            count, peers = state.plain, state.plain_peers
        if count:
            more = f" and {count - len(peers)} more" if count > len(peers) else ""
            found.append(f"at {name} {', '.join(peers)}{more}")
    return "; ".join(found)
