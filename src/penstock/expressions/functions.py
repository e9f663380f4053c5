"""The functions of the language, one line each.

To add a function, add a line. A function of texts and whole numbers needs nothing else: its arguments
are checked against `args`, and `spark` makes its column. Where the types of a function follow other
rules (`coalesce`, `round`), `args` has its number of arguments alone, and `calls.py` types it.

`spark` gets `pyspark.sql.functions` as its first argument, since this file is read where no Spark is
installed, then a column for each argument. It gives null where an argument is null, and null where
Postgres raises an error; then `fails` is set. No builder may throw.

tests/integration/test_expressions.py compares each line with Postgres.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from penstock.expressions import builders as b
from penstock.expressions.types import BOOL, INT, TEXT, Type

MANY: Final = 100
"""How many arguments a function takes that takes any number."""


class Arg(enum.StrEnum):
    """What an argument must be."""

    TEXT = "a text"
    CASED = "a text that is no citext"
    """Postgres has a function of its own for citext, which ignores case."""
    INTEGER = "an integer"
    """Of 4 bytes, as `integer`. In Spark an int; null where the value is beyond it."""
    OTHER = "typed in calls.py"


@dataclass(frozen=True, slots=True)
class Function:
    """One function.

    Attributes:
        args: What its arguments must be.
        result: The type of what it gives.
        spark: Makes its column; see the top of this file. None where `calls.py` types it.
        optional: How many of the last arguments may be left out.
        fails: Whether Postgres raises an error for some arguments, or a limit is set here.
        uses: How often `spark` uses each argument.
        same_as: The function that it is another name of, where calls of both are typed by name.
    """

    args: tuple[Arg, ...]
    result: Type = TEXT
    spark: Callable[..., Any] | None = None
    optional: int = 0
    fails: bool = False
    uses: int = 1
    same_as: str = ""

    @property
    def least(self) -> int:
        """The least number of arguments."""
        return len(self.args) - self.optional

    @property
    def most(self) -> int:
        """The greatest number of arguments."""
        return len(self.args)


def _typed(least: int, most: int | None = None, *, same_as: str = "") -> Function:
    """Return a function whose types `calls.py` settles."""
    most = least if most is None else most
    return Function((Arg.OTHER,) * most, optional=most - least, same_as=same_as)


_T, _C, _I = Arg.TEXT, Arg.CASED, Arg.INTEGER

FUNCTIONS: Final[dict[str, Function]] = {
    # Null
    "coalesce": _typed(1, MANY),
    "nullif": _typed(2),
    "greatest": _typed(1, MANY),
    "least": _typed(1, MANY),
    # Text
    "lower": _typed(1),
    "upper": _typed(1),
    "length": _typed(1),
    "char_length": _typed(1, same_as="length"),
    "character_length": _typed(1, same_as="length"),
    "concat": _typed(1, MANY),
    "concat_ws": _typed(2, MANY),
    "trim": Function((_T, _T), TEXT, lambda f, x, *of: f.trim(x, *of), optional=1),
    "btrim": Function((_T, _T), TEXT, lambda f, x, *of: f.trim(x, *of), optional=1),
    "ltrim": Function((_T, _T), TEXT, lambda f, x, *of: f.ltrim(x, *of), optional=1),
    "rtrim": Function((_T, _T), TEXT, lambda f, x, *of: f.rtrim(x, *of), optional=1),
    "substring": Function((_T, _I, _I), TEXT, b.substring, optional=1, fails=True, uses=3),
    "substr": Function((_T, _I, _I), TEXT, b.substring, optional=1, fails=True, uses=3),
    "left": Function((_T, _I), TEXT, b.left, uses=3),
    "right": Function((_T, _I), TEXT, b.right, uses=3),
    "strpos": Function((_C, _C), INT, lambda f, x, y: f.call_function("instr", x, y)),
    "position": Function((_T, _T), INT, lambda f, x, y: f.call_function("instr", x, y)),
    "starts_with": Function((_T, _T), BOOL, lambda _, x, y: x.startswith(y)),
    "replace": Function((_C, _C, _C), TEXT, lambda f, x, y, z: f.replace(x, y, z)),
    "translate": Function(
        (_C, _C, _C), TEXT, lambda f, x, y, z: f.call_function("translate", x, y, z)
    ),
    "split_part": Function((_C, _C, _I), TEXT, b.split_part, fails=True, uses=2),
    "reverse": Function((_T,), TEXT, lambda f, x: f.reverse(x)),
    "repeat": Function((_T, _I), TEXT, b.repeat, fails=True, uses=2),
    "lpad": Function((_T, _I, _T), TEXT, b.lpad, optional=1, fails=True, uses=2),
    "rpad": Function((_T, _I, _T), TEXT, b.rpad, optional=1, fails=True, uses=2),
    "ascii": Function((_T,), INT, lambda f, x: f.ascii(x)),
    "chr": Function((_I,), TEXT, b.character, fails=True, uses=3),
    "md5": Function((_T,), TEXT, lambda f, x: f.md5(x.cast("binary"))),
    # Numbers
    "abs": _typed(1),
    "ceil": _typed(1),
    "ceiling": _typed(1, same_as="ceil"),
    "floor": _typed(1),
    "round": _typed(1, 2),
    "trunc": _typed(1, 2),
    "sign": _typed(1),
    "mod": _typed(2),
    "power": _typed(2),
    "pow": _typed(2, same_as="power"),
    "sqrt": _typed(1),
    # Time
    "now": _typed(0),
    "date_trunc": _typed(2),
    "date_part": _typed(2),
    "extract": _typed(2),
    # JSON
    "jsonb_typeof": _typed(1),
    "json_typeof": _typed(1),
    "jsonb_array_length": _typed(1),
    "json_array_length": _typed(1),
    # Arrays
    "cardinality": _typed(1),
    "array_length": _typed(2),
}
"""What may be called."""

LACKING: Final = {
    "initcap": "what a word is depends on the locale of the database",
    "to_char": "write round(…, 2)::text, or date_part and ||",
    "random": "a message that is sent again must come out the same",
    "clock_timestamp": "write now()",
    "regexp_replace": "use a transform in Lua or Python",
    "regexp_match": "use a transform in Lua or Python",
    "array_position": "write '…' = any(record.…)",
    "array_to_string": "use a transform in Lua or Python",
    "unnest": "write '…' = any(record.…)",
}
"""Functions that are asked for and are not there, with why or what to write."""
