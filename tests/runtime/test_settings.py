"""Configuration files: what is taken, and how a wrong one is told."""

import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from batonmq.broker.java_keys import JAVA_KEYS
from batonmq.protocol.errors import ConfigError
from batonmq.runtime.properties_text import (
    dump_properties,
    parse_lines,
    parse_properties,
    property_text,
)
from batonmq.runtime.settings import load_settings

GOLDEN = Path(__file__).parents[1] / "golden/java-5.3.3/remoting"


class Store(msgspec.Struct, frozen=True, rename="camel"):
    store_path_root_dir: str = "/store"
    delete_when: str = "04"
    flush_disk_type: Literal["ASYNC_FLUSH", "SYNC_FLUSH"] = "ASYNC_FLUSH"
    file_reserved_time: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 72
    listen_port: int = 10911


class Broker(msgspec.Struct, frozen=True, rename="camel"):
    broker_name: str = "broker-a"
    broker_ip1: str = msgspec.field(name="brokerIP1", default="127.0.0.1")
    listen_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 10911
    auto_create_topic_enable: bool = True
    namesrv_addr: tuple[str, ...] = ()
    zone: str | None = None
    ratio: float = 0.5
    heartbeat_ms: int = 100
    timeout_ms: int = 800

    def __post_init__(self) -> None:
        if self.heartbeat_ms >= self.timeout_ms:
            raise ValueError(
                f"timeoutMs {self.timeout_ms} must be above heartbeatMs {self.heartbeat_ms}"
            )


class Strict(msgspec.Struct, frozen=True, rename="camel"):
    must_be_given: str


SECTIONS: dict[str, type[msgspec.Struct]] = {"broker": Broker, "store": Store}


def load(
    tmp_path: Path, text: str, *, name: str = "b.yaml", environ: dict[str, str] | None = None
) -> tuple[Broker, Store]:
    file = tmp_path / name
    file.write_text(text)
    loaded = load_settings(file, SECTIONS, environ=environ or {})
    broker, store = loaded["broker"], loaded["store"]
    assert isinstance(broker, Broker) and isinstance(store, Store)
    return broker, store


YAML = """
broker:
  brokerName: broker-b   # a comment
  brokerIP1: 10.0.0.1
  autoCreateTopicEnable: false
  namesrvAddr: [a:1, b:2]
  ratio: 1
store:
  deleteWhen: 04
  flushDiskType: SYNC_FLUSH
"""
FLAT = """
# RocketMQ's own form
brokerName = broker-b
brokerIP1: 10.0.0.1
autoCreateTopicEnable false
namesrvAddr=a:1;b:2
ratio=1
deleteWhen=04
flushDiskType=SYNC_FLUSH
listenPort=12
"""


def test_yaml_sections_and_flat_files_give_the_same(tmp_path: Path) -> None:
    broker, store = load(tmp_path, YAML)
    assert broker == Broker(
        "broker-b", "10.0.0.1", auto_create_topic_enable=False, namesrv_addr=("a:1", "b:2"), ratio=1
    )
    assert (store.delete_when, store.flush_disk_type) == ("04", "SYNC_FLUSH")
    for name in ("b.conf", "b.properties", "broker"):
        flat_broker, flat_store = load(tmp_path, FLAT, name=name)
        # A flat key belongs to every section that knows it.
        assert (flat_broker.listen_port, flat_store.listen_port) == (12, 12)
        assert msgspec.structs.replace(flat_broker, listen_port=10911) == broker
        assert msgspec.structs.replace(flat_store, listen_port=10911) == store


@pytest.mark.parametrize("text", ["", "broker:\n", "store: {}\n", "# nothing\n"])
def test_defaults_where_nothing_is_said(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == (Broker(), Store())


def test_no_file_at_all_is_defaults_and_environment() -> None:
    loaded = load_settings(None, SECTIONS, environ={"BATONMQ_BROKER__BROKERNAME": "x"})
    assert loaded == {"broker": Broker("x"), "store": Store()}


def test_the_environment_overrides(tmp_path: Path) -> None:
    broker, store = load(
        tmp_path,
        YAML,
        environ={
            "BATONMQ_BROKER__NAMESRVADDR": "c:3",
            "BATONMQ_STORE__DELETEWHEN": "05",
            "BATONMQ_CONTROLLER__OTHER": "of another process",
            "PATH": "/bin",
        },
    )
    assert (broker.namesrv_addr, store.delete_when) == (("c:3",), "05")


@pytest.mark.parametrize(
    ("text", "line", "key", "value", "allowed"),
    [
        ("broker:\n  brokrName: x\n", 2, "broker.brokrName", "x", "did you mean brokerName?"),
        ("broker:\n  brokername: x\n", 2, "broker.brokername", "x", "did you mean brokerName?"),
        ("broker:\n  qqq: 1\n", 2, "broker.qqq", "1", "none is spelled like it"),
        ("broker:\n  deleteWhen: x\n", 2, "broker.deleteWhen", "x", "belongs in section store"),
        (
            "broker:\n  flushDiskTyp: 1\n",
            2,
            "broker.flushDiskTyp",
            "1",
            "unknown key, did you mean store.flushDiskType?",
        ),
        ("brocker:\n  x: 1\n", 1, "brocker", None, "did you mean broker?"),
        ('broker:\n  zone: "a\\0b"\n', 2, "broker.zone", "a\0b", "without a NUL character"),
        ("broker:\n  listenPort: x\n", 2, "broker.listenPort", "x", "whole number from 0 to 65535"),
        ("\nbroker:\n  listenPort: 70000\n", 3, "broker.listenPort", 70000, "from 0 to 65535"),
        ("broker:\n  ratio: [1]\n", 2, "broker.ratio", [1], "a number"),
        ("broker:\n  autoCreateTopicEnable: 7\n", 2, "broker.autoCreateTopicEnable", 7, "true or"),
        ("store:\n  flushDiskType: X\n", 2, "store.flushDiskType", "X", "ASYNC_FLUSH, SYNC_FLUSH"),
        ("broker:\n  ratio: 1\n  ratio: 2\n", 3, "broker.ratio", 2, "is already set at"),
        ("broker: {}\nbroker: {}\n", 2, "broker", None, "is already set at"),
        ("broker: 5\n", 1, "broker", "5", "a mapping"),
        ("broker:\n  ratio: !!python/x 1\n", 2, "broker.ratio", "1", "could not determine"),
        ("broker:\n  ratio: 2026-13-45\n", 2, "broker.ratio", "2026-13-45", "month must be"),
        ("broker:\n  ratio: !!bool x\n", 2, "broker.ratio", "x", "cannot be read"),
        ("broker:\n  <<: {a: b}\n", 2, "broker.<<", None, "unknown key"),
    ],
)
def test_a_wrong_yaml_setting_is_named_with_value_line_and_what_is_allowed(
    tmp_path: Path, text: str, line: int, key: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert (error.key, error.value, error.where) == (key, value, f"{tmp_path / 'b.yaml'}:{line}")
    assert allowed in error.allowed
    for part in (key, error.where, error.allowed):
        assert part in str(error)


@pytest.mark.parametrize("text", ["[1, 2]", "broker: [", "broker:\n\t- x", "a: b: c", "just text"])
def test_what_is_no_mapping_of_sections_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"b\.yaml:\d"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line", "key", "allowed"),
    [
        ("ratio=1\nbrokrName=x", 2, "brokrName", "did you mean brokerName?"),
        ("\n\nlistenPort = x", 3, "broker.listenPort", "whole number"),
        ("ratio=1\nratio=2", 2, "ratio", "is already set at"),
    ],
)
def test_a_wrong_flat_setting_likewise(
    tmp_path: Path, text: str, line: int, key: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, name="b.conf")
    assert (caught.value.key, caught.value.where) == (key, f"{tmp_path / 'b.conf'}:{line}")
    assert allowed in caught.value.allowed


def test_a_file_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not YAML: maximum recursion depth"):
        load(tmp_path, "[" * 1_000)


def test_a_wrong_variable_likewise(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variable BATONMQ_BROKER__RATIOO.*did you mean ratio"):
        load(tmp_path, "", environ={"BATONMQ_BROKER__RATIOO": "1"})
    # "\udcff": a byte that is no UTF-8, as os.environ has it. It ended with a traceback.
    for bad in ("x", "1\udcff"):
        with pytest.raises(ConfigError, match=r"BATONMQ_BROKER__RATIO: broker\.ratio = "):
            load(tmp_path, "", environ={"BATONMQ_BROKER__RATIO": bad})


def test_r34_contradictory_settings_are_put_beside_the_line_that_names_one(tmp_path: Path) -> None:
    """The heartbeat is not below the timeout: each alone would be allowed."""
    with pytest.raises(ConfigError, match=r"b\.yaml:3: broker\.heartbeatMs = 900: timeoutMs 800"):
        load(tmp_path, "broker:\n  ratio: 1\n  heartbeatMs: 900\n")


def test_a_mandatory_setting_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"strict\.mustBeGiven: missing"):
        load_settings(None, {"strict": Strict}, environ={})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_settings(tmp_path / "b.yaml", SECTIONS, environ={})
    with pytest.raises(OSError):
        load_settings(tmp_path / "none.yaml", SECTIONS, environ={})


def test_the_golden_configuration_texts_are_read() -> None:
    for name, key, value in [
        ("broker-26", "allAckInSyncStateSet", "true"),
        ("controller-1010", "controllerDLegerPeers", "n0-127.0.0.1:9878"),
    ]:
        example = json.loads((GOLDEN / f"{name}.json").read_text())["examples"][0]
        text = bytes.fromhex(example["response"]["body_hex"]).decode()
        found = parse_properties(text)
        assert found[key] == value and len(found) == len(text.splitlines())


def test_java_rules_of_property_text() -> None:
    text = "! comment\n  a = 1 \nb:2\nc 3\nd\\ e=x\\\n   y\nf=\\u0041\\t\\z\ng\n\nh=a=b\\\\\n"
    assert parse_properties(text) == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d e": "xy",
        "f": "A\tz",
        "g": "",
        "h": "a=b\\",
    }
    assert [line.number for line in parse_lines(text)] == [2, 3, 4, 5, 7, 8, 10]
    assert parse_properties("a=1\\") == {"a": "1"}


@given(st.dictionaries(st.text(min_size=1), st.text().map(str.rstrip)))
@hypothesis_settings(deadline=None)
def test_settings_go_there_and_back(settings: dict[str, str]) -> None:
    assert parse_properties(property_text(settings)) == settings


def test_dumped_settings_are_what_a_flat_file_would_say(tmp_path: Path) -> None:
    broker = Broker(namesrv_addr=("a:1", "b:2"))
    text = dump_properties(broker)
    assert "autoCreateTopicEnable=true\n" in text and "namesrvAddr=a:1;b:2\n" in text
    assert "zone" not in text and text == "".join(sorted(text.splitlines(keepends=True)))
    assert load(tmp_path, text, name="b.conf")[0] == broker


def test_a_flat_file_may_have_keys_of_rocketmq_without_a_meaning_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "b.conf"
    file.write_text("listenPort=12\nwaitTimeMillsInSendQueue=9\n")
    loaded = load_settings(file, {"broker": Broker}, environ={}, without_effect=JAVA_KEYS)
    assert loaded["broker"].listen_port == 12  # type: ignore[attr-defined]
    assert f"key=waitTimeMillsInSendQueue where={file}:2" in caplog.text
    file.write_text("listenPort=12\nwaitTimeMillsInSendQueu=9\n")
    with pytest.raises(ConfigError, match="waitTimeMillsInSendQueu"):
        load_settings(file, {"broker": Broker}, environ={}, without_effect=JAVA_KEYS)


class Auth(msgspec.Struct, frozen=True, rename="camel"):
    inner_client_authentication_credentials: str = ""


CREDENTIALS = "innerClientAuthenticationCredentials"


@pytest.mark.parametrize(
    ("name", "text", "environ"),
    [
        ("b.yaml", f"auth:\n  {CREDENTIALS}: hunter2\n  {CREDENTIALS}: hunter2\n", {}),
        ("b.yaml", "auth:\n  innerClientAuthenticationCredentia1s: hunter2\n", {}),
        ("b.properties", f"{CREDENTIALS}=hunter2\n{CREDENTIALS}=hunter2\n", {}),
        ("b.properties", "innerClientAuthenticationCredentia1s=hunter2\n", {}),
        ("b.yaml", "", {"BATONMQ_AUTH__INNERCLIENTAUTHENTICATIONCREDENTIA1S": "hunter2"}),
    ],
)
def test_no_refusal_shows_a_secret(
    tmp_path: Path, name: str, text: str, environ: dict[str, str]
) -> None:
    """Neither of a key that is there twice nor of one that is mistyped."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(tmp_path / name, {"auth": Auth}, environ=environ)
    assert "hunter2" not in str(refused.value) and "redentia" in str(refused.value).lower()
