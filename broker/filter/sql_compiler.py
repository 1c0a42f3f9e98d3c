"""The grammar of SQL92 filters, and a compiler from an expression to a Python function.

The function returns whether a message passes. It finds properties in the raw string, each only when
needed. AND, OR and NOT are three-valued; if a value cannot be compared, the message does not pass,
as in Java. Text after a complete expression is an error. Java ignores such text: there `a LIKE 'x'`
is no error, and passes nothing.

Names keep their case, keywords do not. NOT binds tighter than any comparison. Origin: Java
`SelectorParser.jj`, `ComparisonExpression`, `LogicExpression`, `UnaryExpression`.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import LarkError, VisitError

from batonmq.broker.filter import sql_values
from batonmq.broker.filter.sql_values import INT_MAX, LONG_MAX, Matches, SqlError, ValueKind
from batonmq.protocol.properties import find_property

DEPTH_MAX: Final = 60
"""Python's parser takes 200 nested brackets, and a level of an expression makes two at most."""
SOURCE_MAX: Final = 64 * 1024
"""Maximum length of the Python source of an expression, in characters."""

_TEXT_TESTS: Final = frozenset({"CONTAINS", "STARTSWITH", "ENDSWITH"})
_KEYWORDS: Final = frozenset({"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"})
_GRAMMAR: Final = r"""
start: disjunction
?disjunction: conjunction
    | conjunction (OR conjunction)+                 -> either
?conjunction: equality
    | equality (AND equality)+                      -> both
?equality: comparison
    | equality "=" comparison                       -> equals
    | equality DIFFERS comparison                    -> differs
    | equality IS NULL                              -> is_null
    | equality IS NOT NULL                          -> is_not_null
?comparison: unary
    | comparison ORDER unary                        -> ordered
    | comparison TEXT_TEST STRING                   -> tested
    | comparison NOT TEXT_TEST STRING               -> not_tested
    | comparison BETWEEN unary AND unary            -> between
    | comparison NOT BETWEEN unary AND unary        -> not_between
    | comparison IN "(" STRING ("," STRING)* ")"    -> is_in
    | comparison NOT IN "(" STRING ("," STRING)* ")" -> is_not_in
?unary: primary
    | "+" unary                                     -> plus
    | "-" unary                                     -> minus
    | NOT unary                                     -> negated
?primary: STRING                                    -> text
    | DECIMAL                                       -> decimal
    | FLOAT                                         -> floating
    | TRUE                                          -> true
    | FALSE                                         -> false
    | NULL                                          -> null
    | NAME                                          -> name
    | "(" disjunction ")"
ORDER: ">=" | "<=" | ">" | "<"
DIFFERS.2: "<>"
STRING: /'(?:''|[^'])*'/
FLOAT.2: /[0-9]+\.[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/i
DECIMAL: /(?:0|[1-9][0-9]*)l?/i
NAME: /[a-z_$][a-z0-9_$]*/i
%declare NOT AND OR BETWEEN IN TRUE FALSE NULL IS TEXT_TEST
%ignore /[ \t\n\r\f]+/
%ignore /--[^\n\r]*/
%ignore /\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\//
"""


@dataclass(frozen=True, slots=True)
class Operand:
    """`source`: Python source of its value, None for null. `truth`: shorter source,
    true if `source` gives True, false for False or None. `last`: as `truth`, but it evaluates and
    raises less, so only False may follow it. `is_boolean`: it may be a condition. `is_constant`,
    `value`: for literals.
    """

    source: str
    kind: ValueKind
    depth: int = 1
    truth: str = ""
    last: str = ""
    is_boolean: bool = False
    is_property: bool = False
    is_constant: bool = False
    value: Any = None

    @property
    def passes(self) -> str:
        return self.truth or f"({self.source} is True)"

    @property
    def passes_at_last(self) -> str:
        return self.last or self.passes


@v_args(inline=True)
class _Literals(Transformer[Token, Operand]):
    """Builds Python source bottom-up. `names`: property -> variable; `uses`: how often each
    variable occurs; `constants`: name -> value."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.uses: Counter[str] = Counter()
        self.constants: dict[str, Any] = {}
        self._variables = 0

    def _call_userfunc(self, tree: Any, new_children: Any = None) -> Any:
        """Checks the size of the source after each step, while it grows."""
        node = super()._call_userfunc(tree, new_children)  # type: ignore[no-untyped-call]
        if isinstance(node, Operand) and len(node.source) + len(node.truth) > 4 * SOURCE_MAX:
            raise SqlError(f"it becomes more than {SOURCE_MAX} characters of code")
        return node

    def text(self, token: Token) -> Operand:
        value = _unquoted(token)
        source = self._constant(value)
        return Operand(source, ValueKind.TEXT, is_constant=True, value=value)

    def decimal(self, token: Token) -> Operand:
        value = int(token.rstrip("lL"))
        if value > LONG_MAX:
            raise SqlError(f"the number {token} does not fit into 64 bits")
        kind = ValueKind.INT if value <= INT_MAX else ValueKind.LONG
        return Operand(self._constant(value), kind, is_constant=True, value=value)

    def floating(self, token: Token) -> Operand:
        value = float(token)
        if not 0.0 < value < float("inf"):  # 0.0 as well: Java refuses it
            raise SqlError(f"the number {token} must be above 0 and within a double")
        return Operand(self._constant(value), ValueKind.DOUBLE, is_constant=True, value=value)

    def true(self, _: Token) -> Operand:
        return Operand(
            self._constant(True), ValueKind.BOOLEAN, is_boolean=True, is_constant=True, value=True
        )

    def false(self, _: Token) -> Operand:
        return Operand(
            self._constant(False), ValueKind.BOOLEAN, is_boolean=True, is_constant=True, value=False
        )

    def null(self, _: Token) -> Operand:
        return Operand(self._constant(None), ValueKind.BOOLEAN, is_boolean=True, is_constant=True)

    def name(self, token: Token) -> Operand:
        variable = self.names.setdefault(str(token), f"p{len(self.names)}")
        self.uses[variable] += 1
        return Operand(variable, ValueKind.TEXT, is_property=True)

    def plus(self, node: Operand) -> Operand:
        return node

    def minus(self, node: Operand) -> Operand:
        if node.kind.is_number:
            return Operand(f"(-{node.source})", node.kind, node.depth + 1)
        # Still evaluated, because its operand may raise.
        return Operand(f"({node.source}, None)[1]", ValueKind.NOTHING, node.depth + 1)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _variable(self) -> str:
        self._variables += 1
        return f"v{self._variables}"


@v_args(inline=True)
class _Compiler(_Literals):
    def start(self, node: Operand) -> Operand:
        return _condition(node)

    def _terms(self, parts: tuple[Operand, ...]) -> tuple[list[Operand], list[str], str]:
        """The terms without the tokens between them; each kept in a variable, so that it is
        evaluated once; and whether one of those is unknown."""
        terms = [_condition(part) for part in parts if isinstance(part, Operand)]
        names = [self._variable() for _ in terms]
        kept = [f"({name} := {term.source})" for name, term in zip(names, terms, strict=True)]
        return terms, kept, " or ".join(f"{name} is None" for name in names)

    def either(self, *parts: Operand) -> Operand:
        # Whether a term is unknown matters only if none is true.
        terms, kept, unknown = self._terms(parts)
        found = " or ".join(f"{part} is True" for part in kept)
        truth = " or ".join(term.passes for term in terms)
        return _boolean(f"({found} or (None if {unknown} else False))", *terms, truth=f"({truth})")

    def both(self, *parts: Operand) -> Operand:
        terms, kept, unknown = self._terms(parts)
        failed = " or ".join(f"{part} is False" for part in kept)
        # As the last step unknown and false are the same, so the first that fails may end it.
        last = " and ".join(term.passes_at_last for term in terms)
        source = f"(False if {failed} else None if {unknown} else True)"
        return _boolean(source, *terms, last=f"({last})")

    def negated(self, _: Token, node: Operand) -> Operand:
        return self._not(_condition(node))

    def equals(self, left: Operand, right: Operand) -> Operand:
        for node in (left, right):
            if node.is_constant and node.value is None:
                raise SqlError("NULL cannot be compared: write IS NULL or IS NOT NULL")
        if left.is_constant and right.is_constant and left.is_boolean and not right.is_boolean:
            raise SqlError(f"{_shown(left)} cannot be compared with {_shown(right)}")
        return self._equal(left, right)

    def differs(self, left: Operand, _: Token, right: Operand) -> Operand:
        return self._not(self.equals(left, right))

    def is_null(self, node: Operand, *_: Token) -> Operand:
        return _boolean(source := f"({node.source} is None)", node, truth=source)

    def is_not_null(self, node: Operand, *_: Token) -> Operand:
        return _boolean(source := f"({node.source} is not None)", node, truth=source)

    def ordered(self, left: Operand, sign: Token, right: Operand) -> Operand:
        for node in (left, right):
            is_number = node.kind.is_number and node.is_constant
            if node.is_boolean or (node.is_constant and not is_number):
                raise SqlError(f"{sign} needs numbers, not {_shown(node)}")
        return self._order(left, str(sign), right)

    def between(self, value: Operand, _: Token, low: Operand, __: Token, high: Operand) -> Operand:
        if low.is_constant and high.is_constant:
            if low.value is None or high.value is None:
                raise SqlError("BETWEEN needs two numbers, not NULL")
            if low.kind.is_number and high.kind.is_number and high.value < low.value:
                raise SqlError(f"BETWEEN {low.value} AND {high.value}: the lower comes first")
        return self._between(value, low, high, self.both, ">=", "<=")

    def not_between(self, value: Operand, *rest: Any) -> Operand:
        low, high = (part for part in rest if isinstance(part, Operand))
        return self._between(value, low, high, self.either, "<", ">")

    def _between(
        self,
        value: Operand,
        low: Operand,
        high: Operand,
        joined: Callable[..., Operand],
        over: str,
        under: str,
    ) -> Operand:
        """The first comparison evaluates the value and stores it in a variable; the second, always
        evaluated after it, reads that variable."""
        kept = value
        if not (value.is_property or value.is_constant):
            variable = self._variable()
            kept = replace(value, source=variable, truth="", last="")
            value = replace(value, source=f"({variable} := {value.source})", truth="", last="")
        sign = Token("ORDER", "")
        return joined(
            self.ordered(value, sign.update(value=over), low),
            self.ordered(kept, sign.update(value=under), high),
        )

    def is_in(self, node: Operand, *tokens: Token) -> Operand:
        return self._in(node, tokens, "in")

    def is_not_in(self, node: Operand, *tokens: Token) -> Operand:
        return self._in(node, tokens, "not in")

    def tested(self, node: Operand, test: Token, literal: Token) -> Operand:
        return self._tested(node, test, literal, "")

    def not_tested(self, node: Operand, _: Token, test: Token, literal: Token) -> Operand:
        return self._tested(node, test, literal, "not ")

    # Source.

    def _equal(self, left: Operand, right: Operand) -> Operand:
        if left.is_property and right.is_constant:
            if right.kind is ValueKind.TEXT:
                p, equal = left.source, f"{left.source} == {right.source}"
                return _boolean(f"(None if {p} is None else {equal})", left, truth=f"({equal})")
            return self._order(left, "==", right)
        call = (
            f"_equal({left.source}, {self._constant(left.kind)},"
            f" {right.source}, {self._constant(right.kind)})"
        )
        return _boolean(call, left, right)

    def _order(self, left: Operand, sign: str, right: Operand) -> Operand:
        if left.is_property and right.kind in (ValueKind.INT, ValueKind.LONG):
            # Fewer digits than the type's largest number has: no check of the range is needed.
            p, most = left.source, 10 if right.kind is ValueKind.INT else 19
            convert = "_to_int" if right.kind is ValueKind.INT else "_to_long"
            number = f"(int({p}) if len({p}) < {most} and {p}.isdigit() else {convert}({p}))"
            ordered = f"{number} {sign} {right.source}"
            source = f"(None if {p} is None else {ordered})"
            return _boolean(source, left, truth=f"({p} is not None and {ordered})")
        a, b = self._variable(), self._variable()
        if left.kind is right.kind is ValueKind.TEXT:
            signed = f"_compare_texts({a}, {b})"
        else:
            signed = (
                f"_compare({a}, {self._constant(left.kind)}, {b}, {self._constant(right.kind)})"
            )
        return _boolean(
            f"(None if ({a} := {left.source}) is None or ({b} := {right.source}) is None"
            f" else {signed} {sign} 0)",
            left,
            right,
        )

    def _not(self, node: Operand) -> Operand:
        variable = self._variable()
        return _boolean(
            f"(None if ({variable} := {node.source}) is None else not {variable})", node
        )

    def _in(self, node: Operand, tokens: tuple[Token, ...], how: str) -> Operand:
        if not node.is_property:
            raise SqlError(f"IN needs a property's name before it, not {_shown(node)}")
        values = frozenset(_unquoted(token) for token in tokens if token.type == "STRING")
        p, held = node.source, self._constant(values)
        source = f"(None if {p} is None else {p} {how} {held})"
        return _boolean(source, node, truth=f"({p} is not None and {p} {how} {held})")

    def _tested(self, node: Operand, test: Token, literal: Token, negation: str) -> Operand:
        searched = _unquoted(literal)
        if not searched or node.kind is not ValueKind.TEXT:
            # Still evaluated, because its operand may raise.
            return _boolean(f"({node.source}, False)[1]", node)
        held, a = self._constant(searched), self._variable()
        condition = {
            "CONTAINS": f"{held} in {a}",
            "STARTSWITH": f"{a}.startswith({held})",
            "ENDSWITH": f"{a}.endswith({held})",
        }[test.upper()]
        return _boolean(
            f"(False if ({a} := {node.source}) is None else {negation}({condition}))", node
        )


def _boolean(source: str, *parts: Operand, truth: str = "", last: str = "") -> Operand:
    depth = 1 + max(part.depth for part in parts)
    if depth > DEPTH_MAX:
        raise SqlError(f"the expression is nested deeper than {DEPTH_MAX}")
    return Operand(source, ValueKind.BOOLEAN, depth, truth, last, is_boolean=True)


def _condition(node: Operand) -> Operand:
    if node.is_boolean:
        return node
    if node.is_property:  # true only for a boolean, which no property is
        return _boolean(f"(None if {node.source} is None else False)", node)
    raise SqlError(f"a condition is needed where {_shown(node)} stands")


def _shown(node: Operand) -> str:
    if node.is_constant:
        value = node.value
        return repr(value.decode()) if isinstance(value, bytes) else str(value).upper()
    return "a condition" if node.is_boolean else "a value"


def _unquoted(token: Token) -> bytes:
    return token[1:-1].replace("''", "'").encode("utf-8", "replace")


def _keyword(token: Token) -> Token:
    word = token.upper()
    if word in _KEYWORDS:
        token.type = word
    elif word in _TEXT_TESTS:
        token.type = "TEXT_TEST"
    return token


_parser: Final = Lark(_GRAMMAR, parser="lalr", lexer="basic", lexer_callbacks={"NAME": _keyword})
_VARIABLE: Final = re.compile(r"\bp[0-9]+\b")
_HELPERS: Final = {
    "_compare": sql_values.compare,
    "_compare_texts": sql_values.compare_texts,
    "_equal": sql_values.equal,
    "_to_int": sql_values.to_int,
    "_to_long": sql_values.to_long,
    "_find": find_property,
}


def _function(compiler: _Compiler, root: Operand) -> Matches:
    before: list[str] = []
    found: dict[str, str] = {}
    scope: dict[str, Any] = {**_HELPERS, **compiler.constants}
    for number, (name, variable) in enumerate(compiler.names.items()):
        needle = b"\x02%b\x01" % name.encode()
        scope |= {f"k{number}": needle, f"n{number}": name.encode()}
        begin = f"at + {len(needle)}"
        value = f"raw[{begin}:raw.index(2, {begin})] or _find(raw, n{number})"
        lookup = f"({variable} := None if (at := raw.rfind(k{number})) < 0 else {value})"
        if compiler.uses[variable] == 1:
            # Used once: look it up in place, so that AND or OR may skip the look-up.
            found[variable] = lookup
        else:
            before.append(f"    {lookup}")
    test = _VARIABLE.sub(lambda m: found.pop(m[0], m[0]), root.passes_at_last)
    if len(test) > SOURCE_MAX:
        raise SqlError(f"it becomes more than {SOURCE_MAX} characters of code")
    lines = ["def matches(raw):", *before, "    try:", f"        return {test}"]
    lines += ["    except ValueError:", "        return False"]
    exec(compile("\n".join(lines), "<sql filter>", "exec"), scope)  # of our own source only
    matches: Matches = scope["matches"]
    return matches


def function_of(expression: str) -> Matches:
    """The test of an expression. Raises SqlError."""
    compiler = _Compiler()
    try:
        return _function(compiler, compiler.transform(_parser.parse(expression)))
    except VisitError as error:
        raise SqlError(str(error.orig_exc)) from error
    except LarkError as error:
        raise SqlError(" ".join(str(error).split())[:200]) from error
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise SqlError("nested too deeply") from error
