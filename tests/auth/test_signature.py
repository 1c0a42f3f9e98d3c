"""Signatures of requests, against bytes that RocketMQ 5.3.3 made, and what a client sends."""

import hmac
import itertools
import json
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.auth.config import AuthConfig
from batonmq.auth.given import credentials_in, credentials_of, environment_of
from batonmq.auth.guard import Guard
from batonmq.auth.policy import User
from batonmq.auth.signature import (
    CallSignature,
    Credentials,
    Signer,
    SigningKey,
    call_signature,
    signed_send,
    signed_text,
)
from batonmq.controller.main import guard_of
from batonmq.mqctl.secret_rotation import advance
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.errors import BatonError, BrokerRefusal
from batonmq.remoting.command import TYPE_JSON, RemotingCommand, decode_frame
from batonmq.remoting.connection import Connection
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.remoting.headers import decode_pull, decode_send
from tests.shared.remoting_ends import dialling, handled, serving

CREDENTIALS = "inner_client_authentication_credentials_file"
JAVA = {"topic": "T1", "a": "x", "B": "up", "AccessKey": "AK"}


def test_the_signature_of_the_stock_client() -> None:
    fields = JAVA | {"Signature": "EAjbcMejpuDbwjOl4ASUg4plIS8="}
    assert SigningKey("12345678").proves(fields, b"body")
    assert not SigningKey("12345678").proves(fields, b"bodY")
    assert not SigningKey("12345679").proves(fields, b"body")
    assert not SigningKey("12345678").proves(fields | {"b": "more"}, b"body")
    assert not SigningKey("12345678").proves(JAVA, b"body")


@given(st.text(min_size=1), st.dictionaries(st.text(), st.text()), st.binary())
def test_a_prepared_key_signs_as_hmac_does(
    secret: str, fields: dict[str, str], body: bytes
) -> None:
    fields.pop("Signature", None)
    text = "".join(value for _, value in sorted(fields.items())).encode()
    known = b64encode(hmac.digest(secret.encode(), text + body, "sha1")).decode()
    assert SigningKey(secret).proves(fields | {"Signature": known}, body)


@given(st.text(st.characters(categories=["Cs", "L", "P"])), st.binary())
def test_any_text_of_a_stranger_is_refused_without_an_error(text: str, body: bytes) -> None:
    assert not SigningKey("secret").proves({"a": text, "Signature": text}, body)


HEX = "744D438196AF86606D44B8C9A7C8E0E0B2FFB22B"


@pytest.mark.parametrize(
    "header",
    [
        f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature={HEX}",
        f"MQv2-HMAC-SHA1 Credential=AK/cn/Rocketmq,SignedHeaders=x-mq-date-time,Signature={HEX}",
        f"MQv2-HMAC-SHA1  Signature={HEX.lower()} , Credential=AK/",
    ],
)
def test_the_signature_of_stock_clients_of_grpc(header: str) -> None:
    """The spellings of the Java, C++ and Go clients."""
    date = ("x-mq-date-time", "20260101T000000Z")
    call = call_signature([date, ("authorization", header), ("grpc-bin", b"1")])
    assert call is not None and call.user == "AK"
    assert SigningKey("12345678").proves_call(call)
    assert not SigningKey("12345679").proves_call(call)
    assert not SigningKey("12345678").proves_call(call._replace(signed="20260101T000001Z"))
    assert call_signature([("authorization", header)]) is None
    other = ("x-mq-date-time", "AKT1xup")  # the signed text of a request, seen on the way
    assert call_signature([other, ("authorization", header)]) is None
    assert call_signature([date, ("authorization", header.removeprefix("MQv2-"))]) is None


_DATE = ("x-mq-date-time", "20260101T000000Z")


@given(st.text(), st.text())
def test_any_metadata_of_a_stranger_proves_nothing(header: str, digest: str) -> None:
    call = call_signature([_DATE, ("authorization", f"MQv2-HMAC-SHA1 {header}")])
    assert call is None or not SigningKey("secret").proves_call(call)
    assert not SigningKey("secret").proves_call(CallSignature("u", header, digest))


def test_our_calls_are_signed_as_stock_ones_are() -> None:
    signer = Signer(Credentials(access_key="AK", secret_key="12345678"))
    stock = f"MQv2-HMAC-SHA1 Credential=AK, SignedHeaders=x-mq-date-time, Signature={HEX}"
    assert dict(signer.call_metadata(1_767_225_600_000)) == {
        "x-mq-date-time": "20260101T000000Z",
        "authorization": stock,
    }


def test_a_request_that_is_sent_again_is_signed_again() -> None:
    sign = Signer(Credentials(access_key="AK", secret_key="12345678"))
    shared = {"topic": "T1", "a": "x", "B": "up"}
    request = RemotingCommand(10, ext=shared, body=b"body")
    for _ in range(2):
        sign(request)
        assert request.ext == JAVA | {"Signature": "EAjbcMejpuDbwjOl4ASUg4plIS8="}
    assert "Signature" not in shared


async def test_every_request_of_a_signing_client_carries_its_signature() -> None:
    got: list[RemotingCommand] = []

    def handle(request: RemotingCommand, _: Connection) -> RemotingCommand:
        got.append(request)
        return RemotingCommand.response_to(request)

    user = Credentials(access_key="AK", secret_key="s", security_token="token")
    server, client = RemotingServer(handled(34, handle)), RemotingClient(sign=Signer(user))
    async with serving(server) as address, dialling(client):
        await client.oneway(address, RemotingCommand.request(34, {"a": "1"}))
        await client.call(address, RemotingCommand.request(34, {"a": "2"}, b"body"))
    assert [each.ext["a"] for each in got] == ["1", "2"]
    for each in got:
        assert each.ext["SecurityToken"] == "token"
        assert SigningKey("s").proves(each.ext, each.body)


def test_secrets_are_in_no_text(tmp_path) -> None:
    user = Credentials(access_key="AK", secret_key="hidden", security_token="hidden")
    assert "hidden" not in repr(user) + str(user)
    file = tmp_path / "tools.yml"
    for text in ("hidden", "secretKey: hidden", "{hidden: [", "accessKey: ''\nsecretKey: hidden"):
        file.write_text(text)
        with pytest.raises(ValueError) as caught:
            credentials_in(file)
        assert "hidden" not in str(caught.value)


def test_who_signs_is_in_the_environment_or_in_a_file(tmp_path) -> None:
    file = tmp_path / "tools.yml"
    file.write_text("accessKey: rocketmq\nsecretKey: 12345678\n")
    assert credentials_of({}) is None
    found = credentials_of({"BATONMQ_CREDENTIALS": str(file)})
    assert found == Credentials(access_key="rocketmq", secret_key="12345678")
    keys = {"BATONMQ_ACCESS_KEY": "a", "BATONMQ_SECRET_KEY": "b", "BATONMQ_SECURITY_TOKEN": "c"}
    found = credentials_of(keys | {"BATONMQ_CREDENTIALS": str(file)})
    assert found == Credentials(access_key="a", secret_key="b", security_token="c")
    assert environment_of(found) == keys
    with pytest.raises(ValueError, match="BATONMQ_SECRET_KEY"):
        credentials_of({"BATONMQ_ACCESS_KEY": "a"})
    with pytest.raises(ValueError, match="No such file"):
        credentials_of({"BATONMQ_CREDENTIALS": str(tmp_path / "none")})


@pytest.mark.parametrize("secret", ["0123", "00012345", "1_000", "yes", "1e3", "12:30:45"])
def test_keys_in_a_file_are_read_as_they_are_written(tmp_path: Path, secret: str) -> None:
    """Some forms of YAML's scalars are numbers or truth values to other readers."""
    file = tmp_path / "tools.yml"
    file.write_text(f"accessKey: 007\nsecretKey: {secret}\nsecurityToken: ~\n")
    assert credentials_in(file) == Credentials(access_key="007", secret_key=secret)
    file.write_text("accessKey: a\nsecretKey: [hidden]\n")
    with pytest.raises(ValueError, match="secretKey") as caught:
        credentials_in(file)
    assert "hidden" not in str(caught.value)


NUMBERS = dict.fromkeys("defghjl", "7")
FIELDS = {name: f"{name}1" for name in "abcin"} | NUMBERS | {"k": "false", "m": "true"}


def frame_of(fields: dict[str, object], code: int = 310) -> tuple[bytes, RemotingCommand]:
    """A signed header as JSON, and its command as the general decoder reads it."""
    texts = {name: str(value) for name, value in fields.items() if value is not None}
    command = RemotingCommand.request(code, texts, b"body")
    Signer(Credentials(access_key="AK", secret_key="12345678", security_token="t"))(command)
    ext = fields | command.ext
    header = {"code": code, "opaque": 1, "extFields": ext, "version": 479}
    return json.dumps(header).encode(), decode_frame(
        json.dumps(header).encode(), b"body", TYPE_JSON
    )


@pytest.mark.parametrize(
    ("changed", "is_plain"),
    [
        ({}, True),
        ({"b": ""}, True),
        ({"i": "\u00e9\u6f22\x01"}, True),
        ({"a": "x" * 3000}, True),
        ({"d": "-1", "g": str(1 << 62), "h": "-2147483648"}, True),
        ({"extra": "1"}, False),
        ({"batonRelay": "7@h"}, False),
        ({"d": "07"}, False),
        ({"d": "7 "}, False),
        ({"k": "1"}, False),
        ({"m": "TRUE"}, False),
        ({"j": "null"}, False),
    ],
)
def test_a_signature_over_decoded_values_is_one_over_the_sent_ones(
    changed: dict[str, object], is_plain: bool
) -> None:
    """Another spelling, or a field more, is left to the check of all fields as they came."""
    header, command = frame_of(FIELDS | changed)
    key = SigningKey("12345678")
    assert key.proves(command.ext, b"body")
    short = signed_send(header)
    if short is None:
        assert not is_plain
        return
    ext = short.ext
    assert (ext.access_key, ext.topic) == (command.ext["AccessKey"], command.ext["b"])
    assert key.proves_text(signed_text(ext), b"body", ext.signature) is is_plain
    assert not key.proves_text(signed_text(ext), b"bodY", ext.signature)


def test_a_send_without_optional_fields_or_with_an_odd_header() -> None:
    required = {name: FIELDS[name] for name in "abcdefgh"}
    header, _ = frame_of(required)
    short = signed_send(header)
    assert short is not None
    text, signature = signed_text(short.ext), short.ext.signature
    assert SigningKey("12345678").proves_text(text, b"body", signature)
    for odd in (b"", b"{", b'{"code":310}', header.replace(b'"a1"', b"7"), header[:-3]):
        assert signed_send(odd) is None
    unsigned = json.dumps({"code": 310, "opaque": 1, "extFields": required}).encode()
    short = signed_send(unsigned)
    assert short is not None and not SigningKey("12345678").proves_text(
        signed_text(short.ext), b"body", short.ext.signature
    )


PAIRS = st.lists(
    st.tuples(
        st.sampled_from(
            ["a", "b", "b", "\\u0062", "c", "AccessKey", "topic", "consumerGroup", "z"]
        ),
        st.sampled_from(['"A"', '"B"', '"\\u0042"', '"1"', "1", "true", "null", '""', '"\\ud800"']),
    ),
    max_size=8,
)


@given(PAIRS, st.booleans())
def test_the_guard_reads_the_topic_that_the_handler_reads(
    pairs: list[tuple[str, str]], twice: bool
) -> None:
    """Fields that come twice, in odd spellings or types: the check and what is checked agree."""
    whole = [(name, f'"{name}"') for name in ("topic", "consumerGroup", "AccessKey", "Signature")]
    whole += [(name, '"7"') for name in "abcdefgh"]
    more = ("queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset")
    whole += [(name, '"7"') for name in (*more, "suspendTimeoutMillis", "subVersion")]
    text = ",".join(f'"{name}":{value}' for name, value in whole + pairs)
    fields = f'"extFields":{{{text}}}'
    if twice:
        fields = f'"extFields":{{"b":"first","topic":"first"}},{fields}'
    header = f'{{"code":310,{fields},"flag":0,"opaque":1,"version":479}}'.encode()
    for decode, names in (
        (decode_send, {"b": "topic"}),
        (decode_pull, {"topic": "topic", "consumerGroup": "consumer_group"}),
    ):
        try:
            read = decode(TYPE_JSON, header).ext
        except BatonError:
            continue  # nothing is done
        checked = decode_frame(header, b"", TYPE_JSON).ext
        for name, attribute in names.items():
            assert getattr(read, attribute) == checked[name]
        short = signed_send(header)
        if short is not None and decode is decode_send:
            assert (short.ext.access_key, short.ext.topic) == (checked["AccessKey"], checked["b"])


async def test_the_secret_of_the_nodes_changes_while_they_run(tmp_path: Path) -> None:
    """Each server takes each step at another time, and always all believe what all send. In the end
    the old secret counts no more. A file that is no use changes nothing."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text('{"accessKey":"node","secretKey":"old"}')
        path.chmod(0o600)

    former = Guard(_auth(paths[0].read_text()), "c", tmp_path / "audit.log")
    guards = [Guard(_of_file(path), "c", tmp_path / "audit.log") for path in paths]
    for step in ("next", "former", "done"):
        assert advance(paths[0]) == step
        text = paths[0].read_text()
        for path, guard in zip(paths, guards, strict=True):
            path.write_text(text)
            assert guard._node_file is not None and guard._node_file.reload()
            assert all(_believes(*pair) for pair in itertools.product(guards, repeat=2))
    assert not _believes(guards[0], former) and not _believes(former, guards[0])
    other = text.replace("node", "another")
    for bad, why in ((other, "accessKey is 'another'"), ("{}", "allowed is")):
        paths[0].write_text(bad)
        file = guards[0]._node_file
        assert file is not None and not file.reload() and why in file.refusal
        assert _believes(guards[1], guards[0])
    for guard in (*guards, former):
        guard.close()


async def test_a_file_whose_mode_is_set_right_later_is_taken(tmp_path: Path) -> None:
    """As the refusal says; the mode is no part of what shows that a file has changed. Nor does any
    other refusal end the following."""
    path = tmp_path / "node.json"
    path.write_text('{"accessKey":"node","secretKey":"old"}')
    path.chmod(0o600)

    guard = Guard(_of_file(path), "c", tmp_path / "audit.log")
    file = guard._node_file
    assert file is not None
    path.write_text('{"accessKey":"node","secretKey":"","nextSecretKey":"new"}')
    file._poll()
    assert "neither may be empty" in file.refusal and file.version == 1
    path.write_text('{"accessKey":"node","secretKey":"new"}')
    path.chmod(0o644)
    file._poll()
    assert "chmod 0600" in file.refusal and file.version == 1
    path.chmod(0o600)
    file._poll()
    assert file.refusal == "" and file.version == 2
    guard.close()


def test_the_nodes_have_their_secret_in_the_settings_or_in_one_file(tmp_path: Path) -> None:
    inline = '{"accessKey":"node","secretKey":"s"}'
    for settings in ({"node": ""}, {"node": inline, CREDENTIALS: str(tmp_path)}):
        with pytest.raises(ValueError, match="or innerClientAuthenticationCredentialsFile"):
            _auth(**settings)
    with pytest.raises(ValueError, match=r"lacks: No such file"):
        _of_file(tmp_path / "lacks")
    both = inline.replace("}", ',"nextSecretKey":"n","formerSecretKey":"f"}')
    with pytest.raises(ValueError, match="one of nextSecretKey and formerSecretKey"):
        _auth(both)


@pytest.mark.parametrize("name", ["node", "unknown", "everywhere"])
def test_r58_a_refused_grpc_call_costs_the_same_whether_its_user_exists(
    name: str, tmp_path: Path
) -> None:
    guard = Guard(_auth('{"accessKey":"node","secretKey":"s"}'), "c", tmp_path / "audit.log")
    for group in "abc":
        guard.book(group, "c").replace({"everywhere": User(username="everywhere", password="s")})
    call = Signer(Credentials(access_key=name, secret_key="guess")).call_metadata(0)
    with (
        patch.object(SigningKey, "_of", autospec=True, side_effect=SigningKey._of) as hashed,
        pytest.raises(BrokerRefusal, match="unknown, or its signature is not right"),
    ):
        guard.check_call(RequestCode.CLEAN_BROKER_DATA, call, "127.0.0.1:1", "b")
    guard.close()
    assert hashed.call_count == 1


def test_a_controller_by_itself_says_whose_secrets_it_knows() -> None:
    """A user's new secret does not come to it."""
    user = '{"username":"admin","password":"of the file"}'
    guard = guard_of(_auth('{"accessKey":"node","secretKey":"s"}', init_authentication_user=user))
    assert guard is not None
    request = RemotingCommand(RequestCode.CONTROLLER_ELECT_MASTER)
    Signer(Credentials(access_key="admin", secret_key="of the file"))(request)
    guard.check(request.code, request, _nowhere())
    Signer(Credentials(access_key="admin", secret_key="rotated"))(request)
    with pytest.raises(BrokerRefusal, match=r"runs by itself.*initAuthenticationUser.*its file"):
        guard.check(request.code, request, _nowhere())
    guard.close()


def _auth(node: str, **more: Any) -> AuthConfig:
    return AuthConfig(
        authentication_enabled=True,
        authorization_enabled=True,
        inner_client_authentication_credentials=node,
        **more,
    )


def _of_file(path: Path) -> AuthConfig:
    return _auth("", **{CREDENTIALS: str(path)})


def _nowhere() -> Any:
    return SimpleNamespace(peer="10.0.0.1:1", attachments={})


def _believes(receiver: Guard, sender: Guard) -> bool:
    receiver.book("group", "c")
    request = RemotingCommand(RequestCode.REGISTER_BROKER)
    sender.signer(request)
    try:
        receiver.check(request.code, request, _nowhere())
    except BrokerRefusal:
        return False
    return True
