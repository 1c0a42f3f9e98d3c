"""What the pages say: links lead somewhere, commands exist, and each page is in the index."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest
import yaml

from batonmq.broker import config as broker_config
from batonmq.controller import config as controller_config
from batonmq.mqctl.main import cli
from lab import reference

ROOT: Final = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
)
PAGES: Final = [ROOT / name for name in LISTED.stdout.split() if (ROOT / name).is_file()]
FILES_OF_A_WAY_MAX: Final = 12
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in plain}


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    for folder in (ROOT / "docs", ROOT / "docs" / "decisions"):
        linked = {(folder / link).resolve() for link in links(folder / "README.md")}
        missing = [page for page in folder.glob("*.md") if page not in linked]
        assert [page.name for page in missing] == ["README.md"]


def _commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Of `mqctl NAME …` in code: the name, and the options behind it."""
    text = page.read_text("utf-8")
    code = re.findall(r"```.*?```", text, flags=re.DOTALL)
    code += re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for piece in code:
        for line in piece.splitlines():
            line, _, _ = line.partition(" #")
            for name, rest in re.findall(r"\bmqctl ([a-z]\w+)([^;|&]*)", line):
                yield name, re.findall(r"(?<!\S)(--?[a-zA-Z][\w-]*)", rest)


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    context = click.Context(cli)
    for name, given in _commands(page):
        command = cli.get_command(context, name)
        assert command is not None, f"mqctl {name}"
        if command.context_settings.get("ignore_unknown_options"):
            continue  # a job on Spark parses them itself
        known: set[str] = {"--help", "-h"}
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
        assert set(given) <= known, f"mqctl {name}"


@each_page
def test_a_page_changes_only_keys_that_a_running_process_takes(page: Path) -> None:
    text = " ".join(page.read_text("utf-8").split())
    for server, options in re.findall(r"mqctl update(Broker|Controller)Config ([^`]*)", text):
        known = broker_config if server == "Broker" else controller_config
        found = re.search(r"-k ([a-z]\w+)", options)
        assert found is None or found[1] in known.RUNTIME_KEYS, found


def test_every_alert_has_its_section_in_the_runbook() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/observe/rules.yml").read_text("utf-8"))["groups"]
    text = (ROOT / "docs" / "runbook.md").read_text("utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert sections.pop("Without an alert")
    assert list(sections) == [rule["alert"] for rule in group["rules"]]
    for rule in group["rules"]:
        section = sections[rule["alert"]]
        assert section.partition("\n\n")[2].startswith(f"*{rule['labels']['severity']}*: ")
        for name in re.findall(r"\bmqctl (\w+)", rule["annotations"]["command"]):
            assert f"mqctl {name}" in " ".join(section.split()), (rule["alert"], name)


def test_the_references_are_what_the_code_says() -> None:
    """If it fails: `make reference`."""
    for name, make in reference.PAGES.items():
        there = (ROOT / "docs" / name).read_text("utf-8").splitlines()
        wanted = make().splitlines()
        assert [line for line in there if line not in wanted] == []
        assert there == wanted, f"{name}: make reference"


def test_a_member_that_only_shares_the_name_of_an_inner_one_is_in_the_reference() -> None:
    """`ClientMember`, of which `Admin` is none, has `topics`, too."""
    admin = (ROOT / "docs" / "python-api.md").read_text("utf-8").partition("### Admin\n")[2]
    assert "\n| `topics` |" in admin.partition("\n### ")[0]


def test_a_way_through_the_house_names_few_files() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8")
    table = text.partition("| to read | in this order |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (`.*) \|$", table, re.MULTILINE)
    assert len(rows) >= 3
    for way, order in rows:
        names = re.findall(r"`([\w/]+)`", order)
        assert len(names) <= FILES_OF_A_WAY_MAX, way
        for name in names:
            assert (ROOT / "batonmq" / f"{name}.py").is_file(), name


def test_the_map_names_each_package_and_what_it_may_import() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8")
    table = text.partition("| folder | holds | may import |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(?:batonmq/)?(\w+)/` \|.*\| ([\w, ]*)\|$", table, re.MULTILINE)
    named = {folder: set(re.findall(r"\w+", cell)) for folder, cell in rows}

    def allowed(folder: str) -> set[str]:
        return named[folder].union(*(allowed(below) for below in named[folder]))

    packages = {file.parent.name for file in (ROOT / "batonmq").glob("*/__init__.py")}
    assert packages <= named.keys()
    for package in packages:
        imported = set()
        for file in (ROOT / "batonmq" / package).resolve().rglob("*.py"):
            found = re.findall(r"^\s*(?:from|import) batonmq\.(\w+)", file.read_text("utf-8"), re.M)
            imported |= packages.intersection(found) - {package}
        assert imported <= allowed(package), package
