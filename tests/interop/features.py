"""What programs that send and consume with retries, delays, timers and transactions must have seen.

They report in lines, those of `java/Features.java`; `Seen` compares what was acknowledged with what
arrived. `failover` weakens only what at-least-once cannot promise then: messages may come twice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from batonmq.protocol.properties import TRANSACTION_CHECK_TIMES
from batonmq.protocol.topic_name import TRANS_HALF_TOPIC
from lab.cluster.cluster import SMALL_STORE, Sections, merged
from lab.cluster.queues import read_topic, stored_keys

Line = dict[str, Any]
LEVELS_MS: Final = (2_000, 3_000, 1_000)
"""Of delay levels 1, 2, and 3, which retries begin with; a level above the last counts as 3."""
SETTINGS: Final[Sections] = merged(
    SMALL_STORE,
    {
        "broker": {
            "recallMessageEnable": True,
            "transactionTimeOut": 1000,
            "transactionCheckInterval": 1000,
        },
        "store": {"messageDelayLevel": " ".join(f"{ms // 1000}s" for ms in LEVELS_MS)},
    },
)
MAX_RECONSUME: Final = 2
WISHES: Final = (
    "fails 1", "fails 2", "fails 9",
    "level 1", "level 2", "level 18",
    "sec 1", "ms 1234", "at 1500", "recall 2000",
)  # fmt: skip


def commands_of(name: str) -> list[str]:
    """What a producer is told, without counts, where topics begin with `name`."""
    wishes = [f"{wish} {name}-a" for wish in WISHES]
    return wishes + [f"transaction {outcome} {name}-b" for outcome in sorted(OUTCOMES)]


def check_commits(name_servers: str, topic: str) -> None:
    """Each half message is committed at most once, and none that was rolled back. `topic`: that of
    the transactions. A producer that lost the answer to a half sends it again by the same key."""
    sent = Counter(
        message.keys
        for message in chain.from_iterable(read_topic(name_servers, TRANS_HALF_TOPIC).values())
        if TRANSACTION_CHECK_TIMES not in message.properties  # copies of those that are checked
    )
    commits = stored_keys(name_servers, topic)
    assert commits and commits <= sent, commits - sent
    assert not [key for key in commits if "rollback" in key]


@dataclass(frozen=True)
class Seen:
    """`sent` are lines of producers, `consumed` those of the members of one group, by time."""

    sent: Sequence[Line]
    consumed: Sequence[Line]
    failover: bool = False

    def acked(self, *modes: str) -> list[Line]:
        """Lines of acknowledged sends of these modes, all if none is named."""
        return [line for line in self.sent if "acked" in line and line["mode"] in (modes or MODES)]

    @property
    def arrivals(self) -> dict[str, list[Line]]:
        """What the group's members got of each key, in the order of time."""
        found: dict[str, list[Line]] = {}
        for line in sorted((one for one in self.consumed if "key" in one), key=_time):
            found.setdefault(line["key"], []).append(line)
        return found

    @property
    def dead(self) -> dict[str, list[Line]]:
        """Dead letters by key."""
        found: dict[str, list[Line]] = {}
        for line in (one for one in self.consumed if "dead" in one):
            found.setdefault(line["dead"], []).append(line)
        return found

    def missing(self) -> set[str]:
        """Keys of acknowledged messages that the group neither consumed nor has as dead letters,
        though it must."""
        done = {line["key"] for line in self.consumed if "key" in line and not line["fails"]}
        wanted = {line["acked"] for line in self.acked() if _is_due(line)}
        return wanted - done - self.dead.keys()

    def unchecked(self) -> set[str]:
        """Keys of acknowledged half messages that their producer left to a check still to come."""
        checked = {line["checked"] for line in self.sent if "checked" in line}
        halves = self.acked("transaction")
        return {line["acked"] for line in halves if line["value"].startswith("later-")} - checked

    def check_all(self) -> None:
        """Every rule. To be called when nothing is missing, and nothing more is to come."""
        assert not self.missing()
        self.check_retries()
        self.check_delays()
        self.check_recalls()
        self.check_transactions()

    def check_retries(self) -> None:
        """A failed message comes again with one try more each time; after MAX_RECONSUME it is a
        dead letter, which knows its first topic. What comes twice in a failover counts its tries
        anew from there."""
        arrivals, dead = self.arrivals, self.dead
        assert self.acked("fails")
        for line in self.acked("fails"):
            key, fails = line["acked"], int(line["value"])
            times = [one["times"] for one in arrivals[key]]
            wanted = list(range(min(fails, MAX_RECONSUME) + 1))
            # A client that reaches no broker counts on its own and offers the message once more.
            own = [len(wanted)] if self.failover and fails > MAX_RECONSUME else []
            assert list(dict.fromkeys(times)) in (wanted, wanted + own), arrivals[key]
            assert self.failover or times == wanted, arrivals[key]
            assert {one["topic"] for one in arrivals[key]} == {line["topic"]}
            letters = dead.get(key, [])
            assert bool(letters) == (fails > MAX_RECONSUME), (key, letters)
            assert self.failover or len(letters) <= 1, (key, letters)
            assert {one["of"] for one in letters} <= {line["topic"]}
            self._check_pauses(arrivals[key])

    def _check_pauses(self, arrivals: list[Line]) -> None:
        """The first arrival with n tries is a delay level after the first with n - 1."""
        first: dict[int, int] = {}
        for one in arrivals:
            first.setdefault(one["times"], one["at"])
        for n in range(1, len(first)):
            assert first[n] - first[n - 1] >= LEVELS_MS[-1], arrivals

    def check_delays(self) -> None:
        """Never early; once, if there was no failover."""
        arrivals = self.arrivals
        assert self.acked("level") and self.acked("sec", "ms", "at")
        for line in self.acked("level", "sec", "ms", "at"):
            came = arrivals[line["acked"]]
            assert came[0]["at"] >= due_ms(line), (line, came)
            assert self.failover or len(came) == 1, (line, came)

    def check_recalls(self) -> None:
        """What was recalled never comes."""
        recalled = {line["recalled"] for line in self.sent if "recalled" in line}
        assert recalled
        assert not recalled & self.arrivals.keys()

    def check_transactions(self) -> None:
        """Commits come, rolled back ones never; what was left open was checked back."""
        arrivals = self.arrivals
        assert not self.unchecked()
        ended = self.acked("transaction")
        assert {line["value"] for line in ended} == OUTCOMES
        for line in ended:
            came = arrivals.get(line["acked"], [])
            assert bool(came) == line["value"].endswith("commit"), (line, came)
            assert self.failover or len(came) <= 1, (line, came)
        assert not [key for key in arrivals if "rollback" in key]

    def check_before(self, killed_ms: int) -> None:
        """Until the kill nothing came twice, and no count of tries fell."""
        for came in self.arrivals.values():
            times = [one["times"] for one in came if one["at"] < killed_ms]
            assert times == sorted(set(times)), came

    def check_across(self, killed_ms: int) -> None:
        """Some of each kind were acknowledged before a kill and came, or were checked, after it."""
        arrivals = self.arrivals
        checked = {one["checked"]: one["at"] for one in self.sent if "checked" in one}
        before = [line for line in self.acked() if line["at"] < killed_ms]
        waited = [
            line
            for line in before
            if any(one["at"] > killed_ms for one in arrivals.get(line["acked"], []))
        ]
        assert {line["mode"] for line in waited} >= MODES - {"recall"}
        recalled = {line["recalled"] for line in self.sent if "recalled" in line}
        assert any(one["acked"] in recalled and due_ms(one) > killed_ms for one in before)
        later = [one for one in before if checked.get(one["acked"], 0) > killed_ms]
        assert {line["value"] for line in later} >= {"later-commit", "later-rollback"}


MODES: Final = frozenset({"fails", "level", "sec", "ms", "at", "recall", "transaction"})
OUTCOMES: Final = frozenset({"commit", "rollback", "later-commit", "later-rollback"})


def due_ms(line: Line) -> int:
    """The earliest moment at which a delayed or timed message may arrive, else that of the send."""
    if line["mode"] in ("fails", "transaction"):
        return int(line["sent"])
    value = int(line["value"])
    if line["mode"] == "level":
        return int(line["sent"]) + LEVELS_MS[min(value, len(LEVELS_MS)) - 1]
    return int(line["sent"]) + value * (1000 if line["mode"] == "sec" else 1)


def _is_due(line: Line) -> bool:
    if line["mode"] == "transaction":
        return bool(line["value"].endswith("commit"))
    return bool(line["mode"] != "recall")


def _time(line: Line) -> int:
    return int(line["at"])
