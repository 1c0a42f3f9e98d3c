"""Names in flags: none forges a line of a log or commands a terminal (R46)."""

import click
import pytest

from batonmq.mqctl.params import MqOption

FLAGS = ("--brokerName", "--clusterName", "--topic", "--groupName", "--consumerGroup")


def taken(flag: str, value: str) -> str:
    option = MqOption([flag])
    with click.Context(click.Command("c")) as context:
        return str(option.process_value(context, value))


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", ["a\nb", "a\0", "\x1b[2J", "a\u2028b", "x" * 256, "a;b\r"])
def test_r46_a_flag_takes_no_name_that_cannot_be_shown(flag: str, name: str) -> None:
    with pytest.raises(click.BadParameter, match="allowed"):
        taken(flag, name)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", ["broker-a", "%RETRY%g", "x" * 255, "é", "a;b", "a b"])
def test_r46_a_flag_takes_legal_names(flag: str, name: str) -> None:
    assert taken(flag, name) == name


def test_a_text_may_have_lines() -> None:
    assert taken("--body", "a\nb") == "a\nb"
