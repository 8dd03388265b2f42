"use strict";
// The selected point, the overview, and the start of the page.

(() => {
  const { el } = TH;
  const main = document.getElementById("main");
  const top = document.getElementById("top");
  const overview = el("div", { id: "overview" });
  const detail = el("div", { id: "detail" });
  let log = false; // True if histograms have a logarithmic count axis.

  // ---- the top ------------------------------------------------------------------------------------------------------

  const drawTop = () =>
    top.replaceChildren(
      el("h1", {}, TH.data.title),
      el("dl", { id: "facts" }, TH.data.facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", { title: text }, text)))),
      el("span", { class: "keys" }, el("kbd", {}, "/"), " search  ", el("kbd", {}, "↑↓←→"), " move  ", el("kbd", {}, "[ ]"), " calls"),
      el("button", { id: "theme", type: "button", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: TH.theme.toggle }, "◐"),
    );

  // ---- the overview -------------------------------------------------------------------------------------------------

  const failureCard = (failure, run) => {
    const inputs = Object.entries(failure.inputs || {});
    const own = Object.entries(failure.parameters || {});
    const table = (title, rows) =>
      rows.length ? el("div", {}, el("h4", {}, title), el("table", {}, rows.map(([name, text]) => el("tr", {}, el("th", {}, name), el("td", {}, text))))) : null;
    const [point] = TH.find(failure.address || "");
    const name = el("button", { class: "link", type: "button", onclick: () => point && TH.choose(point) }, failure.address || "outside the modules");
    return el(
      "section",
      { class: "card failure", role: "alert" },
      el("h3", {}, TH.runs.length > 1 ? `${TH.runs[run]}: the run failed in ` : "The run failed in ", name, failure.kind ? ` (${failure.kind})` : ""),
      el("p", {}, el("b", {}, failure.error), `: ${failure.message}`),
      el("div", { class: "shapes" }, table("arguments", inputs), table("parameters", own)),
      failure.where ? el("p", { class: "note" }, failure.where) : null,
    );
  };

  const remarkLine = ({ address = "", text, details = [] }) => {
    const [point] = TH.find(address);
    const name = point ? el("button", { class: "link", type: "button", onclick: () => TH.choose(point) }, address) : address;
    const folded = details.length ? el("details", {}, el("summary", {}, text), el("ul", {}, details.map((each) => el("li", {}, each)))) : text;
    return el("li", {}, address ? [name, ": "] : [], folded);
  };

  const remarksCard = () =>
    TH.data.remarks.length ? el("section", { class: "card remarks" }, el("h3", {}, "What stands out"), el("ul", {}, TH.data.remarks.map(remarkLine))) : null;

  const insideToggle = () =>
    TH.passed.length > TH.shownSteps().length || TH.everything
      ? el("button", { class: "toggle", type: "button", title: "Also draw the values inside modules", onclick: () => { TH.everything = !TH.everything; drawOverview(); } }, TH.everything ? "all points" : "outputs of modules")
      : null;

  const depthCard = () => {
    if (!TH.passed.length) return;
    const names = TH.runs.length ? TH.runs : ["value"];
    const card = el("section", { class: "card", id: "depth" }, el("h3", {}, "Along the depth of the model", insideToggle()));
    overview.append(card);
    TH.charts.depth(card, "size of values (rms)", "value", (each, run) => each.parts[run]?.numbers?.rms ?? null, names);
    TH.charts.depth(card, "norm of gradients", "gradient", (each, run) => each.parts[run]?.gradient?.numbers?.norm ?? null, names);
    const order = TH.everything ? "points, in order of execution →" : "modules, in order of execution →";
    if (names.length > 1) {
      TH.charts.depth(card, "relative difference of values", "value-difference", (each) => each.compared.value?.apart ?? null, ["difference"]);
      TH.charts.depth(card, "relative difference of gradients", "gradient-difference", (each) => each.compared.gradient?.apart ?? null, ["difference"]);
    }
    card.append(el("div", { class: "axis-title" }, order));
  };

  const tableCard = (table) =>
    el(
      "section",
      { class: "card" },
      el("h3", {}, table.title),
      el("div", { class: "scroll" }, el(
        "table",
        { class: "rows" },
        el("thead", {}, el("tr", {}, table.columns.map(([title, right]) => el("th", { class: right ? "right" : "" }, title)))),
        el("tbody", {}, table.rows.map(([cells, depth, style]) => el("tr", { class: style }, cells.map((cell, at) => {
          const made = el("td", { class: table.columns[at][1] ? "right" : "" }, cell);
          if (!at) made.style.paddingLeft = `${8 + depth * 14}px`;
          return made;
        })))),
      )),
      table.footer.map((line) => el("p", { class: "note" }, line)),
    );

  const figureCard = ({ title, lines, png }) =>
    el(
      "section",
      { class: "card figure" },
      el("h3", {}, title),
      png ? el("img", { alt: title, src: `data:image/png;base64,${png}` }) : null,
      lines.map((line) => el("p", { class: "note" }, line)),
    );

  const drawOverview = () => {
    TH.charts.forget();
    overview.replaceChildren();
    overview.append(...TH.data.failures.map((failure, run) => failure && failureCard(failure, run)).filter(Boolean));
    overview.append(...[remarksCard()].filter(Boolean));
    overview.append(...TH.data.figures.map(figureCard));
    depthCard();
    for (const chart of TH.data.charts) {
      const box = el("div", { class: "line" });
      overview.append(el("section", { class: "card chart" }, el("h3", {}, chart.title), box));
      TH.charts.lines(box, chart, true);
    }
    overview.append(...TH.data.treemaps.map(TH.treemap));
    overview.append(...TH.data.tables.map(tableCard));
  };

  // ---- the selected point -------------------------------------------------------------------------------------------

  const ROWS = [
    ["mean", (seen) => TH.number(seen.mean, 4)],
    ["std", (seen) => TH.number(seen.std, 4)],
    ["min", (seen) => TH.number(seen.low, 4)],
    ["max", (seen) => TH.number(seen.high, 4)],
    ["norm", (seen) => TH.number(seen.norm, 4)],
    ["rms", (seen) => TH.number(seen.rms, 4)],
    ["zeros", (seen) => (seen.zeros ? `${TH.number((100 * seen.zeros) / seen.count)} %` : "0")],
    ["NaN", (seen) => TH.count(seen.nans)],
    ["Inf", (seen) => TH.count(seen.infs)],
  ];

  const numbersCard = (columns) =>
    el(
      "section",
      { class: "card numbers" },
      el("h3", {}, "Numbers"),
      el(
        "table",
        {},
        el("tr", {}, el("th"), columns.map(({ title }) => el("th", { class: "right" }, title))),
        ROWS.map(([name, read]) =>
          el("tr", { class: (name === "NaN" || name === "Inf") && columns.some(({ seen }) => read(seen) !== "0") ? "bad" : "" },
            el("th", {}, name), columns.map(({ seen }) => el("td", { class: "right" }, read(seen))))),
      ),
    );

  // Two tapes are shown side by side, with one range, unless one of them would be only a thin line.
  const histograms = (columns) => {
    const keys = TH.runs.length > 1 ? ["value", "gradient"] : [null];
    const ordered = keys.flatMap((key) => {
      const alike = columns.filter((each) => !key || each.key === key);
      const shared = key && alike.length > 1 ? TH.charts.shared(alike.map(({ seen }) => seen)) : null;
      return alike.map((each) => histogramCard({ ...each, title: `Histogram, ${each.title}`, shared }));
    });
    return el("div", { class: `histograms${TH.runs.length > 1 ? " pairs" : ""}` }, ordered);
  };

  const histogramCard = ({ title, seen, key, run, shared }) => {
    const box = el("div", { class: "histogram" });
    const card = el(
      "section",
      { class: "card" },
      el("h3", {}, title, el("button", { class: "toggle", type: "button", title: "Switch between linear and logarithmic counts", onclick: () => { log = !log; draw(); } }, log ? "log" : "linear")),
      box,
    );
    const colour = TH.css(key === "gradient" ? (run ? "--fourth" : "--gradient") : run ? "--third" : "--value");
    requestAnimationFrame(() => box.isConnected && TH.charts.histogram(box, seen, { colour, log, shared }));
    return card;
  };

  const chips = (items, chosen, act) =>
    items.length > 1
      ? el("div", { class: "chips" }, items.slice(0, 400).map(([text, value]) => el("button", { type: "button", class: value === chosen ? "on" : "", onclick: () => act(value) }, text)))
      : null;

  const heading = (point, call, part) => {
    const sample = part || {};
    const facts = [point.kind, point.site === "parameter" ? "parameter" : "", sample.dtype, TH.shape(sample)].filter(Boolean);
    const name = TH.nameOf(point, call);
    return el(
      "div",
      { class: "heading" },
      el("h2", {}, name, el("button", { class: "copy", type: "button", title: "Copy the address", onclick: (event) => { navigator.clipboard?.writeText(name).then(() => (event.target.textContent = "copied")); } }, "copy")),
      el("p", { class: "facts" }, facts.map((fact) => el("span", {}, fact))),
    );
  };

  // A name may be assigned in several places, and a tape does not store which of them a call used.
  const WHICH = "Each of these lines assigns this name, and the tape does not store which one did. To record only one, add its number to the address, such as [1] for the second.";

  const sourceCard = ({ where, source }) => {
    const several = source.length > 1;
    const lines = source.map(([line]) => line).join(", ");
    return el(
      "section",
      { class: "card source" },
      source.map(([line, text]) => el("code", {}, el("i", {}, line), text)),
      el("span", { class: "note" }, several ? `${where.slice(0, where.lastIndexOf(":"))}, lines ${lines}` : where),
      several ? el("span", { class: "note" }, WHICH) : null,
    );
  };

  const pictureCards = (title, items, signed) => {
    const drawn = items
      .filter(({ seen }) => seen && seen.picture !== null && seen.picture !== undefined)
      .map(({ seen, name, run }) => ({ seen, name, run, number: seen.picture, picture: TH.data.pictures[seen.picture] }));
    const there = drawn.filter((item) => item.picture);
    if (!there.length) return drawn.length ? el("section", { class: "card" }, el("h3", {}, title), el("p", { class: "note" }, "No picture: it does not fit within the maximum size of the page.")) : null;
    if (["vector", "number"].includes(there[0].picture.kind)) return TH.maps.vector(title, there, (signed ? ["--gradient", "--fourth"] : ["--value", "--third"]).map(TH.css));
    const of = (pick, best) => best(...there.map(({ seen }) => (seen.numbers ? pick(seen.numbers) : 0)));
    const scale = {
      low: of((seen) => seen.scale[0], Math.min), high: of((seen) => seen.scale[1], Math.max),
      full: [of((seen) => seen.low, Math.min), of((seen) => seen.high, Math.max)],
      colours: "viridis", tile: tileOf(there[0].picture), tokens: TH.data.tokens[there[0].run] || [],
    };
    if (signed && scale.low < 0) {
      const reach = Math.max(-scale.low, scale.high);
      [scale.low, scale.high, scale.colours] = [-reach, reach, "blue–red"];
    }
    return TH.maps.panel(title, there, scale);
  };

  // Fewer maps are drawn larger.
  const tileOf = ({ size: [count] }) => (count <= 4 ? 200 : count <= 16 ? 112 : count <= 128 ? 80 : 52);

  const tokensCard = (point, seen) => {
    const tokens = TH.data.tokens[seen.run] || [];
    const isIds = seen.part.dtype === "int64" && seen.part.shape.at(-1) === tokens.length && tokens.length;
    return isIds ? el("section", { class: "card" }, el("h3", {}, "Tokens"), el("p", { class: "tokens" }, tokens.map((token, at) => el("span", { title: `position ${at}` }, token)))) : null;
  };

  const draw = () => {
    TH.charts.clear();
    TH.tip(null, "");
    const { point, call, part: place } = TH.chosen;
    if (!point) return detail.replaceChildren();
    const runs = TH.runs.map((name, run) => ({ name: TH.runs.length > 1 ? name : "", run, call: TH.callOf(point, run, call) })).filter((each) => each.call);
    const seen = runs.map((each) => ({ ...each, part: each.call.parts[Math.min(place, each.call.parts.length - 1)] }));
    const parts = runs[0]?.call.parts || [];
    const columns = seen.flatMap(({ part, name, run }) => [
      part.numbers ? { title: `${name} value`.trim(), seen: part.numbers, key: "value", run } : null,
      part.gradient?.numbers ? { title: `${name} gradient`.trim(), seen: part.gradient.numbers, key: "gradient", run } : null,
    ]).filter(Boolean);
    const compared = Object.entries(TH.compared(point, call));
    const isFirst = (key) => TH.first && point === TH.first.point && call === TH.first.call && TH.first.gradient === (key === "gradient");
    const texts = seen.filter(({ part }) => part.text).map(({ part, name }) => el("p", { class: "text" }, name ? `${name}: ` : "", part.text));
    detail.replaceChildren(
      ...[
        heading(point, call, seen[0]?.part),
        point.where ? sourceCard(point) : null,
        chips(point.calls.map((each) => [`#${each}`, each]), call, (each) => TH.choose(point, each)),
        chips(parts.map((each, at) => [each.path || "value", at]), place, (at) => TH.choose(point, call, at)),
        point.failed ? el("p", { class: "text bad" }, "The run failed here. The arguments of the call are at the top of the page.") : null,
        seen.length ? null : el("p", { class: "text" }, "Nothing was recorded here."),
        ...texts,
        ...compared.map(([key, { differs, text }]) => el("p", { class: `text compared${differs ? " differs" : ""}` }, `${key === "gradient" ? "Gradients" : "Values"} of the two runs: ${text}.${isFirst(key) ? " This is the first difference." : ""}`)),
        columns.length ? el("div", { class: "cards" }, numbersCard(columns), histograms(columns.filter(({ seen: each }) => each.histogram.length))) : null,
        ...seen.map((each) => (each.part.shape ? tokensCard(point, each) : null)),
        pictureCards("Values", seen.map(({ part, name, run }) => ({ seen: part, name, run })), false),
        pictureCards("Gradients", seen.map(({ part, name, run }) => ({ seen: part.gradient, name, run })), true),
      ].filter(Boolean),
    );
  };

  // ---- the start ----------------------------------------------------------------------------------------------------

  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const { point, call } = TH.chosen;
    const turn = (by) => {
      const at = point ? point.calls.indexOf(call) + by : -1;
      if (at >= 0 && at < point.calls.length) TH.choose(point, point.calls[at]);
    };
    const act = { "/": TH.tree.search, t: TH.theme.toggle, "[": () => turn(-1), "]": () => turn(1) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  let theme = document.documentElement.dataset.theme;
  TH.listeners.push(() => {
    if (theme !== document.documentElement.dataset.theme) {
      theme = document.documentElement.dataset.theme;
      drawOverview();
    }
    draw();
  });

  if (!TH.points.length) document.body.classList.add("no-points");
  drawTop();
  main.append(overview, detail);
  drawOverview();
  const [wanted, call] = TH.find(decodeURIComponent(location.hash.slice(1)));
  const failed = TH.points.find((point) => point.failed);
  const start = wanted || TH.first?.point || failed || TH.passed.find(({ parts }) => parts.some((part) => part && part.shape.length === 4))?.point || TH.passed[0]?.point || TH.points[0];
  if (start) TH.choose(start, wanted || start !== TH.first?.point ? call : TH.first.call);
  TH.tree.focus();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
