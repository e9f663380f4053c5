"""A real browser for the console's tests: Debian's headless shell of Chromium, driven by Playwright.

It takes less CPU than a whole Chromium, which serves as well. `PENSTOCK_CHROMIUM` names one, else it
is looked for on PATH; without one its tests are skipped, and the run reports how many. A test that
leaves an error in the browser's console, or breaks the Content Security Policy, fails.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from penstock.streams.store import Store

from .api_help import ApiServer

VARIABLE: Final = "PENSTOCK_CHROMIUM"
MISSING: Final = "no chromium was found"
HOW: Final = (
    f"install Debian's (apt-get install chromium-headless-shell), or name one by {VARIABLE}"
)
NARROW: Final = (380, 800)
WIDE: Final = (1920, 1080)
COLOURS: Final = ("color-contrast", "link-in-text-block")
"""The rules of axe-core that know colours."""
_NAMES: Final = (
    "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable",
)  # fmt: skip
AXE: Final = Path(__file__).parent / "axe" / "axe.min.js"
# Colours that are in a transition are no page's. What each rule has passed takes longer to report, and
# to send here, than all of the rest.
_VIOLATIONS: Final = """async (rules) => {
  for (const each of document.getAnimations()) each.finish(); // in a closed <details> none ends alone
  const only = rules.length ? {runOnly: {type: "rule", values: rules}} : {};
  return (await axe.run(document, {resultTypes: ["violations"], ...only})).violations;
}"""
# What scrolls may be cut off, and a long name that ends in an ellipsis; what only a screen reader has is
# so on purpose. A chart follows its window some frames later, more of them on a busy machine.
_CUT: Final = """async () => {
  const seen = "*:not(.sr, .sr *, .u-wrap, .u-wrap *, input, textarea)";
  const cut = () => [...document.body.querySelectorAll(seen)].filter((each) => {
    const {overflowX, textOverflow} = getComputedStyle(each);
    const hides = ["hidden", "clip"].includes(overflowX) && textOverflow !== "ellipsis";
    const scrolls = each.matches("header, header *, nav, nav *") && overflowX === "auto";
    return (hides || scrolls) && each.scrollWidth > each.clientWidth + 1;
  });
  const of = document.documentElement;
  for (let i = 0; i < 300 && (of.scrollWidth > of.clientWidth || cut().length); i++) {
    await new Promise(requestAnimationFrame);
  }
  return [of.scrollWidth, of.clientWidth, cut().map((each) => each.outerHTML.slice(0, 200))];
}"""
_MS: Final = 30_000
expect.set_options(timeout=_MS)
# What makes pages differ from run to run, and needs no sandbox of its own under root.
ARGUMENTS: Final = ("--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb")


def chromium() -> str | None:
    """Return the browser's path, None where there is none."""
    if named := os.environ.get(VARIABLE):
        return named
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Window:
    """A browser window on the console at `address`, with what went wrong in it."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.context = context
        self.address = address
        self.page: Page = context.new_page()
        self.page.set_default_timeout(_MS)
        self.errors: list[str] = []
        self._allowed: set[int] = set()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(f"{error}"))

    def allow(self, *statuses: int) -> None:
        """Expect answers with these statuses, which the browser reports as errors."""
        self._allowed |= set(statuses)

    def open(self, path: str = "") -> Page:
        """Go to a path below /console/, and return the page."""
        self.page.goto(f"http://{self.address}/console/{path}")
        return self.page

    def login(self, token: str) -> None:
        """Log in by the form's request; the form itself has tests of its own."""
        address, request = f"http://{self.address}/console/login", self.context.request
        csrf = re.search(r'name="csrf" value="(\w+)"', request.get(address).text())
        assert csrf is not None
        answer = request.post(address, form={"csrf": csrf[1], "token": token}, max_redirects=0)
        assert answer.status == 303, answer.text()

    def check_accessible(self, *rules: str) -> None:
        """Check the page with axe-core, by these rules or by all: nothing serious, nothing critical."""
        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = self.page.evaluate(_VIOLATIONS, rules)
        grave = [
            f"{each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not grave, grave

    def check_fits(self) -> None:
        """Check that the page is no wider than the window, and that nothing in it is cut off."""
        wide, window, cut = self.page.evaluate(_CUT)
        assert wide <= window, f"{wide} px in a window of {window}"
        assert not cut, f"cut off in a window of {window} px: {cut}"

    def check_looks(self, *, dark: bool = False) -> None:
        """Check that the page fits at both widths and is accessible; of the dark, that it is legible."""
        for width, height in (WIDE, NARROW):
            self.page.set_viewport_size({"width": width, "height": height})
            self.check_fits()
        self.check_accessible()
        if dark:
            self.page.emulate_media(color_scheme="dark")
            self.check_accessible(*COLOURS)

    def check_clean(self) -> None:
        """Check that nothing went wrong in the browser."""
        assert not self.errors, self.errors

    def _note(self, message: Any) -> None:
        if message.type != "error" and "Content Security Policy" not in message.text:
            return
        status = re.search(r"responded with a status of (\d+)", message.text)
        if status is None or int(status[1]) not in self._allowed:
            self.errors.append(message.text)


# Of a module: while Playwright runs, its thread has a running event loop, which others' tests may mind.
@pytest.fixture(scope="module")
def chromium_browser() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def window(chromium_browser: Browser, console: ApiServer) -> Iterator[Window]:
    """A window on the API of the fixture `console`; its end checks that nothing went wrong in it."""
    context = chromium_browser.new_context(viewport={"width": 1280, "height": 900})
    found = Window(context, console.address)
    yield found
    context.close()
    found.check_clean()


def token_of(store: Store, role: str) -> str:
    """Make a token of a role, named as it."""
    return store.tokens.create(role, role)


def report_missing(reporter: pytest.TerminalReporter) -> None:
    """Report how many tests there was no browser for."""
    skipped = [each for each in reporter.stats.get("skipped", []) if MISSING in str(each.longrepr)]
    if skipped:
        reporter.write_line(f"{len(skipped)} tests of the console left out: {MISSING}; {HOW}.")
