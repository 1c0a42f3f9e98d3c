"""Which events of the history are sent to BATON_SYS_HISTORY next, and when. Pure.

Invariant: a batch is sent only after the one before it was acknowledged with code 0, in the order
of the history file. So the newest message of the topic is its high-water mark: every event before
it is in the topic, too. A new leader, and any leader after a new master or a failure, asks the
topic for that mark and goes on after it in its own file. Events may come twice, since a refused or
unanswered batch may have been stored; no event that a file still holds is left out.

There are two cases without a known mark. If the topic never had a message, or the file does not
hold the mark's log, publication begins at the oldest event of the files. If all messages have
expired, a node that published to this group before knows the mark; any other begins at the first
event that is younger than RECENT_MS, since otherwise each quiet time would repeat the whole
history. Events that waited longer than that for a topic that became empty are left out.

The history explains, it decides nothing: it is sent some time after the event and after the group's
last election, and not while the group has no master.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from batonmq.history.event import EventKey
from batonmq.history.message import Line
from batonmq.protocol.codes import ResponseCode
from batonmq.runtime.backoff import Backoff

BACKOFF_FIRST_MS: Final = 500
BACKOFF_MAX_MS: Final = 30_000
RECENT_MS: Final = 7 * 86_400_000
"""Longer than brokers keep messages by default (fileReservedTime, 72 h)."""

Batch = Sequence[Line]


KEEPER_FAILURES_MAX: Final = 4
MASTERLESS_MS: Final = 30_000


class KeeperChoice:
    """Which group keeps the topic where no setting names one.

    It is the first one by name that has a master. It stays while that works, and for some time
    without a master. Then another one follows, so that no group, of a stranger or of brokers with a
    full disk, stops the history. `now_ms` is monotonic.
    """

    def __init__(self) -> None:
        self._name = ""
        self._seen_ms = 0
        self._failures = 0
        self._passed_over: set[str] = set()

    def choose(self, with_master: Collection[str], now_ms: int) -> str:
        """Of the groups that have a master; empty if none has one."""
        if self._name in with_master:
            self._seen_ms = now_ms
        elif not self._name or now_ms - self._seen_ms >= MASTERLESS_MS:
            if self._passed_over.issuperset(with_master):
                self._passed_over.clear()
            self._name = min(set(with_master) - self._passed_over, default="")
            self._seen_ms = now_ms
            self._failures = 0
        return self._name

    def acknowledged(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        """An attempt to publish there failed."""
        self._failures += 1
        if self._failures >= KEEPER_FAILURES_MAX and self._name:
            self._passed_over.add(self._name)
            self._name = ""


@dataclass(frozen=True, slots=True)
class Target:
    """The master of the group that keeps the topic."""

    broker_name: str
    address: str
    master_epoch: int


# What to do next.


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until that time, or until the next event (None: only that)."""

    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Learn:
    """Ask for the topic's newest event, then `learned`."""

    target: Target


@dataclass(frozen=True, slots=True)
class Read:
    """Read the next lines of the files after `mark`, then `read`.

    If the files do not hold the mark: from their beginning on, or from RECENT_MS ago if `recent`.
    """

    target: Target
    mark: EventKey | None
    recent: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send these as one batch, then `answered`."""

    target: Target
    batch: Batch


@dataclass(frozen=True, slots=True)
class Create:
    """Create the topic, then `created`."""

    target: Target


Step = Wait | Learn | Read | Send | Create


class HistoryTopic:
    """The publication by one leading controller, from its gate's opening on.

    Times are monotonic ms. After each step the shell passes the outcome in, or `failed`, with the
    step's target. An outcome for an earlier target is ignored.
    """

    def __init__(self, delay_ms: int, now_ms: int) -> None:
        self.delay_ms = delay_ms
        self._target: Target | None = None
        self._due_ms: int | None = now_ms + delay_ms
        self._not_before_ms = 0
        self._backoff = Backoff(BACKOFF_FIRST_MS, BACKOFF_MAX_MS)
        self._learned = False
        self._mark: EventKey | None = None
        self._recent = False
        self._acked: dict[str, EventKey] = {}  # broker name -> the newest that it acknowledged
        self._batch: Batch = ()
        self._create = self._created = False
        self._news = True
        self.behind_since_ms: int | None = now_ms
        """Since when an event waits to be published, None if none does."""
        self.problem = ""
        """Why the last attempt failed, empty after one that did not."""
        self.failures = 0
        """Attempts that failed so far."""

    @property
    def target(self) -> Target | None:
        return self._target

    # Events.

    def set_target(self, target: Target | None, now_ms: int) -> bool:
        """Sets the group's present master, or none. True if it changed."""
        if target == self._target:
            return False
        self._target = target
        self._begin_anew()
        self._backoff.reset()
        self.problem = ""
        # Not at once: clients' writes to a new master come first.
        self._not_before_ms = now_ms + self.delay_ms
        return True

    def written(self, now_ms: int) -> None:
        """There are new lines in the file."""
        self._news = True
        if self.behind_since_ms is None:
            self.behind_since_ms = now_ms
        if self._due_ms is None:
            self._due_ms = now_ms + self.delay_ms

    def learned(self, target: Target, mark: EventKey | None, *, used: bool = False) -> None:
        """The mark of the newest message in the topic. `used`: it had some, perhaps all expired."""
        if target is self._target:
            if mark is None and used:
                mark = self._acked.get(target.broker_name)
                self._recent = mark is None
            self._learned, self._mark = True, mark

    def read(self, target: Target, batch: Batch) -> None:
        """`batch` follows the mark, in order; empty: nothing follows it."""
        if target is not self._target:
            return
        self._batch = batch
        if not batch and not self._news:
            self._due_ms = None
            self.behind_since_ms = None

    def answered(self, target: Target, code: int, remark: str, now_ms: int) -> None:
        """The broker's reply to the batch. Only code 0 acknowledges it."""
        if target is not self._target:
            return
        if code == ResponseCode.SUCCESS:
            self._mark, self._batch = self._batch[-1].mark, ()
            self._acked[target.broker_name] = self._mark
            self._recent = False
            self._backoff.reset()
            self.problem = ""
        elif code == ResponseCode.TOPIC_NOT_EXIST and not self._created:
            self._create = True
        else:
            self.failed(target, f"code {code}: {remark}", now_ms)

    def created(self, target: Target) -> None:
        if target is self._target:
            self._create, self._created = False, True

    def failed(self, target: Target, why: str, now_ms: int) -> None:
        """The step failed: publication begins anew, each time after a longer pause."""
        if target is not self._target:
            return
        self._begin_anew()
        self.failures += 1
        self.problem = why
        self._not_before_ms = now_ms + self._backoff.next_ms()

    # The next step.

    def step(self, now_ms: int) -> Step:
        if self._target is None or self._due_ms is None:
            return Wait()
        ready_ms = max(self._due_ms, self._not_before_ms)
        if now_ms < ready_ms:
            return Wait(ready_ms)
        if not self._learned:
            return Learn(self._target)
        if not self._batch:
            self._news = False
            return Read(self._target, self._mark, self._recent)
        if self._create:
            return Create(self._target)
        return Send(self._target, self._batch)

    def _begin_anew(self) -> None:
        self._learned, self._mark, self._batch = False, None, ()
        self._recent = False
        self._create = self._created = False
