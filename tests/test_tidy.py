"""The rules of the house that a machine can see: sizes, names, owners, markers.

Which imports are allowed is import-linter's (`make lint`). A rule here has its reason in
`docs/ARCHITECTURE.md`, "Code rules".
"""

import ast
import gc
import io
import itertools
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MODULE_LINES_MAX = 600
CLASS_METHODS_MAX = 25
FUNCTION_LINES_MAX = 50
CONSTRUCTOR_PARAMETERS_MAX = 7

#: Pure cores go by these names. They must have the marker by which import-linter finds them.
CORE_NAMES = re.compile(r"(^|_)(core|state|rules|fold)\.py$")

#: What one module does for all others.
OWNERS = {
    r"\btime\.(time|monotonic|perf_counter|clock_gettime)\w*\(": "runtime/clock.py",
    r"\.setsockopt\(": "runtime/sockets.py",
    r"\bfcntl\.lockf\(": "runtime/lock_file.py",
}


# A server's disk may fail at any call, so all its calls go through the one that tests replace.
# Elsewhere: pipes, the reader's own tool, /proc.
OFF_DISK = {"controller/raft/node.py", "history/reader.py", "store/suspicion.py"}
SERVERS = ("broker", "controller", "epoch", "ha", "history", "namesrv", "replicas_manager", "store")
DISK_CALLS = re.compile(
    r"\bos\.(open|close|pread|pwrite|write|ftruncate|posix_fallocate|fsync|fdatasync|link|rename"
    r"|replace|unlink|mkdir|makedirs|listdir)\(|\bshutil\.|\.(read|write)_(bytes|text)\(|\.unlink\("
)


@dataclass(frozen=True)
class Module:
    name: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.name).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        gc.disable()  # Python 3.11 loses count in the parser if a finalizer runs within it
        try:
            return ast.parse(self.text)
        finally:
            gc.enable()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def place(self) -> str:
        """Its path below the package, or below the root: the package's folders stand in both."""
        return self.name.removeprefix("batonmq/")

    @property
    def folder(self) -> str:
        return self.place.split("/")[0]

    @cached_property
    def docstring(self) -> str:
        """Most tests are parsed for nothing else, and no further."""
        found = re.match(r'(?:#.*\n|\s)*("""[\s\S]*?""")', self.text)
        return str(ast.literal_eval(found[1])) if found else ""

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def imported(self) -> set[str]:
        """Dotted names of all that it imports, wherever in the module."""
        names: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        return names

    def comments(self, wanted: re.Pattern[str]) -> list[tuple[int, str]]:
        """(line, text) of each that begins so. To find all tokens takes long."""
        if not wanted.search(self.text):
            return []
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [
            (each.start[0], each.string)
            for each in tokens
            if each.type == tokenize.COMMENT and wanted.match(each.string)
        ]


def _tracked() -> list[Module]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = [name for name in listed.stdout.split() if "_pb2" not in name]
    return [Module(name) for name in names if (ROOT / name).is_file()]


def refuse(found: Iterable[object]) -> None:
    """Fails with one line for each."""
    lines = sorted(map(str, found))
    assert not lines, f"{len(lines)} found:\n" + "\n".join(lines)


MODULES = _tracked()
TESTS = [module for module in MODULES if module.folder == "tests"]
CODE = [module for module in MODULES if module.folder != "tests"]
#: What is installed: everything but the laboratory around it, and examples.
LABORATORY = {"lab", "deploy", "examples"}
PRODUCT = [module for module in CODE if module.folder not in LABORATORY]


def test_every_room_is_looked_at() -> None:
    rooms = {module.folder for module in PRODUCT}
    assert {"controller", "broker", "replicas_manager", "epoch", "spark", "client"} <= rooms
    assert len(PRODUCT) > 200 and len(TESTS) > 150


def test_every_module_says_what_it_is() -> None:
    silent = [m.name for m in MODULES if not m.docstring and not m.name.endswith("conftest.py")]
    refuse(name for name in silent if (ROOT / name).stat().st_size)


def test_no_module_needs_a_scroll_map() -> None:
    sizes = {m.name: m.text.count("\n") for m in CODE}
    refuse(f"{name}: {size}" for name, size in sizes.items() if size > MODULE_LINES_MAX)


def test_no_class_does_everything() -> None:
    """What a reader of other modules has to know of it: public methods and properties. Private ones
    do not count, since that limit made two classes out of one; the module's lines bound them."""
    large = []
    for module in CODE:
        for node in module.classes():
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            named = {item.name for item in node.body if isinstance(item, functions)}
            public = [name for name in named if not name.startswith("_")]
            if len(public) > CLASS_METHODS_MAX:
                large.append((len(public), module.name, node.name))
    refuse(large)


def test_a_public_class_name_means_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for module in PRODUCT:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(module.name)
    refuse((name, modules) for name, modules in where.items() if len(modules) > 1)


def test_a_function_fits_on_a_screen() -> None:
    long = [
        (node.end_lineno - node.lineno + 1, module.name, node.name)
        for module in CODE
        for node in module.functions()
        if node.end_lineno is not None and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    refuse(long)


def test_constructors_take_few_parameters() -> None:
    many = []
    for module in CODE:
        for node in module.classes():
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    count = len(item.args.args) - 1 + len(item.args.kwonlyargs)
                    if count > CONSTRUCTOR_PARAMETERS_MAX:
                        many.append((count, module.name, node.name))
    refuse(many)


def test_no_banners_and_no_notes_to_self() -> None:
    banner = re.compile(r"#\s*([-=#*~_])\1{3,}|#\s*\b(TODO|FIXME|XXX)\b")
    found = [
        f"{module.name}:{line}: {comment}"
        for module in MODULES
        for line, comment in module.comments(banner)
    ]
    refuse(found)


def test_a_text_in_the_code_is_right_below_what_it_describes() -> None:
    found = []
    for module in CODE:
        for node in module.nodes:
            body = getattr(node, "body", None)
            for before, text in itertools.pairwise(body if isinstance(body, list) else ()):
                match text:
                    case ast.Expr(value=ast.Constant(value=str())):
                        described = isinstance(before, ast.Assign | ast.AnnAssign)
                        if not described or text.lineno != (before.end_lineno or 0) + 1:
                            found.append(f"{module.name}:{text.lineno}")
    refuse(found)


def test_formatting_is_skipped_for_tables_only() -> None:
    """A literal, or a call that is given literals, in columns."""
    found = []
    for module in MODULES:
        skipped = {line for line, _ in module.comments(re.compile(r"#.*fmt: ?(skip|off)"))}
        if not skipped:
            continue
        tables: set[int] = set()
        for node in module.nodes:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Tuple | ast.List | ast.Dict | ast.Set | ast.Call):
                tables.update(range(value.lineno - 1, (value.end_lineno or value.lineno) + 1))
        found += [f"{module.name}:{line}" for line in sorted(skipped - tables)]
    refuse(found)


def test_loggers_have_one_name() -> None:
    pattern = re.compile(r"^(?P<name>\w+)(: [\w.]+)? = logging\.getLogger\((?P<of>.*)\)$", re.M)
    found = [
        f"{module.name}: {match[0]}"
        for module in CODE
        for match in pattern.finditer(module.text)
        if (match["name"], match["of"]) != ("log", "__name__")
    ]
    refuse(found)


def test_a_package_that_re_exports_says_what() -> None:
    missing = []
    for module in CODE:
        if not module.name.endswith("__init__.py"):
            continue
        imports = [n for n in module.tree.body if isinstance(n, ast.ImportFrom) and n.module]
        exports = any(str(node.module).startswith("batonmq") for node in imports)
        if exports and not re.search(r"^__all__\b", module.text, re.M):
            missing.append(module.name)
    refuse(missing)


@pytest.mark.parametrize("pattern, owner", OWNERS.items())
def test_one_module_owns(pattern: str, owner: str) -> None:
    # Spark's jobs are programs of their own: what they show is the wall clock of their machine.
    others = {"spark"} if owner == "runtime/clock.py" else set()
    found = [m.place for m in PRODUCT if m.folder not in others and re.search(pattern, m.text)]
    assert found == [owner]


def test_servers_reach_the_disk_through_one_module() -> None:
    found = [
        f"{module.name}: {match[0]}"
        for module in PRODUCT
        if module.folder in SERVERS and module.place not in OFF_DISK
        for match in DISK_CALLS.finditer(module.text)
        if not re.search(r"\bdisk$", module.text[: match.start()])
    ]
    refuse(found)


def test_cores_have_the_marker() -> None:
    unmarked = [
        module.name
        for module in PRODUCT
        if CORE_NAMES.search(module.name) and "Pure" not in module.docstring
    ]
    refuse(unmarked)


def test_no_layout_is_written_twice() -> None:
    """A struct of three fields and more is knowledge: it has one owner."""
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for module in PRODUCT:
        for match in re.finditer(r"Struct\(\s*\"([<>=!@]?[\w ]+)\"", module.text):
            layout = match[1].replace(" ", "")
            if len(layout) > 4:
                homes[layout].add(module.name)
    refuse(f"{layout}: {sorted(names)}" for layout, names in homes.items() if len(names) > 1)


def test_no_module_lives_for_tests_only() -> None:
    """Each module of the product is imported by another one, or is started by its name."""
    dotted = {_dotted(module.name): module.place for module in PRODUCT}
    used: Counter[str] = Counter()
    for module in CODE:
        for name in module.imported():
            used[name] += 1
        for name in re.findall(r"batonmq(?:\.\w+)+", module.text):
            if name != _dotted(module.name):
                used[name] += 1
    entry = re.compile(
        r"(__init__|__main__|main|conftest)\.py$|^mqctl/commands/|^spark/jobs/|^pyspark_"
    )
    orphans = [name for dot, name in dotted.items() if not used[dot] and not entry.search(name)]
    refuse(orphans)


def _dotted(name: str) -> str:
    path = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return path if path.startswith("batonmq") else f"batonmq.{path}"


def test_each_safety_rule_names_its_modules_a_test_and_the_defects_planted_against_it() -> None:
    """A rule that nothing shows is a wish. The named test has the rule in its name."""
    rules = _safety_rules()
    assert sorted(rules) == list(range(1, len(rules) + 1))
    planted = defaultdict(set)
    for patch in (ROOT / "lab" / "sim" / "defects").glob("*.patch"):
        what, _, _ = patch.read_text("utf-8").partition(":")
        for number in re.findall(r"R(\d+)", what):
            planted[int(number)].add(patch.stem)
    for number, items in rules.items():
        modules = re.findall(r"`([^`]+)`", items["Where"])
        files = [ROOT / "batonmq" / f"{module}.py" for module in modules]
        assert files and all(file.is_file() for file in files), (number, modules)
        shown, _, defects = " ".join(items["Shown by"].split()).partition("; planted: ")
        file, test = re.findall(r"`([^`]+)`", shown)
        assert re.search(rf"_r{number}_", test), (number, test)
        assert f"def {test}(" in (ROOT / file).read_text("utf-8"), (number, file, test)
        assert set(re.findall(r"`(\w+)`", defects)) == planted[number], number


def test_each_safety_rule_is_short_and_links_to_its_details() -> None:
    details = (ROOT / "docs" / "safety-details.md").read_text("utf-8")
    linked = set()
    for number, items in _safety_rules().items():
        for name in ("Rule", "Why", "Where"):
            assert items[name].count("\n") < 4, (number, name)
        if f"(safety-details.md#r{number})" in items["Rule"]:
            linked.add(number)
    assert linked == {int(number) for number in re.findall(r"^## R(\d+)$", details, re.MULTILINE)}


def _safety_rules() -> dict[int, dict[str, str]]:
    """By number, the four items of each rule in docs/SAFETY.md."""
    text = (ROOT / "docs" / "SAFETY.md").read_text("utf-8")
    rules: dict[int, dict[str, str]] = {}
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE):
        if not (title := re.match(r"R(\d+): .+\n\n", section)):
            continue
        items = re.findall(
            r"^- \*\*(.+)\*\*: ((?:.+\n?)(?:  .+\n?)*)", section[title.end() :], re.MULTILINE
        )
        assert [name for name, _ in items] == ["Rule", "Why", "Where", "Shown by"], title[0]
        assert int(title[1]) not in rules, title[0]
        rules[int(title[1])] = {name: item.strip() for name, item in items}
    return rules
