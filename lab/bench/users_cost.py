"""What users cost a send of 1 KiB: `python -m lab.bench.users_cost`.

One process, no sockets: the guard before a handler that does nothing, against the signature alone.
The smallest of many rounds, so that other work on the machine counts little.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from batonmq.auth.config import AuthConfig
from batonmq.auth.guard import Guard
from batonmq.auth.policy import AclInfo, PolicyEntry, PolicyInfo, User, merged
from batonmq.auth.signature import Credentials, Signer, SigningKey, signed_send
from batonmq.protocol.codes import RequestCode
from batonmq.remoting.command import TYPE_JSON, RemotingCommand, encode_header
from batonmq.remoting.connection import Processors

CODE: Final = RequestCode.SEND_MESSAGE_V2
CALLS: Final = 10_000
ROUNDS: Final = 25
SECRET: Final = "12345678"
FIELDS: Final[dict[str, str | int | bool | None]] = {
    "a": "producers", "b": "Orders", "c": "TBW102", "d": 4, "e": 3, "f": 0, "g": 1795531200000,
    "h": 0, "i": "UNIQ_KEY\x017F0000010A8C18B4AAC20F0A1B2C0000\x02WAIT\x01true\x02TAGS\x01coffee",
    "j": 0, "k": False, "l": 0, "m": False, "n": "broker-a",
}  # fmt: skip


def _micros(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


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
    processors.register_raw(CODE, lambda *_: None)
    guard.stand_before(processors)
    return processors.raw_handlers[CODE]


def main() -> None:
    request = RemotingCommand.request(CODE, FIELDS, b"x" * 1024)
    Signer(Credentials(access_key="shop", secret_key=SECRET))(request)
    header, body = encode_header(request), request.body
    connection: Any = SimpleNamespace(attachments={}, peer="127.0.0.1:1")
    handler = _guarded()
    handler(connection, TYPE_JSON, header, body)  # from now on it is decided
    signed = signed_send(header)
    assert signed is not None
    key, (_, _, signature, text) = SigningKey(SECRET), signed
    whole = _micros(lambda: handler(connection, TYPE_JSON, header, body))
    proof = _micros(lambda: key.proves_text(text, body, signature))
    fields = _micros(lambda: signed_send(header))
    print(f"a send behind the guard      {whole:6.2f} us")
    print(f"  its signature              {proof:6.2f} us")
    print(f"  reading its fields         {fields:6.2f} us")
    print(f"  the rest                   {whole - proof - fields:6.2f} us")


if __name__ == "__main__":
    main()
