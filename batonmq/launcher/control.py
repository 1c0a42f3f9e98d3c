"""How `mqctl up` and `mqctl secure` talk to a running `batonmq up`: one JSON object and its answer,
a line each, over the socket `run/up.sock` (mode 0600).

`{"do": "add", "group": "broker-a"}` ("": a new group) and `{"do": "remove", "address": …}` are
answered with `name`, `address` and `group` of the broker, `{"do": "secure", "stage": …}` with
`stage`; each with `error` if it was not done.
"""

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

SOCKET: Final = "up.sock"
LINE_MAX: Final = 4096
READ_S: Final = 5.0
ANSWER_S: Final = 30.0
"""A broker that is removed may need ten seconds to end."""

Answer = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, str]]]


@contextmanager
def _short_name(folder: Path) -> Iterator[str]:
    """The socket's name by an open folder: a path may be longer than such a name."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


async def serve(folder: Path, answer: Answer) -> asyncio.Server:
    """`folder`: `run` in the data folder, which is locked by this process. Raises OSError."""
    (folder / SOCKET).unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short_name(folder) as name:
            sock.bind(name)
        (folder / SOCKET).chmod(0o600)  # before it listens
        sock.listen()
    except OSError:
        sock.close()
        raise

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_S):
                asked = json.loads(await reader.readline())
            said = await answer(asked) if isinstance(asked, dict) else {"error": "not an object"}
            writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError):
            pass  # no request came in time, or the client has gone
        finally:
            writer.close()

    return await asyncio.start_unix_server(talk, sock=sock, limit=LINE_MAX)


async def ask(folder: Path, asked: Mapping[str, str]) -> Mapping[str, str]:
    """What the `batonmq up` with this `run` folder answers. Raises OSError if none does."""
    with _short_name(folder) as name:
        reader, writer = await asyncio.open_unix_connection(name)
    try:
        writer.write(json.dumps(asked).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
    except TimeoutError:
        raise TimeoutError(f"no answer within {ANSWER_S:g} s: is it stopped?") from None
    finally:
        writer.close()
    if not line:
        raise ConnectionResetError("it closed the connection without an answer")
    found: Mapping[str, str] = json.loads(line)
    return found
