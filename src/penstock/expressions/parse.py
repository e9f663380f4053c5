"""From text to `Expression`: sqlglot's parser, and its tree checked node by node.

sqlglot's parser decides what belongs to what. Its precedence is that of many dialects at once, so
each node is held against Postgres' own table: a tree of the same tokens that keeps to it is the tree
that Postgres would make, and any other is refused with the advice to put parentheses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from sqlglot import Token, TokenType, exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import ParseError, SqlglotError

from penstock.expressions.errors import ExpressionError
from penstock.expressions.functions import FUNCTIONS
from penstock.expressions.members import member
from penstock.expressions.syntax import MAX_DEPTH, Expr, Expression
from penstock.expressions.tokens import fold, tokenize
from penstock.expressions.types import Reference
from penstock.expressions.words import Reader, Words

Node = Any
"""A node of sqlglot's tree, whose classes have no common name in all versions."""

_MAX_CHAIN: Final = 4 * MAX_DEPTH
"""How deep the tree may be: `1 + 1 + 1 …` makes it deep without nesting."""

_OR, _AND, _NOT, _IS, _COMPARISON, _LIKE, _OTHER, _ADD, _MULTIPLY, _SIGN, _CAST, _ATOM = range(12)
_CHAINS: Final[dict[Any, tuple[str, int]]] = {
    exp.And: ("and", _AND),
    exp.Or: ("or", _OR),
    exp.DPipe: ("||", _OTHER),
}
_BINARY: Final[dict[Any, tuple[str, int]]] = {
    exp.EQ: ("=", _COMPARISON),
    exp.NEQ: ("<>", _COMPARISON),
    exp.LT: ("<", _COMPARISON),
    exp.LTE: ("<=", _COMPARISON),
    exp.GT: (">", _COMPARISON),
    exp.GTE: (">=", _COMPARISON),
    exp.Add: ("+", _ADD),
    exp.Sub: ("-", _ADD),
    exp.Mul: ("*", _MULTIPLY),
    exp.Div: ("/", _MULTIPLY),
    exp.Mod: ("%", _MULTIPLY),
}
_LEVELS: Final[dict[Any, int]] = {
    **{node: level for node, (_, level) in _CHAINS.items()},
    **{node: level for node, (_, level) in _BINARY.items()},
    exp.Not: _NOT,
    exp.Is: _IS,
    exp.NullSafeEQ: _IS,
    exp.NullSafeNEQ: _IS,
    exp.Like: _LIKE,
    exp.ILike: _LIKE,
    exp.SimilarTo: _LIKE,
    exp.Escape: _LIKE,
    exp.In: _LIKE,
    exp.Between: _LIKE,
    exp.Neg: _SIGN,
    exp.Cast: _CAST,
}
# What sqlglot notes on a node beside its operands, none of which changes what it means here.
_NOTES: Final = frozenset({"safe", "typed", "negate", "quoted"})


def parse_condition(text: str) -> Expression:
    """Parse a condition; that it is a boolean is found when it is typed.

    Raises `ExpressionError` for whatever is not of the language, with the position in the text.
    """
    return replace(_parse(text, tokenize(text)), condition=True)


def parse_value(text: str) -> Expression:
    """Parse an expression of any kind; raises `ExpressionError` as `parse_condition` does."""
    return _parse(text, tokenize(text))


def parse_select(text: str) -> tuple[tuple[str, Expression], ...]:
    """Parse `record.id as id, upper(record.name) as name, …` into names and expressions.

    A bare reference may stand without `as`: its last part is the name then. Raises `ExpressionError`
    as `parse_condition` does, and for a name that is missing or there twice.
    """
    tokens = tokenize(text)
    items: list[tuple[str, Expression]] = []
    depth, start = 0, 0
    for at in range(len(tokens) + 1):
        source = text[tokens[at].start : tokens[at].end + 1] if at < len(tokens) else ","
        depth += {"(": 1, ")": -1}.get(source, 0)
        if source != "," or (depth > 0 and at < len(tokens)):
            continue
        if start == at:
            where = tokens[at].start + 1 if at < len(tokens) else len(text) + 1
            raise ExpressionError(where, "an expression is expected here")
        name, expression = _item(text, tokens[start:at])
        if name in dict(items):
            raise ExpressionError(tokens[start].start + 1, f"the name {name} is there twice")
        items.append((name, expression))
        start = at + 1
    return tuple(items)


def _item(text: str, tokens: list[Token]) -> tuple[str, Expression]:
    if text[tokens[0].start : tokens[0].end + 1] == "*":
        raise ExpressionError(tokens[0].start + 1, "`*` is not allowed; name the columns")
    if len(tokens) > 2 and fold(text[tokens[-2].start : tokens[-2].end + 1]) == "as":
        last = tokens[-1]
        source = text[last.start : last.end + 1]
        if last.token_type is TokenType.IDENTIFIER and last.text:
            return last.text, _parse(text, tokens[:-2])
        if source[0].isalpha() or source[0] == "_":
            return fold(source), _parse(text, tokens[:-2])
        raise ExpressionError(last.start + 1, f"{source[:20]!r} is no name")
    expression = _parse(text, tokens)
    reference = expression.root.value
    if expression.root.op != "reference" or not isinstance(reference, Reference):
        raise ExpressionError(tokens[0].start + 1, "a name is missing; write `… as name`")
    name = reference.path[-1] if reference.path else reference.column or reference.root
    if not isinstance(name, str):
        raise ExpressionError(tokens[0].start + 1, "a name is missing; write `… as name`")
    return name, expression


def parse_bare(text: str, columns: Iterable[str]) -> Expression:
    """Parse a condition whose names are columns without `record.` before them."""
    return replace(_parse(text, tokenize(text), bare=True, columns=columns), condition=True)


def _parse(
    text: str, tokens: list[Token], *, bare: bool = False, columns: Iterable[str] = ()
) -> Expression:
    words = Reader(text, tokens, bare=bare, columns=columns).read()
    try:
        trees = Postgres().parser().parse(words.tokens, text)
    except RecursionError:
        raise ExpressionError(tokens[0].start + 1, "it is nested too deep") from None
    except ParseError as error:
        raise _refused(text, words.tokens, error) from None
    except SqlglotError:
        raise ExpressionError(tokens[0].start + 1, "it can't be read") from None
    if len(trees) != 1 or trees[0] is None:
        raise ExpressionError(tokens[0].start + 1, "it can't be read")
    builder = _Builder(words)
    root = builder.build(trees[0], _OR, 0)
    builder.check_parentheses(trees[0])
    return Expression(text, root)


def _refused(text: str, tokens: list[Token], error: ParseError) -> ExpressionError:
    column = error.errors[0].get("col") if error.errors else None
    token = next((t for t in tokens if t.col == column), tokens[0])
    source = text[token.start : token.end + 1]
    if token is tokens[-1] and source != ")":
        return ExpressionError(token.start + 1, f"it can't be read from {source[:40]!r} on")
    return ExpressionError(token.start + 1, f"{source[:40]!r} is not expected here")


class _Builder:
    """Turns sqlglot's tree into ours."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def check_parentheses(self, tree: Node) -> None:
        """Refuse a tree in which sqlglot put parentheses of its own."""
        if sum(type(node) is exp.Paren for node in tree.walk()) != self._words.groups:
            start = self._words.tokens[0].start + 1
            raise ExpressionError(start, f"{_UNCLEAR} around each comparison beside `is`")

    def build(self, node: Node, level: int, depth: int) -> Expr:
        """Return a node that must bind at least as tightly as `level`."""
        if depth > _MAX_CHAIN:
            raise ExpressionError(self._start(node), "it is nested too deep")
        kind = type(node)
        if _LEVELS.get(kind, _ATOM) < level:
            raise ExpressionError(self._start(node), f"{_UNCLEAR} around the part that begins here")
        depth += 1
        if kind is exp.Paren:
            return self.build(node.this, _OR, depth)
        if kind in _CHAINS:
            return self._chain(node, depth)
        if kind in _BINARY:
            op, own = _BINARY[kind]
            # Comparisons don't chain.
            left = self.build(node.this, own + (own == _COMPARISON), depth)
            right = self.build(node.expression, own + 1, depth)
            return Expr(op, left.position, (left, right))
        return self._other(node, depth)

    def _chain(self, node: Node, depth: int) -> Expr:
        op, level = _CHAINS[type(node)]
        nodes: list[Node] = []
        first = node
        while type(first) is type(node):
            nodes.append(first.expression)
            first = first.this
        nodes.append(first)
        parts: list[Expr] = []
        other: str | None = None
        for each in reversed(nodes):
            found = self._other_operator(each) if op == "||" else None
            if found is not None:
                # `a || b -> c` is `(a || b) -> c`.
                left = parts[0] if len(parts) == 1 else Expr(op, parts[0].position, tuple(parts))
                parts, other = [left], found
                continue
            part = self.build(each, level + 1, depth)
            if other is not None:
                part = _combined(other, parts.pop(), part)
                other = None
            parts.append(part)
        return parts[0] if len(parts) == 1 else Expr(op, parts[0].position, tuple(parts))

    def _other_operator(self, node: Node) -> str | None:
        """Return the operator that a node is the place-holder of, if it is one."""
        match node:
            case exp.Column(this=exp.Identifier(this=str(key))):
                return self._words.operators.get(key)
        return None

    def _other(self, node: Node, depth: int) -> Expr:
        build, start = self.build, self._start(node)
        match node:
            case exp.Column(this=exp.Identifier(this=str(key))) if key in self._words.names:
                self._only(node, "this")
                what = self._words.names[key]
                return Expr(
                    "reference" if isinstance(what, Reference) else "typed", start, (), what
                )
            case exp.Literal(this=str(text), is_string=bool(is_string)):
                return Expr("string" if is_string else "number", start, (), text)
            case exp.Boolean(this=bool(flag)):
                return Expr("bool", start, (), flag)
            case exp.Null():
                return Expr("null", start)
            case exp.Not():
                operand = build(node.this, _NOT, depth)
                return Expr("not", operand.position, (operand,))
            case exp.Neg():
                operand = build(node.this, _SIGN, depth)
                return Expr("neg", operand.position, (operand,))
            case exp.Is():
                return self._negated(node, self._is(node, depth))
            case exp.NullSafeEQ() | exp.NullSafeNEQ():
                left = build(node.this, _IS + 1, depth)
                right = build(node.expression, _IS + 1, depth)
                distinct = Expr("is distinct", left.position, (left, right))
                if isinstance(node, exp.NullSafeNEQ):
                    return distinct
                return Expr("not", left.position, (distinct,))
            case exp.Like() | exp.ILike() | exp.SimilarTo() | exp.Escape():
                return self._like(node, depth)
            case exp.In():
                self._only(node, "this", "expressions")
                items = [build(node.this, _LIKE + 1, depth)]
                items += [build(item, _OR, depth) for item in node.expressions]
                if len(items) == 1:
                    raise ExpressionError(items[0].position, "the list after `in` is empty")
                return Expr("in", items[0].position, tuple(items))
            case exp.Between():
                self._only(node, "this", "low", "high")
                operands = (node.this, node.args["low"], node.args["high"])
                args = tuple(build(operand, _LIKE + 1, depth) for operand in operands)
                return Expr("between", args[0].position, args)
            case exp.Case():
                return self._case(node, depth)
            case exp.Cast(this=operand, to=exp.DataType(expressions=[exp.DataTypeParam(this=key)])):
                self._only(node, "this", "to")
                value = build(operand, _CAST, depth)
                return Expr("cast", value.position, (value,), self._words.types[int(key.name)])
            case exp.Anonymous(this=str(key)) if key in self._words.calls:
                return self._call(node, key, depth)
        raise ExpressionError(start, "this is not allowed here")

    def _is(self, node: Node, depth: int) -> Expr:
        self._only(node, "this", "expression")
        operand = self.build(node.this, _IS + 1, depth)
        match node.expression:
            case exp.Null():
                return Expr("is null", operand.position, (operand,))
            case exp.Boolean(this=bool(value)):
                return Expr(f"is {str(value).lower()}", operand.position, (operand,))
        raise ExpressionError(
            operand.position,
            "`is` takes null, true, false or distinct from, each with `not` or without",
        )

    def _like(self, node: Node, depth: int) -> Expr:
        escape = None
        if isinstance(node, exp.Escape):
            character = node.expression
            if not isinstance(character, exp.Literal) or not character.is_string:
                raise ExpressionError(self._start(node), "`escape` takes one character in quotes")
            escape = character.this
            node = node.this
        op = _PATTERNS.get(type(node))
        if op is None:
            raise ExpressionError(
                self._start(node), "`escape` belongs to like, ilike and similar to"
            )
        self._only(node, "this", "expression")
        args = (
            self.build(node.this, _LIKE + 1, depth),
            self.build(node.expression, _LIKE + 1, depth),
        )
        return self._negated(node, Expr(op, args[0].position, args, escape))

    def _case(self, node: Node, depth: int) -> Expr:
        self._only(node, "this", "ifs", "default")
        subject = None if node.this is None else self.build(node.this, _OR, depth)
        args: list[Expr] = []
        for branch in node.args["ifs"]:
            condition = self.build(branch.this, _OR, depth)
            if subject is not None:
                condition = Expr("=", condition.position, (subject, condition))
            args += [condition, self.build(branch.args["true"], _OR, depth)]
        default = node.args.get("default")
        start = args[0].position if subject is None else subject.position
        args.append(Expr("null", start) if default is None else self.build(default, _OR, depth))
        return Expr("case", start, tuple(args))

    def _call(self, node: Node, key: str, depth: int) -> Expr:
        name, type_ = self._words.calls[key]
        start = self._start(node)
        args = tuple(self.build(argument, _OR, depth) for argument in node.expressions)
        low, high = (1, 1) if name == "cast" else (FUNCTIONS[name].least, FUNCTIONS[name].most)
        if not low <= len(args) <= high:
            expected = str(low) if low == high else f"{low} to {high}"
            raise ExpressionError(start, f"{name} takes {expected} arguments, not {len(args)}")
        if key in self._words.swapped:
            args = args[::-1]
        return Expr(name, start, args, type_)

    def _negated(self, node: Node, expr: Expr) -> Expr:
        return Expr("not", expr.position, (expr,)) if node.args.get("negate") else expr

    def _only(self, node: Node, *allowed: str) -> None:
        """Refuse a node with a part that nothing here reads."""
        for name, value in node.args.items():
            if name not in allowed and name not in _NOTES and value not in (None, [], False):
                raise ExpressionError(self._start(node), f"{name} is not allowed here")

    def _start(self, node: Node) -> int:
        """Return where a node begins: where the first of its leaves stands."""
        starts = [start for leaf in node.walk() if (start := leaf.meta.get("start")) is not None]
        return min(starts, default=self._words.tokens[0].start) + 1


def _combined(op: str, left: Expr, right: Expr) -> Expr:
    """Return what one of `OTHER_OPERATORS` makes of two operands; raises `ExpressionError`."""
    if op.startswith("!"):
        return Expr("not", left.position, (_combined(op[1:], left, right),))
    if op in ("~", "~*"):
        return Expr(op, left.position, (left, right))
    return member(op, left, right)


_PATTERNS: Final[dict[Any, str]] = {
    exp.Like: "like",
    exp.ILike: "ilike",
    exp.SimilarTo: "similar to",
}
_UNCLEAR: Final = "what belongs to what is not clear; put parentheses"
