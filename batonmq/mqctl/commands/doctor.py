"""One file with all that support needs to look at a cluster, without its secrets and messages."""

import io
import json
import platform
import sys
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

from batonmq.history.story_text import lines
from batonmq.mqctl.commands.verdict import ANSWER_S, READ_S, document, gather
from batonmq.mqctl.context import CommandContext, disk_failures
from batonmq.mqctl.params import NEW_FILE, command, folders_argument, option
from batonmq.mqctl.verdict.evidence import Evidence
from batonmq.mqctl.verdict.judge import judge
from batonmq.runtime.durable_file import write_named
from batonmq.runtime.section import SECRET
from batonmq.runtime.words import counted

LOG_BYTES: Final = 512 << 10
"""Of each process, the newest: some thousand lines."""
HISTORY_BYTES: Final = 4 << 20
SCRAPE_S: Final = 0.5
"""A process that hangs is in the verdict already: its figures are not waited for."""


@command("doctor", controllers=True, timeout_s=ANSWER_S)
@option("--bundle", required=True, type=NEW_FILE, help="The file to write, FILE.tar.gz.")
@folders_argument
@option("--classic", is_flag=True, help="The cluster has no controllers.")
async def doctor(
    context: CommandContext, bundle: Path, folders: tuple[Path, ...], classic: bool
) -> None:
    """Settings with a password, secret, token or key in their name have no value in it, and
    messages are not read. DIR: as of `mqctl verdict`.

    JSON: bundle, files (names in it)."""
    # Within a limit: a bundle of what broke is wanted now, not after a terabyte of logs.
    evidence = await gather(context, folders, READ_S, classic=classic)
    parts = dict(_parts(evidence, document(evidence, judge(evidence))))
    with disk_failures(bundle):
        # As a whole: on a full disk half an archive would look like a bundle.
        write_named(bundle, _packed(parts))
    context.out.result(
        {"bundle": str(bundle), "files": sorted(parts)},
        f"{bundle}: {counted(len(parts), 'file')}; look through it before you send it",
    )


def _packed(parts: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in sorted(parts.items()):
            info = tarfile.TarInfo(f"doctor/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def _parts(evidence: Evidence, verdict: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    yield "verdict.json", json.dumps(verdict, indent=2, ensure_ascii=False).encode()
    yield "timeline.txt", _timeline(evidence).encode()
    yield "versions.txt", _versions().encode()
    reports = {node.name: dict(node.report) for node in evidence.nodes if node.report}
    health = {"state": evidence.health, "reports": reports}
    yield "health.json", json.dumps(health, indent=2).encode()
    names: Counter[str] = Counter()
    for node in evidence.nodes:
        # A process of another host: its files are not here.
        if not node.folder:
            continue
        name = Path(node.name).name.replace(":", "-")
        folder = Path(node.folder)
        names[name] += 1
        # Copies of stores from several hosts often have one name in different folders.
        kept = name if names[name] == 1 else f"{name}-{names[name]}"
        yield from _tail(f"logs/{kept}.log", folder / "process.log", LOG_BYTES)
        # Where `batonmq up` puts it; for a single store of another installation there is none.
        config = folder.parent / "conf" / f"{name}.yaml"
        settings = _settings(config)
        if settings is not None:
            import yaml

            text = yaml.safe_dump(without_secrets(settings), sort_keys=False)
            yield f"conf/{kept}.yaml", text.encode()
            yield from _metrics(f"metrics/{kept}.txt", settings)
        for history in sorted(folder.glob("**/history-*.jsonl")):
            yield from _tail(f"history/{kept}/{history.name}", history, HISTORY_BYTES)


def _tail(name: str, path: Path, size: int) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            yield name, file.read()
    except OSError:
        return


def _settings(path: Path) -> Any:
    """A settings file; None if it cannot be read or is no YAML: then it is unknown where a secret
    ends."""
    import yaml  # of the extra `server`: settings are on hosts of servers only

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None


def without_secrets(value: Any) -> Any:
    """The same document; what has a secret's name has no value."""
    if isinstance(value, dict):
        return {
            key: "(removed)" if SECRET.search(str(key)) else without_secrets(each)
            for key, each in value.items()
        }
    return [without_secrets(each) for each in value] if isinstance(value, list) else value


def _metrics(name: str, settings: Any) -> Iterator[tuple[str, bytes]]:
    try:
        section = settings.get("metrics") or {}
        host, port = section["metricsPromExporterHost"], int(section["metricsPromExporterPort"])
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=SCRAPE_S) as answer:
            yield name, answer.read()
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return  # it does not run, or shows none: the verdict says which


def _timeline(evidence: Evidence) -> str:
    parts = []
    for story in evidence.stories:
        parts.append(f"{story.kind} {story.broker_name} epoch {story.master_epoch}")
        parts += [f"  {line}" for line in lines(story, 0)]
    return "\n".join(parts) + "\n"


def _versions() -> str:
    found = sorted(f"{each.name}=={each.version}" for each in distributions())
    return "\n".join([platform.platform(), f"python {sys.version}", *found]) + "\n"
