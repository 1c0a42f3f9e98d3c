"""A controller of RocketMQ as a broker sees it: it answers by remoting, and pushes nothing."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingServer


@dataclass
class Record:
    address: str
    check_code: str
    alive: bool = False


class JavaController:
    """Its record of the group is plain attributes, for a test to set; `refuse` answers a code
    with another one instead, `bodies` with that body."""

    def __init__(self) -> None:
        self.replicas: dict[int, Record] = {}
        self.master: int | None = None
        self.key = (0, 0)
        self.members: list[int] = []
        self.leads = True
        self.leader = ""
        self.next_id = 1
        self.heartbeats: list[dict[str, str]] = []
        self.asked: list[int] = []
        self.refuse: dict[int, ResponseCode] = {}
        self.bodies: dict[int, bytes] = {}
        self.elected: Callable[[RemotingCommand], None] = lambda request: None
        self.address = ""
        self._changed = asyncio.Event()
        processors = Processors()
        processors.default(self._answer)
        self._server = RemotingServer(processors, name="java-controller")

    async def listen(self) -> None:
        port = await self._server.listen("127.0.0.1", 0)
        self.address = self.leader = f"127.0.0.1:{port}"

    async def close(self) -> None:
        await self._server.close()

    async def until(self, found: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not found():
                self._changed.clear()
                await self._changed.wait()

    def _answer(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        self.asked.append(request.code)
        self._changed.set()
        code = self.refuse.get(request.code)
        if code is not None:
            return RemotingCommand.response_to(request, code, "refused by the test")
        if request.code == RequestCode.CONTROLLER_GET_METADATA_INFO:
            ext = {"isLeader": self.leads, "controllerLeaderAddress": self.leader}
            return RemotingCommand.response_to(request, ext=ext)
        if request.code == RequestCode.BROKER_HEARTBEAT:
            self.heartbeats.append(dict(request.ext))
            return RemotingCommand.response_to(request)
        if not self.leads:
            return RemotingCommand.response_to(request, ResponseCode.CONTROLLER_NOT_LEADER)
        return self._lead(request)

    def _lead(self, request: RemotingCommand) -> RemotingCommand:
        if (body := self.bodies.get(request.code)) is not None:
            return RemotingCommand.response_to(request, body=body)
        match request.code:
            case RequestCode.CONTROLLER_GET_SYNC_STATE_DATA:
                return RemotingCommand.response_to(request, body=self._group())
            case RequestCode.CONTROLLER_GET_NEXT_BROKER_ID:
                return RemotingCommand.response_to(request, ext={"nextBrokerId": self.next_id})
            case RequestCode.CONTROLLER_APPLY_BROKER_ID:
                return self._apply(request)
            case RequestCode.CONTROLLER_ELECT_MASTER:
                self.elected(request)
        return RemotingCommand.response_to(request)

    def _apply(self, request: RemotingCommand) -> RemotingCommand:
        broker_id = request.require_int("appliedBrokerId")
        check_code = request.require("registerCheckCode")
        known = self.replicas.get(broker_id)
        if known is not None and known.check_code != check_code:
            return RemotingCommand.response_to(request, ResponseCode.CONTROLLER_BROKER_ID_INVALID)
        if known is None:
            self.replicas[broker_id] = Record(check_code.partition(";")[0], check_code)
            self.next_id += 1
        return RemotingCommand.response_to(request)

    def _group(self) -> bytes:
        if not self.replicas:
            return b'{"replicasInfoTable":{}}'
        described = {
            broker_id: {
                "alive": one.alive,
                "brokerAddress": one.address,
                "brokerId": broker_id,
                "brokerName": "broker-a",
            }
            for broker_id, one in self.replicas.items()
        }
        info: dict[str, object] = {
            "masterEpoch": self.key[0],
            "syncStateSetEpoch": self.key[1],
            "inSyncReplicas": [one for i, one in described.items() if i in self.members],
            "notInSyncReplicas": [one for i, one in described.items() if i not in self.members],
        }
        if self.master is not None:
            info["masterBrokerId"] = self.master
            info["masterAddress"] = self.replicas[self.master].address
        return json.dumps({"replicasInfoTable": {"broker-a": info}}).encode()
