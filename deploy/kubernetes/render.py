"""`render.py [KEY=VALUE …]`: the manifests of the chart, for machines without helm.

KEY is a value of chart/values.yaml, such as `broker.storage`; VALUE is YAML. It knows what the
chart uses of helm's templates: values, `range` over a list or `until (int …)`, `if` and `else`.
"""

import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parent / "chart"
# An action; `{{-` takes the white space before it away.
_ACTION: Final = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*\}\}", re.DOTALL)
_RANGE: Final = re.compile(r"(?:(\$\w+) := )?(?:until \(int (\S+)\)|(\S+))")


class RenderError(ValueError):
    """A template uses what this program does not know."""


def render(values: dict[str, Any]) -> str:
    """All manifests, as YAML documents. Raises RenderError."""
    parts = []
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = _run(iter(_pieces(path.read_text())), {"$": values}, wanted=True)
        parts.append(text.strip().removeprefix("---").strip())
    return "\n---\n".join(filter(None, parts)) + "\n"


def _pieces(text: str) -> list[str | tuple[str]]:
    """Texts, and the words of actions."""
    found: list[str | tuple[str]] = []
    end = 0
    for match in _ACTION.finditer(text):
        before = text[end : match.start()] + ("" if match[2] else match[1])
        found += [before, (match[3],)]
        end = match.end()
    return [*found, text[end:]]


def _run(pieces: Any, scope: dict[str, Any], *, wanted: bool) -> str:
    """Up to the `end` of this block, or the end of the text."""
    out: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            out.append(piece if wanted else "")
            continue
        word, _, rest = piece[0].partition(" ")
        if word == "end":
            break
        if word == "else":
            wanted = not wanted
        elif word == "if":
            out.append(_run(pieces, scope, wanted=wanted and bool(_value(rest, scope))))
        elif word == "range":
            out.append(_repeat(pieces, rest, scope) if wanted else _skip(pieces))
        elif wanted:
            value = _value(piece[0], scope)
            out.append(str(value).lower() if isinstance(value, bool) else str(value))
    return "".join(out)


def _skip(pieces: Any) -> str:
    _run(pieces, {"$": {}}, wanted=False)
    return ""


def _repeat(pieces: Any, words: str, scope: dict[str, Any]) -> str:
    match = _RANGE.fullmatch(words)
    if match is None:
        raise RenderError(f"range {words}")
    items = range(int(_value(match[2], scope))) if match[2] else _value(match[3], scope)
    body = _block(pieces)
    named = [match[1]] if match[1] else []
    return "".join(
        _run(iter(body), scope | dict.fromkeys([".", *named], item), wanted=True) for item in items
    )


def _block(pieces: Any) -> list[Any]:
    depth = 1
    body: list[Any] = []
    for piece in pieces:
        if not isinstance(piece, str):
            depth += piece[0].startswith(("if ", "range ")) - (piece[0] == "end")
            if not depth:
                return body
        body.append(piece)
    raise RenderError("a block without its end")


def _value(path: str, scope: dict[str, Any]) -> Any:
    if path in scope and path != "$":
        return scope[path]
    names = path.removeprefix("$").split(".")
    if names[:2] != ["", "Values"]:
        raise RenderError(path)
    value = scope["$"]
    for name in names[2:]:
        try:
            value = value[name]
        except (KeyError, TypeError):
            raise RenderError(f"{path}: there is no such value") from None
    return value


def main(arguments: list[str]) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for argument in arguments:
        key, _, text = argument.partition("=")
        *path, last = key.split(".")
        section = values
        for name in path:
            section = section.get(name, {})
        if last not in section:
            sys.exit(f"{key}: chart/values.yaml has no such value")
        section[last] = yaml.safe_load(text)
    sys.stdout.write(render(values))


if __name__ == "__main__":
    main(sys.argv[1:])
