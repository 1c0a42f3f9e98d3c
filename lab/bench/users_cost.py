"""What users cost a send of 1 KiB: `python -m lab.bench.users_cost`.

One process, no sockets: the guard before a handler that decodes the header, against that handler
alone.
Medians of the fastest tenth of many short rounds: within a round the machine has one speed, so the
differences hold also where its speed changes. In processor time, so other work counts little.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from batonmq.auth.config import AuthConfig
from batonmq.auth.guard import Guard
from batonmq.auth.policy import AclInfo, PolicyEntry, PolicyInfo, User, merged
from batonmq.auth.signature import Credentials, Signer, SigningKey, signed_send, signed_text
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import TYPE_JSON, RemotingCommand, encode_header
from batonmq.remoting.connection import Processors
from batonmq.remoting.headers import SendFrame, decode_send

CODE: Final = RequestCode.SEND_MESSAGE_V2
CALLS: Final = 200
ROUNDS: Final = 1_000
SECRET: Final = "12345678"
FIELDS: Final[dict[str, str | int | bool | None]] = {
    "a": "producers", "b": "Orders", "c": "TBW102", "d": 4, "e": 3, "f": 0, "g": 1795531200000,
    "h": 0, "i": "UNIQ_KEY\x017F0000010A8C18B4AAC20F0A1B2C0000\x02WAIT\x01true\x02TAGS\x01coffee",
    "j": 0, "k": False, "l": 0, "m": False, "n": "broker-a",
}  # fmt: skip


def _micros(*calls: Callable[[], object]) -> list[float]:
    rounds = [
        [timeit.timeit(call, timer=time.thread_time, number=CALLS) for call in calls]
        for _ in range(ROUNDS)
    ]
    fastest = sorted(rounds, key=sum)[: ROUNDS // 10]
    return [statistics.median(times) / CALLS * 1e6 for times in zip(*fastest, strict=True)]


def _guarded() -> Callable[..., object]:
    """The raw handler of a send behind a guard that knows one user."""
    inner = '{"accessKey":"node","secretKey":"of-the-nodes"}'
    config = AuthConfig(
        authentication_enabled=True,
        authorization_enabled=True,
        inner_client_authentication_credentials=inner,
    )
    guard = Guard(config, "C", None)
    entry = PolicyEntry(resource="Topic:Orders", actions=["Pub"])
    acl = AclInfo(policies=[PolicyInfo(entries=[entry])])
    guard.book("broker-a", "C").replace(
        {"shop": merged(User(username="shop", password=SECRET), acl)}
    )
    processors = Processors()
    processors.register_send(CODE, _decoding)
    guard.stand_before(processors)
    return processors.raw_handlers[CODE]


def _decoding(
    _: object, kind: int, header: bytes, __: bytes, request: SendFrame | None = None
) -> None:
    if request is None:
        decode_send(kind, header)


def main() -> None:
    request = RemotingCommand.request(CODE, FIELDS, b"x" * 1024)
    plain, body = encode_header(request), request.body
    Signer(Credentials(access_key="shop", secret_key=SECRET))(request)
    header = encode_header(request)
    connection: Any = SimpleNamespace(attachments={}, peer="127.0.0.1:1")
    handler = _guarded()
    handler(connection, TYPE_JSON, header, body)  # from now on it is decided
    signed = signed_send(header)
    assert signed is not None
    key, signature = SigningKey(SECRET), signed.ext.signature
    # In turn, so that other work on the machine counts alike.
    unsigned, proof, whole = _micros(
        lambda: _decoding(connection, TYPE_JSON, plain, body),
        lambda: key.proves_text(signed_text(signed.ext), body, signature),
        lambda: handler(connection, TYPE_JSON, header, body),
    )
    print(f"an unsigned send's header    {unsigned:6.2f} us")
    print(f"a signed one with the guard  {whole:6.2f} us")
    print(f"  its signature              {proof:6.2f} us")
    print(f"  the rest that users cost   {whole - proof - unsigned:6.2f} us")


if __name__ == "__main__":
    main()
