"use strict";
// Charts, drawn by uPlot: the depth of the model, histograms, lines.

TH.charts = (() => {
  let lasting = []; // Charts of the overview, which stay when another point is selected.
  let alive = []; // Charts of the selected point, which are destroyed before it is drawn again.

  // With many lines, neighbours have similar colours, because they are neighbours in the model.
  const colours = (count) => {
    const few = ["--value", "--gradient", "--third", "--fourth"].map(TH.css);
    return count <= few.length ? few : Array.from({ length: count }, (_, at) => `hsl(${Math.round(220 + (300 * at) / count)} 65% 52%)`);
  };

  const { linear, logarithmic, around, aroundPowers, unitOf, scaled, exponents } = TH.axes;
  const hidden = { show: false };
  const floor = (chart) => chart.scales.y.min;

  // An error in one chart does not affect the others. The chart is drawn synchronously, so its error is raised here.
  const make = (box, options, data, stays) => {
    let chart;
    try {
      const attach = (made, start) => {
        box.append(made.root);
        made.batch(start);
      };
      chart = new uPlot({ legend: { show: false }, width: Math.max(120, box.clientWidth), ...options }, data, attach);
    } catch (error) {
      box.querySelector(".uplot")?.remove();
      box.append(TH.el("p", { class: "note undrawn" }, `This chart could not be drawn: ${error.message}`));
      return null;
    }
    const watch = new ResizeObserver(() => {
      if (box.clientWidth) chart.setSize({ width: box.clientWidth, height: options.height });
    });
    watch.observe(box);
    const end = () => {
      watch.disconnect();
      chart.destroy();
    };
    (stays ? lasting : alive).push({ chart, end });
    return chart;
  };

  const clear = () => {
    alive.forEach(({ end }) => end());
    alive = [];
  };

  // ---- histogram ----------------------------------------------------------------------------------------------------

  const bar = (from, width, count) => ({ from, width, count });

  // One range for several histograms, with a little room at its ends. Null if the bars of one would be too thin to see.
  const shared = (several) => {
    const low = Math.min(...several.map((seen) => seen.low));
    const high = Math.max(...several.map((seen) => seen.high));
    const thin = several.some((seen) => seen.high > seen.low && (seen.high - seen.low) * 20 < high - low);
    const room = (high - low) / 50;
    return thin || !room ? null : [low - room, high + room];
  };

  // The bars, from the lowest value to the highest. A single value has one narrow bar with room on both sides.
  const binned = ({ low, high, histogram: counts }, wanted) => {
    const width = (high - low) / counts.length;
    if (width > 0) return { range: wanted || [low, high], bars: counts.map((count, at) => bar(low + at * width, width, count)) };
    const reach = Math.abs(low) / 2 || 1;
    const range = wanted || [low - reach, low + reach];
    const narrow = (range[1] - range[0]) / 32;
    const bars = [-1.5, -0.5, 0.5].map((at) => bar(low + at * narrow, narrow, 0));
    bars[1].count = counts.reduce((sum, count) => sum + count, 0);
    return { range, bars };
  };

  const histogram = (box, seen, { colour, log, shared: wanted }) => {
    const { range, bars } = binned(seen, wanted);
    const unit = unitOf([seen.low, seen.high, ...(wanted || [])]);
    const told = ({ from, width, count }) =>
      seen.low === seen.high ? `${TH.number(seen.low, 5)}: ${TH.count(count)}` : `${TH.number(from)} to ${TH.number(from + width)}: ${TH.count(count)}`;
    const counts = bars.map(({ count }) => count);
    const upwards = log ? (_u, _min, max) => [-0.3, (max ?? 0) + 0.1] : (_u, _min, max) => [0, max || 1];
    make(
      box,
      {
        height: unit === 1 ? 176 : 190,
        cursor: { points: { show: false }, drag: { x: false, y: false }, y: false },
        scales: { x: { time: false, range: scaled(range, unit) }, y: { range: upwards } },
        axes: [linear(unit, { size: 26 }), log ? logarithmic({ size: 46, least: 0 }) : linear(unitOf(counts), { size: 46, whole: true })],
        series: [
          {},
          {
            fill: colour,
            fillTo: floor,
            width: 0,
            points: { show: false },
            paths: uPlot.paths.bars({ size: [1, Infinity], gap: 1 }),
          },
        ],
        hooks: {
          setCursor: [
            (chart) => {
              const { idx, left, top } = chart.cursor;
              if (idx === null || idx === undefined || left < 0 || (seen.low === seen.high && !counts[idx])) return TH.tip(null, "");
              const place = chart.over.getBoundingClientRect();
              TH.tip({ clientX: place.left + left, clientY: place.top + top }, told(bars[idx]));
            },
          ],
        },
      },
      [bars.map(({ from, width }) => (from + width / 2) / unit), log ? exponents(counts) : scaled(counts, unitOf(counts))],
    );
    box.addEventListener("mouseleave", () => TH.tip(null, ""));
  };

  // ---- lines --------------------------------------------------------------------------------------------------------

  const lines = (box, chart, stays = false) => {
    const names = Object.keys(chart.series);
    const palette = chart.colours || colours(names.length);
    const across = unitOf(chart.x);
    const unit = chart.log ? 1 : unitOf(names.flatMap((name) => chart.series[name]));
    const ends = (_u, min, max) => {
      const room = chart.room / across || (max > min ? 0 : 1);
      return min === chart.x[0] / across && max === chart.x.at(-1) / across ? [min - room, max + room] : [min, max];
    };
    const drawn = (ys) => (chart.log ? exponents(ys) : scaled(ys, unit));
    make(
      box,
      {
        height: chart.height || 180,
        legend: { show: names.length > 1 },
        cursor: { y: false, drag: { x: true, y: false } },
        scales: { x: { time: false, range: ends }, y: { range: chart.log ? aroundPowers : around } },
        hooks: chart.drawn ? { draw: [(made) => chart.drawn(Object.assign(made, { across }))] } : {},
        axes: [linear(across, { size: 26, label: chart.x_label, whole: chart.x.every(Number.isInteger) }), chart.log ? logarithmic({ size: 52 }) : linear(unit, { size: 52 })],
        series: [
          { label: chart.x_label || "x", value: (_u, x) => (x === null ? "" : String(Number((x * across).toPrecision(6)))) },
          ...names.map((name, place) => ({
            label: name,
            stroke: palette[place % palette.length],
            width: 1.5,
            points: { show: chart.x.length < 40 },
            value: (_u, _y, _series, at) => TH.number(at === null ? null : chart.series[name][at], 4),
          })),
        ],
      },
      [scaled(chart.x, across), ...names.map((name) => drawn(chart.series[name]))],
      stays,
    );
  };

  // ---- the depth of the model ---------------------------------------------------------------------------------------

  const PALETTES = { value: ["--value", "--third"], gradient: ["--gradient", "--fourth"], "value-difference": ["--accent"], "gradient-difference": ["--accent"] };

  const legend = (names, palette) =>
    names.map((name, run) => {
      const mark = TH.el("i");
      mark.style.background = palette[run];
      return TH.el("span", { class: "run" }, mark, name);
    });

  const depth = (box, label, key, read, names) => {
    const steps = TH.shownSteps();
    // Half a step of room at both ends, so that the first and last steps can be seen and clicked.
    const x = [-0.5, ...steps.keys(), steps.length - 0.5];
    const padded = (ys) => [null, ...exponents(ys), null];
    const stepAt = (idx) => (idx === null || idx === undefined ? null : Math.max(0, Math.min(steps.length - 1, idx - 1)));
    const series = names.map((_, run) => steps.map((each) => read(each, run)));
    const palette = PALETTES[key].map(TH.css);
    const bad = steps.map((each) => {
      const part = each.parts.find(Boolean);
      const seen = key.startsWith("value") ? part?.numbers : part?.gradient?.numbers;
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
    const holder = TH.el("div", { class: "depth", "data-key": key }, TH.el("div", { class: "axis-title" }, label, names.length > 1 ? legend(names, palette) : []));
    box.append(holder);
    const chart = make(
      holder,
      {
        height: 104,
        cursor: { y: false, drag: { x: true, y: false }, sync: { key: "depth", setSeries: false }, points: { size: 7 } },
        scales: { x: { time: false }, y: { range: aroundPowers } },
        axes: [hidden, logarithmic({ size: 52 })],
        series: [
          {},
          ...series.map((_, run) => ({
            stroke: palette[run],
            width: 1.5,
            fill: run ? undefined : `${palette[run]}22`,
            fillTo: floor,
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
    if (!chart) return null;
    chart.over.addEventListener("mouseleave", () => TH.tip(null, ""));
    let pressed = null;
    chart.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    chart.over.addEventListener("click", (event) => {
      const idx = stepAt(chart.cursor.idx);
      const dragged = pressed !== null && Math.abs(event.clientX - pressed) > 4; // Dragging zooms into a part of the chart.
      if (!dragged && idx !== null) TH.choose(steps[idx].point, steps[idx].call);
    });
    return chart;
  };

  const forget = () => {
    lasting.forEach(({ end }) => end());
    lasting = [];
  };
  TH.listeners.push(() => lasting.forEach(({ chart }) => chart.redraw(false, false)));

  return { histogram, shared, lines, depth, clear, forget };
})();
