"""What refused sends tell about who is master now: `batonMasterAddress`, `batonMasterEpoch`. Pure.

A broker that left its mastership, or follows, names its master with every refusal. That is newer
than what a name server knows for a moment, so for `HINT_MS` it goes before the fetched routes. A
hint of a lower masterEpoch than one heard before is old news. It is only a hint: whoever is named
refuses too if it is no master, and a named one that cannot be reached is forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from batonmq.route import MASTER_ID, TopicRoute
from protocol.codes import MASTER_ADDRESS_HINT, MASTER_EPOCH_HINT

HINT_MS = 5_000


@dataclass(frozen=True, slots=True)
class _Hint:
    address: str
    master_epoch: int
    until_ms: int


class MasterHints:
    """By broker group. Times are ms of one monotonic clock."""

    def __init__(self) -> None:
        self._hints: dict[str, _Hint] = {}

    def heard(self, broker_name: str, ext: Mapping[str, str], now_ms: int) -> str | None:
        """The address that a refusal names, if it is news to go by; None otherwise."""
        address = ext.get(MASTER_ADDRESS_HINT, "")
        epoch_text = ext.get(MASTER_EPOCH_HINT, "")
        if not address or not epoch_text.isdecimal():
            return None
        epoch = int(epoch_text)
        known = self._hints.get(broker_name)
        if known is not None and epoch < known.master_epoch:
            return None
        self._hints[broker_name] = _Hint(address, epoch, now_ms + HINT_MS)
        return address

    def unreachable(self, address: str) -> None:
        """Nobody answers there: the name servers may know better by now."""
        for name, hint in list(self._hints.items()):
            if hint.address == address:
                self._hints[name] = replace(hint, until_ms=0)

    def over(self, route: TopicRoute, now_ms: int) -> TopicRoute:
        """The route with the hinted masters in the place of those that it names."""
        changed = {}
        for name, addresses in route.brokers.items():
            hint = self._hints.get(name)
            if hint is None or now_ms >= hint.until_ms:
                continue
            if MASTER_ID in addresses and addresses[MASTER_ID] != hint.address:
                kept = {i: at for i, at in addresses.items() if at != hint.address}
                changed[name] = {**kept, MASTER_ID: hint.address}
        return replace(route, brokers={**route.brokers, **changed}) if changed else route
