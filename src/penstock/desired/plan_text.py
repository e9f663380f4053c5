"""A plan in words, line by line: what the command line prints and what the console shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

Style = Literal[
    "create", "update", "delete", "take over", "warning", "value", "change", "summary", "plain"
]
_MARKS: Final = {"create": "+", "update": "~", "delete": "-", "take over": "="}
_COUNTED: Final = {
    "create": "to create", "update": "to change", "delete": "to delete",
    "take over": "to take over",
}  # fmt: skip
_LONG: Final = 200
"""How many characters of a value are shown; with `--json` it is whole."""


class LinePart(NamedTuple):
    """A part of a line."""

    text: str
    style: Style = "plain"


Line = tuple[LinePart, ...]


def lines(plan: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the lines of a plan as `Plan.shown` has it: its secrets are masked."""
    for planned in plan["changes"]:
        yield from change_lines(planned)
    if plan["kept"]:
        yield (LinePart("No longer in the file; deleted with --prune alone:", "summary"),)
        for planned in plan["kept"]:
            yield from change_lines(planned)
    for warning in plan["warnings"]:
        yield (LinePart("! ", "warning"), LinePart(warning))
    yield (LinePart(_summary(plan), "summary"),)


def change_lines(planned: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the lines of one change as `PlannedChange.shown` has it."""
    action = planned["action"]
    first = LinePart(f"{_MARKS[action]} {planned['kind']} {planned['name']}", action)
    taken_from = planned.get("taken_from")
    if taken_from is None:
        yield (first,)
    else:
        yield (
            first,
            LinePart(f"  which the {taken_from} manages: the file takes it over", "take over"),
        )
    if action == "create":
        for key, value in planned["spec"].items():
            yield (LinePart(f"    {key}: {_value(value)}", "value"),)
    for field in planned["fields"]:
        before, after = _value(field["before"]), _value(field["after"])
        same = field["secret"] and field["before"] == field["after"]
        text = f"{after} (another secret)" if same else f"{before} → {after}"
        yield (LinePart(f"    {field['path']}: {text}", "change"),)
    for consequence in planned["consequences"]:
        yield LinePart("    ! ", "warning"), LinePart(consequence)


def action_lines(action: str, kind: str, name: str, details: Mapping[str, Any]) -> Iterator[Line]:
    """Yield the lines of what was done beside changes, and how."""
    yield (LinePart(f"{action} {kind} {name}"),)
    for key, value in details.items():
        yield (LinePart(f"    {key}: {_value(value)}", "value"),)


def _value(value: Any) -> str:
    if value is None:
        return "(default)"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text.strip().replace("\n", "⏎")
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"


def _summary(plan: Mapping[str, Any]) -> str:
    changes: Sequence[Mapping[str, Any]] = plan["changes"]
    kept = len(plan["kept"])
    if not changes and not kept:
        return "Nothing to do: the file and the desired state agree."
    counts = plan["counts"]
    text = ", ".join(f"{counts[key]} {word}" for key, word in _COUNTED.items() if counts[key])
    waiting = f"{kept} kept that --prune would delete" if kept else ""
    agrees = not kept and all(each["action"] == "take over" for each in changes)
    more = " Nothing else: the file and the desired state agree." if agrees else ""
    return f"Plan: {', '.join(filter(None, (text, waiting)))}.{more}"
