// Pages, and where their pictures come from: a stream of the launcher's, or the document inside this file.
const $ = id => document.getElementById(id);
const inside = JSON.parse($("document").textContent);
const base = location.pathname.endsWith("/") || inside ? "" : `${location.pathname.split("/").pop()}/`;
const store = `asyncpar token ${location.pathname}`;
let picture = null, lines = [], page = null, heard = 0, state = "connecting";

function figure(label, wide) {
  const value = h("div", { class: "value" }, "–"), more = h("div");
  return { element: h("div", { class: `figure${wide ? " wide" : ""}` }, h("div", { class: "label" }, label), value, more), value, more };
}
const shareOf = (rank, of) => of ? Math.max(0, Math.min(1, rank / of)) : 0;

class JobPage {
  constructor() {
    this.figures = { progress: figure("Progress", true), steps: figure("Steps per second"), world: figure("Ranks"), hosts: figure("Hosts"), time: figure("Running for"), restarts: figure("Restarts") };
    this.values = h("div", { class: "figures values" });
    this.heat = new Heat();
    this.legend = h("div", { class: "legend right" });
    this.past = new Table([
      { name: "Generation", number: true, value: row => row[0] },
      { name: "Ended", number: true, value: row => row[1], cell: row => `${elapsed(picture.time - row[1])} ago` },
      { name: "Why", grow: true, value: row => row[2] },
    ], ["Nothing has begun again", ""]);
    this.again = card("Why it began again", this.past.element);
    this.lines = new Map();
    this.charts = h("div", { class: "charts" });
    this.element = [
      h("section", { class: "card" }, h("div", { class: "figures" }, Object.values(this.figures).map(one => one.element), this.values)),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Ranks over time"), this.legend), this.heat.canvas),
      this.again,
      this.charts,
    ];
  }
  draw(now) {
    const { progress, steps, world, hosts, time, restarts } = this.figures, done = now.progress;
    const speed = last(now.series["steps/s"]);
    progress.value.replaceChildren(done ? `${short(done.completed)}` : "–", done && done.total ? h("small", {}, ` of ${short(done.total)} ${done.description}`) : h("small", {}, done ? ` ${done.description}` : ""));
    const left = done && done.total && speed ? (done.total - done.completed) / speed : null;
    progress.more.replaceChildren(...(done && done.total ? [h("div", { class: "meter", title: left !== null ? `about ${elapsed(left)} left` : null }, h("i", { style: { width: `${100 * shareOf(done.completed, done.total)}%` } }))] : []));
    steps.value.replaceChildren(short(speed), h("small", {}, left > 0 ? `\u2002${elapsed(left)} left` : ""));
    world.value.textContent = now.total || now.world || "–";
    hosts.value.textContent = now.hosts.length || "–";
    time.value.textContent = now.started ? elapsed(now.time - now.started) : "–";
    restarts.value.textContent = now.restarts;
    const past = [...(now.past || [])].reverse();
    this.again.hidden = !past.length;
    this.past.draw(past);
    const values = Object.entries(now.values);
    this.values.replaceChildren(...values.map(([name, value]) => { const one = figure(name); one.value.textContent = short(value); return one.element; }));
    this.legend.replaceChildren(...[2, 3, 4, 6, 7, 5, 8, 9, 1, 0].filter(code => now.counts[code] || now.heat.columns.some(column => column.includes(code))).map(code =>
      h("span", { class: now.counts[code] ? "" : "none" }, swatch(code), `${STATES[code]} ${now.counts[code] || 0}`)));
    this.heat.draw(now.heat);
    for (const [name, points] of Object.entries(now.series)) {
      if (!points.some(value => value !== null && value !== 0)) continue;
      if (!this.lines.has(name)) {
        this.lines.set(name, new Line(name));
        this.charts.append(this.lines.get(name).element);
      }
      this.lines.get(name).draw(now.heat.times, points);
    }
  }
}
const last = points => { for (let at = points.length - 1; at >= 0; at--) if (points[at] !== null) return points[at]; return null; };

class RanksPage {
  constructor() {
    this.filter = h("input", { type: "search", placeholder: "Rank, host, state or operation", "aria-label": "Filter ranks", size: "30", oninput: () => this.draw(picture) });
    this.note = h("span", { class: "quiet" });
    this.table = new Table([
      { name: "Rank", number: true, value: row => row.rank },
      { name: "Host", value: row => row.host },
      { name: "State", value: row => row.state, cell: row => stateCell(row.state) },
      { name: "Step", number: true, value: row => row.step, cell: row => row.step === undefined ? "–" : short(row.step) },
      { name: "What it does", grow: true, value: what, cell: what },
      { name: "For", number: true, value: row => row.operation ? row.operation.seconds : null, cell: row => row.operation ? duration(row.operation.seconds) : "–" },
      { name: "Waits for", value: row => row.operation ? row.operation.waitsFor[0] : null, cell: row => row.operation && row.operation.waitsFor.length ? ranks(row.operation.waitsFor) : "–" },
      { name: "At", mono: true, cell: row => (row.operation && row.operation.site) || row.site || "–" },
      { name: "Loop lag", number: true, value: row => row.lag, cell: row => row.lag === undefined ? "–" : micros(row.lag * 1e6) },
      { name: "CPU", number: true, value: row => row.cpu, cell: row => typeof row.cpu === "number" ? `${Math.round(row.cpu * 100)}%` : "–" },
      { name: "Memory", number: true, value: row => row.rss, cell: row => bytes(row.rss) },
      { name: "PID", number: true, value: row => row.pid },
    ], ["No ranks yet", "They appear when the launcher has started them."]);
    this.element = [h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Ranks"), this.note, h("span", { class: "right" }, this.filter)), this.table.element)];
  }
  draw(now) {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = now.ranks.filter(row => words.every(word => `rank ${row.rank} ${row.host} ${STATES[row.state]} ${what(row)}`.toLowerCase().includes(word)));
    this.note.textContent = now.total > now.ranks.length ? `${now.ranks.length} of ${short(now.total)}, those in the worst states` : words.length ? `${rows.length} of ${now.ranks.length}` : "";
    this.table.nothing = words.length ? ["No rank fits", "Clear the filter to see all."] : ["No ranks yet", "They appear when the launcher has started them."];
    this.table.draw(rows);
  }
}
function what(row) {
  if (row.ending) return row.ending;
  if (row.blocked) return `${row.blocked.what} blocks the event loop at ${row.blocked.where} (${duration(row.blocked.seconds)})`;
  if (row.operation) return row.operation.text || row.operation.label;
  return row.site ? "own code" : row.phase || "–";
}

class LinksPage {
  constructor() {
    this.what = "rtt";
    this.matrix = new Matrix();
    this.blank = h("div");
    this.choices = [["rtt", "Round trip"], ["speed", "MB/s"], ["lane", "Lane"]].map(([name, text]) =>
      h("button", { class: "button", type: "button", "aria-pressed": String(name === this.what), onclick: event => this.choose(name, event.target) }, text));
    this.lanes = h("div", { class: "legend" });
    this.extremes = new Table([
      { name: "From", number: true, value: cell => picture.links.ranks[cell[0]] },
      { name: "To", number: true, value: cell => picture.links.ranks[cell[1]] },
      { name: "Lane", value: cell => picture.links.lanes[cell[4]] || "–" },
      { name: "Round trip", number: true, value: cell => cell[2], cell: cell => cell[2] === null ? "–" : micros(cell[2]) },
      { name: "MB/s", number: true, value: cell => cell[3], cell: cell => short(cell[3]) },
    ], ["No links yet", ""]);
    this.heading = h("h2");
    this.side = h("div", {}, h("div", { class: "head" }, this.heading), this.extremes.element);
    this.both = h("div", { class: "beside" }, h("div", {}, this.matrix.canvas), this.side);
    this.element = [h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Links"), h("span", { class: "quiet" }, "from row to column"), this.lanes, h("span", { class: "segments right", role: "group", "aria-label": "Show" }, this.choices)), this.both, this.blank)];
  }
  choose(name, button) {
    this.what = name;
    this.choices.forEach(one => one.setAttribute("aria-pressed", String(one === button)));
    this.draw(picture);
  }
  draw(now) {
    const some = now.links.cells.length > 0;
    this.both.hidden = !some;
    this.blank.replaceChildren(...(some ? [] : [empty("No links yet", "Ranks of one host that only use shared memory need none; others appear when they are first used.")]));
    const states = [3, 2, 5, 4, 7];
    if (!some) return this.lanes.replaceChildren();
    this.matrix.draw(now.links, this.what);
    const range = this.matrix.range, write = value => this.what === "rtt" ? micros(value) : `${short(value)} MB/s`;
    this.lanes.replaceChildren(...(this.what === "lane" ? now.links.lanes.map((lane, at) => h("span", {}, swatch(states[at % 5]), lane || "?"))
      : range ? [h("span", {}, write(range[0]), h("i", { class: "scale" }), write(range[1]))] : []));
    const place = this.what === "speed" ? 3 : 2;
    this.heading.textContent = this.what === "speed" ? "Busiest" : "Slowest";
    this.extremes.draw(now.links.cells.filter(cell => cell[place] !== null).sort((one, other) => other[place] - one[place]).slice(0, 12));
  }
}

class OperationsPage {
  constructor() {
    this.table = new Table([
      { name: "Operation", value: row => row.label },
      { name: "Group", value: row => row.group },
      { name: "For", number: true, value: row => row.seconds, cell: row => duration(row.seconds) },
      { name: "Size", number: true, value: row => row.bytes, cell: row => bytes(row.bytes) },
      { name: "Called by", cell: row => ranks(row.here, row.hereCount) },
      { name: "Waits for", cell: row => row.waitsFor.length ? ranks(row.waitsFor) : "–" },
      { name: "Call", grow: true, mono: true, cell: row => row.text || "–" },
      { name: "At", mono: true, cell: row => row.site || "–" },
    ], ["Nothing is under way", "Operations that take longer than a moment are listed here, with the ranks that have called them."], { at: 2, down: true });
    this.figures = new Table([
      { name: "What", value: row => row.what },
      { name: "Name", grow: true, value: row => row.name },
      { name: "Algorithm", value: row => row.algorithm, cell: row => row.algorithm || "–" },
      { name: "Size up to", number: true, value: row => row.bytes, cell: row => row.bytes ? bytes(row.bytes) : "–" },
      { name: "Seen", number: true, value: row => row.count, cell: row => short(row.count) },
      { name: "Median", number: true, value: row => row.p50, cell: row => micros(row.p50) },
      { name: "99th", number: true, value: row => row.p99, cell: row => micros(row.p99) },
      { name: "Expected", number: true, value: row => row.expected, cell: row => row.expected ? micros(row.expected) : "–" },
      { name: "Bus bytes/s", number: true, value: row => row.rate, cell: row => row.rate ? bytes(row.rate) : "–" },
    ], ["No figures yet", "They come from the last events of the ranks: operations, buckets of gradients, pipeline actions, checkpoints, spans of your own."]);
    this.element = [card("Under way", this.table.element), h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "How long they took lately"), h("span", { class: "quiet" }, "expected: what the cost model estimates; bus bytes/s: what each rank's link carries")), this.figures.element)];
  }
  draw(now) {
    this.table.draw(now.operations);
    this.figures.draw(now.figures || []);
  }
}

/** Stacked bars by rank: rows of [rank, parts, text], parts as {value, color}; the longest row fills the width. */
function stacked(bars, rows, nothing) {
  const most = Math.max(1e-9, ...rows.map(([, parts]) => parts.reduce((sum, part) => sum + part.value, 0)));
  bars.className = rows.length ? "bars" : "";
  bars.replaceChildren(...(rows.length ? rows.flatMap(([rank, parts, text, more]) => [
    h("span", {}, `rank ${rank}`),
    h("div", { class: "track" }, parts.map(part => h("i", { style: { width: `${100 * part.value / most}%`, background: `var(--s${part.color})` }, title: part.title || null }))),
    h("span", { class: "num" }, text), h("span", { class: "quiet num" }, more || ""),
  ]) : [nothing]));
}
const median = list => list.length ? [...list].sort((one, other) => one - other)[(list.length - 1) >> 1] : null;
const percent = share => share === null ? "–" : `${Math.round(100 * share)}%`;

const place = bucket => Number(bucket.name.split(" ")[1]) || 0;

class GradientsPage {
  constructor() {
    this.figures = { round: figure("Round, median"), own: figure("Own work"), exposed: figure("Waiting for others"), hidden: figure("Hidden by work"), ratio: figure("Codec ratio"), buckets: figure("Buckets") };
    this.bars = h("div", { class: "bars" });
    this.buckets = new Table([
      { name: "Bucket", grow: true, value: row => row.name },
      { name: "Codec or algorithm", value: row => row.algorithm, cell: row => row.algorithm || "–" },
      { name: "Size up to", number: true, value: row => row.bytes, cell: row => bytes(row.bytes) },
      { name: "Seen", number: true, value: row => row.count, cell: row => short(row.count) },
      { name: "Median", number: true, value: row => row.p50, cell: row => micros(row.p50) },
      { name: "99th", number: true, value: row => row.p99, cell: row => micros(row.p99) },
      { name: "Bytes/s", number: true, value: row => row.bytes && row.p50 ? row.bytes / row.p50 : null, cell: row => row.bytes && row.p50 ? bytes(1e6 * row.bytes / row.p50) : "–" },
    ], ["No buckets yet", "Buckets of gradients appear here when a GradientSynchronizer has reduced them."]);
    this.legend = h("div", { class: "legend right" }, h("span", {}, swatch(2), "own work"), h("span", {}, swatch(4), "communication and waiting that nothing hides"));
    this.element = [
      h("section", { class: "card" }, h("div", { class: "figures" }, Object.values(this.figures).map(one => one.element))),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "The last rounds of each rank"), this.legend), this.bars),
      card("Buckets of gradients, in the order in which they are reduced", this.buckets.element),
    ];
  }
  draw(now) {
    const rounds = (now.rounds || []).filter(([, count, all]) => count && all), found = (now.figures || []).filter(row => row.what === "bucket").sort((one, other) => place(one) - place(other));
    const { hidden, ratio } = now.gradients || {};
    this.figures.hidden.value.textContent = percent(hidden ?? null);
    this.figures.ratio.value.textContent = ratio ? `${short(ratio)} ×` : "–";
    const own = median(rounds.map(([, , all, mine]) => mine / all));
    this.figures.round.value.textContent = rounds.length ? micros(median(rounds.map(([, count, all]) => all / count))) : "–";
    this.figures.own.value.textContent = percent(own);
    this.figures.exposed.value.textContent = percent(own === null ? null : 1 - own);
    this.figures.buckets.value.textContent = found.length || "–";
    stacked(this.bars, rounds.map(([rank, count, all, mine]) => [rank, [{ value: mine / count, color: 2 }, { value: Math.max(0, all - mine) / count, color: 4 }], micros(all / count), percent(1 - mine / all)]),
      empty("No rounds yet", "A round is a training step, or what a rank does from one collective of the world to the next."));
    this.buckets.draw(found);
  }
}

const ACTIONS = { forward: 3, backward: 2, backward_input: 2, backward_weight: 1, send_activation: 4, recv_activation: 5, send_gradient: 4, recv_gradient: 5 };
class PipelinePage {
  constructor() {
    this.bubble = figure("Bubble");
    this.worst = figure("Largest of a rank");
    this.strip = new Strip();
    this.run = h("span", { class: "quiet" });
    this.kinds = h("div", { class: "legend right" });
    this.blank = h("div");
    this.bars = h("div", { class: "bars" });
    this.legend = h("div", { class: "legend right" });
    this.table = new Table([
      { name: "Rank", number: true, value: row => row.rank },
      { name: "Action", grow: true, value: row => row.name, cell: row => row.name.replace("_", " ") },
      { name: "Seen", number: true, value: row => row.count, cell: row => short(row.count) },
      { name: "Median", number: true, value: row => row.p50, cell: row => micros(row.p50) },
      { name: "99th", number: true, value: row => row.p99, cell: row => micros(row.p99) },
    ], ["No pipeline yet", "Actions of a pipeline's stages appear here: forward, backward, and what they wait for."]);
    this.element = [
      h("section", { class: "card" }, h("div", { class: "figures" }, this.bubble.element, this.worst.element)),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "The schedule as it ran last"), this.run, this.kinds), h("div", {}, this.strip.svg), this.blank),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Time of the last actions, by rank"), this.legend), this.bars),
      card("Actions", this.table.element),
    ];
  }
  draw(now) {
    const rows = now.pipeline || [], byRank = new Map();
    const idle = rows.length ? (now.rounds || []).filter(([, count, all]) => count && all).map(([, , all, own]) => 1 - own / all) : [];
    this.bubble.value.textContent = percent(median(idle));
    this.worst.value.textContent = percent(idle.length ? Math.max(...idle) : null);
    this.bubble.element.title = "The part of a step in which a rank did not compute, median of all ranks";
    this.drawRun(now.schedule, rows.length > 0);
    for (const row of rows) byRank.set(row.rank, [...(byRank.get(row.rank) || []), row]);
    const names = [...new Set(rows.map(row => row.name))].sort();
    this.legend.replaceChildren(...names.map(name => h("span", {}, swatch(ACTIONS[name] || 1), name.replace("_", " "))));
    stacked(this.bars, [...byRank].map(([rank, actions]) => [rank, actions.map(one => ({ value: one.count * one.p50, color: ACTIONS[one.name] || 1, title: one.name })), micros(actions.reduce((sum, one) => sum + one.count * one.p50, 0))]),
      empty("No pipeline yet", "A program that runs a pipeline shows here how the time of each stage is spent."));
    this.table.draw(rows);
  }
  drawRun(run, some) {
    this.strip.svg.toggleAttribute("hidden", !run);
    this.blank.replaceChildren(...(run ? [] : [some ? empty("No run yet", "Stages are asked for their last run every few seconds.") : empty("No pipeline yet", "A program that runs a pipeline shows here what each stage computed, and when.")]));
    const drawn = run ? run.rows.length : 0;
    this.run.textContent = run ? [`run ${short(run.run)}`, micros(run.seconds * 1e6), `${percent(1 - run.rows.reduce((sum, row) => sum + row.busy, 0) / drawn)} idle`, run.total > drawn ? `${drawn} of ${run.total} ranks` : "", run.left ? `${short(run.left)} actions are not drawn` : ""].filter(Boolean).join("  ·  ") : "";
    const seen = new Set(run ? run.rows.flatMap(row => row.actions.map(action => run.kinds[action[0]])) : []);
    this.kinds.replaceChildren(...[...seen].map(name => h("span", {}, swatch(ACTIONS[name]), name.replace("_", " "))), ...(run ? [h("span", {}, swatch(0), "idle")] : []));
    if (run) this.strip.draw(run);
  }
}

class FlightPage {
  constructor() {
    this.look = h("button", { class: "button", type: "button", onclick: () => this.ask() }, "Look now");
    this.note = h("span", { class: "quiet" }, inside ? "a report keeps no events; `asyncpar flight dump` does" : "asks all ranks for the events they have recorded");
    this.found = h("ul", { class: "findings" });
    this.filter = h("input", { type: "search", placeholder: "r3, all_reduce, started …", "aria-label": "Filter events", size: "26", oninput: () => this.fill() });
    this.table = new Table([
      { name: "Rank", number: true, value: row => row.rank },
      { name: "Event", number: true, value: row => row.ticket },
      { name: "Kind", value: row => row.kind },
      { name: "Name", value: row => row.name },
      { name: "Call", grow: true, mono: true, cell: row => row.text || "–" },
      { name: "Group", value: row => row.group, cell: row => row.group || "–" },
      { name: "State", value: row => row.state },
      { name: "Size", number: true, value: row => row.bytes, cell: row => row.bytes ? bytes(row.bytes) : "–" },
      { name: "Took", number: true, value: row => row.seconds, cell: row => row.seconds === null ? "–" : micros(row.seconds * 1e6) },
      { name: "At", mono: true, cell: row => row.site || "–" },
    ], ["No events yet", "“Look now” asks the ranks; nothing stops meanwhile."], { at: 1, down: true });
    this.events = [];
    this.look.disabled = !!inside;
    this.element = [
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "What holds the job up"), this.note, h("span", { class: "right" }, this.look)), this.found),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Recorded events"), h("span", { class: "right" }, this.filter)), this.table.element),
    ];
  }
  async ask() {
    this.look.disabled = true;
    this.note.textContent = "asking the ranks …";
    try {
      const answer = await ask("flight");
      if (!answer.ok) throw new TypeError(await answer.text());
      const report = await answer.json(), at = new Date().toLocaleTimeString([], { hour12: false });
      this.events = report.events;
      this.note.textContent = `${report.ranks} ${report.ranks === 1 ? "rank" : "ranks"}, ${at}`;
      this.found.replaceChildren(...report.findings.map(one => h("li", {}, h("b", {}, `rank ${ranks(one.ranks)}: ${one.cause}. `), one.text)),
        ...(report.findings.length ? [] : (report.known || []).map(text => h("li", {}, text))),
        ...(report.findings.length || (report.known || []).length ? [] : [h("li", { class: "quiet" }, "Nothing holds up the job, as far as its ranks can tell.")]),
        ...report.problems.map(text => h("li", { class: "quiet" }, `not read: ${text}`)));
      this.fill();
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      this.note.textContent = `no answer: ${error.message}`;
    } finally {
      this.look.disabled = false;
    }
  }
  fill() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.table.nothing = words.length && this.events.length ? ["No event fits", "Clear the filter to see all."] : ["No events yet", "“Look now” asks the ranks; nothing stops meanwhile."];
    this.table.draw(this.events.filter(row => words.every(word => /^r\d+$/.test(word) ? row.rank === +word.slice(1) : `${row.kind} ${row.name} ${row.text} ${row.group} ${row.state} ${row.site}`.toLowerCase().includes(word))));
  }
  draw() {
    if (!this.asked && !inside) { this.asked = true; this.ask(); }
    if (!this.events.length) this.fill();
  }
}

class ActorsPage {
  constructor() {
    this.asks = new Table([
      { name: "From rank", number: true, value: row => row.from },
      { name: "By", value: row => row.caller, cell: row => row.caller || "its program" },
      { name: "Asks", grow: true, value: row => `${row.actor}.${row.endpoint}` },
      { name: "On rank", number: true, value: row => row.rank },
      { name: "For", number: true, value: row => row.seconds || 0, cell: row => duration(row.seconds || 0) },
      { name: "At", mono: true, cell: row => row.site || "–" },
    ], ["No call waits", "Calls of actors that wait for their answer are listed here."], { at: 4, down: true });
    this.boxes = new Table([
      { name: "Rank", number: true, value: row => row.rank },
      { name: "Actor", grow: true, value: row => row.actor },
      { name: "Messages waiting", number: true, value: row => row.waiting },
    ], ["All mailboxes are empty", "Actors with messages that wait are listed here."], { at: 2, down: true });
    this.chains = h("ol", { class: "chains" });
    this.count = h("span", { class: "quiet" });
    this.letters = new Table([
      { name: "Told by rank", number: true, value: row => row.sender },
      { name: "Message", value: row => `${row.actor}.${row.endpoint}` },
      { name: "To rank", number: true, value: row => row.rank },
      { name: "Why it was not handled", grow: true, value: row => row.reason },
    ], ["No dead letters", "Messages that no actor handled are listed here, the last ones of each rank."]);
    this.element = [
      card("Calls that wait", this.asks.element),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Calls that wait for other calls"), h("span", { class: "quiet" }, "from the first caller to the actor that holds it up")), this.chains),
      card("Mailboxes", this.boxes.element),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Dead letters"), this.count), this.letters.element),
    ];
  }
  chain(one) {
    const from = `${one.count > 1 ? "ranks" : "rank"} ${ranks(one.ranks, one.count)}`, steps = one.steps.map(step => h("span", { title: step.site ? `called at ${step.site}` : null },
      h("span", { class: "quiet", "aria-label": "waits for" }, "→ "), h("code", {}, `${step.actor}.${step.endpoint}`), h("span", { class: "quiet" }, ` rank ${step.rank}, ${duration(step.seconds)}`)));
    const end = one.more ? ` and ${one.more} more` : one.cycle ? "a cycle: none of them can go on" : one.end ? `which ${one.end}` : "";
    return h("li", { class: one.cycle ? "cycle" : "" }, h("span", {}, one.caller ? h("code", {}, one.caller) : "", one.caller ? h("span", { class: "quiet" }, ` ${from}`) : from), ...steps, end ? h("span", { class: "end" }, end) : null);
  }
  draw(now) {
    const { chains = [], letters = [], lettersCount = 0 } = now.actors;
    this.chains.replaceChildren(...(chains.length ? chains.map(one => this.chain(one)) : [h("li", { class: "none" }, empty("No call waits for another one", "Where the actor that is called waits for another one itself, the chain is shown here."))]));
    this.count.textContent = lettersCount ? `${short(lettersCount)} in all${lettersCount > letters.length ? ", the last are listed" : ""}` : "";
    this.letters.draw(letters);
    this.asks.draw(now.actors.asks);
    this.boxes.draw(now.actors.mailboxes);
  }
}

class MemoryPage {
  constructor() {
    this.bars = h("div", { class: "bars" });
    this.legend = h("div", { class: "legend right" }, h("span", {}, swatch(3), "resident"), h("span", {}, swatch(2), "shared arena"));
    this.element = [h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Memory by rank"), this.legend), this.bars)];
  }
  draw(now) {
    const rows = now.ranks.filter(row => row.rss), most = Math.max(1, ...rows.map(row => row.rss + (row.arena || 0)));
    this.bars.className = rows.length ? "bars" : "";
    this.bars.replaceChildren(...(rows.length ? rows.flatMap(row => [
      h("span", {}, `rank ${row.rank}`),
      h("div", { class: "track" }, h("i", { style: { width: `${100 * row.rss / most}%`, background: "var(--s3)" } }), h("i", { style: { width: `${100 * (row.arena || 0) / most}%`, background: "var(--s2)" } })),
      h("span", { class: "num" }, bytes(row.rss)), h("span", { class: "quiet num" }, row.arena ? `+ ${bytes(row.arena)}` : ""),
    ]) : [empty("No figures yet", "Ranks report their memory once they have joined a world.")]));
  }
}

class LogsPage {
  constructor() {
    this.filter = h("input", { type: "search", placeholder: "Text, or r3 for rank 3", "aria-label": "Filter lines", size: "26", oninput: () => this.change() });
    this.log = h("div", { class: "log", tabindex: "0", role: "log" });
    this.note = h("span", { class: "quiet" });
    this.shown = -1;
    this.wanted = "";
    this.read = null;
    this.element = [h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Output"), this.note, h("span", { class: "right" }, this.filter)), this.log)];
  }
  words() { return this.filter.value.toLowerCase().split(/\s+/).filter(Boolean); }
  change() {
    const wanted = this.words().filter(word => /^r\d{1,7}$/.test(word)).map(word => +word.slice(1)).slice(0, MOST_READ).join(",");
    if (wanted !== this.wanted) {
      this.wanted = wanted;
      this.read = null;
      clearTimeout(this.timer);
      if (wanted && !inside) this.timer = setTimeout(() => this.readRanks(), 250);
    }
    this.fill();
  }
  async readRanks() {
    const wanted = this.wanted;
    if (!wanted || this.reading) return;
    this.reading = true;
    try {
      const answer = await ask(`output?ranks=${wanted}`);
      const found = answer.ok ? await answer.json() : null;
      if (found && wanted === this.wanted) { this.read = found; this.fill(); }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // no connection: the stream reports it
    } finally {
      this.reading = false;
    }
    if (wanted !== this.wanted) this.readRanks();
  }
  draw() {
    if (!inside) { fetchLines(); if (state === "live") this.readRanks(); }
    const newest = lines.length ? lines[lines.length - 1].n : 0;
    if (newest !== this.shown) this.fill();
  }
  fill() {
    this.shown = lines.length ? lines[lines.length - 1].n : 0;
    const words = this.words(), known = this.read || lines;
    this.note.textContent = this.read ? "the last lines of these ranks" : inside ? "the last lines" : "the last lines of all ranks; r3 has more of rank 3";
    const wanted = words.filter(word => /^r\d+$/.test(word)).map(word => +word.slice(1)), texts = words.filter(word => !/^r\d+$/.test(word));
    const found = known.filter(line => (!wanted.length || wanted.includes(line.rank)) && texts.every(word => line.text.toLowerCase().includes(word)));
    const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 30;
    const width = Math.max(1, ...found.map(line => String(line.rank).length));
    this.log.replaceChildren(...(found.length ? found.map(line => h("div", { class: line.error ? "err" : "" }, h("span", { class: "from" }, line.rank === null ? "" : `${String(line.rank).padStart(width)}  `), line.text)) : [empty(known.length ? "No line fits" : "No output yet", known.length ? "Clear the filter to see all." : "What ranks print appears here.")]));
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
const MOST_READ = 8; // ranks whose output is read together

const PAGES = { job: ["Job", JobPage], ranks: ["Ranks", RanksPage], links: ["Links", LinksPage], operations: ["Operations", OperationsPage], gradients: ["Gradients", GradientsPage], pipeline: ["Pipeline", PipelinePage], actors: ["Actors", ActorsPage], memory: ["Memory", MemoryPage], logs: ["Logs", LogsPage], flight: ["Flight", FlightPage] };
const made = {}, tabs = {};

function show(name) {
  page = PAGES[name] ? name : "job";
  const [, Kind] = PAGES[page];
  made[page] = made[page] || new Kind();
  for (const [key, tab] of Object.entries(tabs)) {
    tab.setAttribute("aria-selected", String(key === page));
    tab.tabIndex = key === page ? 0 : -1;
  }
  $("main").setAttribute("aria-labelledby", `tab-${page}`);
  $("main").replaceChildren(...(picture ? made[page].element : []));
  tip("");
  draw();
}

function go(name) {
  history.replaceState(null, "", `#${name}`);
  show(name);
}

function draw() {
  drawState();
  if (!picture) return;
  const now = picture, worst = Math.max(0, ...Object.keys(now.counts).map(Number));
  $("name").textContent = now.job || "asyncpar";
  $("facts").textContent = [now.command, now.generation ? `generation ${now.generation}` : ""].filter(Boolean).join("  ·  ");
  $("sentence").textContent = now.ended || now.sentence;
  $("sentence").className = now.ended ? (now.failed ? "bad" : "") : worst === 9 || worst === 8 ? "bad" : worst >= 4 ? "warn" : "";
  const alarms = now.alarms || [];
  $("alarms").hidden = !alarms.length;
  if ($("alarms").textContent !== alarms.join("")) $("alarms").replaceChildren(...alarms.map(text => h("li", {}, text)));
  document.title = `${now.job || "asyncpar"} – ${now.ended || now.sentence}`;
  made[page].draw(now);
}

function drawState() {
  const link = $("link"), notice = $("notice"), away = (Date.now() - heard) / 1000;
  const texts = { report: picture ? `as of ${new Date(picture.time * 1000).toLocaleString([], { hour12: false })}` : "", connecting: "connecting", live: "live", ended: "ended", refused: "no access", lost: heard ? `no news for ${duration(Math.round(away))}` : "no connection" };
  link.textContent = texts[state];
  link.className = `link ${state === "lost" || state === "refused" ? "lost" : state === "live" ? "live" : ""}`;
  const kind = state === "lost" || state === "refused" ? state : "";
  notice.hidden = !kind;
  if (notice.dataset.kind === kind) return;
  notice.dataset.kind = kind;
  notice.replaceChildren(...(kind === "lost" ? [h("div", {}, h("b", {}, "The launcher does not answer. "), "It has ended, or the connection to it is cut. What you see is its last report; this page goes on asking.")]
    : kind === "refused" ? [h("div", {}, h("b", {}, "This page needs the job's token. "), "Open the address that `asyncpar launch --dashboard` has printed, or enter the token here.",
      h("form", { onsubmit: event => { event.preventDefault(); token = event.target.elements[0].value.trim(); listen(); } }, h("input", { type: "password", "aria-label": "Token", size: "40", autocomplete: "off" }), h("button", { class: "button" }, "Open")))] : []));
}

function take(text) {
  const first = !picture;
  picture = JSON.parse(text);
  heard = Date.now();
  state = picture.ended ? "ended" : "live";
  if (first) show(page); else draw();
}

let token = "", fetching = false;
const ask = path => fetch(base + path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", credentials: "same-origin", redirect: "error" });

async function fetchLines() {
  if (fetching || state === "ended" && lines.ended) return;
  fetching = true;
  try {
    const answer = await ask(`lines?after=${lines.length ? lines[lines.length - 1].n : 0}`);
    if (!answer.ok) return;
    const fresh = await answer.json();
    lines = lines.concat(fresh).slice(-1000);
    lines.ended = state === "ended";
    if (fresh.length && page === "logs") made.logs.draw();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // no connection: the stream reports it
  } finally {
    fetching = false;
  }
}

/** Read the stream of events until it ends; a request of our own, since an EventSource cannot send a token. */
async function read() {
  const answer = await ask("events");
  if (answer.status === 401 || answer.status === 403) return "refused";
  if (!answer.ok) return "lost";
  sessionStorage.setItem(store, token);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { done, value } = await reader.read();
    if (done) return picture && picture.ended ? "ended" : "lost";
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    const newest = events.reverse().find(event => event.startsWith("data: "));
    if (newest) take(newest.slice(6));
  }
}

let listening = 0;
async function listen() {
  const mine = ++listening;
  for (let pause = 1; mine === listening;) {
    const before = heard;
    let how = "lost";
    try { how = await read(); } catch (error) { console.debug("the stream ended:", error.message); }
    if (mine !== listening) return;
    state = how;
    drawState();
    if (how !== "lost") return;
    pause = heard > before ? 1 : Math.min(10, pause * 1.6);
    await new Promise(resolve => setTimeout(resolve, pause * 1000));
  }
}

function start() {
  Object.entries(PAGES).forEach(([name, [title]]) => {
    tabs[name] = h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "main", onclick: () => go(name) }, title);
    $("tabs").append(tabs[name]);
  });
  $("main").setAttribute("role", "tabpanel");
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
    const names = Object.keys(PAGES), at = names.indexOf(page);
    const next = event.target.matches("[role=tab]") ? { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key] : undefined;
    if (next !== undefined) { go(names[(next + names.length) % names.length]); tabs[page].focus(); event.preventDefault(); }
    else if (/^[0-9]$/.test(event.key) && names[(+event.key + 9) % 10]) go(names[(+event.key + 9) % 10]);
    else if (event.key === "/" && made[page].filter) { made[page].filter.focus(); event.preventDefault(); }
  });
  addEventListener("resize", () => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  const fragment = location.hash.slice(1), given = /(?:^|&)token=([^&]*)/.exec(fragment);
  if (given) {
    token = decodeURIComponent(given[1]);
    history.replaceState(null, "", `${location.pathname}${location.search}#job`);
  }
  addEventListener("hashchange", () => {
    const again = /(?:^#|&)token=([^&]*)/.exec(location.hash);
    if (!again) return show(location.hash.slice(1));
    token = decodeURIComponent(again[1]);
    go(page);
    listen();
  });
  if (inside) {
    lines = inside.lines;
    state = "report";
    picture = inside.picture;
  }
  show(given ? "job" : fragment);
  if (inside) return;
  token = token || sessionStorage.getItem(store) || "";
  listen();
  setInterval(() => {
    if (state === "live" && Date.now() - heard > 5000) state = "lost";
    if (state === "lost") drawState();
  }, 1000);
}
start();
