"""What an unclean election gives up: exactly what the log of the elected replica lacked.

`GivenUp` learns of each such election as it is decided, and again when a master of that epoch, or
of a later one, opens. From then on the truth ends where that log left it, and continues with what
the new master confirms. Until the old master and those that follow it hear of the election they may
show what is given up; they confirm nothing new beside the new master unless the operator accepted
that (R44). An election without an operator, or by one who compares, gives up nothing that a living
replica holds (G5, R17).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lab.sim.hosts import BrokerHost
from lab.sim.records import LogRecord, records


@dataclass
class UncleanElection:
    """`takes_any`: an operator named the winner, whatever others hold. `at`: where the logs part,
    None until the new master opens. `held`: up to where the winner's log was the truth when it was
    elected, by `winner` in that `boot`."""

    epoch: int
    takes_any: bool
    cuts_later_acks: bool
    held: int
    winner: BrokerHost | None
    boot: int
    at: int | None = None
    acks: bool = False  # the new master confirms


class GivenUp:
    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self._elections: list[UncleanElection] = []
        self.operator_compares = False
        """Whether operators name the replica that holds most, from now on."""

    @property
    def any(self) -> bool:
        return bool(self._elections)

    def elected(self, election: UncleanElection) -> None:
        self._elections.append(election)

    def pending(self, epoch: int) -> UncleanElection | None:
        """The newest one that a master which opens in `epoch` completes."""
        due = [each for each in self._elections if each.at is None and each.epoch <= epoch]
        return due[-1] if due else None

    def is_won_by(self, host: BrokerHost, epoch: int) -> bool:
        """Whether `host` acts in `epoch`, for which it was elected uncleanly."""
        election = self.pending(epoch)
        return election is not None and (election.winner, election.epoch) == (host, epoch)

    def completed(
        self, election: UncleanElection, at: int, host: BrokerHost, kept: Iterable[int]
    ) -> None:
        """A master opened whose log is the truth up to `at`; those of others that live are up to
        `kept`."""
        due = [each for each in self._elections if each.at is None and each.epoch <= election.epoch]
        for each in due:
            each.at = at
        # It may have been named for an earlier epoch, and died before it opened.
        takes_any = any(each.takes_any for each in due if each.winner is host)
        is_same = election.winner is host and election.boot == host.boot
        if is_same and at < election.held:
            self._violate(f"R44: {host.incarnation} opens with {at} of {election.held} it had")
        if not takes_any and any(other > at for other in kept):
            self._violate(f"G5: {host.incarnation} leads with {at}, others hold {list(kept)}")

    def bound(self, log_epoch: int) -> int | None:
        """Up to where a log of that newest epoch must be the truth; None: all of it."""
        ats = [e.at for e in self._elections if e.epoch > log_epoch and e.at is not None]
        return min(ats) if ats else None

    def confirms(self, host: BrokerHost, epoch: int) -> None:
        """`host`, a master, confirms more in `epoch`."""
        for each in self._elections:
            if each.at is None:
                continue
            if epoch >= each.epoch:
                each.acks = True
            elif each.acks and not each.cuts_later_acks:
                self._violate(
                    f"R44: {host.incarnation} confirms in epoch {epoch}, beside the master of"
                    f" {each.epoch}"
                )


def records_behind(truth: bytearray, at: int) -> list[LogRecord]:
    """Those of which `at` leaves less than the whole."""
    return [record for record in records(truth) if record.offset + record.size > at]
