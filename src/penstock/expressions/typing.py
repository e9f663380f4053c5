"""Types an expression against the catalog: each operand gets the type that its operator works on.

What can never be evaluated is refused here, with its reason; what some rows alone can't give is
left to `Node.fails`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.expressions import arrays, operators, patterns, probes
from penstock.expressions.calls import call, padded
from penstock.expressions.casts import cast, convert, settled, text_form
from penstock.expressions.catalog import Columns
from penstock.expressions.errors import ExpressionError
from penstock.expressions.functions import FUNCTIONS
from penstock.expressions.literals import number, numeric_type, read, span
from penstock.expressions.names import Names
from penstock.expressions.nodes import Node, Typed
from penstock.expressions.syntax import Expr, Expression, TypedLiteral, TypeName
from penstock.expressions.types import (
    BOOL,
    INT,
    INTERVAL,
    JSON,
    NAMED,
    TEXT,
    Field,
    Kind,
    Reference,
    Type,
)
from penstock.expressions.unify import comparable, unify


def typed(expression: Expression, columns: Columns) -> Typed:
    """Return an expression with its names looked up in `columns` and its types settled.

    Raises `ExpressionError` for a column that no table has, for operands that don't go together, and
    for a condition that is no boolean.
    """
    typer = Typer(Names(columns))
    if expression.root.op == "json" and not expression.condition:
        # It passes through; nothing evaluates it.
        return Typed(typer.member(expression.root, JSON))
    root = settled(typer.node(expression.root))
    if expression.condition and root.kind is not Kind.BOOL:
        if root.kind is not Kind.JSON:
            raise ExpressionError(
                expression.root.position, f"a condition is expected, but this is {root.type}"
            )
        root = convert(root, BOOL, expression.root.position)
    return Typed(root)


class Typer:
    """Types one expression's nodes; a string literal stays `unknown` until its context is known."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def node(self, expr: Expr) -> Node:
        """Return the typed node; raises `ExpressionError`."""
        match expr.op:
            case "reference":
                assert isinstance(expr.value, Reference)  # noqa: S101 - for the type checker
                type_ = self._names.type(expr.value, expr.position)
                field = Field(expr.value, type_, self._names.lacking(expr.value))
                return Node("field", type_, value=field)
            case "string":
                return Node("unknown", TEXT, value=expr.value)
            case "null":
                return Node("unknown", TEXT, value=None)
            case "bool":
                return Node("literal", BOOL, value=expr.value)
            case "number":
                return _number(expr)
            case "typed":
                return _typed_literal(expr)
            case "and" | "or" | "not":
                args = tuple(self._condition(a) for a in expr.args)
                return Node(expr.op, BOOL, args)
            case "is true" | "is false":
                return Node(expr.op, BOOL, (self._condition(expr.args[0]),))
            case "is null":
                if expr.args[0].op == "json":
                    # JSON's null is a value to Postgres.
                    present = self.probe(expr.args[0], "present", "")
                    return Node("is null", BOOL, (present,))
                return Node("is null", BOOL, (_presence(self.node(expr.args[0])),))
            case "between":
                return self._between(expr)
            case "in":
                return Node("in", BOOL, self._compared("=", expr))
            case "=" | "<>" | "<" | "<=" | ">" | ">=" | "is distinct":
                return Node(expr.op, BOOL, self._compared(expr.op, expr))
            case "like" | "ilike" | "similar to" | "~" | "~*":
                return self._like(expr)
            case "case":
                return self._case(expr)
            case "cast":
                assert isinstance(expr.value, TypeName)  # noqa: S101 - for the type checker
                return cast(self.node(expr.args[0]), expr.value, expr.position)
        return self._operator(expr)

    def _nodes(self, exprs: Sequence[Expr]) -> list[Node]:
        return [self.node(e) for e in exprs]

    def _condition(self, expr: Expr) -> Node:
        node = self.node(expr)
        if node.op == "unknown" or node.kind in (Kind.BOOL, Kind.JSON):
            return convert(node, BOOL, expr.position)
        raise ExpressionError(expr.position, f"a condition is expected here, not {node.type}")

    def _compared(self, op: str, expr: Expr) -> tuple[Node, ...]:
        for arg in expr.args:
            of = arg.value
            if isinstance(of, Reference) and not of.path and self._names.is_array(of):
                raise ExpressionError(
                    arg.position, f"{of} is an array; write '…' = any({of}), or {of} @> '{{…}}'"
                )
        return comparable(op, self._nodes(expr.args), _positions(expr))

    def _between(self, expr: Expr) -> Node:
        value, low, high = self._compared("<", expr)
        return Node("and", BOOL, (Node(">=", BOOL, (value, low)), Node("<=", BOOL, (value, high))))

    def _case(self, expr: Expr) -> Node:
        conditions = [self._condition(e) for e in expr.args[:-1:2]]
        exprs = [*expr.args[1::2], expr.args[-1]]
        results = unify([self.node(e) for e in exprs], [e.position for e in exprs])
        args: list[Node] = []
        for condition, result in zip(conditions, results, strict=False):
            args += [condition, result]
        return Node("case", results[0].type, (*args, results[-1]))

    def _like(self, expr: Expr) -> Node:
        value, pattern = expr.args
        if pattern.op != "string":
            raise ExpressionError(
                pattern.position, f"the pattern of {expr.op} must be a '…' literal"
            )
        node = self.text(value, expr.op)
        is_like = expr.op in ("like", "ilike")
        if padded(node) and not (is_like and node.op == "field"):
            raise ExpressionError(
                value.position, f"{expr.op} sees the blanks of a char(n) in this; cast it by ::text"
            )
        assert isinstance(pattern.value, str)  # noqa: S101 - for the type checker
        if not is_like:
            return self._matches(expr, node, pattern.value)
        escaped = operators.like_pattern(pattern.value, expr.value, pattern.position)
        op = "ilike" if node.type.folded else expr.op
        return Node(op, BOOL, (node,), escaped)

    def _matches(self, expr: Expr, node: Node, pattern: str) -> Node:
        escape = expr.value
        assert escape is None or isinstance(escape, str)  # noqa: S101 - for the type checker
        folded = node.type.folded or expr.op == "~*"
        try:
            if expr.op == "similar to":
                found = patterns.similar(pattern, escape, folded=folded)
            else:
                found = patterns.regular(pattern, folded=folded)
        except ValueError as error:
            raise ExpressionError(expr.args[1].position, f"{pattern[:50]!r}: {error}") from None
        return Node("matches", BOOL, (node,), found, fails=found.longest > 0)

    def text(self, expr: Expr, op: str) -> Node:
        """Return a text, as `op` takes it; raises `ExpressionError` for what is none."""
        node = self.node(expr)
        if node.op == "unknown" or node.kind is Kind.JSON:
            return convert(node, TEXT, expr.position)
        if node.kind is Kind.TEXT and not node.type.form:
            return node
        raise ExpressionError(
            expr.position, f"{op} takes a text, and this is {node.type}; cast it by ::text"
        )

    def _operator(self, expr: Expr) -> Node:
        if expr.op in FUNCTIONS:
            return call(self, expr)
        if self.asks_array(expr):
            return arrays.asked(self, expr)
        match expr.op:
            case "||":
                return self._concat(expr)
            case "neg":
                return operators.negate(self.node(expr.args[0]), expr.position)
            case "json text":
                return self.member(expr, TEXT)
            case "json":
                raise ExpressionError(
                    expr.position, "-> gives JSON, which is not taken here; ->> gives its text"
                )
            case "@>" | "?":
                document, what = expr.args
                return self.probe(document, expr.op, "jsonb", what)
        left, right = self._nodes(expr.args)
        return operators.arithmetic(expr.op, left, right, expr.position, expr.args[1].position)

    def member(self, expr: Expr, type_: Type, *more: str) -> Node:
        """Return a part of a column's JSON as a field of a type."""
        assert isinstance(expr.value, Reference)  # noqa: S101 - for the type checker
        self._names.check_json(expr.value, expr.position, *more)
        return Node("field", type_, value=Field(expr.value, type_, self._names.lacking(expr.value)))

    def probe(self, document: Expr, op: str, of: str, what: Expr | None = None) -> Node:
        """Return what is asked of a column's JSON: see `penstock.expressions.probes`.

        `of` is the type that Postgres takes there: json or jsonb.
        """
        if document.op not in ("reference", "json"):
            raise ExpressionError(
                document.position, "a column of JSON is expected here, or a part that -> gives"
            )
        text = "" if what is None else str(what.value)
        if what is not None and op == "@>":
            try:
                probes.decoded(text.encode())
            except probes.UNREADABLE:
                raise ExpressionError(
                    what.position, f"{text[:50]!r} is not JSON; a text is written '\"…\"'"
                ) from None
        node = self.member(document, probes.RESULTS[op], of)
        return replace(node, value=replace(node.value, probe=(op, text)))

    def asks_array(self, expr: Expr) -> bool:
        """Return whether an operator is about a column that is an array: `@>` may be about JSON."""
        if expr.op != "@>":
            return expr.op in arrays.OPERATORS
        column, literal = expr.args
        assert isinstance(column.value, Reference)  # noqa: S101 - for the type checker
        return literal.op == "array" or self._names.is_array(column.value)

    def element(self, expr: Expr) -> Type:
        """Return the type of an array's elements; raises `ExpressionError` for what is no array."""
        if expr.op != "reference" or not isinstance(expr.value, Reference):
            raise ExpressionError(expr.position, "a column that is an array is expected here")
        return self._names.element(expr.value, expr.position)

    def ask(self, expr: Expr, op: str, text: str) -> Node:
        """Return what a probe gives of a column."""
        assert isinstance(expr.value, Reference)  # noqa: S101 - for the type checker
        type_ = probes.RESULTS[op]
        lacking = self._names.lacking(expr.value)
        return Node("field", type_, value=Field(expr.value, type_, lacking, (op, text)))

    def _concat(self, expr: Expr) -> Node:
        nodes = self._nodes(expr.args)
        if not any(n.op == "unknown" or n.kind in (Kind.TEXT, Kind.JSON) for n in nodes):
            raise ExpressionError(expr.position, "|| joins texts, and none of these is one")
        parts = zip(nodes, expr.args, strict=True)
        return Node("concat", TEXT, tuple(text_form(n, e.position) for n, e in parts))


def _positions(expr: Expr) -> list[int]:
    return [e.position for e in expr.args]


def _presence(node: Node) -> Node:
    """Return what is null where a node is: a value need not fit into its kind to be there."""
    if node.op != "field" or node.kind in (Kind.JSON, Kind.TEXT):
        return settled(node)
    return Node("field", TEXT, value=replace(node.value, type=TEXT))


def _number(expr: Expr) -> Node:
    assert isinstance(expr.value, str)  # noqa: S101 - for the type checker
    if expr.value.isdigit() and len(expr.value) < 20 and int(expr.value) < 1 << 63:
        return Node("literal", INT, value=int(expr.value))
    try:
        # More digits than a numeric's are for comparisons with floats.
        value = number(expr.value, most=400)
    except ValueError as error:
        raise ExpressionError(expr.position, f"{expr.value[:50]}: {error}") from None
    return Node("literal", numeric_type(value), value=value)


def _typed_literal(expr: Expr) -> Node:
    assert isinstance(expr.value, TypedLiteral)  # noqa: S101 - for the type checker
    name, text = expr.value.type.name, expr.value.text
    if name == "numeric":
        node = Node("unknown", TEXT, value=text)
        return cast(node, expr.value.type, expr.position)
    type_ = NAMED.get(name)
    if type_ is None:
        raise ExpressionError(expr.position, f"write '…'::{name}")
    try:
        value = span(text) if type_ is INTERVAL else read(text, type_)
    except ValueError as error:
        raise ExpressionError(expr.position, f"{name} {text[:50]!r}: {error}") from None
    return Node("literal", type_, value=value)
