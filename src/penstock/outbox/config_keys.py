r"""The keys of a pipeline's config: what each takes, and the sentence that an error shows for it.

This is the one list of them. `settings` reads a config by it, and `sql.rules` renders it into the SQL
functions that check a config when it is set. Patterns mean the same to `re` (with `re.DOTALL`) and to
Postgres. They are matched against a text in which `${}` stands for each reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from penstock.config.nats import Format, KeyScope
from penstock.core.subject import OUTBOX_VARIABLES

Direction = Literal["out", "in"]
"""`out`: from an outbox to a sink. `in`: from a source into an inbox."""
Kind = Literal["boolean", "choice", "route", "subject", "text", "whole"]
Backend = Literal["nats"]
Start = Literal["beginning", "end"]

BATCH_SIZE: Final = (1, 1000)
"""The smallest and the largest batch."""
CONTENT: Final = r"[\x01-\x1f\x7f]|-BEGIN"
"""Finds what the path of a file lacks and a file's content has."""
GROUP_BY: Final = r"^(none|(payload|header)\..+)$"
STREAM: Final = r"^[^\x01-\x20\x7f.*>/\\]+$"
_PATH: Final = rf"^(?!.*({CONTENT})).*\S"
# A reference may give the scheme, or several servers.
_SERVER: Final = r"((nats|tls)://)?[^\s/]+/?"
_URL: Final = rf"\$\{{\}}|^\s*{_SERVER}(\s*,\s*{_SERVER})*\s*$"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a config.

    Attributes:
        name: The key.
        expected: What it takes, in words.
        kind: The rule for its value: `choice` is one of `choices`, `whole` a whole number from
            `bounds`, `text` a string that `pattern` matches.
        direction: The pipelines that have it; None is both.
        required: Whether a config without it is refused.
        secret: Whether errors and statuses mask its value.
        references: Whether a reference may stand in its value.
    """

    name: str
    expected: str = "a string"
    kind: Kind = "text"
    direction: Direction | None = None
    pattern: str | None = None
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int] | None = None
    required: bool = False
    secret: bool = False
    references: bool = True

    @property
    def is_path(self) -> bool:
        """Whether the value is the path of a file on the relay's machine."""
        return self.pattern == _PATH


def _choice(
    name: str, direction: Direction, of: object, *, required: bool = False, references: bool = True
) -> Key:
    choices: tuple[str, ...] = get_args(of)
    *first, last = (f'"{choice}"' for choice in choices)
    expected = f"{', '.join(first)} or {last}" if first else last
    return Key(
        name, expected, "choice", direction, choices=choices, required=required,
        references=references,
    )  # fmt: skip


_PEM: Final = "the path of a PEM file"
KEYS: Final = (
    _choice("sink_type", "out", Backend, required=True),
    _choice("source_type", "in", Backend, required=True),
    Key("url", "nats://host:port or tls://host:port, several separated by commas",
        pattern=_URL, required=True),
    Key("subject", f"a subject, with {OUTBOX_VARIABLES}", "subject", "out"),
    Key("subject", "the subject to read, * and > allowed", direction="in"),
    Key("stream", "the name of a stream: no blanks, . * > / \\", pattern=STREAM),
    Key("durable", "the name of a durable consumer: no blanks, . * > / \\",
        direction="in", pattern=STREAM),
    Key("credentials_file", "the path of a file that `nsc generate creds` wrote", pattern=_PATH),
    Key("nkey_seed", "a seed (SU…), or the path of a file that holds it", secret=True),
    Key("token", secret=True),
    Key("username"),
    Key("password", secret=True),
    Key("tls_enabled", "true or false", "boolean"),
    Key("tls_ca_cert", _PEM, pattern=_PATH),
    Key("tls_cert", _PEM, pattern=_PATH),
    Key("tls_key", _PEM, pattern=_PATH),
    Key("batch_size", "a whole number from {} to {}".format(*BATCH_SIZE), "whole",
        bounds=BATCH_SIZE),
    _choice("format", "out", Format),
    # The outbox keeps messages by it, in SQL, where no reference is resolved.
    _choice("start", "out", Start, references=False),
    _choice("start", "in", Start),
    Key("route", 'a list of rules {"when": condition, "to": subject}', "route", "out"),
    Key("group_by", '"payload.<field>", "header.<name>" or "none"', direction="out",
        pattern=GROUP_BY),
    _choice("key_scope", "out", KeyScope),
)  # fmt: skip
"""All keys, in the order in which errors list them."""


def keys(direction: Direction) -> dict[str, Key]:
    """Return the keys of a direction's configs by their names."""
    return {key.name: key for key in KEYS if key.direction in (None, direction)}


SECRETS: Final = frozenset(key.name for key in KEYS if key.secret)
