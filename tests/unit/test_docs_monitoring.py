"""What is made from the list of metrics is not stale, and the list has all that `/metrics` has.

Each expression of the dashboard and of the alert rules is parsed, and what it selects is looked up in
what a process exposes; `tests/integration/test_prometheus.py` has a Prometheus evaluate them.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from prometheus_client.core import Metric
from tests.metrics_help import Process
from tests.promql_help import DOCS, alerts, panels

from penstock.runtime.metric_list import GROUPS

EXPRESSIONS = {f"alert {a['alert']}": a["expr"] for a in alerts()} | {
    f"panel {panel['id']} {panel['title']}": target["expr"]
    for panel in panels()
    for target in panel["targets"]
}
OF_PROMETHEUS = {"up": {"job", "instance"}}
JOINED = {"job", "instance"}
"""Labels that Prometheus joins to all that it scrapes."""


@pytest.fixture(scope="module")
def exposed() -> dict[str, Metric]:
    """The metrics of a process, by the name that their samples have."""
    process = Process()
    return {sample.name: metric for metric in process.state.collect() for sample in metric.samples}


def test_what_is_made_from_the_metrics_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    for path, text in runpy.run_path(str(DOCS / "monitoring.py"))["files"]().items():
        assert Path(path).read_text(encoding="utf-8") == text, f"{path}: run `make docs`"


def test_the_list_is_what_a_process_exposes(exposed: dict[str, Metric]) -> None:
    listed = {str(metric): metric for metrics in GROUPS.values() for metric in metrics}
    assert listed.keys() == exposed.keys()
    for name, metric in exposed.items():
        kind = "counter" if listed[name].counts else "gauge"
        assert (metric.type, metric.documentation) == (kind, listed[name].text)
        assert all(set(s.labels) == set(listed[name].labels) for s in metric.samples), name


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_an_expression_selects_what_is_exposed(where: str, exposed: dict[str, Metric]) -> None:
    expression = EXPRESSIONS[where].replace("$__rate_interval", "1m").replace("$__range", "1h")
    parsed = promql.parse(expression)
    names = list(selectors(parsed))
    assert names
    labels: set[str] = set(JOINED)
    for name, matched in names:
        has = OF_PROMETHEUS.get(name) or {*exposed[name].samples[0].labels, *JOINED}
        assert matched <= has, f"{name} has no labels {matched - has}"
        labels |= has
    assert set(grouped(parsed)) <= labels


def selectors(node: promql.Expr) -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each selector in an expression, and the labels that it matches by."""
    for of in walk(node):
        if isinstance(of, promql.VectorSelector):
            yield str(of.name), {m.name for m in of.matchers.matchers}


def grouped(node: promql.Expr) -> Iterator[str]:
    """Yield the labels that the expression's aggregations keep."""
    for of in walk(node):
        if isinstance(of, promql.AggregateExpr) and of.modifier is not None:
            yield from of.modifier.labels


def walk(node: promql.Expr) -> Iterator[promql.Expr]:
    """Yield an expression and all that is in it."""
    found: list[promql.Expr] = []
    promql.walk(node, found.append)
    return iter(found)


def test_each_metric_has_a_panel() -> None:
    shown = " ".join(EXPRESSIONS[where] for where in EXPRESSIONS if where.startswith("panel"))
    for metrics in GROUPS.values():
        for metric in metrics:
            assert re.search(rf"\b{metric}\b", shown), f"{metric} has no panel"


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    every = json.loads((DOCS / "grafana" / "penstock.json").read_text(encoding="utf-8"))["panels"]
    for panel in every:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in every}) == len(every)


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        kept = {*grouped(promql.parse(rule["expr"])), "job", "instance"}
        text = yaml.safe_dump(rule["annotations"])
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_pages_name_no_metric_that_is_not_there() -> None:
    listed = {str(metric) for metrics in GROUPS.values() for metric in metrics}
    for page in ("reference/http-api.md", "how-to/production.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`(penstock_[a-z_]+)(?:\{[^`]*)?`", text))
        assert named <= listed, page
