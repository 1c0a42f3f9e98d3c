"""Names, options, help and completion; what `--help` must not import."""

import os
import subprocess
import sys
from importlib import import_module

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from batonmq.mqctl.catalogue import FAMILIES, MODULES, kebab
from batonmq.mqctl.main import ALIASES, cli
from batonmq.mqctl.output import when
from batonmq.mqctl.params import IDS, SECONDS, TIME, read_time

# Facts from RocketMQ's tools: the short options of each command, and the long name of each.
MQADMIN = {
    "clusterList": {"-m": "--moreStats", "-i": "--interval", "-c": "--clusterName"},
    "brokerStatus": {"-b": "--brokerAddr", "-c": "--clusterName"},
    "getBrokerConfig": {"-b": "--brokerAddr", "-c": "--clusterName"},
    "updateBrokerConfig": {
        "-b": "--brokerAddr", "-c": "--clusterName", "-k": "--key", "-v": "--value",
    },
    "topicList": {"-c": "--clusterModel"},
    "topicRoute": {"-t": "--topic", "-l": "--list"},
    "topicStatus": {"-t": "--topic"},
    "statsAll": {"-a": "--activeTopic", "-t": "--topic"},
    "updateTopic": {
        "-b": "--brokerAddr", "-c": "--clusterName", "-a": "--attributes", "-t": "--topic",
        "-r": "--readQueueNums", "-w": "--writeQueueNums", "-p": "--perm", "-o": "--order",
        "-u": "--unit", "-s": "--hasUnitSub",
    },
    "deleteTopic": {"-t": "--topic", "-c": "--clusterName"},
    "sendMessage": {
        "-t": "--topic", "-p": "--body", "-k": "--key", "-c": "--tags", "-b": "--broker",
        "-i": "--qid",
    },
    "consumeMessage": {
        "-t": "--topic", "-b": "--brokerName", "-i": "--queueId", "-o": "--offset",
        "-g": "--consumerGroup", "-s": "--beginTimestamp", "-e": "--endTimestamp",
        "-c": "--MessageNumber",
    },
    "queryMsgById": {"-t": "--topic", "-i": "--msgId"},
    "queryMsgByKey": {
        "-t": "--topic", "-k": "--msgKey", "-b": "--beginTimestamp", "-e": "--endTimestamp",
        "-m": "--maxNum",
    },
    "consumerProgress": {"-g": "--groupName", "-t": "--topicName"},
    "consumerConnection": {"-g": "--consumerGroup"},
    "resetOffset": {"-g": "--group", "-t": "--topic", "-s": "--timestamp", "-b": "--brokerName",
                    "-q": "--queueId", "-o": "--offset"},
    "skip": {"-g": "--group", "-t": "--topic"},
    "haStatus": {"-c": "--clusterName", "-b": "--brokerAddr", "-i": "--interval"},
    "getSyncStateSet": {
        "-a": "--controllerAddress", "-c": "--clusterName", "-b": "--brokerName",
        "-i": "--interval",
    },
    "getBrokerEpoch": {"-c": "--clusterName", "-b": "--brokerName", "-i": "--interval"},
    "getControllerMetaData": {"-a": "--controllerAddress"},
    "getControllerConfig": {"-a": "--controllerAddress"},
    "updateControllerConfig": {"-a": "--controllerAddress", "-k": "--key", "-v": "--value"},
    "electMaster": {
        "-a": "--controllerAddress", "-b": "--brokerId", "-bn": "--brokerName",
        "-c": "--clusterName",
    },
    "cleanBrokerMetadata": {
        "-a": "--controllerAddress", "-b": "--brokerControllerIdsToClean", "-bn": "--brokerName",
        "-c": "--clusterName", "-l": "--cleanLivingBroker",
    },
}  # fmt: skip


def find(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def test_every_command_of_a_module_is_listed() -> None:
    for module in set(MODULES.values()):
        home = vars(import_module(f"batonmq.mqctl.commands.{module}")).values()
        commands = [each for each in home if isinstance(each, click.Command)]
        groups = [each for each in commands if isinstance(each, click.Group)]
        below = [each for group in groups for each in group.commands.values()]
        found = {each.name for each in commands if each not in below}
        assert found == {name for name, where in MODULES.items() if where == module}


def test_every_command_is_there_under_both_names() -> None:
    assert set(MODULES) >= set(MQADMIN)
    for name in MODULES:
        assert find(name).name == name
        assert find(kebab(name)) is find(name)
    assert kebab("getControllerMetaData") == "get-controller-meta-data"
    assert len(ALIASES) == len(MODULES)


@pytest.mark.parametrize("name", sorted(MQADMIN))
def test_options_are_spelled_as_mqadmin_spells_them_and_in_kebab_case(name: str) -> None:
    by_name = {opt: param for param in find(name).params for opt in param.opts}
    for short, long in {**MQADMIN[name], "-n": "--namesrvAddr"}.items():
        assert by_name[short] is by_name[long] is by_name[f"--{kebab(long[2:])}"]


# A job shows its own help: test_mqctl_analysis.
@pytest.mark.parametrize("name", sorted(set(MODULES) - set(FAMILIES["Analysis"])))
def test_help_of_each_command_shows_a_name_once(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"], prog_name="mqctl")
    assert result.exit_code == 0
    assert f"Usage: mqctl {name}" in result.output
    if name != "completion":
        assert "--namesrvAddr" in result.output
        assert "--namesrv-addr" not in result.output
        assert result.output.count("--json") == 1


def test_the_list_of_commands_fits_and_names_each_once() -> None:
    result = CliRunner().invoke(cli, ["--help"], prog_name="mqctl")
    lines = result.output.splitlines()
    for name in MODULES:
        assert sum(line.split()[:1] == [name] for line in lines) == 1
    assert not any(line.endswith("...") for line in lines[1:])


def test_help_and_import_load_nothing_heavy() -> None:
    """`mqctl --help` and the completion of a command's name: click, and no command."""
    program = """
import sys
import click
import batonmq.mqctl.main
heavy = {"grpc", "pyspark", "rich", "numpy", "asyncio", "uvloop", "msgspec", "yaml", "google",
         "batonmq.client.admin.admin", "batonmq.client.producer.producer", "batonmq.remoting",
         "batonmq.protocol", "batonmq.mqctl.params"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
cli = batonmq.mqctl.main.cli
assert len(cli.shell_complete(click.Context(cli), "clusterL")) == 1
try:
    batonmq.mqctl.main.cli(["--help"], prog_name="mqctl")
except SystemExit as end:
    assert end.code == 0
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=60
    )


def test_every_command_loads_without_what_only_servers_need() -> None:
    """The base installation has none of it; a command that needs one names it when it is run."""
    lacking = (
        "cryptography",
        "lark",
        "numpy",
        "pysyncobj",
        "setproctitle",
        "yaml",
        "opentelemetry",
    )
    program = f"""
import sys
from importlib import import_module
sys.modules.update(dict.fromkeys({lacking}))
from batonmq.mqctl.catalogue import MODULES
for name in sorted(set(MODULES.values())):
    import_module(f"batonmq.mqctl.commands.{{name}}")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


HEALTH_MODULES = 71
"""Modules of ours that `mqctl health` may load: on a loaded host that is most of its time."""


def test_health_loads_only_what_it_asks_with() -> None:
    program = """
import sys
import batonmq.mqctl.main
try:
    batonmq.mqctl.main.cli(["health", "-n", "127.0.0.1:1", "-a", "127.0.0.1:1"])
except SystemExit as end:
    assert end.code == 1
print("loaded:", *sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    loaded = ran.stdout.rpartition("loaded:")[2].split()
    ours = {name for name in loaded if name.startswith("batonmq")}
    assert "batonmq.remoting.endpoint" in ours
    assert len(ours) <= HEALTH_MODULES, sorted(ours)
    unasked = ("history", "store", "broker", "client.admin.messages", "protocol.records")
    assert not [name for name in ours if name.startswith(tuple(f"batonmq.{x}" for x in unasked))]
    assert not {"grpc", "google", "numpy", "rich", "yaml"} & {*loaded}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="mqctl")
    assert result.exit_code == 0
    assert "_MQCTL_COMPLETE" in result.output


def test_completion_completes_commands_and_options() -> None:
    words = {"COMP_WORDS": "mqctl getS", "COMP_CWORD": "1", "_MQCTL_COMPLETE": "bash_complete"}
    program = [sys.executable, "-c", "from batonmq.mqctl.main import main; main()"]
    environ = {**os.environ, **words}
    ran = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60)
    assert "plain,getSyncStateSet" in ran.stdout
    complete = ShellComplete(cli, {}, "mqctl", "_MQCTL_COMPLETE")
    assert "--controllerAddress" in {
        each.value for each in complete.get_completions(["electMaster"], "--con")
    }


def test_a_mistyped_command_gets_a_suggestion() -> None:
    meant_by = {"clusterlist": "clusterList", "topics": "topicList", "status": "health"}
    for typed, meant in {**meant_by, "consumer-progres": "consumerProgress"}.items():
        result = CliRunner().invoke(cli, [typed], prog_name="mqctl")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"no command {typed!r}; did you mean {meant}" in result.stderr
    result = CliRunner().invoke(cli, ["xyzzy"], prog_name="mqctl")
    assert "`mqctl --help` lists them" in result.stderr


def test_one_reader_takes_every_form_of_a_time() -> None:
    now_ms = 1_700_000_000_000
    at = read_time("2024-01-02 03:04:05.678", now_ms)
    assert at % 1000 == 678
    for same in ("2024-01-02#03:04:05:678", "2024-01-02T03:04:05.678", str(at), f"@{at}", when(at)):
        assert read_time(same, now_ms) == at, same
    assert read_time("2024-01-02 03:04", now_ms) == at - 5_678
    assert read_time("2023-11-14T22:13:20Z", 0) == now_ms
    assert read_time("2023-11-14T23:13:20+01:00", 0) == now_ms
    for text, ago_ms in (("90s", 90_000), ("10m", 600_000), ("2h", 7_200_000), ("now", 0)):
        assert read_time(text, now_ms) == now_ms - ago_ms
    for text in ("yesterday", "", "@", "10 m", "2024-13-01"):
        with pytest.raises(ValueError, match="2026-11-24 15:40:00"):
            read_time(text, now_ms)


def test_times_and_ids_are_read() -> None:
    assert TIME.convert("1700000000000", None, None) == 1_700_000_000_000
    assert IDS.convert("1;2, 3", None, None) == (1, 2, 3)
    assert SECONDS.convert("0.5", None, None) == 0.5
    # An infinite or endless time-out ended with a traceback.
    never = [(SECONDS, text) for text in ("nan", "inf", "1e400", "1e7", "0", "x")]
    for kind, text in ((TIME, "yesterday"), (IDS, "a;b"), (IDS, ";"), *never):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)
