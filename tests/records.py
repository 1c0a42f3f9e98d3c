"""Records as tests make them: every field by name."""

from batonmq.protocol.record import NewMessage, encode_record


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
