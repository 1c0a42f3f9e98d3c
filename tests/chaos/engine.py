"""The container engine that the chaos tests run on, and what a machine lacks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import docker
from docker.errors import ImageNotFound

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OWN_BASE_IMAGE = "batonmq-base:bookworm"
PUBLIC_BASE_IMAGE = "python:3.11-slim-bookworm"
IMAGE = "batonmq:chaos"


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
    """What this machine lacks, in words; empty if the tests can run."""
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
