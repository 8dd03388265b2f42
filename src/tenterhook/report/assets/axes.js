"use strict";
// Axes over the whole range of floats. uPlot has no ticks at steps below 1e-16, and hangs on ranges of many powers of
// ten. So its data is scaled to a medium size here, and the positions of the ticks are computed here.

TH.axes = (() => {
  const base = ({ grid, ticks, ...more } = {}) => ({
    stroke: TH.css("--dim"),
    grid: { stroke: TH.css("--line"), width: 1, ...grid },
    ticks: { stroke: TH.css("--line"), width: 1, size: 4, ...ticks },
    font: "11px system-ui, sans-serif",
    labelFont: "11px system-ui, sans-serif",
    labelSize: 14,
    incrs: (_u, _at, min, max) => [1000 * Math.max(1, max - min)], // uPlot needs a step, but nothing here reads it.
    ...more,
  });

  // ---- positions of ticks -------------------------------------------------------------------------------------------

  // Returns one, two or five times a power of ten, so that a span has at most `most` steps.
  const stepOf = (span, most) => {
    const least = span / most;
    const power = 10 ** Math.floor(Math.log10(least));
    return power * ([1, 2, 5].find((each) => each * power >= least * (1 - 1e-9)) ?? 10);
  };

  const between = (low, high, step) => {
    const first = Math.ceil(low / step - 1e-9);
    const count = Math.floor(high / step + 1e-9) - first + 1;
    return Array.from({ length: Math.max(0, count) }, (_, at) => (first + at) * step);
  };

  // The number of ticks that fit: labels are side by side on the first axis, and one above the other on others.
  const room = (chart, at) => Math.max(2, at ? chart.height / 30 : (chart.width - 60) / 54);

  // ---- linear axes --------------------------------------------------------------------------------------------------

  // The power of ten to divide values by, so that their labels stay short.
  const unitOf = (values) => {
    const reach = values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);
    return !reach || (reach >= 1e-3 && reach < 1e5) ? 1 : Number(`1e${Math.floor(Math.log10(reach))}`);
  };

  const scaled = (values, unit) => (unit === 1 ? values : values.map((value) => (value === null ? null : value / unit)));

  const written = (splits) => {
    const step = splits.length > 1 ? splits[1] - splits[0] : Math.abs(splits[0]) || 1;
    const digits = Math.min(15, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    return splits.map((value) => String(Number(value.toFixed(digits))));
  };

  // If the values are integers, the ticks are too.
  const linear = (unit, { size, label = "", whole = false, ...more }) => {
    const text = [label, unit === 1 ? "" : `× ${TH.brief(unit)}`].filter(Boolean).join(" ");
    const least = whole ? 1 / unit : 0;
    return base({
      size,
      label: text || undefined,
      splits: (chart, at, min, max) => between(min, max, Math.max(least, stepOf(max - min, room(chart, at)))),
      values: (_u, splits) => written(splits),
      ...more,
    });
  };

  // Adds some room around the values, and extends the range to zero if zero is near.
  const around = (_u, min, max) => {
    if (min === null) return [0, 1];
    const pad = max > min ? (max - min) * 0.08 : Math.abs(max) / 2 || 1;
    const [low, high] = [min - pad, max + pad];
    return [min >= 0 && min < 0.3 * max ? 0 : low, max <= 0 && max > 0.3 * min ? 0 : high];
  };

  // ---- logarithmic axes: their values are exponents -----------------------------------------------------------------

  const exponents = (values) => values.map((value) => (value > 0 ? Math.log10(value) : null));

  const powers = (chart, at, min, max) => {
    const most = room(chart, at);
    const whole = between(min, max, Math.max(1, stepOf(max - min, most)));
    if (whole.length > 1) return whole;
    const parts = between(Math.floor(min), max, 1).flatMap((each) => [1, 2, 5].map((part) => each + Math.log10(part)));
    const inside = parts.filter((each) => each >= min && each <= max);
    if (inside.length > 1) return inside;
    const power = Math.floor(min); // In such a narrow range the scale is nearly linear.
    const [low, high] = [10 ** (min - power), 10 ** (max - power)];
    return between(low, high, stepOf(high - low, most)).map((each) => power + Math.log10(each));
  };

  const logarithmic = ({ size, least = -Infinity }) =>
    base({
      size,
      splits: (...given) => powers(...given).filter((each) => each >= least),
      values: (_u, splits) => splits.map((each) => TH.brief(10 ** each)),
    });

  const aroundPowers = (_u, min, max) => {
    if (min === null) return [0, 1];
    const pad = Math.max(0.06 * (max - min), 0.1);
    return [min - pad, max + pad];
  };

  return { linear, logarithmic, around, aroundPowers, unitOf, scaled, exponents };
})();
