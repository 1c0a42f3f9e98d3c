"""Settings of the store, named as in Java's `MessageStoreConfig`. Contradicting values are refused
at start.

`DelayLevels` is the setting `messageDelayLevel`. It says what a consume queue unit carries beside
its position: the hash of TAGS; in the queues of DUE_TOPICS the due time in ms since 1970, negative
for a message that recalls another, so that its readers need only the units. Origin: Java
`ScheduleMessageService.parseDelayLevel`, `CommitLog.checkMessageAndReturnSize`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final, Literal

import msgspec

from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.numbers import natural_number, whole_number
from batonmq.protocol.properties import find_property
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import SCHEDULE_TOPIC, TIMER_TOPIC
from batonmq.runtime.clock import UNITS_MS
from batonmq.runtime.section import Ranges, Section

_UNKNOWN_LEVEL_MS: Final = 1_000

HOURS_OF_DAY = 24
DEFAULT_ROOT = "store"  # in the home of the user who runs the broker
SEGMENT_SIZE_MIN = 4096
MESSAGE_SIZE_MIN = 16 * 1024


class DelayLevels:
    """Level n (from 1) of a list such as `1s 5s 10m`; higher levels count as the last."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for a list without a level, or a word that is no number with s, m, h or
        d."""
        self._delays_ms = [_delay_ms(word) for word in text.split()]
        if not self._delays_ms:
            raise ValueError("messageDelayLevel holds no delay; allowed is a list such as 1s 5s 2h")

    def __len__(self) -> int:
        """The last level."""
        return len(self._delays_ms)

    def delay_ms(self, level: int) -> int:
        level = min(level, len(self._delays_ms))
        return self._delays_ms[level - 1] if level > 0 else _UNKNOWN_LEVEL_MS

    def deliver_at(self, level: int, store_timestamp: int) -> int:
        """The due time, in ms since 1970, of a message stored at `store_timestamp`."""
        return store_timestamp + self.delay_ms(level)

    def tags_code(self, topic: str, properties: bytes, store_timestamp: int) -> int:
        """What the unit of a record carries, from its topic, raw properties and time."""
        if topic == SCHEDULE_TOPIC:
            level = find_property(properties, b"DELAY")
            number = whole_number(level or b"") or 0
            if number > 0:
                return self.deliver_at(number, store_timestamp)
        elif topic == TIMER_TOPIC:
            out_ms = whole_number(find_property(properties, b"TIMER_OUT_MS") or b"")
            if out_ms is not None and out_ms >= 0:
                is_recall = find_property(properties, b"TIMER_DEL_UNIQKEY") is not None
                return -out_ms if is_recall else out_ms
        return tags_code(find_property(properties, b"TAGS"))


def _delay_ms(word: str) -> int:
    unit, number = UNITS_MS.get(word[-1]), natural_number(word[:-1])
    if unit is None or number is None:
        raise ValueError(f"messageDelayLevel holds {word!r}, which is no delay such as 10s or 2h")
    return number * unit


def default_root() -> str:
    """`$HOME/store`. Raises ValueError for a user without a home."""
    try:
        return str(Path.home() / DEFAULT_ROOT)
    except RuntimeError as error:
        raise ValueError("storePathRootDir is needed: this user has no home") from error


class StoreConfig(Section, frozen=True, kw_only=True, rename="camel"):
    """Of the commit log, its queues, its index and their upkeep."""

    RANGES: ClassVar[Ranges] = {
        "mapped_file_size_commit_log": (SEGMENT_SIZE_MIN, None),  # bytes
        "mapped_file_size_consume_queue": (UNIT_SIZE, None),  # bytes
        "flush_interval_commit_log": (1, None),  # ms
        "flush_interval_consume_queue": (1, None),  # ms
        "timer_max_delay_sec": (1, None),
        "file_reserved_time": (1, None),  # hours
        "delete_file_batch_max": (1, None),
        "scrub_bytes_per_second": (0, None),
        "disk_max_used_space_ratio": (1, 100),  # percent
        "disk_space_clean_forcibly_ratio": (1, 100),
        "disk_space_warning_level_ratio": (1, 100),
    }
    WITHOUT_EFFECT = frozenset({"sync_flush_timeout"})  # slaveTimeout bounds the wait

    store_path_root_dir: str = msgspec.field(default_factory=default_root)
    store_path_commit_log: str = ""  # empty: <storePathRootDir>/commitlog
    mapped_file_size_commit_log: int = 1 << 30
    mapped_file_size_consume_queue: int = 300_000 * UNIT_SIZE
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    message_index_enable: bool = True
    max_message_size: int = 4 * 1024 * 1024  # bytes of one body
    enabled_append_prop_crc: bool = msgspec.field(name="enabledAppendPropCRC", default=True)
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

    timer_wheel_enable: bool = True
    timer_max_delay_sec: int = 259_200  # and never longer than fileReservedTime

    flush_disk_type: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = "ASYNC_FLUSH"
    ha_sync_flush: bool = False
    flush_interval_commit_log: int = 500  # ms
    flush_interval_consume_queue: int = 1000  # ms
    sync_flush_timeout: int = 5000  # ms

    file_reserved_time: int = 72  # hours
    delete_when: str = "04"  # hours of the day, separated by `;`
    disk_max_used_space_ratio: int = 75  # percent; above it, expired files go at any hour
    disk_space_clean_forcibly_ratio: int = 85  # percent; above it, files go regardless of age
    disk_space_warning_level_ratio: int = 90  # percent; above it, puts are refused
    clean_file_forcibly_enable: bool = True
    clean_resource_interval: int = 10_000  # ms
    delete_file_batch_max: int = 10

    max_transfer_bytes_on_message_in_memory: int = 256 * 1024
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_disk: int = 64 * 1024
    max_transfer_count_on_message_in_disk: int = 8
    access_message_in_memory_max_ratio: int = 40  # percent of the machine's memory
    os_page_cache_busy_timeout_ms: int = msgspec.field(
        name="osPageCacheBusyTimeOutMills", default=1000
    )
    max_msgs_num_batch: int = 64  # answers of one key query

    min_in_sync_replicas: int = 1
    slave_timeout: int = 3000  # ms
    ha_listen_port: int = 10912

    scrub_bytes_per_second: int = 4 << 20  # of the log's own background check; 0: off

    truncated_log_max_sets: int = 8  # how many cuts are kept aside
    truncated_log_max_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.store_path_root_dir.strip():
            raise ValueError("storePathRootDir is empty: name a folder, or leave the key out")
        if self.ha_sync_flush and self.flush_disk_type != "SYNC_FLUSH":
            raise ValueError("haSyncFlush needs flushDiskType SYNC_FLUSH")
        least = min(MESSAGE_SIZE_MIN, self.mapped_file_size_commit_log // 4)
        if self.max_message_size < least:
            raise ValueError(
                f"maxMessageSize is {self.max_message_size}, at least {least} bytes are allowed:"
                " the broker's own records need them"
            )
        self.delay_levels  # noqa: B018  raises if messageDelayLevel is no list of delays
        self.delete_hours  # noqa: B018  raises if deleteWhen is not a list of hours

    @property
    def puts_again_percent(self) -> int:
        """At most so much of a disk that counted as full is used when it takes puts again."""
        return self.disk_space_warning_level_ratio - 1

    @property
    def root(self) -> Path:
        return Path(self.store_path_root_dir)

    @property
    def commit_log_folder(self) -> Path:
        if self.store_path_commit_log:
            return Path(self.store_path_commit_log)
        return self.root / "commitlog"

    @property
    def sync_flush(self) -> bool:
        return self.flush_disk_type == "SYNC_FLUSH"

    @property
    def timer_max_delay_ms(self) -> int:
        """How far ahead a timed message may be due: the log must still have it then."""
        return min(self.timer_max_delay_sec, self.file_reserved_time * 3600) * 1000

    @property
    def delay_levels(self) -> DelayLevels:
        return DelayLevels(self.message_delay_level)

    @property
    def delete_hours(self) -> frozenset[int]:
        hours: set[int] = set()
        for part in filter(None, (piece.strip() for piece in self.delete_when.split(";"))):
            hour = natural_number(part, HOURS_OF_DAY - 1)
            if hour is None:
                raise ValueError(f"deleteWhen must list hours 00 to 23 by `;`, not {part!r}")
            hours.add(hour)
        return frozenset(hours)
