// The form of a sink or a consumer: conditions written into its filter, and the trial beside it.
"use strict";

(() => {
  const csrf = document.querySelector("meta[name=csrf]").content;
  const BARE = /^(smallint|integer|bigint|numeric|real|double precision|oid)\b/;
  const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
  const PLAIN = /^[a-z_][a-z0-9_]*$/;

  const text = (value) => `'${value.replaceAll("'", "''")}'`;
  const named = (column) => (PLAIN.test(column) ? column : `"${column.replaceAll('"', '""')}"`);

  for (const builder of document.querySelectorAll("[data-builder]")) {
    const form = builder.closest("form");
    const field = form.elements[builder.dataset.builder];
    const column = builder.querySelector("[data-column]");
    const operator = builder.querySelector("[data-operator]");
    const value = builder.querySelector("[data-value]");
    const list = builder.querySelector("datalist");
    let types = new Map();
    builder.hidden = false;

    function literal(given) {
      const type = types.get(column.value.trim()) ?? "";
      if (BARE.test(type) && NUMBER.test(given)) return given;
      if (type === "boolean" && /^(true|false)$/i.test(given)) return given.toLowerCase();
      return text(given);
    }

    function condition() {
      const name = column.value.trim();
      const left = /^(record|changes|metadata)\.|^action$/.test(name) ? name : `record.${named(name)}`;
      const by = operator.value;
      if (by.startsWith("is ")) return `${left} ${by}`;
      if (by === "in") return `${left} in (${value.value.split(",").map((each) => literal(each.trim())).join(", ")})`;
      if (by.endsWith("like")) return `${left} ${by} ${text(value.value)}`;
      return `${left} ${by} ${literal(value.value.trim())}`;
    }

    builder.addEventListener("click", (event) => {
      const word = event.target.closest("[data-add]")?.dataset.add;
      if (word === undefined || column.value.trim() === "") return;
      const before = field.value.trim();
      const whole = before !== "" && /\b(and|or)\b/i.test(before) ? `(${before})` : before;
      field.value = before === "" ? condition() : `${whole} ${word} ${condition()}`;
      field.dispatchEvent(new Event("input", { bubbles: true }));
      column.value = value.value = "";
      column.focus();
    });

    let known = null;
    async function learn() {
      const chosen = [...form.querySelectorAll("[name=table]:checked")].map((each) => each.value);
      const tables = [...chosen, form.elements.tables?.value ?? "", builder.dataset.tables].join(" ").trim();
      if (tables === known || builder.dataset.source === "") return;
      known = tables;
      const query = new URLSearchParams({ source: builder.dataset.source, tables });
      const answer = await fetch(`/console/sinks/form/columns?${query}`);
      if (!answer.ok) return;
      const found = await answer.json();
      types = new Map(found.map((each) => [each.name, each.type]));
      list.replaceChildren(...found.map((each) => new Option(each.type, each.name)));
    }
    form.addEventListener("change", learn);
    learn();
  }

  const form = document.querySelector("form[data-trial]");
  if (form === null) return;
  const place = document.getElementById("trial");

  const post = (path) => fetch(path, {
    method: "POST",
    headers: { "X-CSRF-Token": csrf, "HX-Request": "true" },
    body: new URLSearchParams(new FormData(form)),
  });

  // One trial at a time: what is typed meanwhile is tried when it is over.
  let busy = false;
  let waiting = false;
  async function attempt() {
    if (busy) { waiting = true; return; }
    busy = true;
    place.classList.add("stale");
    try {
      const answer = await post(form.dataset.trial);
      if (answer.status === 204) { location.reload(); return; }
      if (answer.ok) {
        const found = new DOMParser().parseFromString(await answer.text(), "text/html");
        place.replaceChildren(...[...found.body.childNodes].map((each) => document.importNode(each, true)));
        place.classList.remove("stale");
      }
    } catch { /* it stays as it was, and stale */ }
    busy = false;
    if (waiting) { waiting = false; attempt(); }
  }

  let timer = 0;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    if (form.elements.messages.value.trim() !== "") timer = setTimeout(attempt, 400);
  });

  form.querySelector("[data-take]").addEventListener("click", async (event) => {
    const button = event.currentTarget;
    const taken = document.getElementById("taken");
    button.disabled = true;
    taken.textContent = "Waiting for messages …";
    try {
      const answer = await post(button.dataset.take);
      const found = answer.ok ? await answer.json() : { messages: "", why: "It failed." };
      taken.textContent = found.why;
      if (found.messages !== "") {
        form.elements.messages.value = found.messages;
        attempt();
      }
    } finally {
      button.disabled = false;
    }
  });
})();
