"""The stock Java client on this machine: what is needed, fetched once, compiled, and run.

`missing_tools` names what a machine lacks. `prepared_classpath` fetches the jars named in `pom.xml`
with Maven into build/interop (git-ignored) and compiles `java/` there; both are kept until the pom
or a source changes. `JavaProgram` runs one of the programs and collects its JSON lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "interop"
JDK = 17
# The stock client waits 20 s for its next rebalance, or 30 s for a pull's answer, when it meets one
# of its own races (a heartbeat that finds its lock taken, a request into a closing channel).
WAIT_S = 90.0
OPENED = [
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
]
# Short-lived programs: the first compiler alone starts fastest and leaves the brokers their cores.
SMALL_JVM = ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
T = TypeVar("T")


class FetchError(Exception):
    """Maven or javac failed; the text says which and shows the end of its output."""


def missing_tools() -> list[str]:
    """What this machine lacks for the Java ring, by name; empty if nothing."""
    lacks = [] if _jdk_version() >= JDK else [f"a JDK {JDK} (java and javac)"]
    if not shutil.which("mvn") and not is_fetched():
        lacks.append("Maven (mvn)")
    return lacks


def _jdk_version() -> int:
    if not shutil.which("java") or not shutil.which("javac"):
        return 0
    done = subprocess.run(["javac", "-version"], capture_output=True, text=True, check=False)
    found = re.search(r"javac (\d+)", done.stdout + done.stderr)
    return int(found[1]) if found else 0


def _digest(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def is_fetched() -> bool:
    """Whether the jars named in pom.xml are here."""
    stamp = BUILD / "lib.stamp"
    return stamp.exists() and stamp.read_text() == _digest([HERE / "pom.xml"])


def prepared_classpath() -> str:
    """Fetches and compiles what is not there yet. Raises FetchError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_fetched():
            _fetch()
        _compile()
    return f"{BUILD / 'classes'}{os.pathsep}{BUILD / 'lib'}/*"


def _fetch() -> None:
    lib, pom = BUILD / "lib", HERE / "pom.xml"
    shutil.rmtree(lib, ignore_errors=True)
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={lib}", "-DincludeScope=runtime"]
    _run(["mvn", "-q", "-B", "-f", str(pom), *goal])
    (BUILD / "lib.stamp").write_text(_digest([pom]))


def _compile() -> None:
    sources = sorted((HERE / "java").glob("*.java"))
    stamp, digest = BUILD / "classes.stamp", _digest([HERE / "pom.xml", *sources])
    if stamp.exists() and stamp.read_text() == digest:
        return
    classes = BUILD / "classes"
    shutil.rmtree(classes, ignore_errors=True)
    names = [str(source) for source in sources]
    lib = str(BUILD / "lib" / "*")
    _run(["javac", "-Xlint:all,-processing,-classfile", "-d", str(classes), "-cp", lib, *names])
    stamp.write_text(digest)


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FetchError(f"{argv[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


class JavaProgram:
    """One running program; a context manager that ends it. Its lines of JSON are in `lines`."""

    def __init__(
        self, classpath: str, folder: Path, name: str, *arguments: str, binary_headers: bool = False
    ) -> None:
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self._noise: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        serialize = ["-Drocketmq.serialize.type=ROCKETMQ"] if binary_headers else []
        # The client writes its logs under user.home.
        home = [f"-Duser.home={folder}"]
        argv = ["java", *SMALL_JVM, *OPENED, *serialize, *home, "-cp", classpath, name, *arguments]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self._reader = threading.Thread(target=self._read, name=f"java-{name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> JavaProgram:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.append(json.loads(line))
            else:
                self._noise.append(line)

    def of(self, field: str) -> list[dict[str, Any]]:
        """The lines that have this field, so far."""
        return [line for line in list(self.lines) if field in line]

    def wait_for(self, what: str, found: Callable[[], T], seconds: float = WAIT_S) -> T:
        """Polls until `found()` is true; fails naming `what`, with the program's last words."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            result = found()
            if result:
                return result
            if ended or time.monotonic() > deadline:
                how = f"{self.name} ended" if ended else f"not within {seconds:.0f} s"
                words = "".join(self._noise[-20:]) + "\n".join(map(str, self.lines[-5:]))
                raise AssertionError(f"waited in vain for {what}: {how}\n{words}")
            time.sleep(0.02)

    def tell(self, line: str) -> None:
        """One line for its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self, seconds: float = WAIT_S) -> list[dict[str, Any]]:
        """Closes its stdin, waits for its end, which must be a good one; all its lines."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.wait_for("its end", lambda: self.process.poll() is not None, seconds)
        self._reader.join(5)
        assert self.process.returncode == 0, "".join(self._noise[-20:])
        return self.lines
