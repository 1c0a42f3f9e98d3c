"""Bits of `sysFlag` in messages, in pull requests and of topics. Origin: Java `MessageSysFlag`,
`PullSysFlag`, `TopicSysFlag`, `CompressionType`."""

from typing import Final

# Message.
COMPRESSED: Final = 0x1
TRANSACTION_NOT_TYPE: Final = 0x0
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC
TRANSACTION_MASK: Final = 0xC
BORN_HOST_V6: Final = 0x10
STORE_HOST_V6: Final = 0x20
INNER_BATCH: Final = 0x80
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300

# Pull request.
PULL_COMMIT_OFFSET: Final = 0x1
PULL_SUSPEND: Final = 0x2
PULL_SUBSCRIPTION: Final = 0x4
PULL_CLASS_FILTER: Final = 0x8

# Topic: used by clients in unit mode; has subscriptions of such clients.
UNIT_TOPIC: Final = 0x1
UNIT_SUB_TOPIC: Final = 0x2


def has_queue_unit(sys_flag: int) -> bool:
    """Whether such a record gets a place in its consume queue (prepared and rollback do not)."""
    return sys_flag & TRANSACTION_MASK in (TRANSACTION_NOT_TYPE, TRANSACTION_COMMIT)
