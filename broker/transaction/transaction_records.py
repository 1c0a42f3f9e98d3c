"""The records of a transaction: half message, op, committed message, and the copy for a check.

Each is made of the one before, so a message keeps its body, properties and birth whatever becomes
of it. Pure. Origin: Java `TransactionalMessageBridge`, `EndTransactionProcessor`.
"""

from __future__ import annotations

from typing import Final

from batonmq.broker.transaction.transaction_table import Half, op_body
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.properties import (
    CHECK_IMMUNITY_TIME_IN_SECONDS,
    PGROUP,
    REAL_QID,
    REAL_TOPIC,
    TAGS,
    TRAN_MSG,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_ID,
    decode_properties,
    encode_properties,
    find_property,
)
from batonmq.protocol.record import Buffer, NewMessage, message_to_store, scan_record
from batonmq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_MASK
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC

QUEUE: Final = 0
OP_TAG: Final = "d"
IMMUNITY_DEFAULT_MS: Final = 6000
_WAITS: Final = ("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")


def is_half(properties: bytes) -> bool:
    """Whether a sent message is to wait for the end of a transaction. Raises BrokerRefusal 13 for
    one that is to wait for a time as well."""
    found = decode_properties(properties)
    if found.get(TRAN_MSG, "").lower() != "true":
        return False
    waits = [name for name in _WAITS if found.get(name, "0") not in ("0", "-1")]
    if waits:
        raise BrokerRefusal(
            ResponseCode.MESSAGE_ILLEGAL,
            f"property TRAN_MSG together with {waits[0]}: a message of a transaction cannot be"
            " delayed; it was not stored",
        )
    return True


def make_half(message: NewMessage) -> None:
    """Turns a sent message into its half message, in place."""
    properties = decode_properties(message.properties)
    properties |= {
        TRANSACTION_ID: (message.uniq_key or b"").decode(),
        REAL_TOPIC: message.topic,
        REAL_QID: str(message.queue_id),
    }
    message.properties = encode_properties(properties).encode()
    message.sys_flag &= ~TRANSACTION_MASK
    message.topic, message.queue_id = TRANS_HALF_TOPIC, QUEUE


def half_of(record: Buffer) -> Half:
    """What the table needs of a half message's record."""
    head = scan_record(record)
    assert head is not None, "units point to whole records"
    properties = head.properties
    immunity = find_property(properties, CHECK_IMMUNITY_TIME_IN_SECONDS.encode())
    checks = find_property(properties, TRANSACTION_CHECK_TIMES.encode()) or b"0"
    return Half(
        head.queue_offset,
        head.physical_offset,
        head.size,
        find_property(properties, b"UNIQ_KEY") or b"",
        (find_property(properties, PGROUP.encode()) or b"").decode("utf-8", "replace"),
        head.store_timestamp,
        int(checks) if checks.isdigit() else 0,
        immunity_ms(immunity.decode("utf-8", "replace")) if immunity is not None else None,
    )


def immunity_ms(text: str) -> int:
    """How long after its birth a half is not checked; -1, and what is no number, mean 6 s."""
    text = text.strip()
    return int(text) * 1000 if text.isascii() and text.isdecimal() else IMMUNITY_DEFAULT_MS


def real_place(properties: bytes) -> tuple[str, int] | None:
    """Topic and queue to which a half message belongs; None if its properties do not say."""
    topic, queue_id = (find_property(properties, name.encode()) for name in (REAL_TOPIC, REAL_QID))
    if topic is None or queue_id is None or not queue_id.isdigit():
        return None
    return topic.decode("utf-8", "replace"), int(queue_id)


def committed(record: Buffer, phy_offset: int, place: tuple[str, int]) -> NewMessage:
    """The message that a commit puts into its own topic and queue."""
    message = message_to_store(record)
    message.topic, message.queue_id = place
    message.sys_flag = message.sys_flag & ~TRANSACTION_MASK | TRANSACTION_COMMIT
    message.prepared_transaction_offset = phy_offset
    return message


def checked_once_more(record: Buffer, checks: int) -> NewMessage:
    """The copy of a half message that is checked now, for the `checks`-th time."""
    message = message_to_store(record)
    properties = decode_properties(message.properties)
    properties[TRANSACTION_CHECK_TIMES] = str(checks)
    message.properties = encode_properties(properties).encode()
    return message


def op(offsets: list[int], now_ms: int) -> NewMessage:
    """The record that ends the half messages at these queue offsets."""
    properties = encode_properties({TAGS: OP_TAG}).encode()
    body = op_body(offsets)
    return NewMessage(
        TRANS_OP_HALF_TOPIC,
        QUEUE,
        body,
        properties,
        tags_code(OP_TAG),
        None,
        None,
        now_ms,
        bytes(8),
    )
