"""What makes a program an example: it is listed, says what it shows, and uses public names only."""

import ast
import re
import sys
from pathlib import Path
from typing import Final

import pytest

import batonmq
from lab.cluster.processes import ROOT

EXAMPLES: Final = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX: Final = 120
#: What an application may import beside `batonmq` itself.
OPEN_MODULES: Final = {"batonmq.blocking", "batonmq.otel", "batonmq.spark.session"}

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def test_the_page_lists_each_example_once() -> None:
    page = (ROOT / "examples" / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", page, re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]


@each_example
def test_an_example_is_short_and_says_what_it_shows(example: Path) -> None:
    text = example.read_text("utf-8")
    assert text.count("\n") <= LINES_MAX
    assert ast.get_docstring(ast.parse(text))
    assert '"--name-servers", default="127.0.0.1:9876"' in text


@each_example
def test_an_example_uses_public_names_only(example: Path) -> None:
    for node in ast.walk(ast.parse(example.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert all(alias.name in sys.stdlib_module_names for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "batonmq":
                assert all(hasattr(batonmq, alias.name) for alias in node.names)
            elif module.startswith("batonmq"):
                assert module in OPEN_MODULES
            else:
                assert module.split(".")[0] in sys.stdlib_module_names | {"pyspark"}
