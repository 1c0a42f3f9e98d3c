"""A second client: the ordinary `batonmq.Producer`, as an application would use it.

`python -m lab.faults.client` sends one message after the other in several tasks until its input
ends, then prints one JSON line: how many were sent, the errors of those that failed, and the
longest time between two acknowledged sends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Final

import uvloop

from batonmq import ClientOptions, ClientTls, Credentials
from batonmq.client.errors import ClientError
from batonmq.client.producer.producer import Producer
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import Message
from lab.cluster import frames
from lab.cluster.processes import input_ended

TOPIC: Final = "FaultsClient"
TASKS: Final = 2
PAUSE_S: Final = 0.002


class SendTotals:
    """What the tasks count together. Times in seconds."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.sent = 0
        self.failed: list[str] = []
        self.gap_s = 0.0
        self.slowest_s = 0.0
        self._last_s = time.monotonic()

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._producer.send(Message(TOPIC, b"c" * 128))
            except (BatonError, ClientError) as error:
                self.failed.append(str(error))
            else:
                now = time.monotonic()
                self.sent += 1
                self.slowest_s = max(self.slowest_s, now - began)
                self.gap_s = max(self.gap_s, now - self._last_s)
                self._last_s = now
            await asyncio.sleep(PAUSE_S)


def _options() -> ClientOptions:
    if not (folder := frames.tls_folder()):
        return ClientOptions()
    user = Credentials(access_key=frames.USER, secret_key=frames.SECRET)
    return ClientOptions(tls=ClientTls(trust_cert_path=str(folder / "ca.pem")), credentials=user)


async def _run(name_servers: str) -> None:
    async with Producer(
        "faults_client", name_servers=name_servers, client_options=_options()
    ) as producer:
        await producer.send(Message(TOPIC, b"first"))
        print("ready", flush=True)
        sending = SendTotals(producer)
        tasks = [asyncio.create_task(sending.run()) for _ in range(TASKS)]
        await input_ended().wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        counts = {"sent": sending.sent, "failed": sending.failed}
        times = {"gapS": sending.gap_s, "slowestS": sending.slowest_s}
        print(json.dumps(counts | times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.faults.client")
    parser.add_argument("name_servers", help="host:port, several joined by ';'")
    uvloop.run(_run(parser.parse_args().name_servers))


if __name__ == "__main__":
    main()
