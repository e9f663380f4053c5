// What every page does: live parts, search as one types, copying. No state but the page's own.
"use strict";

(() => {
  const AGAIN = 5; // seconds until a stream that was refused is asked for again
  const csrf = document.querySelector("meta[name=csrf]")?.content ?? "";

  // `<section id="x" data-live="2">`: this part of the page is looked at every 2 seconds, and the
  // figures of `data-charts`. The page's own address streams what changes of them while its tab is seen.
  let stream = null;
  let timer = 0;
  const held = new Map(); // by id, what a part is to be once nobody works in it
  const parts = () => [...document.querySelectorAll("[data-live]")];
  const charts = () => [...document.querySelectorAll("[data-charts]")];

  function follow(seconds = Math.min(...parts().map((each) => Number(each.dataset.live)))) {
    clearTimeout(timer);
    stream?.close();
    stream = null;
    held.clear();
    if (!document.hidden && parts().length > 0) timer = setTimeout(listen, seconds * 1000);
  }

  function listen() {
    stream = new EventSource(location.href);
    stream.addEventListener("parts", async (event) => {
      const { ids, changed } = JSON.parse(event.data);
      for (const part of parts()) {
        const there = ids.includes(part.id);
        // What says what is waited for, which comes soon: the page is another one once it is there.
        if (!there && part.hasAttribute("data-reloads")) { location.reload(); return; }
        part.classList.toggle("stale", !there);
      }
      for (const [id, text] of Object.entries(changed)) await show(id, text);
    });
    stream.addEventListener("figures", (event) => {
      const { of, figures } = JSON.parse(event.data);
      for (const section of charts()) {
        if (section.dataset.charts === of) section.dispatchEvent(new CustomEvent("figures", { detail: figures }));
      }
    });
    stream.addEventListener("reload", () => location.reload());
    stream.addEventListener("error", () => {
      for (const each of [...parts(), ...charts()]) each.classList.add("stale"); // it may be true no more
      if (stream.readyState === EventSource.CLOSED) follow(AGAIN); // else the browser asks again by itself
    });
  }

  document.addEventListener("visibilitychange", () => follow(0));
  follow();

  async function show(id, text) {
    const now = document.getElementById(id);
    if (now === null) return;
    if (holdsFocus(now)) { held.set(id, text); return; }
    held.delete(id);
    const found = document.createElement("template");
    found.innerHTML = text;
    if (now.innerHTML !== found.innerHTML) {
      await htmx.swap({ target: now, text, swap: "innerMorph", sourceElement: now });
    }
  }

  function release() {
    for (const [id, text] of held) show(id, text);
  }
  document.addEventListener("selectionchange", release);
  document.addEventListener("focusout", () => setTimeout(release, 0)); // by then it is another's

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
        follow();
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
    const label = button.dataset.label ??= button.getAttribute("aria-label");
    const name = (text, whole) => { button.textContent = text; button.setAttribute("aria-label", whole); };
    name(said, said);
    announce(said);
    setTimeout(() => { if (button.textContent === said) name("Copy", label); }, done ? 1500 : 6000);
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

  window.penstock = { announce };
})();
