"""Settings of a running process: all or none, kept over restarts, and some never."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from batonmq.protocol.errors import BrokerRefusal
from batonmq.runtime.runtime_settings import ChangeRules, RuntimeSettings
from batonmq.runtime.section import LogLevel, Section
from tests.shared.failing_disk import failing, walk_errors


class Config(msgspec.Struct, rename="camel"):
    send_limit: int = 10
    hold_ms: int = 500
    listen_port: int = 1
    secret_path: str = ""

    def __post_init__(self) -> None:
        if self.hold_ms > 100 * self.send_limit:
            raise ValueError("holdMs is above sendLimit x 100")


class Levelled(Section, frozen=True, kw_only=True, rename="camel"):
    log_level: LogLevel = ""


def settings(path: Path | None = None) -> RuntimeSettings[Config]:
    keys = frozenset({"sendLimit", "holdMs", "secretPath"})
    remark = "{key} may not even be named"
    made = RuntimeSettings(
        Config(), ChangeRules(keys, frozenset({"secretPath"}), remark, path, refuses_unknown=True)
    )
    made.load()
    return made


def test_changes_of_different_days_outlast_a_restart_together(tmp_path: Path) -> None:
    path = tmp_path / "kept.properties"
    seen: list[int] = []
    for text in ("sendLimit=20\n", "holdMs=700\n"):
        made = settings(path)
        made.on_change = lambda config: seen.append(config.hold_ms)
        asyncio.run(made.update(text.encode()))
    assert seen == [500, 700]
    again = settings(path).current
    assert (again.send_limit, again.hold_ms) == (20, 700)
    path.write_text("holdMs=9000\nlistenPort=7\n")
    with pytest.raises(ValueError, match=f"{path}: holdMs is above"):
        settings(path)
    path.write_bytes(b"holdMs=\xff")
    with pytest.raises(ValueError, match=f"{path}: .*can't decode"):
        settings(path)


def test_a_value_that_is_set_back_after_a_failed_write_outlasts_a_restart(tmp_path: Path) -> None:
    """The file may have the new value, though the answer was an error."""

    def attempt(rule: str, number: int) -> bool:
        path = tmp_path / str(number) / "kept.properties"
        made = settings(path)
        with failing(rule) as struck:
            try:
                asyncio.run(made.update(b"sendLimit=20"))
            except BrokerRefusal as refusal:
                assert "Input/output error; the disk fails" in (refusal.remark or "")
                assert made.current.send_limit == 10
        asyncio.run(made.update(b"sendLimit=10"))
        assert settings(path).current.send_limit == 10
        return bool(struck)

    assert walk_errors("changes * EIO", attempt) > 4


@pytest.mark.parametrize(
    ("text", "code", "remark"),
    [
        ("sendLimit=20\nsecretPath=/x", 16, "secretPath may not even be named"),
        ("sendLimit=20\nlistenPort=2", 16, "listenPort is changed only in the file"),
        ("sendLimit=20\nsendLimits=2", 29, "sendLimits: unknown key, did you mean sendLimit?"),
        ("sendLimit=20\nholdMs=soon", 1, "holdMs is 'soon': a whole number is allowed"),
        ("sendLimit=20\nholdMs=9000", 1, "holdMs is above sendLimit x 100"),
    ],
)
def test_of_a_change_that_is_refused_nothing_is_in_force(
    tmp_path: Path, text: str, code: int, remark: str
) -> None:
    path = tmp_path / "kept.properties"
    made = settings(path)
    with pytest.raises(BrokerRefusal) as raised:
        asyncio.run(made.update(text.encode()))
    assert raised.value.code == code
    assert remark in (raised.value.remark or "")
    assert made.current == Config() and not path.exists()


def test_a_key_of_rocketmq_without_a_meaning_here_is_accepted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = ChangeRules(
        frozenset({"sendLimit"}),
        frozenset(),
        "",
        tmp_path / "kept",
        refuses_unknown=True,
        without_effect=frozenset({"waitTimeMillsInSendQueue", "sendLimit"}),
    )
    made = RuntimeSettings(Config(), rules)
    change = made.plan("waitTimeMillsInSendQueue=9\nsendLimit=20\n")
    assert change.warning == "without effect in BatonMQ: waitTimeMillsInSendQueue"
    made.apply(change)
    assert made.current.send_limit == 20
    assert "settings_without_effect keys=waitTimeMillsInSendQueue" in caplog.text
    assert made.plan("sendLimit=30").warning is None
    with pytest.raises(BrokerRefusal, match="InSendQueu: unknown key"):
        made.plan("waitTimeMillsInSendQueu=9\n")


def test_the_log_level_changes_while_running_and_outlasts_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("root")
    monkeypatch.setattr("logging.getLogger", lambda *_: root)
    rules = ChangeRules(frozenset({"logLevel"}), frozenset(), "", tmp_path / "kept")
    made = RuntimeSettings(Levelled(), rules)
    assert root.level == logging.NOTSET, "empty: as the command line says"
    asyncio.run(made.update(b"logLevel=DEBUG\n"))
    assert root.level == logging.DEBUG
    with pytest.raises(BrokerRefusal, match="one of"):
        made.plan("logLevel=LOUD")
    root.setLevel(logging.INFO)
    RuntimeSettings(Levelled(), rules).load()
    assert root.level == logging.DEBUG
