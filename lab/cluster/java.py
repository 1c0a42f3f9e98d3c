"""The stock Java jars, our small programs compiled against them, and a running program.

`prepared_classpath` fetches the jars that `pom.xml` names with Maven into build/java (git-ignored)
and compiles a folder of sources there; both are kept until the pom or a source changes.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from lab.cluster import processes
from lab.cluster.frames import BROKER_NAME

PEER_VERSION: Final = "5.3.3"
POM: Final = processes.ROOT / "lab" / "cluster" / "pom.xml"
PROGRAMS: Final = processes.ROOT / "tests" / "interop" / "java"
"""Sources of the programs with stock clients, which tests and measurements share."""
BUILD: Final = processes.ROOT / "build" / "java"
LIB: Final = BUILD / "lib"
ARCHIVE: Final = BUILD / "classes.jsa"
"""The classes of stock clients and servers, parsed and verified once: a JVM that maps them starts
with two thirds of the work. A JVM ignores an archive of other jars or of another JDK."""
JDK: Final = 17
# The stock client waits 20 s for its next rebalance, or 30 s for the reply to a pull, when it meets
# one of its own races (a heartbeat that finds its lock taken, a request into a closing channel).
WAIT_S: Final = 90.0
LIMIT_S: Final = 180.0
"""Of a wait for a server: a slave fetches tables each minute, and a slow machine takes its time."""
JVM_OPENINGS: Final = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
)
# Only the fast compiler (C1): a short-lived JVM starts sooner, with a third less processor time.
SHORT_LIVED: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
SMALL_JVM: Final = ("-Xms64m", "-Xmx256m", *SHORT_LIVED)
BROKER_MAIN: Final = "org.apache.rocketmq.broker.BrokerStartup"
CLUSTER_NAME: Final = "DefaultCluster"
ADMIN_MAIN: Final = "org.apache.rocketmq.tools.command.MQAdminStartup"
NAMESRV_MAIN: Final = "org.apache.rocketmq.namesrv.NamesrvStartup"
ARCHIVED: Final = (f"-XX:SharedArchiveFile={ARCHIVE}", "-Xlog:cds*=off")
SMALL_HEAP: Final = (
    "-Xms256m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", *SHORT_LIVED, *ARCHIVED,
)  # fmt: skip
BENCH_HEAP: Final = ("-Xms512m", "-Xmx512m", "-Xmn256m", "-XX:MaxDirectMemorySize=1g")
SEGMENT: Final = 1 << 20
SMALL_FILES: Final[dict[str, object]] = {
    "mappedFileSizeCommitLog": SEGMENT,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
}
NO_WARMING: Final[dict[str, object]] = {"transferMsgByHeap": "true", "warmMapedFileEnable": "false"}
T = TypeVar("T")


class JavaError(RuntimeError):
    """Maven, javac or a program failed; the text says which and shows the end of its output."""


def missing_tools() -> list[str]:
    """What this machine lacks for Java, by name; empty if nothing."""
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


def is_fetched() -> bool:
    """Whether the jars of the pom are here."""
    return _is_current(LIB, _digest([POM]))


def prepared_classpath(sources: Path = PROGRAMS) -> str:
    """Fetches the jars and compiles the programs in `sources`, unless that is done. Raises
    JavaError."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_fetched():
            _fetch()
            ARCHIVE.unlink(missing_ok=True)
        if not ARCHIVE.exists():
            _archive()
        classes = _compile(sources)
    return f"{LIB}/*{os.pathsep}{classes}"  # the archive's jars come first, or it is not used


def _fetch() -> None:
    shutil.rmtree(LIB, ignore_errors=True)
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={LIB}", "-DincludeScope=runtime"]
    _run(["mvn", "-q", "-B", "-f", str(POM), *goal])
    _mark_current(LIB, _digest([POM]))


def _archive() -> None:
    """Of what a name server with its controller loads, a broker under it, and a client."""
    base = processes.free_base_port(1)
    server = f"{processes.HOST}:{base}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def listing(program: str) -> tuple[str, ...]:
            return *SMALL_JVM, f"-XX:DumpLoadedClassList={folder / program}.classes"

        settings = broker_settings(
            processes.HOST, base + 1035, server, folder / "store", f"{processes.HOST}:{base + 2}"
        )
        home = folder / "namesrv"
        servers = [
            start_server(
                NAMESRV_MAIN, name_server_settings([base], 0, home), home, listing("namesrv")
            ),
            start_server(
                BROKER_MAIN, {**settings, **NO_WARMING}, folder / "broker", listing("broker")
            ),
        ]
        try:
            processes.wait_for("a broker", lambda: not processes.is_free(base + 1035), LIMIT_S)
            command = ["updateTopic", "-n", server, "-c", CLUSTER_NAME, "-t", "any"]
            _run(["java", *listing("client"), *JVM_OPENINGS, f"-Duser.home={folder}",
                  "-cp", f"{LIB}/*", ADMIN_MAIN, *command])  # fmt: skip
        finally:
            processes.stop_all(servers, 0.0)
        # An id is of one list alone, and a source that of another loader.
        lines = (
            line for each in folder.glob("*.classes") for line in each.read_text().splitlines()
        )
        known = dict.fromkeys(
            re.sub(r" id: .*", "", line) for line in lines if " source:" not in line
        )
        classes = folder / "classes"
        classes.write_text("\n".join(known))
        _run(["java", "-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedClassListFile={classes}",
              f"-XX:SharedArchiveFile={ARCHIVE}", "-Xlog:cds*=off", "-cp", f"{LIB}/*"])  # fmt: skip


def _compile(sources: Path) -> Path:
    files = sorted(sources.glob("*.java"))
    classes, digest = BUILD / sources.parent.name, _digest([POM, *files])
    if not _is_current(classes, digest):
        shutil.rmtree(classes, ignore_errors=True)
        names = [str(file) for file in files]
        lint = "-Xlint:all,-processing,-classfile"
        _run(["javac", lint, "-d", str(classes), "-cp", f"{LIB}/*", *names])
        _mark_current(classes, digest)
    return classes


def _digest(paths: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _is_current(folder: Path, digest: str) -> bool:
    stamp = folder / ".made-from"
    return stamp.exists() and stamp.read_text() == digest


def _mark_current(folder: Path, digest: str) -> None:
    (folder / ".made-from").write_text(digest)


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JavaError(f"{argv[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def start_server(
    main: str, settings: Mapping[str, object], home: Path, heap: Sequence[str]
) -> subprocess.Popen[bytes]:
    """A server of RocketMQ with a configuration file and a home folder of its own, which gets its
    logs and what it prints (`process.log`)."""
    home.mkdir(parents=True, exist_ok=True)
    config = home / "server.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    homes = [f"-Duser.home={home}", f"-Drocketmq.home.dir={home}"]
    argv = ["java", *heap, *homes, *JVM_OPENINGS, "-cp", f"{LIB}/*", main, "-c", str(config)]
    return processes.spawn(argv, home / "process.log", cwd=home)


def name_server_settings(ports: Sequence[int], index: int, home: Path) -> dict[str, object]:
    """The name server on `ports[index]` with its controller two ports above, one of as many."""
    peers = (f"n{i}-{processes.HOST}:{port + 2}" for i, port in enumerate(ports))
    return {
        "listenPort": ports[index],
        "enableControllerInNamesrv": "true",
        "controllerDLegerGroup": "group1",
        "controllerDLegerPeers": ";".join(peers),
        "controllerDLegerSelfId": f"n{index}",
        "controllerStorePath": home / "controller",
        "enableElectUncleanMaster": "false",
        "notifyBrokerRoleChanged": "true",
    }


def broker_settings(
    host: str, port: int, name_servers: str, store: Path, controllers: str = ""
) -> dict[str, object]:
    """Of a broker of the one group, in RocketMQ's keys, which brokers of ours take too. With
    `controllers` (addresses, `;` between them) in controller mode, acknowledged by the whole set.
    """
    under_controllers = {
        "brokerId": -1,
        "brokerRole": "SLAVE",
        "controllerAddr": controllers,
        "enableControllerMode": "true",
        "allAckInSyncStateSet": "true",
    }
    return {
        "brokerClusterName": CLUSTER_NAME,
        "brokerName": BROKER_NAME,
        "listenPort": port,
        "haListenPort": port + 1,
        "namesrvAddr": name_servers,
        "brokerIP1": host,
        "brokerIP2": host,
        "storePathRootDir": store,
        "storePathCommitLog": store / "commitlog",
        "diskMaxUsedSpaceRatio": 95,
        **(under_controllers if controllers else {}),
    }


class JavaProgram:
    """One running program; a context manager that ends it. Its lines of JSON are in `lines` and in
    NAME.json of its folder, all else that it prints goes to NAME.log."""

    def __init__(
        self,
        classpath: str,
        folder: Path,
        name: str,
        *arguments: str,
        binary_headers: bool = False,
        jvm: Sequence[str] = SMALL_JVM,
    ) -> None:
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self._log = folder / f"{name}.log"
        folder.mkdir(parents=True, exist_ok=True)
        serialize = ["-Drocketmq.serialize.type=ROCKETMQ"] if binary_headers else []
        # The client writes its logs under user.home.
        options = [*ARCHIVED, *jvm, *JVM_OPENINGS, *serialize, f"-Duser.home={folder}"]
        argv = ["java", *options, "-cp", classpath, name, *arguments]
        self._process = processes.spawn_talking(argv, self._log, cwd=folder)
        self._reader = threading.Thread(target=self._read, name=f"java-{name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        processes.stop_all([self._process], 0.0)
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("a") as log, self._log.with_suffix(".json").open("a") as lines:
            for line in self._process.stdout:
                if line.startswith("{"):
                    self.lines.append(json.loads(line))
                    lines.write(line)
                else:
                    log.write(line)
                    log.flush()

    def of(self, field: str) -> list[dict[str, Any]]:
        """The lines that have this field, so far."""
        return [line for line in list(self.lines) if field in line]

    def wait_for(
        self,
        what: str,
        found: Callable[[], T],
        limit_s: float = WAIT_S,
        *,
        diagnostics: Callable[[], str] = lambda: "",
    ) -> T:
        """Polls until `found()` is true, or the program has ended. Raises JavaError with `what`,
        `diagnostics()` and the log's end."""

        def look() -> T | None:
            has_ended = self._process.poll() is not None and not self._reader.is_alive()
            result = found()
            if has_ended and not result:
                raise processes.NotInTime(f"{self.name} ended before: {what}\n{diagnostics()}")
            return result

        try:
            return processes.wait_for(what, look, limit_s, diagnostics)
        except processes.NotInTime as error:
            output = processes.tail(self._log) + "\n".join(map(str, self.lines[-5:]))
            raise JavaError(f"{error}\n{self._log}:\n{output}") from None

    def send(self, line: str) -> None:
        """One line for its standard input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise JavaError(f"{self.name} has ended\n{processes.tail(self._log)}") from exc

    def ask(self, line: str, limit_s: float) -> dict[str, Any]:
        """Sends a line and returns the first line of JSON after it."""
        known = len(self.lines)
        self.send(line)
        self.wait_for(f"the result of {line}", lambda: len(self.lines) > known, limit_s)
        return self.lines[known]

    def finish(self, limit_s: float = WAIT_S) -> list[dict[str, Any]]:
        """Closes its standard input and waits for exit code 0; all its lines."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.wait_for("its end", lambda: self._process.poll() is not None, limit_s)
        self._reader.join(5)
        if self._process.returncode:
            raise JavaError(
                f"{self.name} ended with {self._process.returncode}\n{processes.tail(self._log)}"
            )
        return self.lines
