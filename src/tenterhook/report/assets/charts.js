"use strict";
// Charts, drawn by uPlot: the depth of the model, histograms, lines.

TH.charts = (() => {
  let depths = []; // The charts of the whole model, which stay while points are chosen.
  let alive = []; // Charts of the part of the page that is drawn anew, to be taken down before.

  const colours = () => [TH.css("--value"), TH.css("--gradient"), TH.css("--third"), TH.css("--fourth")];

  const axis = ({ grid, ticks, ...more } = {}) => ({
    stroke: TH.css("--dim"),
    grid: { stroke: TH.css("--line"), width: 1, ...grid },
    ticks: { stroke: TH.css("--line"), width: 1, size: 4, ...ticks },
    font: "11px system-ui, sans-serif",
    ...more,
  });

  const short = (value) => (value === null ? "" : TH.number(value, 2));

  // Of a logarithmic axis, only the powers of ten are drawn, and of those no more than fit; with twos and fives between
  // them if there are too few.
  const rounded = (value, mantissas) => mantissas.some((each) => {
    const power = Math.log10(value / each);
    return Math.abs(power - Math.round(power)) < 1e-9;
  });
  const powers = (_, splits) => {
    let found = splits.filter((value) => value > 0 && rounded(value, [1]));
    if (found.length < 2) found = splits.filter((value) => value > 0 && rounded(value, [1, 2, 5]));
    const every = Math.max(1, Math.ceil(found.length / 4));
    const kept = new Set(found.filter((_each, place) => place % every === 0));
    return splits.map((value) => (kept.has(value) ? value : null));
  };
  const decades = {
    filter: powers,
    grid: { filter: powers },
    ticks: { filter: powers },
    values: (_, splits) => splits.map((value) => (value === null ? null : TH.number(value, 2))),
  };

  const make = (box, options, data, lasting) => {
    const chart = new uPlot({ legend: { show: false }, width: Math.max(120, box.clientWidth), ...options }, data, box);
    const watch = new ResizeObserver(() => {
      if (box.clientWidth) chart.setSize({ width: box.clientWidth, height: options.height });
    });
    watch.observe(box);
    if (!lasting) {
      alive.push(() => {
        watch.disconnect();
        chart.destroy();
      });
    }
    return chart;
  };

  const clear = () => {
    alive.forEach((end) => end());
    alive = [];
  };

  // ---- histogram ----------------------------------------------------------------------------------------------------

  const histogram = (box, seen, colour, log) => {
    const bins = seen.histogram;
    const width = (seen.high - seen.low) / bins.length || 1;
    const x = bins.map((_, place) => seen.low + (place + 0.5) * width);
    const low = bins.length === 1 ? seen.low - 1 : seen.low;
    const high = bins.length === 1 ? seen.high + 1 : seen.high;
    const y = bins.map((count) => (log ? (count ? count : null) : count));
    make(
      box,
      {
        height: 176,
        cursor: { points: { show: false }, drag: { x: false, y: false }, y: false },
        scales: { x: { time: false, range: [low, high] }, y: log ? { distr: 3 } : { range: (_u, _min, max) => [0, max || 1] } },
        axes: [axis({ size: 26, values: (_u, splits) => splits.map(short) }), axis({ size: 46, ...(log ? decades : { values: (_u, splits) => splits.map(short) }) })],
        series: [
          {},
          {
            fill: colour,
            width: 0,
            points: { show: false },
            paths: uPlot.paths.bars({ size: [1, Infinity], gap: 1 }),
          },
        ],
        hooks: {
          setCursor: [
            (chart) => {
              const { idx, left, top } = chart.cursor;
              if (idx === null || idx === undefined || left < 0) return TH.tip(null, "");
              const place = chart.over.getBoundingClientRect();
              const from = seen.low + idx * width;
              TH.tip(
                { clientX: place.left + left, clientY: place.top + top },
                `${TH.number(from)} to ${TH.number(from + width)}: ${TH.count(bins[idx])}`,
              );
            },
          ],
        },
      },
      [x, y],
    );
    box.addEventListener("mouseleave", () => TH.tip(null, ""));
  };

  // ---- lines --------------------------------------------------------------------------------------------------------

  const lines = (box, chart) => {
    const names = Object.keys(chart.series);
    const palette = colours();
    make(
      box,
      {
        height: chart.height || 180,
        legend: { show: names.length > 1 },
        cursor: { y: false, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: chart.log ? { distr: 3 } : {} },
        axes: [
          axis({ size: chart.x_label ? 40 : 26, label: chart.x_label || undefined, labelSize: 14, labelFont: "11px system-ui", values: (_u, s) => s.map(short) }),
          axis({ size: 52, ...(chart.log ? decades : { values: (_u, s) => s.map(short) }) }),
        ],
        series: [
          { label: chart.x_label || "x", value: (_u, v) => short(v) },
          ...names.map((name, place) => ({
            label: name,
            stroke: palette[place % palette.length],
            width: 1.5,
            points: { show: chart.x.length < 40 },
            value: (_u, v) => TH.number(v, 4),
          })),
        ],
      },
      [chart.x, ...names.map((name) => (chart.log ? chart.series[name].map((y) => (y > 0 ? y : null)) : chart.series[name]))],
    );
  };

  // ---- the depth of the model ---------------------------------------------------------------------------------------

  const depth = (box, label, key, read, names) => {
    const steps = TH.shownSteps();
    // Half a step of room at both ends, so that the first and the last one can be seen and hit.
    const x = [-0.5, ...steps.keys(), steps.length - 0.5];
    const padded = (ys) => [null, ...ys.map((y) => (y > 0 ? y : null)), null];
    const stepAt = (idx) => (idx === null || idx === undefined ? null : Math.max(0, Math.min(steps.length - 1, idx - 1)));
    const series = names.map((_, run) => steps.map((each) => read(each, run)));
    const palette = key === "value" ? [TH.css("--value"), TH.css("--third")] : [TH.css("--gradient"), TH.css("--fourth")];
    const bad = steps.map((each) => {
      const part = each.parts.find(Boolean);
      const seen = key === "value" ? part?.numbers : part?.gradient?.numbers;
      return Boolean(seen && (seen.nans || seen.infs));
    });
    if (!series.some((ys) => ys.some((y) => y > 0)) && !bad.some(Boolean)) return null;
    const column = (chart, place, colour, width) => {
      const left = chart.valToPos(place, "x", true);
      chart.ctx.save();
      chart.ctx.strokeStyle = colour;
      chart.ctx.lineWidth = width * devicePixelRatio;
      chart.ctx.beginPath();
      chart.ctx.moveTo(left, chart.bbox.top);
      chart.ctx.lineTo(left, chart.bbox.top + chart.bbox.height);
      chart.ctx.stroke();
      chart.ctx.restore();
    };
    const holder = TH.el("div", { class: "depth", "data-key": key }, TH.el("div", { class: "axis-title" }, label));
    box.append(holder);
    const chart = make(
      holder,
      {
        height: 104,
        cursor: { y: false, drag: { x: true, y: false }, sync: { key: "depth", setSeries: false }, points: { size: 7 } },
        scales: { x: { time: false }, y: { distr: 3 } },
        axes: [axis({ show: false }), axis({ size: 52, ...decades })],
        series: [
          {},
          ...series.map((_, run) => ({
            stroke: palette[run],
            width: 1.5,
            fill: run ? undefined : `${palette[run]}22`,
            points: { show: steps.length <= 80, size: 5, fill: palette[run] },
          })),
        ],
        hooks: {
          draw: [
            (made) => {
              bad.forEach((is, place) => is && column(made, place, TH.css("--bad"), 2));
              const at = steps.findIndex((each) => each.point === TH.chosen.point && each.call === TH.chosen.call);
              if (at >= 0) column(made, at, TH.css("--accent"), 1.5);
            },
          ],
          setCursor: [
            (made) => {
              const { left, top } = made.cursor;
              const idx = stepAt(made.cursor.idx);
              if (idx === null || left < 0 || !made.over.matches(":hover")) return;
              const place = made.over.getBoundingClientRect();
              const values = names.map((name, run) => `${names.length > 1 ? `${name}: ` : ""}${TH.number(series[run][idx])}`);
              TH.tip(
                { clientX: place.left + left, clientY: place.top + top },
                `${TH.nameOf(steps[idx].point, steps[idx].call)}\n${label}: ${values.join(", ")}${bad[idx] ? " · NaN or Inf" : ""}`,
              );
            },
          ],
        },
      },
      [x, ...series.map(padded)],
      true,
    );
    chart.over.addEventListener("mouseleave", () => TH.tip(null, ""));
    let pressed = null;
    chart.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    chart.over.addEventListener("click", (event) => {
      const idx = stepAt(chart.cursor.idx);
      const dragged = pressed !== null && Math.abs(event.clientX - pressed) > 4; // A drag enlarges a part of the chart.
      if (!dragged && idx !== null) TH.choose(steps[idx].point, steps[idx].call);
    });
    depths.push(chart);
    return chart;
  };

  const forget = () => {
    depths.forEach((chart) => chart.destroy());
    depths = [];
  };
  TH.listeners.push(() => depths.forEach((chart) => chart.redraw(false, false)));

  return { histogram, lines, depth, clear, forget };
})();
