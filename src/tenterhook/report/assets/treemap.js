"use strict";
// Treemaps: nested rectangles whose areas are sizes.

TH.treemap = ({ title, boxes }) => {
  const inner = boxes.map(({ left, top, width, height, depth, name, text }) => {
    const made = TH.el("div", { "aria-label": text, onmousemove: (event) => TH.tip(event, text), onmouseleave: () => TH.tip(null, "") }, name);
    Object.assign(made.style, { left: `${left}%`, top: `${top}%`, width: `${width}%`, height: `${height}%` });
    made.style.background = `color-mix(in srgb, var(--value) ${Math.min(72, 12 * depth)}%, var(--soft))`;
    return made;
  });
  return TH.el("section", { class: "card" }, TH.el("h3", {}, title), TH.el("div", { class: "treemap", role: "img", "aria-label": title }, inner));
};
