"""Takes the pictures of docs/images/ from a demo that it runs: `python -m docs.screenshots`.

Look at each before it goes in: spacing, alignment, contrast, nothing cut off, nothing secret.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from playwright.sync_api import Browser, Locator, Page, sync_playwright
from tests.browser import ARGUMENTS, HOW, MISSING, NARROW, Window, chromium

IMAGES: Final = Path(__file__).parent / "images"
_SIZE: Final = (1280, 800)
_CONSOLE: Final = re.compile(r"http://(\S+)/console, with the token (\S+)")
_POINTS: Final = 24
"""Of a chart; one comes every five seconds."""
_MS: Final = 180_000
_END: Final = 180.0
_FILTER: Final = "record.total > 300"
_TRANSFORM: Final = "record.id, record.customer_id as customer, record.total"


@contextlib.contextmanager
def demo() -> Iterator[tuple[str, str]]:
    """Run a demo; yield the address of its console, and a token."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", "--console"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    printed: deque[str] = deque(maxlen=20)
    try:
        for line in process.stdout or ():
            printed.append(line)
            if found := _CONSOLE.search(line):
                break
        else:
            raise SystemExit(f"the demo has no console; it printed:\n{''.join(printed)}")
        # It waits where nobody reads what it prints.
        threading.Thread(target=printed.extend, args=[process.stdout], daemon=True).start()
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(_END)
    if code:
        raise SystemExit(f"the demo ended with {code}; it printed:\n{''.join(printed)}")


class Camera:
    """A window that takes pictures of the console, and refuses to take one of the token."""

    def __init__(
        self,
        browser: Browser,
        address: str,
        token: str,
        size: tuple[int, int],
        *,
        dark: bool = False,
    ) -> None:
        self._width, self._height = size
        context = browser.new_context(
            viewport={"width": self._width, "height": self._height},
            color_scheme="dark" if dark else "light",
        )
        self._token = token
        self._window = Window(context, address)
        self._window.login(token)
        self._window.page.set_default_timeout(_MS)

    def open(self, path: str) -> Page:
        """Go to a path below /console/, and return the page."""
        return self._window.open(path)

    def take(self, name: str, above: Locator | None = None) -> None:
        """Take the picture of this name once nothing of it is stale: of what is above an element."""
        page = self._window.page
        page.wait_for_function("() => document.querySelector('.stale') === null")
        if self._token in page.locator("body").inner_text():
            raise SystemExit(f"{page.url} shows the token")
        box = above and above.bounding_box()
        height = min(box["y"] if box else math.inf, self._height)
        page.screenshot(
            path=IMAGES / f"{name}.png",
            clip={"x": 0, "y": 0, "width": self._width, "height": height},
            animations="disabled",
        )
        self._window.check_clean()

    def overview(self, name: str) -> None:
        """Take a picture of the overview when all is well, and its charts have lines."""
        page = self.open("overview")
        page.locator("#state .badge.ready").wait_for()
        page.wait_for_function(
            "most => [...document.querySelectorAll('[data-chart]')]"
            ".every(chart => chart.dataset.points >= most)",
            arg=_POINTS,
        )
        self.take(name)


def take(address: str, token: str, browser: Browser) -> None:
    """Take all pictures."""
    camera = Camera(browser, address, token, _SIZE)
    camera.overview("overview")
    Camera(browser, address, token, NARROW, dark=True).overview("overview-narrow")

    asked = {"table": "public.orders", "action": "update", "filter": _FILTER}
    page = camera.open(f"streams/orders?{urlencode(asked)}")
    row = page.locator("#list tbody tr")
    camera.take("messages", above=row.nth(3))
    page.locator("#list tbody th a").first.click()
    page.locator("#where .badge.ready").wait_for()
    camera.take("message", above=page.get_by_role("heading", name="Whole"))

    page = camera.open("sinks/form/new?source=shop&to=stream")
    page.get_by_label("Name", exact=True).fill("large-orders")
    page.get_by_label("public.orders").check()
    page.get_by_label("delete", exact=True).uncheck()
    page.get_by_label("Filter").fill(_FILTER)
    page.get_by_label("Transform").select_option("sql")
    page.get_by_label("Its code").fill(_TRANSFORM)
    page.locator("#f-from").select_option("")  # the next changes, for 10 s
    page.get_by_role("button", name="Take them").click()
    page.locator("#trial .badge, #trial .problem").first.wait_for()
    page.get_by_label("Filter").locator("..").evaluate(
        "field => { field.scrollIntoView(); scrollBy(0, -16) }"
    )
    camera.take("sink")


def main() -> None:
    """Run a demo, and take pictures of its console."""
    path = chromium()
    if path is None:
        raise SystemExit(f"{MISSING}: {HOW}")
    IMAGES.mkdir(exist_ok=True)
    with demo() as (address, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        take(address, token, browser)
        browser.close()


if __name__ == "__main__":
    main()
