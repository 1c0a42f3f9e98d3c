"""The project's docker-compose.yml under a name, network and ports of its own, for tests.

What an operator does goes through `mqctl` from the host; what happens to the machines through the
engine's API. Ended with its volumes; the logs of a failed run are kept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docker
import yaml
from docker.models.containers import Container
from docker.models.networks import Network

from batonmq import ClientOptions, ClientTls, Credentials
from lab.cluster.connection import BlockingConnection, ask
from lab.cluster.frames import HA_STATUS
from lab.cluster.mqctl import Ran, mqctl
from lab.cluster.processes import wait_for
from tests.chaos.engine import DEPLOY, IMAGE, compose_command

GROUP = "broker-a"
NUMBERS = (1, 2, 3)
BROKERS = tuple(f"broker-{n}" for n in NUMBERS)
NAME_SERVERS = tuple(f"namesrv-{n}" for n in NUMBERS)
HEALTHY_S = 30.0


class ComposeCluster:
    """Use as a context manager; `up` has run and volumes are new inside it."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "batonmq-chaos",
        subnet: int = 93,
        secured: bool = False,
    ) -> None:
        """`secured`: TLS on every port, and users; `folder` gets the certificates."""
        self.folder = folder
        self.secured = secured
        self.name = name
        self.host = f"10.191.{subnet}.1"
        self.namesrv_ports, self.broker_ports = "231", "232"
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
            "BATONMQ_NAMESRV_PORTS": self.namesrv_ports,
            "BATONMQ_BROKER_PORTS": self.broker_ports,
            "BATONMQ_TLS_FOLDER": str(self.tls),
        }
        self.client = docker.from_env()
        self.up_began = 0.0

    def __enter__(self) -> ComposeCluster:
        try:
            if self.secured:
                self.make_certificates()
            self.compose("down", "--volumes", "--timeout", "5")
            self.up_began = time.monotonic()
            self.compose("up", "--detach", "--no-build")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (*BROKERS, *NAME_SERVERS):
            self._settle(name)
        self.compose("down", "--volumes", "--timeout", "5")
        self.client.close()

    def _settle(self, name: str) -> None:
        for container in self._all(name):
            if container.status == "paused":
                container.unpause()

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

    def make_certificates(self) -> None:
        """Makes or renews them."""
        subprocess.run(
            [str(DEPLOY / "secure.sh")], env=self._environ, check=True, capture_output=True
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
        labels = [
            f"com.docker.compose.project={self.name}",
            f"com.docker.compose.service={name}",
        ]
        found: list[Container] = self.client.containers.list(all=True, filters={"label": labels})
        return found

    def container(self, name: str) -> Container:
        (found,) = self._all(name)
        return found

    @property
    def network(self) -> Network:
        (found,) = self.client.networks.list(names=[f"{self.name}_cluster"])
        return found

    @property
    def name_server_addresses(self) -> str:
        return ";".join(f"{self.host}:{self.namesrv_ports}{6 + n}6" for n in NUMBERS)

    @property
    def controller_addresses(self) -> str:
        return ";".join(f"{self.host}:{self.namesrv_ports}{6 + n}8" for n in NUMBERS)

    @property
    def broker_addresses(self) -> list[str]:
        return [f"{self.host}:{self.broker_ports}{n}1" for n in NUMBERS]

    def broker_at(self, address: str) -> str:
        """The service behind an advertised address."""
        return BROKERS[self.broker_addresses.index(address)]

    def controller_at(self, address: str) -> str:
        return NAME_SERVERS[self.controller_addresses.split(";").index(address)]

    # -- what an operator does --

    def mqctl(self, *arguments: str, controllers: bool = True) -> Ran:
        """One run of the command, with nothing but the advertised addresses."""
        environ = {
            "NAMESRV_ADDR": self.name_server_addresses,
            "CONTROLLER_ADDR": self.controller_addresses if controllers else None,
        }
        if self.secured:
            environ |= {
                "BATONMQ_TLS_TRUST": str(self.tls / "ca.pem"),
                "BATONMQ_TLS_CERT": str(self.tls / "admin.pem"),
                "BATONMQ_CREDENTIALS": str(self.tls / "admin.yaml"),
            }
        return mqctl(*arguments, home=self.folder, env=environ)

    def wait_healthy(self, seconds: float = HEALTHY_S) -> float:
        """Waits until `mqctl health` ends with 0 and each container is healthy; for how long."""
        began = time.monotonic()
        ran = self.mqctl("health", "--watch", "--interval", "0.2", "--within", str(seconds))
        assert ran.code == 0, f"not healthy after {seconds} s:\n{ran.out}\n{ran.err}"
        for name in (*NAME_SERVERS, *BROKERS):
            wait_for(f"{name} to be healthy", lambda name=name: self.is_healthy(name), seconds)
        return time.monotonic() - began

    def is_healthy(self, name: str) -> bool:
        """The health check of the compose file, now."""
        container = self.container(name)
        check = container.attrs["Config"]["Healthcheck"]["Test"]
        code, _ = container.exec_run(check[1:])
        return bool(code == 0)

    def group(self) -> dict[str, Any]:
        """What the controllers record of the group."""
        ran = self.mqctl("getSyncStateSet", "-b", GROUP, "--json")
        assert ran.code == 0, ran.err
        found: dict[str, Any] = ran.json["replicasInfoTable"][GROUP]
        return found

    def master(self) -> str:
        return self.broker_at(self.group()["masterAddress"])

    def leader(self) -> str:
        """The name server whose controller leads."""
        ran = self.mqctl("getControllerMetaData", "--json")
        assert ran.json["controllerLeaderAddress"], ran.out
        return self.controller_at(ran.json["controllerLeaderAddress"])

    def self_declared_masters(self) -> list[str]:
        """Every broker that calls itself master."""
        words = {a: ask(a, HA_STATUS).json for a in self.broker_addresses}
        return [self.broker_at(address) for address, word in words.items() if word["master"]]

    # -- what happens to it --

    def kill(self, names: Iterable[str]) -> None:
        """SIGKILL by the engine, which then leaves them dead until `start`."""
        for name in names:
            self.container(name).kill()

    def crash(self, name: str) -> None:
        """The process dies inside its container; the restart policy starts it again."""
        os.kill(self._server_pid(self.container(name)), signal.SIGKILL)

    def _server_pid(self, container: Container) -> int:
        """The child of the container's init, as the host numbers it."""
        init = container.attrs["State"]["Pid"]
        (child,) = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return int(child)

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            self.container(name).start()

    def pause(self, names: Iterable[str]) -> None:
        for name in names:
            self.container(name).pause()

    def unpause(self, names: Iterable[str]) -> None:
        for name in names:
            self.container(name).unpause()

    def cut_off(self, names: Iterable[str]) -> None:
        network = self.network
        for name in names:
            network.disconnect(self.container(name))

    def reconnect(self, names: Iterable[str], address: str | None = None) -> None:
        """Under their service names; with `address` inside, or any."""
        network = self.network
        for name in names:
            network.connect(self.container(name), aliases=[name], ipv4_address=address)

    def address_inside(self, name: str) -> str:
        networks = self.container(name).attrs["NetworkSettings"]["Networks"]
        address: str = networks[f"{self.name}_cluster"]["IPAddress"]
        return address

    def exit_code(self, name: str) -> int:
        """Of a stopped container."""
        state = self.container(name).attrs["State"]
        assert state["Status"] == "exited", state
        return int(state["ExitCode"])

    def keep_logs(self, folder: Path) -> None:
        """Every container's log into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*NAME_SERVERS, *BROKERS):
            for container in self._all(name):
                (folder / f"{name}.log").write_bytes(container.logs(timestamps=True))


def first_ack(addresses: list[str], topic: str, deadline_s: float = 60.0) -> float:
    """The moment (monotonic) at which a write to any of `addresses` was first acknowledged."""

    def acknowledged() -> float | None:
        for address in addresses:
            try:
                with BlockingConnection(address, timeout_s=1.0) as probe:
                    if probe.send(topic, b"first").code == 0:
                        return time.monotonic()
            except OSError:
                continue
        return None

    found: float = wait_for("an acknowledged write", acknowledged, deadline_s)
    return found
