"""Finding single messages: by key (12) and by id (33). Origin: QueryMessageProcessor in Java."""

from __future__ import annotations

from broker.request_fields import number, text
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import BrokerRefusal
from remoting.command import RemotingCommand
from remoting.connection import Connection
from remoting.server import Processors
from store.message_store import MessageStore

UNIQUE_QUERY_MAX = 32


class QueryProcessor:
    """Answers with stored records, untouched, never from above confirmOffset (SAFETY G4)."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.QUERY_MESSAGE, self.by_key)
        processors.register(RequestCode.VIEW_MESSAGE_BY_ID, self.by_offset)

    def by_key(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """12. The hash may collide: callers check the key, as they must with Java."""
        unique = request.ext.get("_UNIQUE_KEY_QUERY", "false").lower() == "true"
        maximum = UNIQUE_QUERY_MAX if unique else number(request, "maxNum")
        found = self._store.query_message(
            text(request, "topic"),
            text(request, "key"),
            maximum,
            number(request, "beginTimestamp"),
            number(request, "endTimestamp"),
        )
        if not found.parts:
            raise BrokerRefusal(
                ResponseCode.QUERY_NOT_FOUND,
                f"no message of topic {request.ext['topic']} with key {request.ext['key']} here",
            )
        return RemotingCommand.response_to(
            request,
            ext={
                "indexLastUpdateTimestamp": str(found.index_last_update_timestamp),
                "indexLastUpdatePhyoffset": str(found.index_last_update_phyoffset),
            },
            body=b"".join(found.parts),
        )

    def by_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """33. The record that begins at a physical offset."""
        offset = number(request, "offset")
        record = self._store.look_message_by_offset(offset)
        if record is None:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR, f"no message begins at physical offset {offset}"
            )
        return RemotingCommand.response_to(request, body=bytes(record))
