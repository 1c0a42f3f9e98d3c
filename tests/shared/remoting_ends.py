"""Ends of remoting connections over loopback sockets; they are closed after their test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from batonmq.remoting.connection import Handler, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer

C = TypeVar("C", bound=RemotingClient)


def handled(code: int, handler: Handler) -> Processors:
    """Of this code only."""
    processors = Processors()
    processors.register(code, handler)
    return processors


@asynccontextmanager
async def serving(server: RemotingServer) -> AsyncIterator[str]:
    """The address that it listens on."""
    try:
        yield f"127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    finally:
        await server.close()
        assert not server.connections


@asynccontextmanager
async def dialling(client: C) -> AsyncIterator[C]:
    try:
        yield client
    finally:
        await client.close()
        assert not client.connections
