"""Admin calls that find stored messages."""

import asyncio

from batonmq.client.admin.requests import AdminRequests
from batonmq.client.errors import ClientError
from batonmq.client.instance.topic_route import topic_route
from batonmq.protocol.codes import LONG_MAX, UNIQUE_KEY_FIELD, RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.message import MessageExt
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.records.codec import decode_records

_NOT_FOUND = ResponseCode.QUERY_NOT_FOUND


class MessageAdmin:
    def __init__(self, requests: AdminRequests) -> None:
        self._requests = requests

    async def by_id(self, msg_id: str, topic: str = "") -> MessageExt | None:
        """The message with this offset message id, from the broker that the id names; None if it is
        gone.

        Raises ClientError for an invalid id."""
        try:
            address, offset = decode_offset_msg_id(msg_id)
        except ValueError as error:
            raise ClientError(
                f"{msg_id} is no offset message id ({error}): a unique key is looked up with "
                "`mqctl queryMsgByKey`"
            ) from error
        ext = {"offset": str(offset)}
        if topic:
            ext["topic"] = topic
        code = RequestCode.VIEW_MESSAGE_BY_ID
        try:
            body = await self._requests.find(address, code, ext, "finding a message", _NOT_FOUND)
        except ResponseError as error:
            if error.code == ResponseCode.SYSTEM_ERROR:
                return None  # so brokers, Java's too, answer for an offset that they do not have
            raise
        messages = decode_records(body or b"")
        return messages[0] if messages else None

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 64,
        begin_ms: int = 0,
        end_ms: int = LONG_MAX,
    ) -> list[MessageExt]:
        """Messages with that word in KEYS, stored in [`begin_ms`, `end_ms`] (wall clock), in order
        of store time. Brokers search by hash, so their results are checked here."""
        found = await self._query(topic, key, max_messages, begin_ms, end_ms, unique=False)
        return [m for m in found if key in m.keys.split()][:max_messages]

    async def by_unique_key(self, topic: str, key: str) -> MessageExt | None:
        """The message with this unique key (`SendResult.msg_id`); the first copy, if a retry during
        a failover stored it twice."""
        found = await self._query(topic, key, 32, 0, LONG_MAX, unique=True)
        return next((m for m in found if m.uniq_key == key), None)

    async def _query(
        self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int, *, unique: bool
    ) -> list[MessageExt]:
        requests = self._requests
        data = await requests.client.name_servers.route(topic, deadline_ms=requests.deadline_ms())
        ext = {
            "topic": topic,
            "key": key,
            "maxNum": str(max_num),
            "beginTimestamp": str(begin_ms),
            "endTimestamp": str(end_ms),
            UNIQUE_KEY_FIELD: "true" if unique else "false",
        }

        # Each master has an index of its own messages only.
        async def at(broker_name: str, address: str) -> list[MessageExt]:
            code = RequestCode.QUERY_MESSAGE
            body = await requests.find(address, code, ext, "looking up by key", _NOT_FOUND)
            found = decode_records(body or b"")
            for message in found:
                message.broker_name = broker_name  # a record does not name its broker group
            return found

        masters = topic_route(topic, data).masters()
        parts = await asyncio.gather(*(at(name, address) for name, address in masters.items()))
        found = [message for part in parts for message in part]
        return sorted(found, key=lambda m: (m.store_timestamp, m.physical_offset))
