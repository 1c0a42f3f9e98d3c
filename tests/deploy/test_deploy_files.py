"""deploy/ says what the processes understand: every setting, port and address of the project."""

import configparser
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from batonmq.broker.config import BrokerConfig
from batonmq.broker.main import SECTIONS as BROKER_SECTIONS
from batonmq.launcher.layout import DEFAULT_WATCHDOG_S
from batonmq.namesrv.main import SECTIONS as NAMESRV_SECTIONS
from batonmq.runtime.settings import load_settings
from tests.deploy.conftest import DEPLOY, ROOT, says

_VARIABLE = re.compile(r"\$\{(\w+)\}")
NUMBERS = (1, 2, 3)
NODE = '{"accessKey":"node","secretKey":"secret"}'


def dotenv() -> dict[str, str]:
    lines = (DEPLOY / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def compose(**chosen: str) -> dict[str, Any]:
    """The project as compose reads it, with `.env` and what the shell sets over it."""
    variables = dotenv() | chosen
    text = (DEPLOY / "docker-compose.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(lambda m: variables[m[1]], text))
    return found


def settings_of(
    project: dict[str, Any], service: str, sections: dict[str, type[msgspec.Struct]]
) -> dict[str, Any]:
    """What the process of a service would start with."""
    entry = project["services"][service]
    kind, option, file = entry["command"]
    assert (option, file) == ("-c", f"/etc/batonmq/{kind}.yaml")
    environ = {key: str(value) for key, value in entry["environment"].items()}
    return load_settings(DEPLOY / "config" / f"{kind}.yaml", sections, environ=environ)


def published(project: dict[str, Any], service: str) -> dict[tuple[str, int], int]:
    """(host address, host port) -> port inside."""
    ports = [entry.split(":") for entry in project["services"][service]["ports"]]
    return {(host, int(outside)): int(inside) for host, outside, inside in ports}


def servers(project: dict[str, Any]) -> dict[str, Any]:
    """The services that are processes of ours: those without a profile."""
    return {name: each for name, each in project["services"].items() if "profiles" not in each}


@pytest.fixture(params=[{}, {"BATONMQ_NAMESRV_PORTS": "231", "BATONMQ_BROKER_PORTS": "232"}])
def project(request: pytest.FixtureRequest) -> dict[str, Any]:
    return compose(**request.param)


def test_every_variable_has_its_default_in_the_one_file() -> None:
    files = sorted(DEPLOY.glob("docker-compose*.yml"))
    used = {name for file in files for name in _VARIABLE.findall(file.read_text())}
    assert used <= dotenv().keys()
    assert dotenv().keys() - used == {"COMPOSE_PROJECT_NAME"}


def test_both_composes_take_the_file(project: dict[str, Any]) -> None:
    """docker-compose 1.29 knows no `name`, v2 calls `version` obsolete."""
    extensions = {key for key in project if key.startswith("x-")}
    assert project.keys() - extensions == {"services", "networks", "volumes"}
    for service in servers(project).values():
        assert isinstance(service.get("depends_on", []), list)
        assert (service["init"], service["restart"]) == (True, "unless-stopped")


def test_every_process_has_its_own_volume_and_controllers_share_one_password(
    project: dict[str, Any],
) -> None:
    shared = "raft-password:/var/lib/batonmq-raft"
    for name, service in servers(project).items():
        own = f"{name}:/var/lib/batonmq"
        assert service["volumes"] == ([own, shared] if "namesrv" in name else [own])
    assert project["volumes"].keys() == {*servers(project), "raft-password", "prometheus"}
    controller = settings_of(project, "namesrv-1", NAMESRV_SECTIONS)["controller"]
    assert str(controller.raft_password_path) == "/var/lib/batonmq-raft/password"


def test_controllers_are_stopped_before_brokers(project: dict[str, Any]) -> None:
    """Compose stops in the reverse order of its starts."""
    brokers = [name for name in project["services"] if name.startswith("broker-")]
    for name, service in servers(project).items():
        assert service.get("depends_on", []) == ([] if name in brokers else brokers)


def test_brokers_listen_where_they_are_advertised(project: dict[str, Any]) -> None:
    host = dotenv()["BATONMQ_ADVERTISE_HOST"]
    for number in NUMBERS:
        name = f"broker-{number}"
        sections = settings_of(project, name, BROKER_SECTIONS)
        broker, listeners = sections["broker"], published(project, name)
        assert broker.address == f"{host}:{broker.listen_port}"
        for port in (broker.listen_port, broker.listen_port - 2):
            assert listeners.pop((host, port)) == port
        assert not listeners
        assert (broker.bind_host, broker.ha_ip) == ("0.0.0.0", name)
        assert sections["store"].store_path_root_dir.startswith("/var/lib/batonmq/")
        check = project["services"][name]["healthcheck"]["test"]
        assert [str(word) for word in check[-2:]] == ["broker", str(broker.listen_port)]


def test_brokers_know_every_name_server_and_controller(project: dict[str, Any]) -> None:
    names, listeners = [], []
    for number in NUMBERS:
        sections = settings_of(project, f"namesrv-{number}", NAMESRV_SECTIONS)
        names.append(f"namesrv-{number}:{sections['namesrv'].listen_port}")
        listeners.append(sections["controller"].self_peer.grpc_address)
    for number in NUMBERS:
        sections = settings_of(project, f"broker-{number}", BROKER_SECTIONS)
        assert list(sections["broker"].name_servers) == names
        assert sections["replicas"].controller_grpc_addr.split(";") == listeners


def test_controllers_agree_on_who_they_are(project: dict[str, Any]) -> None:
    host = dotenv()["BATONMQ_ADVERTISE_HOST"]
    groups = set()
    for number in NUMBERS:
        name = f"namesrv-{number}"
        sections = settings_of(project, name, NAMESRV_SECTIONS)
        namesrv, controller = sections["namesrv"], sections["controller"]
        peer, listeners = controller.self_peer, published(project, name)
        groups.add(controller.peers)
        assert namesrv.enable_controller_in_namesrv
        assert peer.remoting_address == f"{host}:{peer.port}"
        assert peer.grpc_address == f"{name}:{peer.grpc_port}"
        assert peer.raft_address == f"{name}:{peer.raft_port}"
        assert controller.raft_bind_address == "0.0.0.0"
        for port in (namesrv.listen_port, peer.port, peer.grpc_port):
            assert listeners.pop((host, port)) == port
        assert not listeners, "the Raft port is not published"
        assert controller.store_path.startswith("/var/lib/batonmq/")
        check = [str(word) for word in project["services"][name]["healthcheck"]["test"]]
        assert check[-4:] == ["namesrv", str(namesrv.listen_port), "controller", str(peer.port)]
    assert len(groups) == 1


def test_no_two_listeners_share_a_port(project: dict[str, Any]) -> None:
    listeners = [listener for name in servers(project) for listener in published(project, name)]
    assert len(set(listeners)) == len(listeners) == 3 * 3 + 3 * 2


def test_every_container_has_a_limit_of_its_memory(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        number, unit = service["mem_limit"][:-1], service["mem_limit"][-1]
        assert int(number) << {"m": 20, "g": 30}[unit] >= 512 << 20, name
    for service in servers(project).values():
        assert float(service["cpus"]) >= 0 and service["pids_limit"] > 0


def test_the_observe_profile_scrapes_every_process_and_shows_the_dashboards(
    project: dict[str, Any],
) -> None:
    observers = {n: s for n, s in project["services"].items() if n not in servers(project)}
    assert {name: each["profiles"] for name, each in observers.items()} == {
        "prometheus": ["observe"],
        "grafana": ["observe"],
    }
    scraped = yaml.safe_load((DEPLOY / "observe" / "prometheus-compose.yml").read_text())
    (targets,) = (c["targets"] for j in scraped["scrape_configs"] for c in j["static_configs"])
    ports = {}
    for name in servers(project):
        sections = BROKER_SECTIONS if "broker" in name else NAMESRV_SECTIONS
        ports[name] = settings_of(project, name, sections)["metrics"].prom_exporter_port
    assert set(targets) == {f"{name}:{port}" for name, port in ports.items()}
    assert (DEPLOY / "observe" / scraped["rule_files"][0]).exists()

    provisioning = DEPLOY / "observe" / "grafana"
    (source,) = yaml.safe_load((provisioning / "datasources/batonmq.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/batonmq.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in observers["grafana"]["volumes"])
    assert mounts["./observe/dashboards"] == provider["options"]["path"]
    for volume in (*observers["grafana"]["volumes"], *observers["prometheus"]["volumes"]):
        source_path = volume.split(":")[0]
        assert not source_path.startswith(".") or (DEPLOY / source_path).is_dir()


def test_compose_itself_takes_the_project_with_all_profiles() -> None:
    file = DEPLOY / "docker-compose.yml"
    said = says("docker-compose", "-f", file, "--profile", "observe", "config")
    seen = yaml.safe_load(said)["services"]
    assert {"prometheus", "grafana"} < seen.keys() and len(seen) == 8
    assert all("mem_limit" in service for service in seen.values())


def test_the_secured_project_is_the_same_with_tls_and_users_in_every_process(
    tmp_path: Path,
) -> None:
    """Beside the settings of docker-compose.yml a service has those of TLS and users, and its own
    folder of certificates and the secret of the nodes, which no other one sees."""
    secret = tmp_path / "node.json"
    secret.write_text(NODE)
    secret.chmod(0o600)
    file_key = "BATONMQ_AUTH__INNERCLIENTAUTHENTICATIONCREDENTIALSFILE"
    variables = dotenv()
    text = (DEPLOY / "docker-compose.secure.yml").read_text()
    over = yaml.safe_load(_VARIABLE.sub(lambda m: variables[m[1]], text))["services"]
    project = compose()
    assert over.keys() == servers(project).keys()
    for name, added in over.items():
        assert added["volumes"] == [f"./tls/nodes/{name}:/etc/batonmq-tls:ro"]
        assert added["env_file"] == ["./tls/users.env"]
        service = project["services"][name]
        assert added["environment"][file_key] == "/etc/batonmq-tls/node.json"
        service["environment"] |= added["environment"] | {file_key: str(secret)}
        sections = BROKER_SECTIONS if name.startswith("broker-") else NAMESRV_SECTIONS
        found = settings_of(project, name, sections)
        assert (found["tls"].server_mode, found["tls"].nodes) == ("enforcing", "enforcing")
        assert found["tls"].dials and found["auth"].authorization_enabled
        assert not found["auth"].audit_only and found["auth"].node_user().secret_key == "secret"


def test_prometheus_takes_its_files() -> None:
    for name in ("prometheus.yml", "prometheus-compose.yml"):
        says("promtool", "check", "config", DEPLOY / "observe" / name)


def test_the_advertised_address_is_the_first_of_the_network() -> None:
    variables = dotenv()
    network = variables["BATONMQ_SUBNET"].removesuffix("0/24")
    assert variables["BATONMQ_ADVERTISE_HOST"] == f"{network}1"
    assert variables["BATONMQ_PUBLISH_HOST"] == variables["BATONMQ_ADVERTISE_HOST"]


def test_nothing_is_fetched_from_a_place_of_its_own() -> None:
    """No registry, mirror or download address: what the machine is configured for is used."""
    host = re.compile(r"\w+://(?!\$)|\b[\w-]+\.(?:io|org|com|net|dev)\b")
    for file in sorted(DEPLOY.rglob("*")):
        if not file.is_file() or {"wheelhouse", "__pycache__"} & set(file.parts):
            continue
        text = file.read_text().replace("docker.io", "").replace("unix://", "")
        text = text.replace("http://prometheus:9090", "")  # a service of the project
        text = re.sub(r"\b[\w.]+\.(?:io|com)/(?=[a-z])", "", text)  # labels and groups of an API
        assert not host.findall(text), file
    base = dotenv()["BATONMQ_BASE_IMAGE"]
    assert "/" not in base


def test_the_image_holds_every_package() -> None:
    """What the wheel is made of is not kept out of the build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept_out = {line for line in lines if line and line[0] not in "#!"}
    for package in packages:
        assert Path(package).parts[0] not in kept_out


def unit_section(name: str) -> configparser.SectionProxy:
    """The section of the service unit."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "batonmq@.service")
    return unit[name]


def test_the_unit_starts_what_there_is_and_has_its_loop_watched() -> None:
    service = unit_section("Service")
    assert (service["Type"], service["Restart"], service["RestartSec"]) == ("notify", "always", "0")
    assert float(service["WatchdogSec"]) >= DEFAULT_WATCHDOG_S
    words = service["ExecStart"].split()
    module = words[words.index("-m") + 1]
    for kind in ("broker", "namesrv", "controller"):
        assert importlib.util.find_spec(module.replace("%i", kind)) is not None


def test_the_unit_may_write_to_its_own_folder_only() -> None:
    service = unit_section("Service")
    confined = {
        "ProtectSystem": "strict",
        "NoNewPrivileges": "true",
        "PrivateTmp": "true",
        "StateDirectory": "batonmq",
        "CapabilityBoundingSet": "",
    }
    assert {key: service[key] for key in confined} == confined
    assert "ReadWritePaths" not in service
    assert int(service["LimitNOFILE"]) >= 1 << 20
    assert service["MemoryMax"].endswith("G")
    # The folder of the example files is the one that systemd makes.
    for kind in ("broker", "namesrv"):
        text = (DEPLOY / "config" / f"{kind}.yaml").read_text()
        assert f"/var/lib/{service['StateDirectory']}/" in text


@pytest.mark.parametrize("name", ["batonmq@broker.service", "batonmq@broker.socket"])
def test_systemd_takes_the_units(tmp_path: Path, name: str) -> None:
    """`systemd-analyze verify` prints each key that it does not know, and each bad value."""
    for file in (DEPLOY / "systemd").iterdir():
        # It looks for the program and the user, which this machine may not have.
        text = file.read_text().replace("/opt/batonmq/bin/python", sys.executable)
        (tmp_path / file.name).write_text(text.replace("User=batonmq", "User=root"))
    assert says("systemd-analyze", "verify", "--man=no", tmp_path / name) == ""


def test_the_socket_unit_holds_the_ports_that_a_broker_listens_on_by_default() -> None:
    lines = (DEPLOY / "systemd" / "batonmq@broker.socket").read_text().splitlines()
    held = {int(line.partition("=")[2]) for line in lines if line.startswith("ListenStream=")}
    port = BrokerConfig().listen_port
    assert held == {port, port - 2}
