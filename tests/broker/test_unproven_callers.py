"""Where anybody passes, history and audit log name only users whose signature was right."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc.aio
import pytest
from msgspec import structs

from batonmq.auth.signature import Credentials, Signer
from batonmq.controller.service import ControllerService
from batonmq.proto.controller.v1 import controller_pb2
from batonmq.proto.controller.v1.controller_pb2_grpc import ControllerServiceStub
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.runtime.clock import wall_ms
from tests.broker import test_users
from tests.broker.test_users import ADMIN, AUTH, controller_with_users

CODE = RequestCode.CONTROLLER_ELECT_MASTER
UNKNOWN = ResponseCode.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED


@pytest.mark.parametrize(
    "passes", [{"audit_only": True}, {"authentication_whitelist": str(CODE.value)}], ids=str
)
async def test_a_name_that_nobody_proved_is_not_written_down(
    passes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = structs.replace(AUTH, **passes)
    monkeypatch.setattr(test_users, "AUTH", auth)
    wrong = Credentials(access_key="admin", secret_key="wrong")
    names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
    reasons, users = [], []
    async with controller_with_users(tmp_path) as server:
        assert isinstance(server.service, ControllerService)
        requests = server.service.requests
        submit = requests.submit

        async def submitted(command: Any) -> Any:
            reasons.append(command.reason)
            return await submit(command)

        peer = server.service.config.self_peer.grpc_address
        with (
            patch.object(requests, "submit", submitted),
            patch.object(server.guard.audit, "changed", lambda user, *_: users.append(user)),
        ):
            async with grpc.aio.insecure_channel(peer) as channel:
                stub: Any = ControllerServiceStub(channel)  # type: ignore[no-untyped-call]
                for who in (wrong, ADMIN):
                    assert (await server.ask(who, CODE, names)).code == UNKNOWN
                    request = controller_pb2.ElectMasterRequest(broker_name="broker-a")
                    signed = Signer(who).call_metadata(wall_ms())
                    reply = await stub.ElectMaster(request, metadata=signed, timeout=5)
                    assert reply.status.code == UNKNOWN
                    me = await server.ask(who, RequestCode.BATON_WHO_AM_I)
                    assert (b"admin" in me.body) is (who is ADMIN)
    assert users == ["", "", "admin", "admin"]
    asked = [f"asked by {way} from 127.0.0.1" for way in ("remoting", "gRPC")]
    assert reasons == [*asked, *(f"{each} as admin" for each in asked)]
