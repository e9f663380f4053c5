"""A Prometheus scrapes a process, and evaluates each expression of the dashboard and of the alert rules.

Debian's package `prometheus` has it; where it is missing, `tests/unit/test_docs_monitoring.py` still
compares the expressions with what a process exposes.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any

import httpx
import pytest
from tests.metrics_help import Process
from tests.promql_help import DOCS, alerts, panels
from tests.waits import await_true

from penstock.api.health import Server, application

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL),
    reason="no prometheus and promtool on PATH: `apt-get install prometheus` has both",
)

CONFIG = """\
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ['RULES']
scrape_configs:
  - job_name: penstock
    static_configs: [{targets: ['TARGET']}]
"""


class Scraped:
    """A process, and the Prometheus that scrapes it."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self._client = httpx.Client(
            base_url=f"http://{address}/api/v1", timeout=10, trust_env=False
        )

    def query(self, expression: str) -> list[Any]:
        """Return the samples that an expression comes to."""
        answer = self._client.get("/query", params={"query": filled(expression)}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        assert not answer.get("warnings"), f"{expression}: {answer}"
        found = answer["data"]["result"]
        assert isinstance(found, list)
        return found

    def rules(self) -> dict[str, Any]:
        """Return the alert rules by name, with their state."""
        groups = self._client.get("/rules").json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def ready(self) -> bool:
        """Whether rates can be computed."""
        try:
            return bool(self.query("rate(penstock_captured_messages_total[1m])"))
        except (httpx.TransportError, JSONDecodeError):  # while it starts it answers in plain text
            return False


def filled(expression: str) -> str:
    """Return an expression with what Grafana fills in."""
    for name, value in {"$__rate_interval": "1m", "$__range": "1h", "$job": ".+"}.items():
        expression = expression.replace(name, value)
    return expression


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    assert PROMETHEUS
    folder, process = tmp_path_factory.mktemp("prometheus"), Process()
    server = Server(application(process.state), "127.0.0.1:0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    rules = DOCS / "grafana" / "alerts.yml"
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.replace("RULES", str(rules)).replace("TARGET", server.address))
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        scraped = Scraped(process, address)
        await_true(scraped.ready, what=f"two scrapes; see {folder / 'log'}")
        yield scraped
    finally:
        running.terminate()
        running.wait(timeout=30)
        server.close()


def test_promtool_accepts_the_rules() -> None:
    assert PROMTOOL
    rules = DOCS / "grafana" / "alerts.yml"
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(rules)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_panel_shows_something_and_each_alert_fires_when_it_should(scraped: Scraped) -> None:
    for panel in panels():
        for target in panel["targets"]:
            assert scraped.query(target["expr"]), f"{panel['title']}: {target['expr']}"
    rules = {rule["alert"]: rule["expr"] for rule in alerts()}
    assert scraped.rules().keys() == rules.keys()
    for name, expression in rules.items():
        assert not scraped.query(expression), f"{name} fires while all is well"

    scraped.process.fail()
    for name, expression in rules.items():
        if name in ("PenstockDown", "PenstockDegraded"):
            continue
        await_true(lambda of=expression: bool(scraped.query(of)), what=f"{name} fires")  # type: ignore[misc]  # mypy infers no lambda with a default
    assert scraped.query(rules["PenstockDegraded"])  # a sync, a consumer
    of = {rule["name"]: rule for rule in scraped.rules().values()}
    assert all(rule["health"] == "ok" for rule in of.values()), of

    for name, consumer in (("PenstockStreamLags", "orders"), ("PenstockConsumerLags", "mail")):
        assert [of["metric"]["consumer"] for of in scraped.query(rules[name])] == [consumer]
