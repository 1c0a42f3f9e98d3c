"""One admin request to one address, with errors that say what to do."""

from collections.abc import Callable

from batonmq.errors import UnsupportedByBrokerError
from protocol.codes import ResponseCode
from protocol.errors import ResponseError
from remoting.client import RemotingClient
from remoting.command import RemotingCommand


class AdminCall:
    def __init__(self, remoting: Callable[[], RemotingClient], timeout_ms: int) -> None:
        self._remoting = remoting
        self.timeout_ms = timeout_ms

    async def ask(
        self,
        address: str,
        request: RemotingCommand,
        what: str,
        *,
        also: frozenset[int] = frozenset(),
        final: bool = True,
    ) -> RemotingCommand:
        """A reply with code 0 or one of `also`.

        Raises ResponseError, UnsupportedByBrokerError (code 3), ConnectError,
        RequestTimeoutError. `final` False: another address is tried next, so wait only half.
        """
        timeout_ms = self.timeout_ms if final else max(self.timeout_ms // 2, 1)
        reply = await self._remoting().invoke(address, request, timeout_ms)
        if reply.code == ResponseCode.SUCCESS or reply.code in also:
            return reply
        if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnsupportedByBrokerError(what, request.code, address)
        raise ResponseError(reply.code, reply.remark, address)
