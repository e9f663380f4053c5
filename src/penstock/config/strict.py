"""Types of settings that take no other type's value, and the one rule of names.

pydantic's own take `true` for 1, `"3000"` for 3000 and 1 for `true`, which hides a mistake.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

NAME_RULE: Final = "letters, digits, `_` and `-`, at most 63 of them, a letter or a digit first"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
_DIGITS: Final = re.compile(r"[0-9]{1,20}")


class StrictModel(BaseModel):
    """Settings that take no unknown key, never change, and show no value in errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Untyped(str):
    """A text that stands for a value of any type: of an environment variable, or a Spark option."""

    __slots__ = ()


def is_name(text: str) -> bool:
    """Whether a source, sink, consumer or token may be called this."""
    return re.fullmatch(_NAME, text) is not None


def _only(kinds: tuple[type, ...], code: str, expected: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, Untyped):
            return str(value)
        # 5.0 is a whole number in JSON.
        if type(value) in kinds or (int in kinds and type(value) is float and value.is_integer()):
            return value
        raise PydanticCustomError(code, f"Input should be {expected}")

    return BeforeValidator(check)


def _digits(value: Any) -> Any:
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        raise PydanticCustomError("int_parsing", "Input should be a whole number")
    return value


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"{text!r} is not a name: expected {NAME_RULE}")
    return text


Whole = Annotated[int, _only((int,), "int_type", "a whole number")]
Number = Annotated[float, _only((int, float), "float_type", "a number")]
Flag = Annotated[bool, _only((bool,), "bool_type", "true or false")]
DIGITS: Final = BeforeValidator(_digits)
"""For a whole number of a URL, where all is text; it comes last in an annotation."""
Name = Annotated[
    str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})
]
