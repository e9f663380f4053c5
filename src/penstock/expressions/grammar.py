"""sqlglot's parser of Postgres, with the language's operands and Postgres' order of its other operators.

sqlglot reads operators, from `or` down to `*`. What they stand between is read by `Operands`, and is in
sqlglot's tree as a `Leaf` that holds its `Expr`. `tree.py` walks the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from sqlglot import Token, TokenType, exp

from penstock.expressions.errors import ExpressionError
from penstock.expressions.operands import CONSTANTS, Operands
from penstock.expressions.syntax import Expr
from penstock.expressions.tree import Leaf, Node, Operator, Predicate
from penstock.expressions.vocabulary import OTHER_OPERATORS


class Grammar(Operands):
    """Reads one expression; whatever is not of the language is an `ExpressionError`."""

    DISJUNCTION: ClassVar = {TokenType.OR: exp.Or}
    CONJUNCTION: ClassVar = {TokenType.AND: exp.And}
    EQUALITY: ClassVar = {TokenType.EQ: exp.EQ, TokenType.NEQ: exp.NEQ}
    COMPARISON: ClassVar = {
        TokenType.LT: exp.LT,
        TokenType.LTE: exp.LTE,
        TokenType.GT: exp.GT,
        TokenType.GTE: exp.GTE,
    }
    TERM: ClassVar = {TokenType.PLUS: exp.Add, TokenType.DASH: exp.Sub}
    FACTOR: ClassVar = {TokenType.STAR: exp.Mul, TokenType.SLASH: exp.Div, TokenType.MOD: exp.Mod}
    EXPONENT: ClassVar[dict[TokenType, Any]] = {}
    UNARY_PARSERS: ClassVar = {
        TokenType.NOT: lambda self: self.prefixed(exp.Not, self._parse_equality),
        TokenType.DASH: lambda self: self.prefixed(exp.Neg, self._parse_unary),
        TokenType.PLUS: lambda self: self.prefixed(None, self._parse_unary),
    }
    RANGE_PARSERS: ClassVar = {
        TokenType.IS: lambda self, this: self.is_(this),
        TokenType.IN: lambda self, this: self.in_(this),
        TokenType.BETWEEN: lambda self, this: self.between(this),
        TokenType.LIKE: lambda self, this: self.like("like", this),
        TokenType.ILIKE: lambda self, this: self.like("ilike", this),
        TokenType.SIMILAR_TO: lambda self, this: self.like("similar to", this),
    }

    def read(self, text: str, tokens: list[Token]) -> Expr:
        """Return what the tokens are."""
        self._nested = 0
        self.reset()
        self.sql = text
        self._chunks = [tokens]
        self._advance_chunk()
        expr = self._value()
        if self._curr:
            self._leftover("")
        return expr

    # Operators

    def prefixed(self, kind: Any, operand: Callable[[], Node]) -> Node:
        """Return an operand behind a sign or `not`; None is the sign that changes nothing."""
        with self._deeper(self._prev):
            found = operand()
        return found if kind is None else kind(this=found)

    def is_(self, this: Node) -> Node:
        """Return what follows `is`."""
        negated = self._take("not")
        if self._take("distinct"):
            self._expect("from")
            found = Predicate(op="is distinct", expressions=[this, self._parse_bitwise()])
        elif (word := self._word) in CONSTANTS:
            self._advance()
            found = Predicate(op=f"is {word}", expressions=[this])
        else:
            self._operand()
            found = Predicate(op="is", expressions=[this])
        return self._negate_range(found) if negated else found

    def in_(self, this: Node) -> Node:
        """Return what follows `in`."""
        with self._parentheses():
            items = [] if self._word == ")" else self._list([self._value()])
        nodes = [Leaf(expr=item, start=item.position) for item in items]
        return Predicate(op="in", expressions=[this, *nodes])

    def between(self, this: Node) -> Node:
        """Return what follows `between`."""
        low = self._parse_bitwise()
        self._expect("and")
        return Predicate(op="between", expressions=[this, low, self._parse_bitwise()])

    def like(self, op: str, this: Node) -> Node:
        """Return what follows `like` and its kind."""
        found = Predicate(op=op, expressions=[this, self._parse_bitwise()])
        if self._take("escape"):
            if not self._curr or self._curr.token_type is not TokenType.STRING:
                raise ExpressionError(self._start, "`escape` takes one character in quotes")
            found.set("value", self._curr.text)
            self._advance()
        return found

    def _parse_bitwise(self) -> Node:
        this = self._parse_term()
        while (op := self._source()) == "||" or op in OTHER_OPERATORS:
            self._advance()
            this = Operator(this=this, expression=self._parse_term(), op=op)
        return this

    def _negate_range(self, this: Node = None) -> Node:
        this.set("negated", True)
        return this

    def _parse_at_time_zone(self, this: Node) -> Node:
        return this
