"""The project's docker-compose.yml under a name, network and ports of its own.

What an operator does goes through `mqctl` from the host; what happens to the machines through the
engine's API. Ended with its volumes.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import docker
import yaml
from docker.errors import ImageNotFound
from docker.models.containers import Container
from docker.models.networks import Network

from batonmq import ClientOptions, ClientTls, Credentials
from lab.cluster.cluster import GROUP, Cluster
from lab.cluster.connection import ask, takes_writes
from lab.cluster.frames import HA_STATUS
from lab.cluster.mqctl import Ran, mqctl
from lab.cluster.processes import ROOT, wait_for

DEPLOY: Final = ROOT / "deploy"
OWN_BASE_IMAGE: Final = "batonmq-base:bookworm"
PUBLIC_BASE_IMAGE: Final = "python:3.11-slim-bookworm"
IMAGE: Final = "batonmq:chaos"
NUMBERS: Final = (1, 2, 3)
BROKERS: Final = tuple(f"broker-{n}" for n in NUMBERS)
NAME_SERVERS: Final = tuple(f"namesrv-{n}" for n in NUMBERS)
NAMESRV_PORTS: Final = "231"
BROKER_PORTS: Final = "232"
HEALTHY_S: Final = 30.0


def compose_command() -> list[str] | None:
    """Compose v2 if the docker command has it, else Debian's docker-compose, else None."""
    docker_command = shutil.which("docker")
    if docker_command is not None:
        asked = subprocess.run(
            [docker_command, "compose", "version"], capture_output=True, check=False
        )
        if asked.returncode == 0:
            return [docker_command, "compose"]
    old = shutil.which("docker-compose")
    return [old] if old is not None else None


def missing_tools() -> list[str]:
    """What this machine lacks, in words; empty if the cluster can run."""
    missing = []
    if compose_command() is None:
        missing.append("docker compose")
    command = shutil.which("docker")
    if command is None:
        missing.append("the docker command")
    # Asked by the command: the package leaves the socket of a failed first contact open.
    elif subprocess.run([command, "info"], capture_output=True, check=False).returncode != 0:
        missing.append("a running container engine (deploy/start-engine.sh starts Debian's)")
    return missing


def base_image() -> str:
    """What the image is built on: what the user says, else Debian's packages, else a registry."""
    chosen = os.environ.get("BATONMQ_BASE_IMAGE")
    if chosen:
        return chosen
    client = docker.from_env()
    try:
        client.images.get(OWN_BASE_IMAGE)
        return OWN_BASE_IMAGE
    except ImageNotFound:
        can_make = os.geteuid() == 0 and shutil.which("debootstrap") is not None
        return OWN_BASE_IMAGE if can_make else PUBLIC_BASE_IMAGE
    finally:
        client.close()


def build_image() -> None:
    """The image of this work tree. Raises CalledProcessError with what the build said."""
    environ = os.environ | {"BATONMQ_IMAGE": IMAGE, "BATONMQ_BASE_IMAGE": base_image()}
    subprocess.run(
        [str(DEPLOY / "build-image.sh")], env=environ, check=True, capture_output=True, text=True
    )


class ComposeCluster(Cluster):
    """A context manager inside which `up` has run, with new volumes. Names: those of services."""

    limit_s = HEALTHY_S

    def __init__(
        self, folder: Path, *, name: str = "batonmq-chaos", subnet: int = 93, secured: bool = False
    ) -> None:
        """`secured`: TLS on every port, and users; `folder` gets the certificates."""
        self.folder = folder
        self.secured = secured
        self.name = name
        self.host = f"10.191.{subnet}.1"
        command = compose_command()
        assert command is not None
        files = ["docker-compose.yml", *(["docker-compose.secure.yml"] if secured else [])]
        self._compose = [*command, *(word for file in files for word in ("-f", str(DEPLOY / file)))]
        self._environ = os.environ | {
            "COMPOSE_PROJECT_NAME": name,
            "BATONMQ_IMAGE": IMAGE,
            "BATONMQ_ADVERTISE_HOST": self.host,
            "BATONMQ_PUBLISH_HOST": self.host,
            "BATONMQ_SUBNET": f"10.191.{subnet}.0/24",
            "BATONMQ_NAMESRV_PORTS": NAMESRV_PORTS,
            "BATONMQ_BROKER_PORTS": BROKER_PORTS,
            "BATONMQ_TLS_FOLDER": str(self.tls),
        }
        self.client = docker.from_env()
        self.up_began = 0.0

    def __enter__(self) -> Self:
        try:
            if self.secured:
                self.secure()
            self.compose("down", "--volumes", "--timeout", "0")
            self.up_began = time.monotonic()
            self.compose("up", "--detach", "--no-build")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.compose("down", "--volumes", "--timeout", "0")
        self.client.close()

    def compose(self, *arguments: str) -> str:
        """Fails with the command's output."""
        done = subprocess.run(
            [*self._compose, *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"compose {arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def secure(self, *words: str) -> None:
        """Makes or renews the certificates; with `secrets` one step to a new secret of nodes."""
        subprocess.run(
            [str(DEPLOY / "secure.sh"), *words], env=self._environ, check=True, capture_output=True
        )

    # -- what it consists of --

    @property
    def tls(self) -> Path:
        return self.folder / "tls"

    @property
    def client_options(self) -> ClientOptions:
        """How a client of the user admin dials."""
        if not self.secured:
            return ClientOptions()
        user = yaml.safe_load((self.tls / "admin.yaml").read_text())
        signs = Credentials(access_key=user["accessKey"], secret_key=user["secretKey"])
        return ClientOptions(
            tls=ClientTls(trust_cert_path=str(self.tls / "ca.pem")), credentials=signs
        )

    def _all(self, name: str) -> list[Container]:
        labels = [f"com.docker.compose.project={self.name}", f"com.docker.compose.service={name}"]
        found: list[Container] = self.client.containers.list(all=True, filters={"label": labels})
        return found

    def _container(self, name: str) -> Container:
        (found,) = self._all(name)
        return found

    @property
    def _network(self) -> Network:
        (found,) = self.client.networks.list(names=[f"{self.name}_cluster"])
        return found

    @property
    def name_servers(self) -> str:
        return ";".join(f"{self.host}:{NAMESRV_PORTS}{6 + n}6" for n in NUMBERS)

    @property
    def controllers(self) -> list[str]:
        return [f"{self.host}:{NAMESRV_PORTS}{6 + n}8" for n in NUMBERS]

    @property
    def broker_addresses(self) -> list[str]:
        return [f"{self.host}:{BROKER_PORTS}{n}1" for n in NUMBERS]

    def broker_at(self, address: str) -> str:
        """The service behind an advertised address."""
        return BROKERS[self.broker_addresses.index(address)]

    # -- what an operator does --

    def mqctl(self, *arguments: str) -> Ran:
        """One run of the command, with nothing but the advertised addresses."""
        environ = {"NAMESRV_ADDR": self.name_servers, "CONTROLLER_ADDR": ";".join(self.controllers)}
        if self.secured:
            environ |= {
                "BATONMQ_TLS_TRUST": str(self.tls / "ca.pem"),
                "BATONMQ_TLS_CERT": str(self.tls / "admin.pem"),
                "BATONMQ_CREDENTIALS": str(self.tls / "admin.yaml"),
            }
        return mqctl(*arguments, home=self.folder, env=environ)

    def wait_healthy(self) -> float:
        """Waits until `mqctl health` ends with 0 and each container is healthy; for how long."""
        began = time.monotonic()
        ran = self.mqctl("health", "--watch", "--interval", "0.2", "--within", str(HEALTHY_S))
        assert ran.code == 0, f"not healthy after {HEALTHY_S} s:\n{ran.out}\n{ran.err}"
        for name in (*NAME_SERVERS, *BROKERS):
            self.wait_for(f"{name} to be healthy", partial(self._is_healthy, name))
        return time.monotonic() - began

    def _is_healthy(self, name: str) -> bool:
        """The health check of the compose file, now."""
        container = self._container(name)
        check = container.attrs["Config"]["Healthcheck"]["Test"]
        code, _ = container.exec_run(check[1:])
        return bool(code == 0)

    def group_state(self, group: str = GROUP) -> dict[str, Any] | None:
        """By `mqctl`, which also signs and dials TLS where that is on."""
        ran = self.mqctl("getSyncStateSet", "-b", group, "--json")
        return ran.json["replicasInfoTable"][group] if ran.code == 0 else None

    def group(self) -> dict[str, Any]:
        """What the controllers record of the group; waits for one of them."""
        return self.wait_for("the group's record", self.group_state)

    def master(self) -> str:
        return self.broker_at(self.group()["masterAddress"])

    def leader(self) -> str:
        """The name server whose controller leads."""
        return NAME_SERVERS[self.controllers.index(self.controller)]

    def self_declared_masters(self) -> list[str]:
        """Every broker that calls itself master."""
        words = {a: ask(a, HA_STATUS).json for a in self.broker_addresses}
        return [self.broker_at(address) for address, word in words.items() if word["master"]]

    # -- what happens to it --

    def kill(self, names: Iterable[str]) -> None:
        """SIGKILL by the engine, which then leaves them dead until `start`."""
        for name in names:
            self._container(name).kill()

    def crash(self, name: str) -> None:
        """The process dies inside its container; the restart policy starts it again."""
        os.kill(self._server_pid(self._container(name)), signal.SIGKILL)

    def _server_pid(self, container: Container) -> int:
        """The child of the container's init, as the host numbers it."""
        init = container.attrs["State"]["Pid"]
        (child,) = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return int(child)

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            self._container(name).start()

    def cut_off(self, names: Iterable[str]) -> None:
        network = self._network
        for name in names:
            network.disconnect(self._container(name))

    def reconnect(self, names: Iterable[str], address: str | None = None) -> None:
        """Under their service names; with `address` inside, or any."""
        network = self._network
        for name in names:
            network.connect(self._container(name), aliases=[name], ipv4_address=address)

    def address_inside(self, name: str) -> str:
        networks = self._container(name).attrs["NetworkSettings"]["Networks"]
        address: str = networks[f"{self.name}_cluster"]["IPAddress"]
        return address

    def exit_code(self, name: str) -> int:
        """Of a stopped container."""
        state = self._container(name).attrs["State"]
        assert state["Status"] == "exited", state
        return int(state["ExitCode"])

    def logs(self) -> list[Path]:
        """Written from what the engine keeps."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*NAME_SERVERS, *BROKERS):
            text = b"".join(container.logs(timestamps=True) for container in self._all(name))
            (folder / f"{name}.log").write_bytes(text)
        return sorted(folder.glob("*.log"))


def first_ack(addresses: list[str], topic: str, deadline_s: float = 60.0) -> float:
    """The moment (monotonic) at which a write to any of `addresses` was first acknowledged."""

    def is_acked() -> bool:
        return any(takes_writes(address, topic) for address in addresses)

    wait_for("an acknowledged write", is_acked, deadline_s)
    return time.monotonic()
