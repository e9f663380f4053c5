// A change in rounds: a form `data-rounds` in `#rounds` is sent again, until its answer has none left.
"use strict";

(() => {
  async function go() {
    for (;;) {
      const place = document.getElementById("rounds");
      const form = place?.querySelector("form[data-rounds]");
      if (!form) return;
      const body = new URLSearchParams(new FormData(form));
      const answer = await fetch(form.action, { method: "POST", body, headers: { "HX-Request": "true" } });
      const found = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("rounds");
      if (found === null) { location.href = form.querySelector("a").href; return; }
      if (!document.contains(form)) return; // it was stopped
      place.replaceWith(document.importNode(found, true));
      penstock.announce(found.querySelector("[data-done]")?.textContent ?? "");
    }
  }
  document.addEventListener("DOMContentLoaded", () => { go().catch(() => {}); }); // the button goes on by hand
})();
