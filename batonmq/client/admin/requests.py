"""Sends admin requests; errors say what to do."""

from collections.abc import Mapping
from typing import TypeVar

from batonmq.client.errors import ClientError, UnsupportedByBrokerError
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.json_body import Json
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.properties_text import has_line_break, property_text

J = TypeVar("J", bound=Json)


class AdminRequests:
    def __init__(self, client: ClientInstance, timeout_ms: int) -> None:
        self.client = client
        self.timeout_ms = timeout_ms

    def deadline_ms(self) -> int:
        return boot_ms() + self.timeout_ms

    async def ask(
        self,
        address: str,
        code: RequestCode,
        ext: dict[str, str],
        what: str,
        *,
        body: bytes = b"",
        also: frozenset[int] = frozenset(),
        timeout_ms: int | None = None,
    ) -> RemotingCommand:
        """Returns a reply with code 0 or one of `also`. `what`: the subject of error texts.

        Raises ResponseError, UnsupportedByBrokerError (code 3), ConnectError,
        RequestTimeoutError."""
        request = RemotingCommand.request(code, ext, body)
        reply = await self.client.remoting.invoke(address, request, timeout_ms or self.timeout_ms)
        if reply.code == ResponseCode.SUCCESS or reply.code in also:
            return reply
        if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedByBrokerError(what, code, address)
        raise ResponseError(reply.code, reply.remark, address)

    async def read(
        self, kind: type[J], address: str, code: RequestCode, ext: dict[str, str], what: str
    ) -> J:
        """The body of a reply. Raises as `ask`, and RemoteProtocolError for another body."""
        return kind.decode((await self.ask(address, code, ext, what)).body)

    async def find(
        self, address: str, code: RequestCode, ext: dict[str, str], what: str, absent: ResponseCode
    ) -> bytes | None:
        """The body of a reply; None if its code is `absent`. Raises as `ask`."""
        reply = await self.ask(address, code, ext, what, also=frozenset({absent}))
        return reply.body if reply.code == ResponseCode.SUCCESS else None

    async def change_settings(
        self, address: str, code: RequestCode, settings: Mapping[str, str], what: str
    ) -> str:
        """Changes settings; returns the broker's warning or "". Raises ClientError for a line
        break, and as `ask`."""
        for key, value in settings.items():
            if has_line_break(key) or has_line_break(value):
                raise ClientError(f"{key!r} = {value!r}: a setting is one line")
        reply = await self.ask(address, code, {}, what, body=property_text(settings).encode())
        return reply.remark or ""
