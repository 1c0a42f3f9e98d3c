"""The stock jars, our small Java programs compiled against them, and a running program to talk to.

Jars come from Maven Central by `bench/java/pom.xml` into `build/java-peer/lib`, once for a pom;
the programs go to `build/java-peer/classes`, once for a source. Neither is in the repository.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.proc import spawn_talking, stop_all, tail

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ROOT / "bench" / "java"
CACHE: Final = ROOT / "build" / "java-peer"
PEER_VERSION: Final = "5.3.3"
JVM_OPENINGS: Final = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
)
READY_LIMIT_S: Final = 60.0


class MissingToolError(RuntimeError):
    """Something that must be installed is not; the text says what and how to get it."""


class JavaProgramError(RuntimeError):
    """A Java program ended or fell silent; the text holds the end of its log."""


def missing_tools() -> list[str]:
    """What this machine lacks to run the Java side, by name; empty if nothing."""
    needs = {
        "java": "a Java runtime (JDK 17: apt install openjdk-17-jdk-headless)",
        "javac": "the Java compiler (JDK 17: apt install openjdk-17-jdk-headless)",
        "mvn": "Maven (apt install maven)",
    }
    return [f"{tool}: {what}" for tool, what in needs.items() if shutil.which(tool) is None]


def fetch_jars(say: Callable[[str], None]) -> Path:
    """The folder of the stock jars, filled through Maven unless this pom was fetched before."""
    lacking = missing_tools()
    if lacking:
        raise MissingToolError("not installed: " + "; ".join(lacking))
    lib, pom = CACHE / "lib", SOURCES / "pom.xml"
    if _is_current(lib, _digest([pom])):
        return lib
    say(f"fetching RocketMQ {PEER_VERSION} with Maven (about 90 MB, once)")
    shutil.rmtree(lib, ignore_errors=True)
    lib.mkdir(parents=True)
    argv = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
    done = subprocess.run(
        [*argv, f"-DoutputDirectory={lib}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise MissingToolError(
            "Maven could not fetch the jars of the Java peer:\n"
            + (done.stdout + done.stderr)[-2000:]
        )
    _mark_current(lib, _digest([pom]))
    return lib


def compile_programs(lib: Path, say: Callable[[str], None]) -> Path:
    """The folder of our compiled programs."""
    classes = CACHE / "classes"
    sources = sorted(SOURCES.glob("*.java"))
    if _is_current(classes, _digest(sources)):
        return classes
    say(f"compiling {', '.join(source.name for source in sources)}")
    shutil.rmtree(classes, ignore_errors=True)
    classes.mkdir(parents=True)
    argv = ["javac", "-nowarn", "-d", str(classes), "-cp", f"{lib}/*", *map(str, sources)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise JavaProgramError("javac failed:\n" + done.stderr[-2000:])
    _mark_current(classes, _digest(sources))
    return classes


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _is_current(folder: Path, digest: str) -> bool:
    mark = folder / ".made-from"
    return mark.exists() and mark.read_text() == digest


def _mark_current(folder: Path, digest: str) -> None:
    (folder / ".made-from").write_text(digest)


class JavaProgram:
    """A program that reads a line and answers with a line of JSON; what else it prints is noise."""

    def __init__(self, lib: Path, classes: Path, main: str, args: list[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{main}.log"
        argv = ["java", "-Xms512m", "-Xmx512m", f"-Duser.home={folder}", *JVM_OPENINGS]
        self._process = spawn_talking([*argv, "-cp", f"{classes}:{lib}/*", main, *args], self._log)
        self._main = main
        self._answer(READY_LIMIT_S)

    def __enter__(self) -> JavaProgram:
        return self

    def __exit__(self, *exc: object) -> None:
        stop_all([self._process])
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: str, limit_s: float) -> dict[str, Any]:
        """Gives it one line of work and waits for the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise self._error("has ended") from exc
        return self._answer(limit_s)

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = self._process.stdout.readline()
                if not line:
                    raise self._error("has ended")
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        raise self._error(f"did not answer within {limit_s:.0f} s")

    def _error(self, what: str) -> JavaProgramError:
        return JavaProgramError(f"{self._main} {what}\n{tail(self._log)}")
