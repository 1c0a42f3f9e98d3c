"""A contract of import-linter whose modules are those that carry a marker in their docstring.

A list of names in pyproject.toml would be forgotten when a module is added or moved. The marker
stands in the module that it binds, and its reader sees it there.
"""

import ast
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class MarkedContract(Contract):
    """Modules whose docstring has `marker` import none of `forbidden_modules`.

    `indirectly`: neither do the modules that they import, and so on.
    `modules_min`: fewer marked modules break the contract, so that a marker that was renamed does
    not switch it off.
    """

    marker = fields.StringField()
    forbidden_modules = fields.SetField(subfield=fields.StringField())
    modules_min = fields.IntegerField()
    indirectly = fields.BooleanField(required=False, default=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        forbidden: set[str] = self.forbidden_modules  # type: ignore[assignment]
        marked = [module for module in graph.modules if self._is_marked(module)]
        imported_by = (
            graph.find_upstream_modules
            if self.indirectly
            else graph.find_modules_directly_imported_by
        )
        found = {
            module: used for module in marked if (used := _roots(imported_by(module)) & forbidden)
        }
        enough = len(marked) >= self.modules_min  # type: ignore[operator]
        return ContractCheck(
            kept=enough and not found, metadata={"count": len(marked), "found": found}
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        output.print(f"{check.metadata['count']} modules carry the marker {self.marker!r}.")
        for module, used in sorted(check.metadata["found"].items()):
            output.print_error(f"{module} carries it and imports {', '.join(sorted(used))}.")

    def _is_marked(self, module: str) -> bool:
        path = Path(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return str(self.marker) in (ast.get_docstring(ast.parse(file.read_text())) or "")
        return False


def _roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}
