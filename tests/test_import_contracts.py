"""The contract by markers: what it finds, and that it cannot be switched off unnoticed."""

from pathlib import Path

import pytest
from grimp import ImportGraph

from tests.import_contracts import MarkedContract


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImportGraph:
    """room.core (Pure) imports room.shell, which imports time."""
    monkeypatch.chdir(tmp_path)
    graph = ImportGraph()
    for name, text in (("core", '"""Decides. Pure."""'), ("shell", '"""Reads the clock."""')):
        path = tmp_path / "room" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        graph.add_module(f"room.{name}")
    graph.add_module("time", is_squashed=True)
    graph.add_import(importer="room.core", imported="room.shell")
    graph.add_import(importer="room.shell", imported="time")
    return graph


def contract(modules_min: int = 1, **options: object) -> MarkedContract:
    return MarkedContract(
        name="pure",
        session_options={},
        contract_options={
            "marker": "Pure",
            "forbidden_modules": ["time"],
            "modules_min": modules_min,
            **options,
        },
    )


def test_only_marked_modules_are_bound(graph: ImportGraph) -> None:
    assert contract().check(graph, verbose=False).kept
    graph.add_import(importer="room.core", imported="time")
    broken = contract().check(graph, verbose=False)
    assert not broken.kept and broken.metadata["found"] == {"room.core": {"time"}}


def test_what_they_import_is_looked_at_on_request(graph: ImportGraph) -> None:
    assert not contract(indirectly="true").check(graph, verbose=False).kept


def test_too_few_marked_modules_break_it(graph: ImportGraph) -> None:
    assert not contract(modules_min=2).check(graph, verbose=False).kept
