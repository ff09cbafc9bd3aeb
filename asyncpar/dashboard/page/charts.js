// Drawing: the heat strip, the matrix of links, lines over time, the schedule of a pipeline.
const STATES = ["no word yet", "ended", "computes", "communicates", "waits", "silent", "holds others up", "blocks its loop", "stopped", "failed"];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const palette = () => STATES.map((_, state) => css(`--s${state}`));

/** Make an element: properties, listeners (on...), style values (style: {}), children. Text is text, never HTML. */
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

function tip(text, event) {
  const box = document.getElementById("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6));
  const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

/** Return a context for `canvas` in CSS pixels, or null while it has no size. */
function prepare(canvas, width, height) {
  if (width < 1 || height < 1) return null;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return context;
}

const clock = time => new Date(time * 1000).toLocaleTimeString([], { hour12: false });
const rowName = (heat, row) => heat.ranksPerRow === 1 ? `${row}` : `${row * heat.ranksPerRow}–${(row + 1) * heat.ranksPerRow - 1}`;

/** Rank by time, coloured by state. */
class Heat {
  constructor() {
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "States of ranks over time; arrow keys read one",
      onmousemove: event => this.point(event), onmouseleave: () => tip(""), onkeydown: event => this.key(event),
      onblur: () => { this.cursor = null; tip(""); this.draw(this.heat); } });
    this.heat = null;
    this.cursor = null;
  }
  draw(heat) {
    this.heat = heat;
    const rows = Math.max(1, ...heat.columns.map(column => column.length));
    const width = this.canvas.clientWidth;
    const size = rows <= 8 ? 22 : rows <= 20 ? 14 : rows <= 40 ? 9 : rows <= 64 ? 5 : 4;
    const gap = size > 12 ? 3 : size > 4 ? 1 : 0;
    const context = prepare(this.canvas, width, rows * (size + gap) + 22);
    if (!context) return;
    const last = rowName(heat, rows - 1);
    const left = Math.ceil(context.measureText(last).width) + 12;
    const slots = Math.max(60, heat.columns.length);
    const step = (width - left) / slots;
    Object.assign(this, { rows, size, gap, left, step, first: slots - heat.columns.length });
    const ratio = devicePixelRatio || 1, snap = at => Math.round(at * ratio) / ratio;
    const colours = palette();
    context.fillStyle = colours[0];
    context.globalAlpha = 0.45;
    for (let row = 0; row < rows; row++) context.fillRect(left, row * (size + gap), width - left, size);
    context.globalAlpha = 1;
    heat.columns.forEach((column, x) => {
      const [from, to] = [snap(left + (this.first + x) * step), snap(left + (this.first + x + 1) * step)];
      for (let row = 0; row < column.length; row++) {
        context.fillStyle = colours[+column[row]];
        context.fillRect(from, row * (size + gap), to - from, size);
      }
    });
    this.labels(context, width);
    if (this.cursor) {
      context.strokeStyle = css("--text");
      context.strokeRect(left + (this.first + this.cursor.x) * step, this.cursor.row * (size + gap), Math.max(3, step), size);
    }
  }
  labels(context, width) {
    const { rows, size, gap, left, step, heat } = this;
    context.fillStyle = css("--quiet");
    context.textAlign = "right";
    const every = Math.ceil(16 / (size + gap));
    const stride = [1, 2, 4, 8, 16, 32].find(value => value >= every) || every;
    for (let row = 0; row < rows; row += stride) context.fillText(rowName(heat, row), left - 8, row * (size + gap) + Math.max(size / 2, 6));
    const bottom = rows * (size + gap) + 12;
    const times = heat.times;
    if (!times.length) return;
    context.textAlign = "right";
    context.fillText(clock(times[times.length - 1]), width, bottom);
    const start = left + this.first * step;
    if (width - start > 170) {
      context.textAlign = "left";
      context.fillText(clock(times[0]), start, bottom);
    }
  }
  point(event) {
    if (!this.heat || !this.rows) return;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - this.left) / this.step) - this.first;
    const row = Math.floor((event.clientY - box.top) / (this.size + this.gap));
    tip(this.text(x, row), event);
  }
  text(x, row) {
    const column = this.heat.columns[x];
    if (!column || column[row] === undefined) return "";
    const plural = this.heat.ranksPerRow > 1;
    return `rank${plural ? "s" : ""} ${rowName(this.heat, row)}${plural ? ", the worst of them" : ""}: ${STATES[+column[row]]}\n${clock(this.heat.times[x])}`;
  }
  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!moves[event.key] || !this.heat || !this.heat.columns.length) return;
    event.preventDefault();
    event.stopPropagation();
    const at = this.cursor || { x: this.heat.columns.length - 1, row: 0 };
    const x = Math.max(0, Math.min(this.heat.columns.length - 1, at.x + moves[event.key][0]));
    const row = Math.max(0, Math.min(this.rows - 1, at.row + moves[event.key][1]));
    this.cursor = { x, row };
    this.draw(this.heat);
    const box = this.canvas.getBoundingClientRect();
    const text = this.text(x, row);
    this.canvas.setAttribute("aria-label", text);
    tip(text, { clientX: box.left + this.left + (this.first + x) * this.step, clientY: box.top + row * (this.size + this.gap) });
  }
}

function mix(low, high, share) {
  const parse = text => [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
  const [from, to] = [parse(low), parse(high)];
  return `rgb(${from.map((value, at) => Math.round(value + (to[at] - value) * share)).join(",")})`;
}

/** From each rank (row) to each rank (column): round trip, MB/s or lane. */
class Matrix {
  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "Links from rank (row) to rank (column)",
      onmousemove: event => this.point(event), onmouseleave: () => tip("") });
  }
  draw(links, what) {
    Object.assign(this, { links, what });
    const count = links.ranks.length, room = this.canvas.parentElement.clientWidth;
    const longest = String(links.ranks[count - 1] || 0).length * 7 + 14;
    const size = Math.max(5, Math.min(64, Math.floor((Math.min(room, 640) - longest) / count)));
    const side = longest + size * count;
    this.canvas.style.width = `${side}px`;
    const context = prepare(this.canvas, side, side);
    if (!context) return;
    Object.assign(this, { size, origin: longest, cells: new Map() });
    const gap = size > 10 ? 2 : size > 6 ? 1 : 0;
    const number = cell => cell[what === "rtt" ? 2 : 3];
    const values = what === "lane" ? [] : links.cells.map(number).filter(value => value !== null && value > 0);
    const [least, most] = [Math.min(...values), Math.max(...values)].map(value => Math.log(value));
    this.range = values.length ? [Math.min(...values), Math.max(...values)] : null;
    const lanes = [3, 2, 5, 4, 7].map(state => css(`--s${state}`));
    context.fillStyle = css("--s0");
    context.globalAlpha = 0.45;
    for (let row = 0; row < count; row++) for (let column = 0; column < count; column++) context.fillRect(longest + column * size, longest + row * size, size - gap, size - gap);
    context.globalAlpha = 1;
    for (const cell of links.cells) {
      const [row, column] = cell, value = number(cell);
      this.cells.set(row * count + column, cell);
      if (what !== "lane" && value === null) continue;
      const share = what === "lane" ? 0 : !(value > 0) ? 0 : most > least ? (Math.log(value) - least) / (most - least) : 0.5;
      context.fillStyle = what === "lane" ? lanes[cell[4] % lanes.length] : mix(css("--low"), css("--high"), share);
      context.fillRect(longest + column * size, longest + row * size, size - gap, size - gap);
      if (size >= 44) {
        context.fillStyle = what !== "lane" && share > 0.5 ? css("--card") : css("--text");
        context.textAlign = "center";
        context.fillText(what === "lane" ? links.lanes[cell[4]] : short(value), longest + column * size + (size - gap) / 2, longest + row * size + (size - gap) / 2);
      }
    }
    context.fillStyle = css("--quiet");
    const every = [1, 2, 4, 8, 16].find(value => value * size >= 18) || 16;
    for (let place = 0; place < count; place += every) {
      const middle = longest + place * size + Math.max((size - gap) / 2, 4);
      context.textAlign = "right";
      context.fillText(links.ranks[place], longest - 7, middle);
      context.textAlign = "center";
      context.fillText(links.ranks[place], middle, longest - 11);
    }
  }
  point(event) {
    const { links, size, origin } = this;
    if (!links) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - origin) / size), row = Math.floor((event.clientY - box.top - origin) / size);
    const cell = column < 0 || row < 0 ? null : this.cells.get(row * links.ranks.length + column);
    if (!cell) return tip("");
    const parts = [`rank ${links.ranks[row]} to rank ${links.ranks[column]}${links.lanes[cell[4]] ? ` (${links.lanes[cell[4]]})` : ""}`];
    if (cell[2] !== null) parts.push(`round trip ${micros(cell[2])}`);
    if (cell[3] !== null) parts.push(`${short(cell[3])} MB/s sent`);
    tip(parts.join("\n"), event);
  }
}

/** One line over time. */
class Line {
  constructor(name) {
    this.name = name;
    this.now = h("span", { class: "now" });
    this.box = h("div");
    this.element = h("section", { class: "card chart" }, h("div", { class: "head" }, h("h2", {}, name), this.now), this.box);
  }
  draw(times, points) {
    const known = points.filter(value => value !== null);
    this.now.textContent = known.length ? short(known[known.length - 1]) : "–";
    const width = this.box.clientWidth;
    if (width < 1) return;
    if (this.plot && this.theme === css("--text")) {
      if (this.plot.width !== width) this.plot.setSize({ width, height: 130 });
      this.plot.setData([times, points]);
      return;
    }
    if (this.plot) this.plot.destroy();
    this.theme = css("--text");
    const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width, height: 130, padding: [6, 4, 0, 0], cursor: { show: false }, legend: { show: false },
      scales: { y: { range: (_, low, high) => low === null ? [0, 1] : [low >= 0 && low < high * 0.6 ? 0 : low - Math.abs(low) * 0.02 - 1e-9, high + Math.abs(high) * 0.06 + 1e-9] } },
      axes: [{ ...axis, grid: { show: false }, size: 24, space: 90, values: (_, at) => at.map(time => clock(time)) },
        { ...axis, size: 48, space: 32, values: (_, at) => at.map(short) }],
      series: [{}, { stroke: css("--accent"), width: 1.5, points: { show: false }, spanGaps: true }],
    }, [times, points], this.box);
  }
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A run of a pipeline as it was: a row for each rank, a block for each action, over time. */
class Strip {
  constructor() {
    this.svg = svg("svg", { class: "strip", tabindex: "0", role: "img", "aria-label": "The schedule as it ran; arrow keys read one action" });
    for (const [name, take] of [["mousemove", event => this.point(event)], ["mouseleave", () => tip("")], ["keydown", event => this.key(event)], ["blur", () => { this.mark(null); tip(""); }]]) this.svg.addEventListener(name, take);
    this.cursor = null;
  }
  draw(run) {
    const width = this.svg.parentElement.clientWidth;
    if (width < 1 || this.width === width && this.run && this.run.run === run.run && this.run.seconds === run.seconds && this.run.rows.length === run.rows.length) return;
    Object.assign(this, { run, width, cursor: null });
    const rows = run.rows, count = rows.length;
    const size = count <= 2 ? 36 : count <= 4 ? 30 : count <= 8 ? 24 : count <= 16 ? 18 : count <= 32 ? 12 : 8, gap = count <= 8 ? 4 : count <= 16 ? 3 : 2;
    const names = rows.map(row => width < 560 ? `${row.rank}` : `rank ${row.rank}  ${row.stages.length > 1 ? "stages" : "stage"} ${row.stages.join(", ")}`);
    const left = Math.max(...names.map(name => name.length)) * 6.4 + 10, right = 40, room = width - left - right;
    const scale = room / (run.seconds * 1e6), height = count * (size + gap);
    Object.assign(this, { size, gap, left, scale });
    const every = size + gap >= 14 ? 1 : size + gap >= 10 ? 2 : 4;
    const widest = Math.max(...rows.flatMap(row => row.actions.map(action => String(action[2]).length))) * 6.4 + 3;
    const labelled = run.kinds.map((_, kind) => { const wide = median(rows.flatMap(row => row.actions.filter(action => action[0] === kind).map(action => action[4] * scale))); return size >= 18 && wide !== null && wide - 1 >= widest; });
    const parts = this.ticks(height, room);
    rows.forEach((row, at) => {
      const top = at * (size + gap), middle = top + size / 2;
      parts.push(svg("rect", { class: "idle", x: left, y: top, width: room, height: size }));
      if (at % every === 0) {
        parts.push(svg("text", { class: "name", x: left - 10, y: middle, "text-anchor": "end" }, names[at]));
        parts.push(svg("text", { class: "name", x: width, y: middle, "text-anchor": "end" }, `${Math.round(100 * row.busy)}%`));
      }
      row.actions.forEach((action, place) => {
        const [kind, stage, batch, begun, micros] = action, from = left + begun * scale, wide = Math.max(0.5, micros * scale);
        const chunk = Math.min(3, row.stages.indexOf(stage));
        parts.push(svg("rect", { class: `action ${run.kinds[kind]} chunk${chunk}`, x: from, y: top, width: wide > 4 ? wide - 1 : wide, height: size, rx: wide > 6 ? 2 : 0, "data-row": at, "data-place": place }));
        if (labelled[kind] && wide >= String(batch).length * 6.4 + 3) parts.push(svg("text", { class: "batch", x: from + (wide - 1) / 2, y: middle, "text-anchor": "middle" }, batch));
      });
    });
    this.frame = svg("rect", { class: "cursor", visibility: "hidden" });
    parts.push(this.frame);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height + 18}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height + 18);
    this.svg.replaceChildren(...parts);
  }
  ticks(height, room) {
    const total = this.run.seconds * 1e6, rough = total / Math.max(2, Math.floor(room / 110)), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(times => times * power).find(value => value >= rough), parts = [], [unit, per] = total >= 1e6 ? ["s", 1e6] : total >= 1000 ? ["ms", 1000] : ["µs", 1];
    for (let at = 0; at <= total; at += step) {
      const x = this.left + at * this.scale;
      parts.push(svg("line", { class: "tick", x1: x, x2: x, y1: 0, y2: height }));
      parts.push(svg("text", { class: "name", x: Math.min(x, this.left + room - 16), y: height + 9, "text-anchor": at ? "middle" : "start" }, at ? `${+(at / per).toPrecision(3)} ${unit}` : "0"));
    }
    return parts;
  }
  text(at, place) {
    const row = this.run.rows[at], [kind, stage, batch, begun, took] = row.actions[place];
    return `rank ${row.rank}, stage ${stage}: ${this.run.kinds[kind].replace("_", " ")} of micro-batch ${batch}\n${micros(took)}, after ${micros(begun)}`;
  }
  point(event) {
    const { row, place } = event.target.dataset;
    tip(row === undefined ? "" : this.text(+row, +place), event);
  }
  mark(cursor) {
    this.cursor = cursor;
    if (!this.frame) return;
    this.frame.setAttribute("visibility", cursor ? "visible" : "hidden");
    if (!cursor) return;
    const [, , , begun, took] = this.run.rows[cursor.row].actions[cursor.place];
    for (const [name, value] of Object.entries({ x: this.left + begun * this.scale, y: cursor.row * (this.size + this.gap), width: Math.max(3, took * this.scale), height: this.size })) this.frame.setAttribute(name, value);
  }
  key(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!moves[event.key] || !this.run) return;
    event.preventDefault();
    event.stopPropagation();
    const rows = this.run.rows, [along, down] = this.cursor ? moves[event.key] : [0, 0], at = this.cursor || { row: 0, place: 0 };
    const row = Math.max(0, Math.min(rows.length - 1, at.row + down)), actions = rows[row].actions;
    const begun = rows[at.row].actions[at.place][3];
    const nearest = actions.reduce((best, action, place) => Math.abs(action[3] - begun) < Math.abs(actions[best][3] - begun) ? place : best, 0);
    this.mark({ row, place: row === at.row ? Math.max(0, Math.min(actions.length - 1, at.place + along)) : nearest });
    const text = this.text(row, this.cursor.place), box = this.frame.getBoundingClientRect();
    this.svg.setAttribute("aria-label", text);
    tip(text, { clientX: box.left, clientY: box.top });
  }
}
