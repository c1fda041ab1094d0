"use strict";
// The page's only script: the theme's button, and the labels browser. What comes from the data becomes text nodes and nothing else.
(() => {
  const SHOWN = 50;
  const NODES = /^((preliminary|subject|attribute)(_probs|_outside_mass)?|(query|product)_(subject|attribute)|phi_(grade|agrees))$/;
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

  // ---- what is looked for

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
    const nodes = row.own;
    const others = Object.keys(nodes || {}).filter((name) => !NODES.test(name));
    if (nodes && Object.keys(nodes).length > others.length) {
      side.append(part("nodes", graph(nodes, row.grade)));
      for (const name of ["preliminary", "subject", "attribute"]) {
        if (nodes[`${name}_probs`]) side.append(part(name, bars(nodes[`${name}_probs`], nodes[name], nodes[`${name}_outside_mass`])));
      }
      const said = ["query_subject", "query_attribute", "product_subject", "product_attribute"].filter((name) => nodes[name]);
      if (said.length) side.append(part("what it saw", words(said.map((name) => `${name.replace("_", " ")}: ${nodes[name]}`).join("\n"), "nodes")));
    }
    if (others.length) side.append(part("of its labeler", words(others.map((name) => `${name}: ${nodes[name]}`).join("\n"), "columns of its labeler")));
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
    const svg = drawn("svg", { viewBox: `0 0 260 ${lines.length * 20}`, role: "img", "aria-label": lines.map(([name, value]) => `${name}: ${value.toFixed(3)}`).join(", ") });
    lines.forEach(([name, value, isChosen], at) => {
      const y = at * 20;
      svg.append(
        drawn("text", { x: 46, y: y + 14, "text-anchor": "end", class: "f-ink", "font-weight": isChosen ? 700 : 400 }, name),
        drawn("rect", { x: 52, y: y + 4, width: 150, height: 12, rx: 2, class: "f-plain" }),
        drawn("rect", { x: 52, y: y + 4, width: Math.max(0, 150 * value), height: 12, rx: 2, class: name === "outside" ? "f-s2" : "f-s1" }),
        drawn("text", { x: 256, y: y + 14, "text-anchor": "end", class: "f-ink" }, value.toFixed(3)),
      );
    });
    return svg;
  }

  // Graph-GRPO's nodes: what the query asks and the product is, the two scores, φ of them, and the grade with the one that came before.
  function graph(nodes, grade) {
    const has = (name) => nodes[name] !== undefined && nodes[name] !== null;
    const places = {
      query_subject: [2, 0, 86], product_subject: [92, 0, 86], query_attribute: [182, 0, 86], product_attribute: [272, 0, 86],
      subject: [47, 70, 86], attribute: [227, 70, 86], preliminary: [2, 140, 100], phi_grade: [137, 140, 86], grade: [137, 210, 86],
    };
    const edges = [
      ["query_subject", "subject"], ["product_subject", "subject"], ["query_attribute", "attribute"], ["product_attribute", "attribute"],
      ["subject", "phi_grade"], ["attribute", "phi_grade"], ["preliminary", "grade"], ["phi_grade", "grade"],
    ];
    const values = { ...nodes, grade };
    const names = { phi_grade: "φ says", preliminary: "first grade", grade: "grade", subject: "subject", attribute: "attribute", query_subject: "query: subject", product_subject: "product: subject", query_attribute: "query: attribute", product_attribute: "product: attribute" };
    const top = ["query_subject", "product_subject", "query_attribute", "product_attribute"].some(has) ? 0 : 70;
    const there = (name) => name === "grade" ? grade !== undefined : has(name);
    const svg = drawn("svg", { viewBox: `0 ${top} 360 ${256 - top}`, role: "img", "aria-label": Object.keys(places).filter(there).map((name) => `${names[name]}: ${values[name]}`).join("; ") });
    for (const [from, to] of edges) {
      if (!there(from) || !there(to)) continue;
      const [x1, y1, w1] = places[from], [x2, y2, w2] = places[to];
      const differs = from === "phi_grade" && nodes.phi_agrees === false;
      svg.append(drawn("path", { d: `M ${x1 + w1 / 2} ${y1 + 42} C ${x1 + w1 / 2} ${y1 + 58}, ${x2 + w2 / 2} ${y2 - 16}, ${x2 + w2 / 2} ${y2}`, class: `f-none ${differs ? "s-s2" : "s-soft"}`, "stroke-width": differs ? 2 : 1.2, "stroke-dasharray": differs ? "4 3" : "none" }));
    }
    for (const [name, [x, y, width]] of Object.entries(places)) {
      if (!there(name)) continue;
      const isGrade = name === "grade";
      svg.append(
        drawn("rect", { x, y: y + 1, width, height: 40, rx: 6, class: `f-card ${isGrade ? "s-link" : "s-soft"}`, "stroke-width": isGrade ? 2 : 1 }),
        drawn("text", { x: x + width / 2, y: y + 16, "text-anchor": "middle", class: "f-soft t9" }, names[name]),
        drawn("text", { x: x + width / 2, y: y + 32, "text-anchor": "middle", class: "f-ink" }, clipped(String(values[name]), 14)),
      );
    }
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
