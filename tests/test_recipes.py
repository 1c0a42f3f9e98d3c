"""The recipes of CONTRIBUTING.md: every file that they name exists, and what is there today of each
kind is found in the places that its recipe lists."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

import lab.faults
from batonmq.auth.config import AuthConfig
from batonmq.broker import config as broker_config
from batonmq.broker.java_keys import JAVA_KEYS
from batonmq.controller import config as controller_config
from batonmq.ha.config import HAConfig
from batonmq.namesrv import config as namesrv_config
from batonmq.protocol.codes import RequestCode
from batonmq.runtime.metrics import MetricsConfig
from batonmq.runtime.tls import TlsConfig
from batonmq.store.config import StoreConfig
from lab.faults.catalogue import FAULTS
from lab.faults.clients import CLIENT_FAULTS
from lab.faults.trial import Fault

ROOT: Final = Path(__file__).resolve().parents[1]
RECIPES: Final = (
    "A request code",
    "A configuration key",
    "A rule of the controllers",
    "A status key",
    "A fault",
    "A planted defect",
)
#: RocketMQ's own keys: NamesrvConfig and NettyServerConfig; ControllerConfig.
_NAMESRV: Final = """
listenPort bindAddress enableControllerInNamesrv kvConfigPath configStorePath configBlackList
scanNotActiveBrokerInterval serverChannelMaxIdleTimeSeconds orderMessageEnable
returnOrderTopicConfigToBroker enableAllTopicList enableTopicList supportActingMaster
notifyMinBrokerIdChanged deleteTopicWithBrokerRegistration
"""
_CONTROLLER: Final = """
controllerDLegerGroup controllerDLegerPeers controllerDLegerSelfId bindAddress controllerStorePath
configStorePath configBlackList enableElectUncleanMaster notifyBrokerRoleChanged isProcessReadEvent
scanNotActiveBrokerInterval scanInactiveMasterInterval serverChannelMaxIdleTimeSeconds
electMasterMaxRetryCount controllerType mappedFileSize controllerThreadPoolNums
controllerRequestThreadPoolQueueCapacity rocketmqHome
"""
#: Of BrokerIdentity, and the name of a key in RocketMQ 4.
JAVA_BROKER: Final = JAVA_KEYS | {
    "brokerClusterName",
    "brokerId",
    "brokerName",
    "haSlaveFallbehindMax",
}
JAVA_NAMESRV: Final = set(_NAMESRV.split())
JAVA_CONTROLLER: Final = set(_CONTROLLER.split())
SECTIONS: Final[dict[str, tuple[Any, Set[str], Set[str]]]] = {
    "broker": (broker_config.BrokerConfig, JAVA_BROKER, broker_config.RUNTIME_KEYS),
    "replicas": (broker_config.ReplicasConfig, JAVA_BROKER, broker_config.RUNTIME_KEYS),
    "store": (StoreConfig, JAVA_BROKER, broker_config.RUNTIME_KEYS),
    "ha": (HAConfig, JAVA_BROKER, broker_config.RUNTIME_KEYS),
    "metrics": (MetricsConfig, JAVA_BROKER, frozenset()),
    "auth": (AuthConfig, JAVA_BROKER, frozenset()),
    "tls": (TlsConfig, set(TlsConfig.ALIASES.values()), frozenset()),
    "namesrv": (namesrv_config.NamesrvConfig, JAVA_NAMESRV, namesrv_config.RUNTIME_KEYS),
    "controller": (
        controller_config.ControllerConfig,
        JAVA_CONTROLLER,
        controller_config.RUNTIME_KEYS,
    ),
}


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def recipe(title: str) -> str:
    """The text below its heading."""
    _, found, rest = text_of("CONTRIBUTING.md").partition(f"\n### {title}\n")
    assert found, title
    return re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]


def files(title: str) -> list[str]:
    """All paths that it names."""
    return re.findall(r"`((?:[\w.-]+/)+[\w.-]+|[A-Z]+\.md)`", recipe(title))


def test_the_recipes_are_those_that_are_checked() -> None:
    _, _, rest = text_of("CONTRIBUTING.md").partition("\n## Recipes\n")
    titles = re.findall(r"^### (.*)$", rest.partition("\n## ")[0], re.MULTILINE)
    assert tuple(titles) == RECIPES


@pytest.mark.parametrize("title", RECIPES)
def test_every_file_of_a_recipe_exists(title: str) -> None:
    assert len(files(title)) >= 3
    assert [name for name in files(title) if not (ROOT / name).is_file()] == []


def _registered(folder: Path) -> Iterator[int]:
    """Codes that `register` or `register_raw` of some processor is called with."""
    for module in folder.rglob("*.py"):
        text = module.read_text("utf-8")
        if "processors.register" not in text:
            continue
        tree = ast.parse(text)
        named = {}
        for node in tree.body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=value)
                ):
                    named[name] = value
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _registers(node):
                for part in ast.walk(node):
                    source = named.get(part.id) if isinstance(part, ast.Name) else part
                    yield from _codes(source)


def _registers(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.startswith("register")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "processors"
        for node in ast.walk(function)
    )


def _codes(source: ast.AST | None) -> Iterator[int]:
    for node in ast.walk(source) if source is not None else ():
        match node:
            case ast.Attribute(value=ast.Name(id="RequestCode"), attr=name):
                yield RequestCode[name]


def test_a_request_code_is_in_the_table_of_processors() -> None:
    """And nothing else is, but the codes of what a broker sends itself."""
    table: set[int] = set()
    docstring = ast.get_docstring(ast.parse(text_of("broker/__init__.py"))) or ""
    for row in re.findall(r"^\| `[\w.]+` \| (.*) \|$", docstring, re.MULTILINE):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", row):
            table |= set(range(int(first), int(last or first) + 1))
    sent = {RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT}
    assert set(_registered(ROOT / "broker")) == table - sent


def test_no_request_code_is_only_a_name() -> None:
    used: set[str] = set()
    for folder in ("batonmq", "broker", "controller", "replicas_manager", "spark"):
        for module in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"RequestCode\.(\w+)", module.read_text("utf-8")))
    assert {code.name for code in RequestCode} <= used


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_that_rocketmq_lacks_is_among_the_settings(section: str) -> None:
    config, java, live = SECTIONS[section]
    page = text_of("docs/settings.md").partition(f"\n## `{section}:`\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\| (.*) \|$", page, re.MULTILINE)
    fields = {field.encode_name: field for field in msgspec.structs.fields(config)}
    assert {key for key, *_ in rows} == fields.keys() - java
    for key, shown, meaning in rows:
        default = fields[key].default
        assert shown == (str(default).lower() if isinstance(default, bool) else str(default)), key
        assert meaning.endswith("*live*") == (key in live), key


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_that_changes_while_running_exists(section: str) -> None:
    live = SECTIONS[section][2]
    known = {
        field.encode_name
        for config, _, keys in SECTIONS.values()
        if keys is live
        for field in msgspec.structs.fields(config)
    }
    assert live <= known


MODES = ("controlled", "classic")


def _keys_of(*functions: str) -> set[str]:
    """Literal keys of the dicts in these methods of BrokerStatus and of both replications."""
    replications = [f"broker/replication/{name}.py" for name in ("replication", *MODES)]
    return {
        str(key.value)
        for name in ("broker/status.py", *replications)
        for node in ast.walk(ast.parse(text_of(name)))
        if isinstance(node, ast.FunctionDef) and node.name in functions
        for part in ast.walk(node)
        if isinstance(part, ast.Dict)
        for key in part.keys
        if isinstance(key, ast.Constant)
    }


def test_a_status_key_is_explained_to_operators() -> None:
    page = text_of("docs/operating.md")
    figures = page.partition("## Figures of a broker")[2]
    problems = page.partition("## What `mqctl health` says of a broker")[2].partition("\n## ")[0]
    shown = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", figures, re.MULTILINE))))
    assert shown == _keys_of("_of_role", "status")
    assert set(re.findall(r"^\| `([^`]+)` \|", problems, re.MULTILINE)) == _keys_of("problems")


def test_a_fault_is_in_the_catalogue_with_a_name_of_its_own() -> None:
    for module in pkgutil.iter_modules(lab.faults.__path__):
        if module.name != "__main__" and not module.ispkg:
            importlib.import_module(f"lab.faults.{module.name}")

    def below(kind: type[Fault]) -> Iterator[type[Fault]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    named = {
        kind
        for kind in below(Fault)
        # Those of `lab.faults.aftermath` are its own: it needs them in the order of its schedule.
        if "name" in vars(kind) and not kind.__module__.startswith("lab.faults.aftermath.")
    }
    assert named == set(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.title for fault in FAULTS)
    assert len({fault.name for fault in CLIENT_FAULTS}) == len(CLIENT_FAULTS)


def test_a_planted_defect_says_what_it_breaks_and_stands_in_the_rules() -> None:
    safety = text_of("docs/SAFETY.md")
    for patch in (ROOT / "lab" / "sim" / "defects").glob("*.patch"):
        head, _, _ = patch.read_text("utf-8").partition("\n--- ")
        rule = re.match(r"[RG]\d+(?=[,:])", head)
        assert rule, patch.name
        assert re.search(r"^Found by seed \d+$", head, re.MULTILINE), patch.name
        assert rule[0].startswith("G") or f"`{patch.stem}`" in safety, patch.name


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe_of_lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", text_of("Makefile"), re.MULTILINE)
    assert recipe_of_lint
    lint = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe_of_lint[1].splitlines()]
    (repository,) = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == lint
