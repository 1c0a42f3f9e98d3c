"""How one life's cluster is set up; drawn by its seed. Pure."""

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

T = TypeVar("T")

_EXPIRES = 0.2
_UNCLEAN = 0.12
_ROLLS = 0.12
_FEATURE = 0.4

_WEARS = 0.25
_STRAINS = 0.2

#: Settings that are features of the broker, beside sends and pulls.
FEATURES = ("retries", "delays", "transactions", "orderly", "pops", "filters", "questions")

#: What plain lives have nothing of.
NOT_PLAIN = (
    *FEATURES,
    "wears",
    "strains",
    "tears",
    "recalls",
    "lags",
    "lasts",
    "unanswered",
    "disturbs",
    "proves",
    "returns",
)


class Draw(Protocol):
    """What is used of `random.Random`."""

    def choice(self, options: tuple[T, ...]) -> T: ...

    def random(self) -> float: ...


@dataclass(frozen=True)
class Settings:
    """`segment_size`, `batch_bytes` in bytes."""

    min_in_sync: int = 1
    sync_flush: bool = False
    ha_sync_flush: bool = False
    segment_size: int = 16_384
    queue_file_units: int = 200
    batch_bytes: int = 2_048
    drift: float = 0.0  # how much faster or slower a clock may go
    recreates: bool = False  # a topic is deleted and created again
    expires: bool = False  # segments expire, by age and where the disk fills up
    reserved_hours: int = 72
    rolls: bool = False  # every member is stopped and started again, one after the other
    unclean: bool = False  # an operator elects a replica that lacks confirmed messages
    scrub_rate: int = 0  # bytes a second of each broker's background check of its log
    wears: bool = False  # the disk of one broker wears out
    strains: bool = False  # faults come together
    tears: bool = False  # the end of a transaction is torn
    recalls: bool = False  # a master ends when it has answered a recall
    lags: bool = False  # a slave learns late what is confirmed
    lasts: bool = False  # a partial fault lasts for seconds, before the other faults begin
    unanswered: bool = False  # a name server's answers do not reach the master
    disturbs: bool = False  # operators and strangers disturb servers
    proves: bool = False  # brokers prove the secret of the nodes to each other
    returns: bool = False  # before the other faults, disks of another time come back
    retries: bool = False  # consumers fail messages, some for good
    delays: bool = False  # messages with a delay level, or a time
    transactions: bool = False
    orderly: bool = False  # a group with queue locks
    pops: bool = False  # a group that pops
    pops_in_order: bool = False
    locks_expire: bool = False  # members of the orderly group are killed, too
    filters: bool = False  # a group that subscribes by SQL92
    questions: bool = False  # request and reply

    @property
    def acks_are_flushed(self) -> bool:
        """Whether nothing is acknowledged before every member has it on its disk."""
        return self.sync_flush and self.ha_sync_flush

    @property
    def has_features(self) -> bool:
        """Whether any of FEATURES is used."""
        return any(getattr(self, name) for name in FEATURES)


def draw_settings(rng: Draw) -> Settings:
    sync = rng.random() < 0.35
    return Settings(
        min_in_sync=rng.choice((1, 1, 2)),
        sync_flush=sync,
        ha_sync_flush=sync and rng.random() < 0.7,
        segment_size=rng.choice((8_192, 16_384, 65_536)),
        queue_file_units=rng.choice((20, 200)),
        batch_bytes=rng.choice((512, 2_048, 16_384)),
        drift=rng.choice((0.0, 0.0, 0.005)),
        recreates=rng.random() < 0.3,
    )


def with_variants(settings: Settings, rng: Draw) -> Settings:
    """What only some lives have. `rng` is one of its own: the others stay what they were."""
    if rng.random() < _EXPIRES:
        settings = replace(
            settings,
            expires=True,
            segment_size=min(settings.segment_size, rng.choice((4_096, 8_192, 16_384))),
            reserved_hours=rng.choice((1, 3)),
        )
    if rng.random() < _UNCLEAN:
        settings = replace(settings, unclean=True, recreates=False)
    if rng.random() < _ROLLS:
        settings = replace(settings, rolls=True)
    return settings


def with_features(settings: Settings, rng: Draw) -> Settings:
    """Which features a life uses."""
    orderly, pops = rng.random() < _FEATURE, rng.random() < _FEATURE
    return replace(
        settings,
        retries=rng.random() < _FEATURE,
        delays=rng.random() < _FEATURE,
        transactions=rng.random() < _FEATURE,
        orderly=orderly,
        pops=pops,
        pops_in_order=pops and rng.random() < 0.4,
        locks_expire=orderly and rng.random() < 0.15,
        filters=rng.random() < _FEATURE / 2,
        questions=rng.random() < _FEATURE / 2,
    )


def with_strains(settings: Settings, rng: Draw) -> Settings:
    """Which further faults a life has. Disks wear out where nothing else takes bytes from a log for
    good."""
    wears, strains = rng.random() < _WEARS, rng.random() < _STRAINS
    is_free = not settings.expires and not settings.unclean
    return replace(settings, wears=wears and is_free, strains=strains and not settings.unclean)


def without_features(settings: Settings) -> Settings:
    return replace(settings, **dict.fromkeys(FEATURES, False), recreates=False)
