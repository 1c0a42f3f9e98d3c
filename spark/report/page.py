"""A report: a template filled with facts, one file that loads nothing from elsewhere.

What is text is escaped by the template, wherever it comes from. The page forbids itself every
request (Content-Security-Policy), so a picture that wanted one would show as an error, not leak.
Free of Spark.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
from plotly.offline import get_plotlyjs

from batonmq.spark.report.plots import kind_label
from batonmq.spark.report.quantities import (
    UNKNOWN,
    bytes_text,
    count_text,
    counted,
    duration_text,
    moment_text,
    rate_text,
)

_PACKAGE: Final = "batonmq.spark.report"
_TEXTS: Final[dict[str, Callable[[Any], str]]] = {
    "moment": moment_text, "duration": duration_text, "bytes": bytes_text, "count": count_text,
    "rate": rate_text, "kind": kind_label, "offset": "{:,}".format, "times": "{:.2f}".format,
    "percent": "{:.1%}".format,
}  # fmt: skip


def _shown(value: Any, kind: str) -> str:
    """The text of a table's cell of a column of that kind."""
    return UNKNOWN if value is None else _TEXTS.get(kind, str)(value)


def _group_names(names: Sequence[str]) -> str:
    """Up to three names, or how many there are."""
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} groups"


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(_PACKAGE),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )  # fmt: skip
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "allow_nan": False}
    made.filters |= {**_TEXTS, "shown": _shown, "counted": counted, "group_names": _group_names}
    made.globals |= {"UNKNOWN": UNKNOWN, "plotly_js": get_plotlyjs}
    return made


_ENVIRONMENT: Final = _environment()


def render(template: str, facts: dict[str, Any], folder: Path | None = None) -> str:
    """The page as HTML. `folder`: of a template that is not among those beside this file. Raises
    ValueError for a number that JSON has not."""
    made = _ENVIRONMENT
    if folder is not None:
        own = jinja2.FileSystemLoader(folder)
        made = made.overlay(loader=jinja2.ChoiceLoader([own, jinja2.PackageLoader(_PACKAGE)]))
    return made.get_template(template).render(toc=[], **facts)
