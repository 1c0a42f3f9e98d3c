"""Files by Hadoop's file systems: `hdfs://`, and every scheme that the session has a jar for.

Spark runs the Python code of a data source in processes of their own, on the driver as on
executors, and none of them can call Spark's JVM. So each starts one inside of itself (JPype), at
the first such path, with Spark's jars, the session's, and its settings `spark.hadoop.*`; it reads
`core-site.xml` and the like from HADOOP_CONF_DIR. Free of Spark.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs

SHARED: Final = "BATONMQ_HADOOP"
"""The variable by which a session's settings reach all of its Python processes."""
_JARS: Final = {
    "s3a": "hadoop-aws", "abfs": "hadoop-azure", "abfss": "hadoop-azure", "gs": "gcs-connector"
}  # fmt: skip
_PYARROWS: Final = frozenset({"", "file", "s3", "s3n"})
_HEAP: Final = "-Xmx512m"
_HEAD: Final = "spark.hadoop."
_S3_SETTINGS: Final = {
    "access.key": "access_key", "secret.key": "secret_key", "session.token": "session_token",
    "endpoint.region": "region", "assumed.role.arn": "role_arn",
}  # fmt: skip


_DELTA: Final = {
    "access_key": "access_key_id", "secret_key": "secret_access_key",
    "session_token": "session_token", "region": "region", "anonymous": "skip_signature",
}  # fmt: skip


def share_settings(spark: Mapping[str, str]) -> str:
    """What of Spark's settings is Hadoop's, and the session's jars: for this process, and as the
    text of SHARED for others."""
    own = {key[len(_HEAD) :]: value for key, value in spark.items() if key.startswith(_HEAD)}
    jars = [each for each in spark.get("spark.jars", "").split(",") if each]
    os.environ[SHARED] = text = json.dumps({"settings": own, "jars": jars})
    return text


def _shared(what: str) -> Any:
    return json.loads(os.environ.get(SHARED) or '{"settings": {}, "jars": []}')[what]


def takes(scheme: str) -> bool:
    """Whether paths of a scheme are Hadoop's: what pyarrow knows, too, only if there is a jar."""
    if scheme in _PYARROWS:
        return False
    jar = _JARS.get(scheme)
    return not jar or any(Path(each).name.startswith(jar) for each in _class_path())


def s3_options(bucket: str) -> dict[str, Any]:
    """What `fs.s3a.*` says to pyarrow's S3 of a bucket; empty if it says nothing."""
    given = _shared("settings")
    general = "fs.s3a."
    own = f"{general}bucket.{bucket}."
    said = {key[len(general) :]: value for key, value in given.items() if key.startswith(general)}
    said |= {key[len(own) :]: value for key, value in given.items() if key.startswith(own)}
    options: dict[str, Any] = {
        name: said[key] for key, name in _S3_SETTINGS.items() if said.get(key)
    }
    if "AnonymousAWSCredentialsProvider" in said.get("aws.credentials.provider", ""):
        options["anonymous"] = True
    if endpoint := said.get("endpoint"):
        scheme, separator, place = endpoint.rpartition("://")
        secure = said.get("connection.ssl.enabled", "true").lower() != "false"
        options["scheme"] = scheme if separator else "https" if secure else "http"
        options["endpoint_override"] = place
        options["force_virtual_addressing"] = said.get("path.style.access", "").lower() != "true"
    return options


def delta_options(place: str) -> dict[str, str] | None:
    """The same for the package deltalake; None where nothing is said."""
    scheme, _, rest = place.partition("://")
    said = s3_options(rest.partition("/")[0]) if scheme in ("s3", "s3a") else {}
    options = {f"aws_{name}": str(said[key]) for key, name in _DELTA.items() if said.get(key)}
    if "endpoint_override" in said:
        options["aws_endpoint"] = f"{said['scheme']}://{said['endpoint_override']}"
        options["aws_allow_http"] = str(said["scheme"] == "http").lower()
    return options or None


def _class_path() -> list[str]:
    """Jars of Spark, of the session where they lie on this machine, and of this executor; before
    them the folders of settings."""
    named = [os.environ.get(name, "") for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")]
    home = os.environ.get("SPARK_HOME")
    if home is None and (spec := importlib.util.find_spec("pyspark")) is not None:
        home = str(Path(spec.origin or "").parent)
    folders = [Path(home) / "jars"] if home else []
    spark = sys.modules.get("pyspark")  # in a task: what this executor was sent
    sent = getattr(getattr(spark, "SparkFiles", None), "_root_directory", None)
    if sent:
        folders.append(Path(sent))
    jars = [re.sub("^file:/*", "/", each) for each in _shared("jars")]
    found = [str(each) for folder in folders for each in sorted(folder.glob("*.jar"))]
    return [each for each in (*named, *found, *jars) if each and os.path.exists(each)]


@cache
def _jvm() -> Any:
    """The classes of Hadoop. Raises OSError if no JVM can be started here."""
    try:
        import jpype
        import jpype.config
    except ImportError:
        raise OSError("the package JPype1 is not installed: pip install 'batonmq[spark]'") from None
    try:
        if not jpype.isJVMStarted():
            # At the end of the process objects of Java are still referred to, by threads of
            # pyarrow, too: a JVM that is taken down before them takes the process down.
            jpype.config.onexit = jpype.config.destroy_jvm = False
            jpype.startJVM(_HEAP, "-Xrs", classpath=_class_path(), convertStrings=True)
        return jpype.JPackage("org").apache.hadoop
    except (jpype.JVMNotFoundException, OSError, RuntimeError) as error:
        raise OSError(f"no JVM could be started (JAVA_HOME names the JDK): {error}") from None


@contextmanager
def _named(uri: str) -> Iterator[None]:
    """Java's exceptions as Python has them, each one line that begins with the path."""
    import jpype

    try:
        yield
    except jpype.JException as error:
        name = str(error.getClass().getSimpleName())
        why = " ".join(str(error.getMessage() or name).split())
        if name == "FileNotFoundException":
            raise FileNotFoundError(f"{uri}: not found") from None
        scheme = uri.partition("://")[0]
        if "No FileSystem for scheme" in why or "ClassNotFoundException" in why:
            jar = _JARS.get(scheme, "that of its file system")
            raise ValueError(
                f"no jar for {uri}: Spark needs {jar}, by spark.jars.packages or spark.jars ({why})"
            ) from None
        raise OSError(f"{uri}: {name}: {why}") from None


class HadoopFiles(fs.FileSystemHandler):
    """pyarrow's view of one Hadoop file system; paths are those behind the root's authority."""

    def __init__(self, root: str) -> None:
        """Raises OSError, ValueError for a scheme without a jar."""
        self._root = root
        hadoop = _jvm()
        with _named(root):
            conf = hadoop.conf.Configuration()
            for key, value in _shared("settings").items():
                conf.set(key, value)
            self._path = hadoop.fs.Path
            self._fs = self._path(f"{root}/").getFileSystem(conf)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HadoopFiles) and other._root == self._root

    def __hash__(self) -> int:
        return hash(self._root)

    def get_type_name(self) -> str:
        return "hadoop"

    def normalize_path(self, path: str) -> str:
        return path

    def _at(self, path: str) -> Any:
        return self._path(f"{self._root}/{path.lstrip('/')}")

    def _info(self, status: Any) -> fs.FileInfo:
        path = str(status.getPath().toUri().getPath())
        kind = fs.FileType.Directory if status.isDirectory() else fs.FileType.File
        size = {} if status.isDirectory() else {"size": int(status.getLen())}
        return fs.FileInfo(path, kind, **size)

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [self._one(path) for path in paths]

    def _one(self, path: str) -> fs.FileInfo:
        try:
            with _named(f"{self._root}{path}"):
                return self._info(self._fs.getFileStatus(self._at(path)))
        except FileNotFoundError:
            return fs.FileInfo(path, fs.FileType.NotFound)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = selector.base_dir
        kind = self._one(folder).type
        if kind == fs.FileType.NotFound and selector.allow_not_found:
            return []
        if kind == fs.FileType.File:
            raise NotADirectoryError(f"{self._root}{folder}: it is no folder")
        with _named(f"{self._root}{folder}"):
            found = [self._info(each) for each in self._fs.listStatus(self._at(folder))]
        if selector.recursive:
            for each in [each for each in found if each.type == fs.FileType.Directory]:
                below = fs.FileSelector(each.path, recursive=True)
                found += self.get_file_info_selector(below)
        return found

    def open_input_file(self, path: str) -> pa.NativeFile:
        uri = f"{self._root}{path}"
        with _named(uri):
            size = self._fs.getFileStatus(self._at(path)).getLen()
            return pa.PythonFile(
                _JavaReader(uri, self._fs.open(self._at(path)), int(size)), mode="r"
            )

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Mapping[str, str]) -> pa.NativeFile:
        uri = f"{self._root}{path}"
        with _named(uri):
            return pa.PythonFile(_JavaWriter(uri, self._fs.create(self._at(path), True)), mode="w")

    def create_dir(self, path: str, recursive: bool) -> None:
        self._done(path, self._fs.mkdirs)

    def delete_dir(self, path: str) -> None:
        self._done(path, lambda at: self._fs.delete(at, True))

    def delete_file(self, path: str) -> None:
        self._done(path, lambda at: self._fs.delete(at, False))

    def move(self, source: str, target: str) -> None:
        if self._one(target).is_file:  # HDFS replaces none
            self.delete_file(target)
        self._done(source, lambda at: self._fs.rename(at, self._at(target)))

    def _done(self, path: str, call: Any) -> None:
        with _named(f"{self._root}{path}"):
            # HDFS has a second rename(), without a result, and JPype prefers it.
            if call(self._at(path)) is False:
                raise OSError(f"{self._root}{path}: the file system refused it")

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError

    delete_dir_contents = delete_root_dir_contents = copy_file = open_append_stream = _refuse


class _JavaStream:
    """A stream of Java as a file of Python."""

    def __init__(self, uri: str, stream: Any) -> None:
        self._uri, self._stream = uri, stream
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with _named(self._uri):
                self._stream.close()

    def flush(self) -> None:
        """What a close does."""


class _JavaReader(_JavaStream):
    def __init__(self, uri: str, stream: Any, size: int) -> None:
        super().__init__(uri, stream)
        self._size, self._position = size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        import jpype

        left = max(0, self._size - self._position)
        size = left if size is None or size < 0 else min(size, left)
        held = jpype.JArray(jpype.JByte)(size)
        with _named(self._uri):
            self._stream.readFully(self._position, held, 0, size)
        self._position += size
        return memoryview(held).tobytes()


class _JavaWriter(_JavaStream):
    def write(self, data: bytes) -> int:
        import jpype

        with _named(self._uri):
            self._stream.write(jpype.JArray(jpype.JByte)(memoryview(data).cast("b")))
        return len(data)
