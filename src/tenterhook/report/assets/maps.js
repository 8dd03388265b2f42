"use strict";
// Pictures: maps and matrices from PNG, with an adjustable scale, and lines for vectors.

TH.maps = (() => {
  // ---- colours ------------------------------------------------------------------------------------------------------

  const SCALES = {
    viridis: ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725"],
    magma: ["#000004", "#180f3d", "#440f76", "#721f81", "#9e2f7f", "#cd4071", "#f1605d", "#fd9668", "#feca8d", "#fcfdbf"],
    "blue–red": ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"],
    grey: ["#000000", "#ffffff"],
  };
  const NO_NUMBER = [255, 0, 200]; // NaN and Inf must be visible on every scale.

  const tables = {};
  const table = (name) => {
    if (tables[name]) return tables[name];
    const stops = SCALES[name].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    const made = new Uint8ClampedArray(256 * 3);
    for (let level = 0; level < 256; level += 1) {
      const place = (level / 255) * (stops.length - 1);
      const index = Math.min(Math.floor(place), stops.length - 2);
      for (let part = 0; part < 3; part += 1) {
        made[level * 3 + part] = stops[index][part] + (stops[index + 1][part] - stops[index][part]) * (place - index);
      }
    }
    tables[name] = made;
    return made;
  };

  // ---- decoding -----------------------------------------------------------------------------------------------------

  const decoded = new Map();

  const decode = (number) => {
    if (!decoded.has(number)) decoded.set(number, read(TH.data.pictures[number]));
    return decoded.get(number);
  };

  // Returns the bytes of every map, one map after the other.
  const read = async (picture) => {
    const [count, height, width] = picture.size;
    const file = new Blob([TH.bytes(picture.png, Uint8Array)], { type: "image/png" });
    const image = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
    const canvas = new OffscreenCanvas(image.width, image.height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, image.width, image.height).data;
    const levels = new Uint8Array(count * height * width);
    for (let map = 0; map < count; map += 1) {
      const left = Math.floor(map / picture.down) * width;
      const top = (map % picture.down) * height;
      for (let row = 0; row < height; row += 1) {
        let from = ((top + row) * image.width + left) * 4;
        let to = (map * height + row) * width;
        for (let column = 0; column < width; column += 1, from += 4, to += 1) levels[to] = pixels[from];
      }
    }
    return { levels, low: TH.bytes(picture.low, Float32Array), high: TH.bytes(picture.high, Float32Array) };
  };

  // If a picture has values beyond every scale, its first and last level stand for those.
  const valueAt = (picture, seen, map, level) => {
    if (!level) return NaN;
    if (picture.beyond && (level === 1 || level === 255)) return level === 1 ? -Infinity : Infinity;
    const [first, count] = picture.beyond ? [2, 252] : [1, 254];
    return seen.low[map] + ((level - first) / count) * (seen.high[map] - seen.low[map]);
  };

  // ---- painting -----------------------------------------------------------------------------------------------------

  // Draws one map in colours, with one pixel per value.
  const paint = (picture, seen, map, scale) => {
    const [, height, width] = picture.size;
    const image = new ImageData(width, height);
    const colours = table(scale.colours);
    const [low, high] = scale.each ? [seen.low[map], seen.high[map]] : [scale.low, scale.high];
    const lookup = new Uint8ClampedArray(256 * 3);
    for (let level = 0; level < 256; level += 1) {
      const share = level ? (valueAt(picture, seen, map, level) - low) / (high - low || 1) : NaN;
      const index = Math.round(Math.max(0, Math.min(1, share)) * 255) * 3;
      for (let part = 0; part < 3; part += 1) lookup[level * 3 + part] = level ? colours[index + part] : NO_NUMBER[part];
    }
    const start = map * height * width;
    for (let place = 0; place < height * width; place += 1) {
      const level = seen.levels[start + place] * 3;
      image.data[place * 4] = lookup[level];
      image.data[place * 4 + 1] = lookup[level + 1];
      image.data[place * 4 + 2] = lookup[level + 2];
      image.data[place * 4 + 3] = 255;
    }
    const canvas = new OffscreenCanvas(width, height);
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  };

  const fitted = (canvas, width, height) => {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    return context;
  };

  // ---- a grid of maps -----------------------------------------------------------------------------------------------

  const GAP = 3;

  const grid = (canvas, room, picture, seen, scale, onpick) => {
    const [count, height, width] = picture.size;
    const zoom = scale.tile / Math.max(height, width);
    const [tileWidth, tileHeight] = [Math.max(1, width * zoom), Math.max(1, height * zoom)];
    const across = Math.max(1, Math.min(count, Math.floor((room + GAP) / (tileWidth + GAP))));
    const down = Math.ceil(count / across);
    const context = fitted(canvas, across * (tileWidth + GAP) - GAP, down * (tileHeight + GAP) - GAP);
    for (let map = 0; map < count; map += 1) {
      const left = (map % across) * (tileWidth + GAP);
      const top = Math.floor(map / across) * (tileHeight + GAP);
      context.drawImage(paint(picture, seen, map, scale), left, top, tileWidth, tileHeight);
    }
    const under = (event) => {
      const left = event.offsetX;
      const top = event.offsetY;
      const map = Math.floor(top / (tileHeight + GAP)) * across + Math.floor(left / (tileWidth + GAP));
      const column = Math.floor((left % (tileWidth + GAP)) / zoom);
      const row = Math.floor((top % (tileHeight + GAP)) / zoom);
      return map < count && row < height && column < width ? { map, row, column } : null;
    };
    canvas.onmousemove = (event) => {
      const at = under(event);
      TH.tip(event, at ? describe(picture, seen, at, scale) : "");
    };
    canvas.onclick = (event) => {
      const at = under(event);
      if (at) onpick(at.map);
    };
    canvas.onmouseleave = () => TH.tip(null, "");
  };

  // Maps with as many rows and columns as there are tokens are attention patterns.
  const axesOf = (picture, tokens) => {
    const [, rows, columns] = picture.whole;
    const heads = picture.axes[0] === "channel" && tokens.length > 1 && rows === tokens.length && columns === tokens.length;
    return heads ? ["head", "query", "key"] : picture.axes;
  };

  const place = (picture, axis, index, tokens) => {
    const whole = picture.whole[axis];
    const size = picture.size[axis];
    if (whole === size) return tokens && tokens.length === whole ? `${index} ${JSON.stringify(tokens[index])}` : String(index);
    const from = Math.floor((index * whole) / size);
    const to = Math.ceil(((index + 1) * whole) / size) - 1;
    return from === to ? String(from) : `${from}–${to}`;
  };

  const describe = (picture, seen, { map, row, column }, scale) => {
    const [, height, width] = picture.size;
    const level = seen.levels[(map * height + row) * width + column];
    const value = valueAt(picture, seen, map, level);
    const axes = axesOf(picture, scale.tokens);
    const parts = [
      picture.size[0] > 1 ? `${axes[0] || "map"} ${map}` : "",
      `${axes[1]} ${place(picture, 1, row, scale.tokens)}`,
      `${axes[2]} ${place(picture, 2, column, scale.tokens)}`,
    ];
    const end = `${value < 0 ? "below -" : "above "}${TH.brief(picture.beyond || 0)}`;
    const told = Number.isNaN(value) ? "NaN or Inf" : Number.isFinite(value) ? `≈ ${TH.number(value, 4)}` : end;
    const mean = picture.size[1] < picture.whole[1] || picture.size[2] < picture.whole[2] ? "mean " : "";
    return `${parts.filter(Boolean).join(", ")}\n${mean}${told}`;
  };

  // ---- one map, large, with its axes --------------------------------------------------------------------------------

  const single = (canvas, room, picture, seen, scale, map, side = null) => {
    const [, height, width] = picture.size;
    const rowTokens = scale.tokens.length === picture.whole[1] && height === picture.whole[1];
    const columnTokens = scale.tokens.length === picture.whole[2] && width === picture.whole[2];
    const left = rowTokens ? 96 : 34;
    const top = columnTokens ? 78 : 18;
    const most = side ? side / Math.max(width, height) : 22;
    const across = Math.max(0.2, Math.min(most, (room - left - 8) / width));
    // A matrix of few rows and many columns is stretched, so that its rows can be distinguished.
    const down = side ? across : Math.max(0.2, Math.min(most, Math.max(across, Math.min(14, 260 / height)), 900 / height));
    const context = fitted(canvas, left + width * across + 8, top + height * down + 8);
    context.drawImage(paint(picture, seen, map, scale), left, top, width * across, height * down);
    context.fillStyle = TH.css("--dim");
    context.font = "10px ui-monospace, monospace";
    context.textBaseline = "middle";
    label(context, height, down, rowTokens, scale.tokens, (text, at) => {
      context.textAlign = "right";
      context.fillText(text, left - 6, top + at);
    }, picture.whole[1]);
    label(context, width, across, columnTokens, scale.tokens, (text, at) => {
      context.save();
      context.translate(left + at, top - 6);
      if (columnTokens) context.rotate(-Math.PI / 3);
      context.textAlign = columnTokens ? "left" : "center";
      context.fillText(text, 0, columnTokens ? 0 : -4);
      context.restore();
    }, picture.whole[2]);
    canvas.onmousemove = (event) => {
      const column = Math.floor((event.offsetX - left) / across);
      const row = Math.floor((event.offsetY - top) / down);
      const inside = row >= 0 && row < height && column >= 0 && column < width;
      TH.tip(event, inside ? describe(picture, seen, { map, row, column }, scale) : "");
    };
    canvas.onclick = null;
    canvas.onmouseleave = () => TH.tip(null, "");
  };

  const label = (context, count, step, named, tokens, write, whole) => {
    const every = Math.max(1, Math.ceil((named ? 11 : 34) / step));
    for (let index = 0; index < count; index += every) {
      const text = named ? tokens[index].trim() || "·" : String(Math.floor((index * whole) / count));
      write(text.length > 13 ? `${text.slice(0, 12)}…` : text, (index + 0.5) * step);
    }
  };

  // ---- the panel: one or two pictures under one scale ---------------------------------------------------------------

  const panel = (title, items, defaults) => {
    const scale = { ...defaults, each: false };
    const boxes = items.map(() => TH.el("canvas", { class: "map" }));
    const large = TH.el("canvas", { class: "map large" });
    const holder = TH.el("div", { class: "large-holder", hidden: true }, large);
    let picked = null;
    const isGrid = items.some((item) => item.picture.kind === "maps");

    const redraw = async () => {
      for (const [at, item] of items.entries()) {
        const seen = await decode(item.number);
        const room = boxes[at].parentElement.clientWidth - 2;
        if (room <= 0) continue;
        if (item.picture.kind === "maps") {
          grid(boxes[at], room, item.picture, seen, scale, (map) => {
            picked = picked && picked.map === map && picked.at === at ? null : { map, at };
            redraw();
          });
        } else single(boxes[at], room, item.picture, seen, scale, 0);
      }
      holder.hidden = !picked;
      if (picked) {
        const item = items[picked.at];
        const seen = await decode(item.number);
        holder.dataset.title = `${item.name ? `${item.name}, ` : ""}${axesOf(item.picture, scale.tokens)[0]} ${picked.map}, ${TH.number(seen.low[picked.map])} to ${TH.number(seen.high[picked.map])}`;
        single(large, holder.clientWidth - 22, item.picture, seen, scale, picked.map, Math.max(520, 2 * scale.tile));
      }
      legend.style.background = `linear-gradient(to right, ${SCALES[scale.colours].join(",")})`;
      body.dataset.ready = "yes";
    };

    const legend = TH.el("span", { class: "legend" });
    const bound = (key) =>
      TH.el("input", {
        type: "number", class: "bound", step: "any", value: TH.brief(scale[key]), "aria-label": `${key} end of the scale`,
        onchange: (event) => { scale[key] = Number(event.target.value); redraw(); },
      });
    const [low, high] = [bound("low"), bound("high")];
    const renew = () => {
      low.value = TH.brief(scale.low);
      high.value = TH.brief(scale.high);
      redraw();
    };
    const choice = TH.el(
      "select",
      { "aria-label": "Colours", onchange: (event) => { scale.colours = event.target.value; redraw(); } },
      Object.keys(SCALES).map((name) => TH.el("option", { value: name, selected: name === scale.colours }, name)),
    );
    const button = (text, help, act) => TH.el("button", { type: "button", title: help, onclick: act }, text);
    const tools = TH.el(
      "div",
      { class: "tools" },
      choice, low, legend, high,
      button("full", "From the smallest value to the largest", () => { [scale.low, scale.high] = defaults.full; renew(); }),
      button("inner", "Without the outermost values", () => { [scale.low, scale.high] = [defaults.low, defaults.high]; renew(); }),
      button("± symmetric", "Zero in the middle", () => {
        const reach = Math.max(Math.abs(scale.low), Math.abs(scale.high)) || 1;
        [scale.low, scale.high, scale.colours] = [-reach, reach, "blue–red"];
        choice.value = scale.colours;
        renew();
      }),
      isGrid ? TH.el("label", {}, TH.el("input", { type: "checkbox", onchange: (event) => { scale.each = event.target.checked; redraw(); } }), "scale each map separately") : null,
      isGrid ? TH.el("label", {}, "size", TH.el("input", { type: "range", class: "size", min: 16, max: 256, value: scale.tile, "aria-label": "Size of a map", oninput: (event) => { scale.tile = Number(event.target.value); redraw(); } })) : null,
    );
    const columns = items.map((item, at) =>
      TH.el("figure", {}, item.name ? TH.el("figcaption", {}, item.name) : null, boxes[at], TH.el("p", { class: "note" }, noteOf(item.picture, scale.tokens))),
    );
    const body = TH.el("div", { class: `pictures${items.length > 1 ? " pair" : ""}` }, columns);
    const made = TH.el("section", { class: "card maps", "data-kind": items[0].picture.kind }, TH.el("h3", {}, title), tools, holder, body);
    new ResizeObserver(redraw).observe(body);
    return made;
  };

  const noteOf = (picture, tokens = []) => {
    const [count, height, width] = picture.size;
    const [all, rows, columns] = picture.whole;
    const notes = [];
    if (picture.kind === "maps") notes.push(`${TH.count(all)} ${axesOf(picture, tokens)[0] === "head" ? "heads" : "maps"} of ${rows}×${columns}`);
    if (count < all) notes.push(`the first ${TH.count(count)} are shown`);
    if (picture.kind === "vector" && width < columns) notes.push(`averaged from ${TH.count(columns)} to ${TH.count(width)}`);
    else if (height < rows || width < columns) notes.push(`averaged to ${height}×${width}`);
    if (picture.example && picture.example[1] > 1) notes.push(`example ${picture.example[0]} of ${picture.example[1]}`);
    return notes.join(", ");
  };

  // ---- lines --------------------------------------------------------------------------------------------------------

  const vector = (title, items, palette) => {
    const made = TH.el("section", { class: "card vector", "data-kind": "vector" }, TH.el("h3", {}, title));
    for (const item of items) {
      const values = [...TH.bytes(item.picture.floats, Float32Array)].map((value) => (Number.isFinite(value) ? value : null));
      const step = item.picture.whole[2] / values.length;
      if (item.name) made.append(TH.el("figcaption", {}, item.name));
      if (item.picture.kind === "number") {
        made.append(TH.el("p", { class: "single" }, TH.number(values[0], 6)));
      } else {
        const strip = TH.el("canvas", { class: "strip" });
        const box = TH.el("div", { class: "line" });
        made.append(box, strip);
        const chart = {
          x: values.map((_, at) => at * step), series: { value: values }, colours: [palette[item.run % palette.length]],
          height: 170, room: step / 2, drawn: (drawn) => paintStrip(strip, drawn, values, step),
        };
        requestAnimationFrame(() => box.isConnected && TH.charts.lines(box, chart));
      }
      const note = noteOf(item.picture);
      if (note) made.append(TH.el("p", { class: "note" }, note));
    }
    return made;
  };

  // One cell per value, centred below the position of the value on the axis of the line.
  const paintStrip = (canvas, chart, values, step) => {
    const [left, width] = [chart.bbox.left, chart.bbox.width].map((each) => each / (devicePixelRatio || 1));
    const context = fitted(canvas, Math.max(1, width), 18);
    canvas.style.marginLeft = `${left}px`;
    const reach = values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 1;
    const colours = table("blue–red");
    const { min, max } = chart.scales.x;
    const [across, zoom] = [chart.across, width / (max - min)];
    values.forEach((value, at) => {
      const index = Math.round(((value ?? 0) / reach / 2 + 0.5) * 255) * 3;
      const parts = value === null ? NO_NUMBER : colours.slice(index, index + 3);
      const from = (((at - 0.5) * step) / across - min) * zoom;
      context.fillStyle = `rgb(${parts.join(",")})`;
      context.fillRect(from, 0, (step / across) * zoom + 0.5, 18);
    });
  };

  return { panel, vector, decode };
})();
