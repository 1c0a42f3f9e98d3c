"""Records and messages as tests make them."""

from batonmq.protocol.message import MessageExt
from batonmq.protocol.records.codec import NewMessage, encode_record


def record_of(
    *,
    topic: bytes,
    queue_offset: int,
    physical_offset: int,
    store_timestamp: int,
    store_host: bytes,
    append_prop_crc: bool,
    **message: object,
) -> bytes:
    """The bytes of one record; `message` are the fields of a NewMessage."""
    fields = {"tags_code": 0, "keys": None, "uniq_key": None} | message
    return encode_record(
        NewMessage(topic="", **fields),  # type: ignore[arg-type]
        topic,
        queue_offset,
        physical_offset,
        store_timestamp,
        store_host,
        append_prop_crc,
    )


def message(offset: int, body: bytes = b"x" * 10, **properties: str) -> MessageExt:
    """A message as a consumer has it, at that offset of queue 0 of topic T."""
    return MessageExt(
        topic="T",
        queue_id=0,
        queue_offset=offset,
        physical_offset=offset * 100,
        store_size=100,
        msg_id=f"id{offset}",
        body=body,
        body_crc=0,
        flag=0,
        sys_flag=0,
        born_timestamp=0,
        born_host="h:1",
        store_timestamp=0,
        store_host="h:1",
        reconsume_times=0,
        prepared_transaction_offset=0,
        properties=properties,
    )
