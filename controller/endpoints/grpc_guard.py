"""Before the handlers of the gRPC port: who signed a call, and whether that user may."""

from typing import Any, Final
from urllib.parse import unquote

import grpc
import grpc.aio

from batonmq.auth.guard import Guard
from batonmq.auth.rights import RIGHTS
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BrokerRefusal

_SAME_AS: Final = {
    "RegisterBroker": RequestCode.CONTROLLER_REGISTER_BROKER,
    "AlterSyncStateSet": RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET,
    "ElectMaster": RequestCode.CONTROLLER_ELECT_MASTER,
    "GetReplicaInfo": RequestCode.CONTROLLER_GET_REPLICA_INFO,
    "GetHistory": RequestCode.CONTROLLER_GET_METADATA_INFO,
    "ReportEvent": RequestCode.BROKER_HEARTBEAT,
    "BrokerSession": RequestCode.BROKER_HEARTBEAT,
}
"""Method -> the remoting request whose right it needs."""


class SignedCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets only calls of users pass that may make them, by the table of remoting requests."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        method = details.method.rpartition("/")[2]
        # gRPC answers UNIMPLEMENTED: a method without a right in the table is closed to all.
        if handler is None or method not in _SAME_AS:
            return None

        code = _SAME_AS[method]

        async def call(request: Any, context: Any) -> Any:
            group = getattr(request, "broker_name", "")
            try:
                user = self._check(code, context, group)
            except BrokerRefusal as error:
                return getattr(pb, f"{method}Reply")(status=_status(error))
            answer = handler.unary_unary(request, context)
            # The audit log has what changes something; reads would fill it.
            if not RIGHTS[code].changes:
                return await answer
            group_text = f"group={group}"
            return await self._guard.noted(
                user, peer_of(context), code, group_text, answer, lambda reply: reply.status.code
            )

        async def session(messages: Any, context: Any) -> None:
            try:
                self._check(code, context, "")
            except BrokerRefusal as error:
                # In a message, as every refusal of a session: a status would look like a cut link.
                refused = pb.Refused(status=_status(error))
                await context.write(pb.ControllerMessage(refused=refused))
            else:
                await handler.stream_stream(messages, context)

        coders = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(call, *coders)
        return grpc.stream_stream_rpc_method_handler(session, *coders)

    def _check(self, code: int, context: Any, broker_name: str) -> str:
        metadata = context.invocation_metadata()
        return self._guard.check_call(code, metadata, peer_of(context), broker_name)


def peer_of(context: Any) -> str:
    """As in remoting; gRPC says ipv4:10.0.0.1:4711 and ipv6:%5B::1%5D:4711."""
    return unquote(context.peer().partition(":")[2])


def _status(refusal: BrokerRefusal) -> pb.Status:
    return pb.Status(code=refusal.code, remark=refusal.remark)
