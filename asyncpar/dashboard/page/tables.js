// Words and tables.
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(3));
}
function bytes(value) {
  if (!value) return value === 0 ? "0" : "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < 4) { value /= 1000; unit++; }
  return `${value >= 99.5 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}
const micros = value => value >= 1e5 ? `${(value / 1e6).toFixed(2)} s` : value >= 1000 ? `${(value / 1000).toFixed(1)} ms` : `${Math.round(value)} µs`;
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60) % 60} s`;
}
function ranks(list, count) {
  const parts = [];
  for (let at = 0; at < list.length; at++) {
    const from = list[at];
    while (list[at + 1] === list[at] + 1) at++;
    parts.push(list[at] - from > 1 ? `${from}–${list[at]}` : list[at] > from ? `${from}, ${list[at]}` : `${from}`);
  }
  const more = (count || list.length) - list.length;
  return parts.join(", ") + (more > 0 ? ` and ${more} more` : "");
}
/** Time since a start: 0:07, 12:40, 3:07:09. */
function elapsed(seconds) {
  const whole = Math.max(0, Math.round(seconds)), two = value => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
const swatch = state => h("span", { class: "swatch", style: { background: `var(--s${state})` } });
const stateCell = state => h("span", { class: "state" }, swatch(state), STATES[state]);
const empty = (title, text) => h("div", { class: "empty" }, h("b", {}, title), text);
const card = (title, ...children) => h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, title)), ...children);

/** Columns: {name, value(row) for order, cell(row) -> node or text, number, grow}. Order is kept between frames. */
class Table {
  constructor(columns, nothing, order) {
    Object.assign(this, { columns, nothing, order: order || null, rows: [] });
    this.headers = columns.map((column, at) => h("th", { class: column.number ? "n" : "", scope: "col" },
      column.value ? h("button", { type: "button", onclick: () => this.sort(at) }, column.name) : column.name));
    this.body = h("tbody");
    this.table = h("table", {}, h("thead", {}, h("tr", {}, this.headers)), this.body);
    this.blank = h("div");
    this.element = h("div", { class: "scroll" }, this.table, this.blank);
  }
  sort(at) {
    this.order = this.order && this.order.at === at ? { at, down: !this.order.down } : { at, down: !!this.columns[at].number };
    this.draw(this.rows);
  }
  draw(rows) {
    this.rows = rows;
    let shown = rows;
    if (this.order) {
      const { at, down } = this.order, value = this.columns[at].value;
      const known = item => item === null || item === undefined ? -Infinity : item;
      shown = [...rows].sort((one, other) => {
        const [a, b] = [known(value(one)), known(value(other))];
        return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
      });
    }
    this.headers.forEach((header, at) => {
      if (this.order && this.order.at === at) header.setAttribute("aria-sort", this.order.down ? "descending" : "ascending");
      else header.removeAttribute("aria-sort");
    });
    this.table.hidden = !rows.length;
    this.blank.replaceChildren(...(rows.length ? [] : [empty(...this.nothing)]));
    this.body.replaceChildren(...shown.map(row => h("tr", {}, this.columns.map(column => {
      const content = column.cell ? column.cell(row) : column.value(row);
      const text = typeof content === "string" || typeof content === "number" ? String(content) : null;
      return h("td", { class: [column.number ? "n" : "", column.grow ? "grow" : "", column.mono ? "mono" : ""].join(" ").trim(), title: column.grow ? text : null }, content === undefined || content === null ? "–" : text === null ? content : text);
    }))));
  }
}
