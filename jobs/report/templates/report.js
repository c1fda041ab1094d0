"use strict";
// The page's only script: the theme's button, and the labels browser. What comes from the data becomes text nodes and nothing else.
(() => {
  const SHOWN = 50;
  const byId = (name) => document.getElementById(name);

  const theme = byId("theme");
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  theme.hidden = false;
  nameTheme();
  addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });

  const held = byId("rows");
  if (!held) return;
  const { runs, rows } = JSON.parse(held.textContent);

  function element(tag, name, ...children) {
    const found = document.createElement(tag);
    if (name) found.className = name;
    for (const child of children) found.append(child);
    return found;
  }

  function drawn(tag, attributes, ...children) {
    const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    for (const child of children) found.append(child);
    return found;
  }

  const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const clipped = (text, most) => { const points = Array.from(text); return points.length > most ? points.slice(0, most - 1).join("") + "…" : text; };

  // ---- search and filters

  const hay = rows.map((row) => [
    row.query_id, row.doc_id, row.query, row.document, row.reasoning, row.intent, row.reason, row.status,
    ...(row.flags || []), ...(row.evidence || []).map((span) => span[2]),
  ].filter(Boolean).join("\n").toLowerCase());

  function options(select, values) {
    select.append(new Option("any", ""));
    for (const [value, text] of values) select.append(new Option(text, value));
  }
  const distinct = (values) => [...new Set(values)].sort();
  options(byId("by-run"), runs.map((run, number) => [number, run.name]));
  options(byId("by-status"), distinct(rows.map((row) => row.status)).map((name) => [name, name]));
  options(byId("by-grade"), [...new Set(rows.map((row) => row.grade).filter((grade) => grade !== undefined))].sort((a, b) => a - b).map((grade) => [grade, String(grade)]));
  byId("by-run").parentElement.hidden = runs.length < 2;
  byId("by-gold").parentElement.hidden = !rows.some((row) => row.gold !== undefined);

  const ORDERS = {
    entropy: (a, b) => (rows[b].entropy ?? -1) - (rows[a].entropy ?? -1),
    outside: (a, b) => (rows[b].outside ?? -1) - (rows[a].outside ?? -1),
  };
  const GOLD = {
    differs: (row) => row.gold !== undefined && row.grade !== undefined && row.gold !== row.grade,
    agrees: (row) => row.gold !== undefined && row.gold === row.grade,
    none: (row) => row.gold === undefined,
  };

  let kept = [];
  let first = 0;

  function choose() {
    const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const run = byId("by-run").value, status = byId("by-status").value, grade = byId("by-grade").value;
    const agrees = GOLD[byId("by-gold").value];
    const low = parseFloat(byId("low").value), high = parseFloat(byId("high").value);
    kept = [];
    for (let place = 0; place < rows.length; place++) {
      const row = rows[place];
      if (run !== "" && row.run !== Number(run)) continue;
      if (status && row.status !== status) continue;
      if (grade !== "" && row.grade !== Number(grade)) continue;
      if (agrees && !agrees(row)) continue;
      if (!Number.isNaN(low) && !(row.entropy >= low)) continue;
      if (!Number.isNaN(high) && !(row.entropy <= high)) continue;
      if (!words.every((word) => hay[place].includes(word))) continue;
      kept.push(place);
    }
    const order = ORDERS[byId("order").value];
    if (order) kept.sort(order);
  }

  function refresh() {
    performance.mark("filter-from");
    choose();
    first = 0;
    show();
    performance.measure("filter", "filter-from");
  }

  function show() {
    const shown = kept.slice(first, first + SHOWN);
    byId("list").replaceChildren(...shown.map((place) => line(rows[place])));
    byId("list").start = first + 1;
    const range = kept.length > SHOWN ? `, ${(first + 1).toLocaleString("en")} to ${(first + shown.length).toLocaleString("en")} shown` : "";
    byId("found").textContent = `${kept.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows${range}`;
    byId("pager").hidden = kept.length <= SHOWN;
    byId("earlier").disabled = first === 0;
    byId("later").disabled = first + SHOWN >= kept.length;
  }

  function turn(step) {
    first = Math.max(0, first + step);
    show();
    byId("labels").scrollIntoView();
    const button = byId("list").querySelector("button");
    if (button) button.focus({ preventScroll: true });
  }

  // ---- a row

  function line(row) {
    const chips = element("span", "chips", element("span", "badge" + (row.status === "ok" ? "" : " bad"), row.status === "ok" ? `grade ${row.grade}` : row.status));
    if (row.gold !== undefined) {
      const tone = row.grade === undefined ? "" : row.gold === row.grade ? " good" : " warn";
      chips.append(element("span", "badge" + tone, `gold ${row.gold}`));
    }
    const what = element("span", "what", row.query || row.query_id, " ", element("span", "", clipped(row.document || row.doc_id, 160)));
    const facts = [];
    if (runs.length > 1) facts.push(clipped(runs[row.run].name, 24));
    if (row.entropy !== undefined) facts.push(`H ${number(row.entropy, 2)}`);
    if (row.outside !== undefined) facts.push(`outside ${number(row.outside, 3)}`);
    const head = element("button", "head", chips, what, element("span", "side-note", facts.join(" · ")));
    head.type = "button";
    head.setAttribute("aria-expanded", "false");
    const item = element("li", "", head);
    head.addEventListener("click", () => {
      const isOpen = head.getAttribute("aria-expanded") === "true";
      head.setAttribute("aria-expanded", String(!isOpen));
      if (isOpen) item.lastChild.remove();
      else item.append(detail(row));
    });
    return item;
  }

  function part(title, ...children) {
    return element("div", "part", element("h3", "", title), ...children);
  }

  function words(text, label) {
    const found = element("div", "words", text);
    found.tabIndex = 0;
    found.setAttribute("role", "group");
    found.setAttribute("aria-label", label);
    return found;
  }

  // Spans count code points, JavaScript's strings UTF-16 units: one letter beyond U+FFFF is two of these.
  function marked(text, spans) {
    const found = words("", "document");
    const points = Array.from(text);
    let at = 0;
    for (const [start, end] of [...spans].sort((a, b) => a[0] - b[0])) {
      const from = Math.max(start, at), to = Math.min(end, points.length);
      if (to <= from) continue;
      found.append(points.slice(at, from).join(""), element("mark", "", points.slice(from, to).join("")));
      at = to;
    }
    found.append(points.slice(at).join(""));
    return found;
  }

  function detail(row) {
    const text = element("div", "texts");
    text.append(part("query", words(row.query ?? "(its text is not here)", "query")));
    const spans = row.evidence || [];
    text.append(part(row.length ? `document, the first ${Array.from(row.document).length.toLocaleString("en")} of ${row.length.toLocaleString("en")} characters` : "document", marked(row.document ?? "(its text is not here)", row.document === undefined ? [] : spans)));
    if (spans.length) text.append(part("evidence", words(spans.map((span) => `${span[0]}–${span[1]}  ${span[2]}`).join("\n") + (row.evidence_more ? `\n… (${row.evidence_more.toLocaleString("en")} pieces more)` : ""), "evidence")));
    if (row.intent) text.append(part("intent", words(row.intent, "intent")));
    if (row.reasoning) text.append(part("reasoning", words(row.reasoning, "reasoning")));
    if (row.reason) text.append(part("why there is no label", words(row.reason, "reason")));
    for (const one of row.tries || []) {
      text.append(part(`try ${one.attempt}, ${one.stage}, ended by ${one.finish}: ${one.reason}`, words(one.text || "(empty)", `try ${one.attempt}`)));
    }
    const side = element("div", "panels");
    if (row.probs) side.append(part("grade", bars(row.probs, row.grade, row.outside)));
    // distributions of the labeler's own nodes as bars, all other columns as lines
    const own = row.own || {};
    const bared = Object.keys(own).filter((name) => name.endsWith("_probs") && own[name].every((value) => typeof value === "number"));
    for (const name of bared) {
      const node = name.slice(0, -"_probs".length);
      side.append(part(node, bars(own[name], own[node], own[`${node}_outside_mass`])));
    }
    const others = Object.keys(own).filter((name) => !bared.includes(name) && !name.endsWith("_outside_mass"));
    if (others.length) side.append(part("of its labeler", words(others.map((name) => `${name}: ${own[name]}`).join("\n"), "columns of its labeler")));
    if (row.samples) side.append(part("samples", words(row.samples.map((one) => one.grade ?? one.status).join(", "), "samples")));
    const facts = [`row ${row.row}`, `query ${row.query_id}`, `document ${row.doc_id}`, runs[row.run].name];
    if (row.tokens) facts.push(`${row.tokens[0]} tokens in, ${row.tokens[1]} out`);
    if (row.reused) facts.push("reused from an earlier run");
    facts.push(...(row.flags || []));
    side.append(part("about", words(facts.join("\n"), "about")));
    return element("div", "open", text, side);
  }

  function bars(probs, chosen, outside) {
    const lines = probs.map((value, grade) => [String(grade), value, grade === chosen]);
    if (outside !== undefined && outside !== null) lines.push(["outside", outside, false]);
    const svg = drawn("svg", { viewBox: `0 0 260 ${lines.length * 20}`, role: "img", "aria-label": lines.map(([name, value]) => `${name}: ${number(value, 3)}`).join(", ") });
    lines.forEach(([name, value, isChosen], at) => {
      const y = at * 20;
      svg.append(
        drawn("text", { x: 46, y: y + 14, "text-anchor": "end", class: "f-ink", "font-weight": isChosen ? 700 : 400 }, name),
        drawn("rect", { x: 52, y: y + 4, width: 150, height: 12, rx: 2, class: "f-plain" }),
        drawn("rect", { x: 52, y: y + 4, width: Math.max(0, 150 * value), height: 12, rx: 2, class: name === "outside" ? "f-s2" : "f-s1" }),
        drawn("text", { x: 256, y: y + 14, "text-anchor": "end", class: "f-ink" }, number(value, 3)),
      );
    });
    return svg;
  }

  let waits = 0;
  for (const name of ["find", "low", "high"]) {
    byId(name).addEventListener("input", () => { clearTimeout(waits); waits = setTimeout(refresh, 60); });
  }
  for (const name of ["by-run", "by-status", "by-grade", "by-gold", "order"]) byId(name).addEventListener("change", refresh);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(refresh, 0));
  byId("earlier").addEventListener("click", () => turn(-SHOWN));
  byId("later").addEventListener("click", () => turn(SHOWN));
  byId("filters").hidden = false;
  refresh();
})();
