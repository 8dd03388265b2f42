"use strict";
// The tree: folding, search and keyboard. Only visible rows are in the document.

TH.tree = (() => {
  const ROW = 24;
  const box = document.getElementById("tree");
  const rows = document.getElementById("rows");
  const query = document.getElementById("query");
  const hits = document.getElementById("hits");

  // ---- nodes --------------------------------------------------------------------------------------------------------

  const root = { name: "", path: "", depth: -1, children: [], byName: new Map(), point: null, open: true };
  const nodeOf = new Map();

  const child = (parent, name) => {
    let node = parent.byName.get(name);
    if (!node) {
      const path = parent.path ? `${parent.path}.${name}` : name;
      node = { name, path, depth: parent.depth + 1, parent, children: [], byName: new Map(), point: null, open: false };
      parent.byName.set(name, node);
      parent.children.push(node);
    }
    return node;
  };

  for (const point of TH.points) {
    let node = root;
    for (const name of point.path) node = child(node, name);
    if (point.inner || !point.path.length) node = child(node, point.inner || ":return");
    node.point = point;
    nodeOf.set(point, node);
  }
  // A difference between two tapes is marked at its row, and at folded rows above it.
  for (const [point, node] of nodeOf) {
    const first = point === TH.first?.point;
    if (!first && !TH.differs(point)) continue;
    node.differs = true;
    for (let each = node; each; each = each.parent) {
      each.holdsDifference = true;
      each.holdsFirst ||= first;
    }
  }

  // A small model is shown completely, a large one folded to its first levels.
  const unfold = (node, levels) => {
    node.open = levels > 0;
    for (const each of node.children) unfold(each, levels - 1);
  };
  unfold(root, TH.points.length <= 60 ? 99 : 2);

  // ---- search -------------------------------------------------------------------------------------------------------

  let found = null; // The matching nodes and their ancestors.
  let fit = [];

  const search = () => {
    const wanted = query.value.trim().toLowerCase();
    found = null;
    fit = [];
    if (wanted) {
      const words = wanted.split(/\s+/);
      found = new Set();
      for (const [point, node] of nodeOf) {
        const text = `${point.address} ${point.kind} ${(point.source || []).map(([, text]) => text).join(" ")}`.toLowerCase();
        if (!words.every((word) => text.includes(word))) continue;
        fit.push(node);
        for (let each = node; each; each = each.parent) found.add(each);
      }
      fit.sort((a, b) => a.point.index - b.point.index);
    }
    hits.textContent = wanted ? `${TH.count(fit.length)} of ${TH.count(TH.points.length)}` : "";
    box.scrollTop = 0;
    layout();
  };

  // ---- rows ---------------------------------------------------------------------------------------------------------

  let shown = [];

  const layout = () => {
    shown = [];
    const visit = (node) => {
      for (const each of node.children) {
        if (found && !found.has(each)) continue;
        shown.push(each);
        if (each.children.length && (found || each.open)) visit(each);
      }
    };
    visit(root);
    rows.style.height = `${shown.length * ROW}px`;
    draw();
  };

  const scale = (key) => {
    const sizes = TH.shownSteps().flatMap((each) => each.parts.map((part) => measure(part, key))).filter((size) => size > 0);
    const [low, high] = [Math.min, Math.max].map((end) => Math.log10(sizes.reduce((a, b) => end(a, b), sizes[0] ?? 1)));
    return (size) => (size > 0 ? Math.max(0.06, Math.min(1, (Math.log10(size) - low) / (high - low || 1))) : 0);
  };

  const measure = (part, key) => {
    const seen = key === "gradient" ? part?.gradient?.numbers : part?.numbers;
    return seen ? seen.rms : 0;
  };

  const scales = { value: scale("value"), gradient: scale("gradient") };

  const firstPart = (point) => {
    for (const run of point.runs) for (const call of run || []) for (const part of call.parts) return part;
    return null;
  };

  const badOf = (part) => {
    const seen = [part?.numbers, part?.gradient?.numbers].filter(Boolean);
    return [seen.some(({ nans }) => nans) ? "NaN" : "", seen.some(({ infs }) => infs) ? "Inf" : ""].filter(Boolean).join(" ");
  };

  const marked = (name) => {
    const wanted = query.value.trim().toLowerCase().split(/\s+/)[0];
    const at = wanted ? name.toLowerCase().indexOf(wanted) : -1;
    if (at < 0) return [name];
    return [name.slice(0, at), TH.el("mark", {}, name.slice(at, at + wanted.length)), name.slice(at + wanted.length)];
  };

  const differenceBadge = (node, isOpen) => {
    if (!(node.differs || (node.holdsDifference && !isOpen))) return null;
    if (node.holdsFirst && (node.point === TH.first.point || !isOpen)) {
      const what = TH.first.gradient ? "gradients" : "values";
      return TH.el("span", { class: "badge first", title: `The first difference between the two tapes: ${what}` }, "first difference");
    }
    return TH.el("span", { class: "badge differs", title: "The two tapes differ here", "aria-label": "differs" }, "≠");
  };

  const bars = (part) =>
    TH.el(
      "span",
      { class: "bars", "aria-hidden": "true" },
      ["value", "gradient"].map((key) => {
        const size = measure(part, key);
        const bar = TH.el("i", { class: key });
        bar.style.width = `${Math.round(scales[key](size) * 34)}px`;
        return size ? bar : TH.el("i", { class: "none" });
      }),
    );

  const legend = () => {
    const any = (key) => TH.passed.some(({ parts }) => parts.some((part) => measure(part, key)));
    const names = [["value", "values"], ["gradient", "gradients"]].filter(([key]) => any(key));
    if (!names.length) return;
    const marks = names.map(([key, name]) => TH.el("span", {}, TH.el("i", { class: key }), name));
    document.getElementById("side").append(TH.el("div", { class: "sizes" }, marks, "size (rms), on a log scale"));
  };

  const drawRow = (node, place) => {
    const { point } = node;
    const part = point && firstPart(point);
    const bad = badOf(part);
    const chosen = point && point === TH.chosen.point;
    const folds = node.children.length > 0;
    const isOpen = folds && (found || node.open);
    const calls = point && point.calls.length > 1 ? `×${point.calls.length}` : "";
    const row = TH.el(
      "div",
      {
        class: `row${chosen ? " chosen" : ""}${point?.calls.length ? "" : " bare"}${point?.failed ? " failed" : ""}`,
        role: "treeitem",
        "aria-level": node.depth + 1,
        "aria-selected": chosen ? "true" : "false",
        "aria-expanded": folds ? String(Boolean(isOpen)) : null,
        "data-address": point ? point.address : null,
        title: point ? `${point.address}  ${point.kind}  ${part ? TH.shape(part) : ""}` : node.path,
        onclick: () => pick(node),
      },
      TH.el("span", { class: `fold${folds ? "" : " leaf"}${isOpen ? " open" : ""}`, onclick: (event) => toggle(event, node) }),
      TH.el("span", { class: `name${point?.inner ? " inner" : ""}` }, marked(node.name), TH.el("small", {}, calls)),
      TH.el("span", { class: "kind" }, point ? (point.inner ? "" : point.kind) : ""),
      point?.failed ? TH.el("span", { class: "badge bad" }, "failed") : null,
      differenceBadge(node, isOpen),
      bad ? TH.el("span", { class: "badge bad" }, bad) : null,
      TH.el("span", { class: "shape" }, part ? TH.shape(part) : ""),
      bars(part),
    );
    row.style.transform = `translateY(${place * ROW}px)`;
    row.style.paddingLeft = `${8 + node.depth * 14}px`;
    return row;
  };

  const draw = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 8);
    const last = Math.min(shown.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 8);
    rows.replaceChildren(...shown.slice(first, last).map((node, offset) => drawRow(node, first + offset)));
    if (!shown.length) rows.replaceChildren(TH.el("p", { class: "empty" }, found ? "No matching points." : "No points."));
  };

  // ---- moving -------------------------------------------------------------------------------------------------------

  let cursor = null;

  const reveal = (node) => {
    for (let each = node.parent; each; each = each.parent) each.open = true;
    cursor = node;
    layout();
    const place = shown.indexOf(node);
    if (place < 0) return;
    const top = place * ROW;
    if (top < box.scrollTop || top + ROW > box.scrollTop + box.clientHeight) {
      box.scrollTop = top - box.clientHeight / 3;
      draw();
    }
  };

  const pick = (node) => {
    cursor = node;
    if (node.point) TH.choose(node.point);
    else {
      node.open = !node.open;
      layout();
    }
  };

  const toggle = (event, node) => {
    if (!node.children.length) return;
    event.stopPropagation();
    node.open = !node.open;
    layout();
  };

  const step = (by) => {
    const place = Math.max(0, Math.min(shown.length - 1, shown.indexOf(cursor) + by));
    const node = shown[place];
    if (!node) return;
    cursor = node;
    if (node.point) TH.choose(node.point);
    else reveal(node);
  };

  const across = (right) => {
    if (!cursor) return;
    if (right && cursor.children.length && !cursor.open) cursor.open = true;
    else if (right) return step(1);
    else if (!right && cursor.open && cursor.children.length) cursor.open = false;
    else if (cursor.parent && cursor.parent !== root) {
      cursor = cursor.parent;
      if (cursor.point) return TH.choose(cursor.point);
    }
    layout();
  };

  const keys = {
    ArrowDown: () => step(1),
    ArrowUp: () => step(-1),
    PageDown: () => step(20),
    PageUp: () => step(-20),
    Home: () => step(-1e9),
    End: () => step(1e9),
    ArrowRight: () => across(true),
    ArrowLeft: () => across(false),
  };

  box.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  box.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(box);
  query.addEventListener("input", search);
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && fit.length) {
      const next = (fit.findIndex((node) => node.point === TH.chosen.point) + 1) % fit.length;
      pick(fit[next]);
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      box.focus();
      step(1);
    } else if (event.key === "Escape") {
      query.value = "";
      search();
      box.focus();
    }
  });

  TH.listeners.push(() => {
    const node = TH.chosen.point && nodeOf.get(TH.chosen.point);
    if (node) reveal(node);
    else draw();
  });
  legend();
  layout();
  return { step, focus: () => box.focus(), search: () => query.focus() };
})();
