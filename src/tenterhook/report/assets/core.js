"use strict";
// The data of the page, small helpers, and the selected point.

const TH = { data: JSON.parse(document.getElementById("data").textContent), listeners: [] };

// ---- elements -------------------------------------------------------------------------------------------------------

TH.el = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
};

TH.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- numbers --------------------------------------------------------------------------------------------------------

TH.number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
};

// At most three digits, without trailing zeros.
TH.brief = (value) => {
  const rounded = Number(value.toPrecision(3));
  const size = Math.abs(rounded);
  return size >= 1e5 || (size && size < 1e-3) ? rounded.toExponential().replace("e+", "e") : String(rounded);
};

TH.count = (value) => value.toLocaleString("en-US");

TH.bytes = (text, type) => new type(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);

TH.shape = (part) => (part.shape ? part.shape.join("×") || "scalar" : "");

// ---- points ---------------------------------------------------------------------------------------------------------

TH.points = TH.data.points;
TH.runs = TH.data.runs;

TH.points.forEach((point, index) => {
  point.index = index;
  point.calls = [...new Set(point.runs.flatMap((run) => (run || []).map((call) => call.call)))].sort((a, b) => a - b);
});

TH.callOf = (point, run, call) => (point.runs[run] || []).find((each) => each.call === call) || null;

TH.nameOf = (point, call) => (point.calls.length > 1 || call > 0 ? `${point.address}#${call}` : point.address);

// The differences of the values and gradients of one call between two tapes.
TH.compared = (point, call) => point.runs.map((_, run) => TH.callOf(point, run, call)?.compared).find(Boolean) || {};

TH.differs = (point) => point.calls.some((call) => Object.values(TH.compared(point, call)).some(({ differs }) => differs));

// The first difference between two tapes, if the page shows that call.
TH.first = (() => {
  const wanted = TH.data.first;
  const point = wanted && TH.points.find(({ address }) => address === wanted.address);
  return point && point.calls.includes(wanted.call) ? { ...wanted, point } : null;
})();

// Every call of every point in the order of execution, for the charts by depth.
TH.passed = (() => {
  const found = [];
  for (const point of TH.points) {
    if (point.site === "parameter") continue;
    for (const call of point.calls) {
      const seen = TH.runs.map((_, run) => TH.callOf(point, run, call));
      const first = seen.find(Boolean);
      const parts = seen.map((each) => (each && each.parts.find((part) => part.numbers)) || null);
      if (parts.some(Boolean)) found.push({ point, call, rank: first.rank, parts, compared: TH.compared(point, call) });
    }
  }
  found.sort((a, b) => a.rank - b.rank);
  return found;
})();

// The outputs of modules in order of execution. Includes values inside modules on request, or if there is nothing else.
TH.everything = false;
TH.shownSteps = () => {
  const outputs = TH.passed.filter(({ point }) => point.site === "return" || !point.site);
  return TH.everything || outputs.length < 2 ? TH.passed : outputs;
};

// ---- selection ------------------------------------------------------------------------------------------------------

TH.chosen = { point: null, call: 0, part: 0 };

TH.choose = (point, call = null, part = 0) => {
  TH.chosen = { point, call: call === null && point ? (point.calls[0] ?? 0) : call, part };
  const name = point ? TH.nameOf(point, TH.chosen.call) : "";
  try {
    history.replaceState(null, "", name ? `#${encodeURIComponent(name)}` : "#");
  } catch (_) {
    // Some browsers do not allow history on a page from disk.
  }
  for (const listener of TH.listeners) listener();
};

TH.find = (name) => {
  const exact = TH.points.find((point) => point.address === name);
  if (exact) return [exact, null];
  const cut = name.lastIndexOf("#");
  const point = cut > 0 && TH.points.find((each) => each.address === name.slice(0, cut));
  return point ? [point, Number(name.slice(cut + 1))] : [null, null];
};

// ---- light and dark -------------------------------------------------------------------------------------------------

TH.theme = (() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = (() => {
    try {
      return localStorage.getItem("tenterhook-theme");
    } catch (_) {
      return null; // A page from disk may have no local storage.
    }
  })();
  const set = (name) => {
    root.dataset.theme = name;
    for (const listener of TH.listeners) listener();
  };
  root.dataset.theme = stored || (dark.matches ? "dark" : "light");
  return {
    toggle() {
      const name = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("tenterhook-theme", name);
      } catch (_) {
        // Then the theme is kept only while the page is open.
      }
      set(name);
    },
  };
})();

// ---- tooltips -------------------------------------------------------------------------------------------------------

TH.tip = (event, text) => {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const top = event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18;
  tip.style.transform = `translate(${left}px, ${top}px)`;
};
