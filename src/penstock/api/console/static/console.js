// What every page does: live parts, search as one types, copying. No state but the page's own.
"use strict";

(() => {
  const SHARE = 60; // a look takes at most a sixtieth of the time,
  const LONGEST = 15; // unless the next one were further away than so many seconds
  const csrf = document.querySelector("meta[name=csrf]")?.content ?? "";

  // Calls `look` every `seconds`, up to every `longest` where its answer takes long, and never in a
  // hidden tab.
  function repeat(element, seconds, look, longest = LONGEST) {
    let timer = 0;
    let busy = false;
    const wait = (time) => { clearTimeout(timer); timer = setTimeout(run, time); };
    async function run() {
      if (document.hidden || busy || !element.isConnected) return;
      busy = true;
      const began = performance.now();
      try {
        await look();
      } catch (error) {
        element.classList.add("stale"); // what stands there was true, and may be no more
      }
      busy = false;
      const share = SHARE * (performance.now() - began);
      wait(Math.max(seconds * 1000, Math.min(share, longest * 1000)));
    }
    document.addEventListener("visibilitychange", () => { if (!document.hidden) wait(0); });
    return { now: () => wait(0), start: () => wait(seconds * 1000) };
  }

  // `<section id="x" data-live="2">`: this part of the page, read again every 2 seconds. Parts of the
  // same period share a look.
  const periods = new Map();
  for (const part of document.querySelectorAll("[data-live]")) {
    const seconds = Number(part.dataset.live);
    periods.set(seconds, [...(periods.get(seconds) ?? []), part.id]);
  }
  for (const [seconds, ids] of periods) {
    const waits = ids.some((id) => document.getElementById(id).hasAttribute("data-reloads"));
    repeat(document.body, seconds, async () => {
      const answer = await fetch(location.href, { headers: { "HX-Request": "true" } });
      if (answer.status === 204 || answer.status === 401) { location.reload(); return; }
      const read = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (answer.ok && ids.some((id) => ends(id, read))) { location.reload(); return; }
      for (const id of ids) await show(id, answer.ok ? read.getElementById(id) : null);
    }, waits ? seconds : LONGEST).start();
  }

  // A part that says what is waited for, which comes soon: the page is another one once it is there.
  function ends(id, read) {
    return document.getElementById(id)?.hasAttribute("data-reloads") && read.getElementById(id) === null;
  }

  async function show(id, found) {
    const now = document.getElementById(id);
    if (found === null || now === null) { now?.classList.add("stale"); return; }
    now.classList.remove("stale");
    if (now.innerHTML !== found.innerHTML && !holdsFocus(now)) {
      await htmx.swap({ target: now, text: found.innerHTML, swap: "innerMorph", sourceElement: now });
    }
  }

  // Who selects a text of it, or types into it, keeps it as it is meanwhile.
  function holdsFocus(part) {
    const at = document.activeElement;
    const types = at !== null && part.contains(at) && at.matches("input, textarea, select");
    const selection = document.getSelection();
    return types || (!selection.isCollapsed && part.contains(selection.anchorNode));
  }

  // A form `data-search`: its results replace `#list`, and the URL is theirs.
  for (const form of document.querySelectorAll("[data-search]")) {
    let timer = 0;
    form.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(async () => {
        const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
        const url = `${location.pathname}${query.size ? `?${query}` : ""}`;
        history.replaceState(null, "", url);
        const answer = await fetch(url, { headers: { "HX-Request": "true" } });
        const found = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("list");
        if (answer.ok && found !== null) {
          document.getElementById("list").replaceWith(document.importNode(found, true));
          htmx.process(document.getElementById("list"));
          announce(found.querySelector(".paging")?.textContent ?? "");
        }
      }, 200);
    });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (button === null) return;
    const done = await copied(button);
    const said = done ? "Copied" : "Selected: press Ctrl+C";
    button.textContent = said;
    announce(said);
    setTimeout(() => { button.textContent = "Copy"; }, done ? 1500 : 6000);
  });

  // Whether a button's text is copied; where that can't be, it is selected. A page over plain HTTP has no
  // `navigator.clipboard`, unless it is of this machine.
  async function copied(button) {
    const text = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch { /* there is none, or it is refused */ }
    const shown = button.parentElement.querySelector(".copy > code");
    const selection = document.getSelection();
    let field = null;
    if (shown !== null) {
      selection.selectAllChildren(shown);
    } else {
      field = Object.assign(document.createElement("textarea"), { value: text, readOnly: true });
      button.after(field);
      field.select();
    }
    const write = (event) => { event.clipboardData.setData("text/plain", text); event.preventDefault(); };
    document.addEventListener("copy", write, { once: true });
    const done = document.execCommand("copy");
    document.removeEventListener("copy", write);
    if (done) {
      selection.removeAllRanges(); // a part of the page with a selection is not read again
      field?.remove();
      button.focus();
    }
    return done;
  }

  // Forms are sent once.
  document.addEventListener("submit", (event) => {
    if (event.defaultPrevented || event.target.method !== "post") return;
    setTimeout(() => { for (const each of event.target.querySelectorAll("button")) each.disabled = true; }, 0);
  });
  window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

  document.addEventListener("htmx:config:request", (event) => {
    event.detail.ctx.request.headers["X-CSRF-Token"] = csrf;
  });

  function announce(text) {
    const place = document.getElementById("announce");
    if (place !== null) place.textContent = text.replace(/\s+/g, " ").trim();
  }

  window.penstock = { repeat, announce };
})();
