"""Files by `pyarrow.fs`: local ones by their path, others by a URI such as `s3://bucket/store`.

What Hadoop has a file system for, and pyarrow none, goes through Hadoop's. Free of Spark.
"""

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from typing import Final, Self, TypeVar

import msgspec
from pyarrow import fs

from batonmq.spark.read import hadoop

_WILDCARDS: Final = frozenset("*?[")
_LOCAL: Final = "file:"
_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_S3: Final = "s3"
_BUFFER_BYTES: Final = 1 << 20
_Work = TypeVar("_Work")
COMMA_HINT: Final = "; a path that holds a comma is given as a JSON list"


@cache
def _opened(root: str) -> tuple[fs.FileSystem, str]:
    """A file system, and what its paths begin with that is no path in URIs: the bucket, say."""
    if not root:
        return fs.LocalFileSystem(), ""
    scheme, _, authority = root.partition("://")
    if hadoop.takes(scheme):
        return fs.PyFileSystem(hadoop.HadoopFiles(root)), ""
    if scheme == _S3 and (options := hadoop.s3_options(authority)):
        return fs.S3FileSystem(**options), authority
    system, prefix = fs.FileSystem.from_uri(root)
    return system, prefix.rstrip("/")


class UnknownPlace(ValueError):
    """A URI that names no file system here."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A file system. `root` is its URI without a path, empty for local files; it pickles well."""

    root: str

    @property
    def file_system(self) -> fs.FileSystem:
        return _opened(self.root)[0]

    def uri(self, path: str) -> str:
        """A path of this file system as users name it."""
        return self.root + path.removeprefix(_opened(self.root)[1])

    def open(self, path: str) -> "OpenFile":
        """A file for reading at any place. Raises OSError."""
        return OpenFile(path, self.file_system.open_input_file(path))

    def read_small(self, path: str) -> bytes | None:
        """The whole file, None if it is missing."""
        try:
            with self.file_system.open_input_file(path) as file:
                data: bytes = file.read()
                return data
        except FileNotFoundError:
            return None

    def children(self, folder: str) -> list[fs.FileInfo]:
        """What lies directly in a folder, sorted by path; nothing if the folder is missing."""
        found = self.file_system.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        return sorted(found, key=lambda info: str(info.path))

    def _children_if_folder(self, path: str) -> list[fs.FileInfo]:
        try:
            return self.children(path)
        except NotADirectoryError:  # a file beside the folders that a pattern means
            return []

    def exists(self, path: str) -> bool:
        return bool(self.file_system.get_file_info(path).type != fs.FileType.NotFound)

    def glob(self, pattern: str) -> list[str]:
        """Paths that match a pattern with `*`, `?`, `[...]` within its parts, sorted.

        A pattern without a wildcard is returned as it is, whether it exists or not.
        """
        found = ["/" if pattern.startswith("/") else ""]
        for part in pattern.strip("/").split("/"):
            if not _WILDCARDS & set(part):
                found = [f"{path.rstrip('/')}/{part}" if path else part for path in found]
                continue
            found = [
                str(info.path)
                for path in found
                for info in self._children_if_folder(path or ".")
                if fnmatchcase(info.base_name, part)
            ]
        if _WILDCARDS & set(pattern):
            return sorted(path for path in found if self.exists(path))
        return [pattern.rstrip("/") or "/"]


LOCAL: Final = Storage("")


class OpenFile:
    """An open file; close it, or use it in a `with`."""

    def __init__(self, path: str, file: object) -> None:
        self.path = path
        self._file = file
        self.size: int = file.size()  # type: ignore[attr-defined]

    def read_at(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; fewer only at the file's end. Raises OSError."""
        size = min(size, self.size - offset)
        if size <= 0:
            return b""
        data: bytes = self._file.read_at(size, offset)  # type: ignore[attr-defined]
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # type: ignore[attr-defined]


def split_paths(text: str) -> list[str]:
    """The paths of an option: a JSON list (as Spark passes several), or parts between commas.

    A local path that exists as written is one path, whatever is in it. Raises ValueError for what
    begins like a JSON list and is none.
    """
    if "," in text and os.path.exists(text):
        return [text]
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            raise ValueError(
                f"{text!r} is no JSON list of paths; a pattern that begins so is written with "
                "./ before it"
            ) from None
    return [part.strip() for part in text.split(",") if part.strip()]


def even_parts(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in `count` parts of about one size; none if it is empty."""
    size = max(0, end - begin)
    return pairwise([*(begin + size * part // count for part in range(count)), begin + size])


def gather(
    works: Sequence[_Work], size_of: Callable[[_Work], int], size_bytes: int
) -> list[tuple[_Work, ...]]:
    """Neighbours together until a group has that many bytes: what is small shares a task."""
    groups: list[list[_Work]] = []
    held = 0
    for work in works:
        size = size_of(work)
        if not groups or held + size > size_bytes:
            groups.append([])
            held = 0
        groups[-1].append(work)
        held += size
    return [tuple(group) for group in groups]


def locate(path: str) -> tuple[Storage, str]:
    """(storage, path in it) of a path or URI. Raises UnknownPlace, ValueError.

    Local ones, also `file:/path` and `file:///path`, are made absolute, so one place has one name.
    """
    if path.lower().startswith(_LOCAL):
        return LOCAL, _local_path(path)
    scheme, separator, rest = path.partition("://")
    if not separator:
        return LOCAL, os.path.abspath(path)
    scheme = scheme.lower()
    if scheme in ("s3a", "s3n") and not hadoop.takes(scheme):
        scheme = _S3
    authority, _, inner = rest.partition("/")
    storage = Storage(f"{scheme}://{authority}")
    try:
        _, prefix = _opened(storage.root)
    except (ValueError, OSError) as error:
        named = "" if hadoop.takes(scheme) else f"{path}: "
        raise UnknownPlace(f"{named}{error}") from error
    return storage, f"{prefix}/{inner}".rstrip("/") or "/"


def spark_uri(place: str) -> str:
    """As Spark's JVM takes it: its client of S3 has the scheme s3a, and a path alone would be of
    the file system that `fs.defaultFS` names."""
    if place.startswith("s3://"):
        return f"s3a{place[2:]}"
    return place if _URI.match(place) else f"file://{os.path.abspath(place)}"


def found(patterns: Sequence[str]) -> Iterator[tuple[Storage, str]]:
    """The places that paths and patterns mean, each once. Raises FileNotFoundError if nothing
    matches one, ValueError.
    """
    seen: set[tuple[Storage, str]] = set()
    for pattern in patterns:
        storage, inner = locate(pattern)
        paths = storage.glob(inner)
        if not paths:
            raise FileNotFoundError(f"{pattern}: nothing matches{COMMA_HINT * (len(patterns) > 1)}")
        for path in paths:
            if (storage, path) not in seen:
                seen.add((storage, path))
                yield storage, path


def files_of(patterns: Sequence[str]) -> Iterator[tuple[Storage, fs.FileInfo]]:
    """The files that these mean, or that lie below such folders, as Spark lists them: nothing
    there that is in or below what begins with `_` or a dot. Raises FileNotFoundError, ValueError.
    """
    for storage, path in found(patterns):
        info = storage.file_system.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"{path}: nothing matches")
        if info.is_file:
            yield storage, info
            continue
        below = storage.file_system.get_file_info(fs.FileSelector(path, recursive=True))
        for each in sorted(below, key=lambda info: str(info.path)):
            parts = str(each.path)[len(path) :].strip("/").split("/")
            if each.is_file and not any(part.startswith(("_", ".")) for part in parts):
                yield storage, each


@dataclass(frozen=True, slots=True)
class TextPart:
    """The lines of a file that begin in [begin, end); `end` 0: all of it, and it may be packed."""

    storage: Storage
    path: str
    begin: int = 0
    end: int = 0

    def lines(self, size_max: int = -1, at_once: int = 0) -> Iterator[tuple[int, bytes]]:
        """(offset, line); of a line above `size_max` the beginning. `at_once`: blocks of whole
        lines, of about so many bytes each.

        Raises OSError, also for a file that is shorter than `end`.
        """
        end, system = self.end, self.storage.file_system
        opened = system.open_input_file if end else system.open_input_stream  # this one unpacks
        with io.BufferedReader(opened(self.path), _BUFFER_BYTES) as file:
            at = self.begin
            if at:  # the line that holds the byte before belongs to the part before
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while at < end or not end:
                size = min(at_once, end - at) if end else at_once
                text = file.read(size - 1) if at_once else b""
                text += file.readline(size_max)
                if not text:
                    break
                yield at, text
                at += len(text)
        if at < end:  # without an error the missing lines would seem to have no fault
            raise OSError(
                f"{self.path} ends at {at}, {end} bytes were listed: it was replaced meanwhile; "
                "read again"
            )


def _local_path(uri: str) -> str:
    path = uri[len(_LOCAL) :]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        path = slash + rest if host in ("", "localhost") else ""
    if not path.startswith("/"):
        raise ValueError(f"path={uri!r}: a local URI is file:///path, with an absolute path")
    return os.path.abspath(f"/{path.lstrip('/')}")
