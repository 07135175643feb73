// Shows what the server tells of a run. Events bring whole panels, and of a chart the rows that are new.
const page = (id) => document.getElementById(id);
const charts = new Map();
let told = {};
let ahead = 0; // seconds by which the server's clock is ahead of this one

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== "") element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function say(element, text) { // a live region speaks whenever its text is set
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

// Ages go on between two events.
const since = (unix, before, after = "") => make("span", { "data-since": unix, "data-before": before, "data-after": after });

function tick() {
  const now = Date.now() / 1000 + ahead;
  for (const element of document.querySelectorAll("[data-since]")) {
    const { since, before, after } = element.dataset;
    say(element, `${before}${duration(now - Number(since))}${after}`);
  }
}

const htmlOf = new WeakMap();

function fill(body, rows) { // a cell is [content, attributes]; rows that have not changed stay, and what is selected in them
  rows.forEach((cells, index) => {
    const row = make("tr", {}, ...cells.map(([content, attributes], column) =>
      make(column ? "td" : "th", { scope: column ? null : "row", ...attributes }, content)));
    const html = row.innerHTML;
    const known = body.rows[index];
    if (known && htmlOf.get(known) === html) return;
    htmlOf.set(row, html);
    if (known) known.replaceWith(row);
    else body.append(row);
  });
  while (body.rows.length > rows.length) body.lastElementChild.remove();
}

const heads = (names) => make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
const number = (value) => value.toLocaleString("en-US");
const show = {};

show.header = (header) => {
  const state = page("state");
  state.hidden = false;
  state.className = `status ${header.mood}`;
  say(state, header.is_paused ? "paused" : header.status);
  const of = header.num_steps ? ` of ${header.num_steps}` : "";
  say(page("step"), `Step ${header.step}${of} done`);
  const progress = page("progress");
  progress.hidden = !header.num_steps;
  progress.max = header.num_steps || 1;
  progress.value = header.step;
  const phase = header.waiting_for ? `${header.phase}, waiting for ${header.waiting_for}` : header.phase;
  page("phase").replaceChildren(...(phase ? [header.phase_since ? since(header.phase_since, `${phase}, since `, ".") : `${phase}.`] : []));
  const elapsed = header.duration_s === null
    ? (header.begun === null ? [] : [since(header.begun, "Started ", " ago.")])
    : [`Took ${duration(header.duration_s)}.`];
  page("elapsed").replaceChildren(...elapsed);
  connected();
};

show.figures = (figures) => {
  page("figures").replaceChildren(...figures.map(({ label, text, note, value }) => make("div", {},
    make("dt", {}, label),
    make("dd", {}, value === null ? text : make("data", { value }, text)),
    note ? make("dd", { class: "note" }, note) : null)));
};

show.notes = (notes) => {
  page("notes").hidden = notes.length === 0;
  page("notes").replaceChildren(...notes.map((note) => make("li", {}, note)));
};

show.ledger = ({ issued, ends, unaccounted }) => {
  const name = (end) => `end-${end.name.replace(" ", "-")}`;
  const term = (count, what, kind = "") => make("span", { class: `term ${kind}` }, make("b", {}, number(count)), ` ${what}`);
  const terms = ends.flatMap((end, index) => [index ? "+" : "=", term(end.count, end.name, name(end))]);
  page("sum").replaceChildren(term(issued, "issued"), ...terms);
  page("bar").replaceChildren(...ends.filter((end) => end.count).map((end) => {
    const part = make("span", { class: name(end) });
    part.style.flexGrow = end.share;
    return part;
  }));
  say(page("closes"), unaccounted ? `The ledger does not close: ${number(unaccounted)} groups are unaccounted for.`
    : "The ledger closes: every issued group ended in exactly one way, or is still in flight.");
  page("closes").className = unaccounted ? "alarm" : "";
  const rows = ends.map((end) => [[end.name], [number(end.count)], [`${(100 * end.share).toFixed(1)} %`]]);
  fill(page("ledger").tBodies[0], [...rows, [["issued"], [number(issued)], [""]]]);
};

show.workers = (workers) => {
  const plain = (value) => [value === null ? "–" : String(value), { class: "number" }];
  fill(page("workers").tBodies[0], workers.map((worker) => [
    [worker.name],
    [worker.state, { class: worker.mood }],
    plain(worker.policy_version),
    plain(worker.in_flight),
    [worker.rss_bytes === null ? "–" : make("data", { value: worker.rss_bytes }, `${number(Math.round(worker.rss_bytes / 2 ** 20))} MiB`), { class: "number" }],
    [worker.heard === null ? "–" : since(worker.heard, "", " ago"), { class: "number" }],
    [worker.waits.length ? make("ul", {}, ...worker.waits.map((wait) => make("li", {}, wait.what, wait.since === null ? null : since(wait.since, " (", ")")))) : "–"],
  ]));
};

show.gauges = (gauges) => {
  page("section-gauges").hidden = gauges.length === 0;
  if (!page("section-gauges").open) return;
  fill(page("gauges").tBodies[0], gauges.map(({ worker, name, value, unit }) =>
    [[worker], [name], [make("data", { value }, `${number(Number(value.toPrecision(6)))} ${unit}`), { class: "number" }]]));
};

show.evaluations = ({ header, rows }) => {
  page("section-evaluations").hidden = rows.length === 0;
  page("evaluations").tHead.replaceChildren(heads(header));
  fill(page("evaluations").tBodies[0], rows.map((row) => row.map((cell) => [cell])));
};

show.troubles = (troubles) => {
  const line = ({ time, worker, text }) => [make("time", { datetime: time }, time.slice(11, 19)), " ", make("b", {}, worker), ` ${text}`];
  page("troubles").replaceChildren(...(troubles.length === 0 ? ["None that the logs or the bus tell of."] : troubles.map((trouble) => trouble.detail
    ? make("details", { class: "trouble" }, make("summary", {}, ...line(trouble)), make("pre", { tabindex: 0 }, trouble.detail))
    : make("p", { class: "trouble" }, ...line(trouble)))));
};

show.sampled = (sampled) => {
  const choice = page("sampled");
  choice.disabled = sampled === null;
  choice.min = sampled?.first ?? 1;
  choice.max = sampled?.last ?? 1;
  choice.placeholder = sampled === null ? "" : `${sampled.last}`;
  if (!choice.value) showSamples();
};

let asked = 0; // an answer that another question has overtaken is not shown

async function showSamples() {
  const step = page("sampled").value || told.sampled?.last;
  const number = ++asked;
  const [groups, note] = await samplesOf(step);
  if (number !== asked) return;
  say(page("samples-note"), note);
  page("samples").replaceChildren(...groups.map(oneGroup));
}

async function samplesOf(step) {
  if (step === undefined) return [[], told.header?.is_live ? "No completions were kept yet." : "No completions were kept."];
  const answer = await fetch(`${location.pathname}/samples/${step}`).catch(() => null);
  if (answer === null) return [[], "Connection lost."];
  if (answer.status === 404) return [[], `No completions of step ${step} were kept.`];
  if (!answer.ok) return [[], `Not to be read: ${await answer.text()}`];
  const groups = await answer.json();
  return [groups, `${groups.length} prompt groups of step ${step}`];
}

function oneGroup(group) {
  return make("article", {},
    make("p", { class: "label" }, `Group ${group.group_id} of ${group.data_source}, answer `, make("code", {}, group.ground_truth || "–")),
    make("pre", { tabindex: 0, role: "region", "aria-label": `Prompt of group ${group.group_id}` }, group.prompt),
    make("div", { class: "pair" }, ...group.completions.map((completion, index) => oneCompletion(completion, index, group))));
}

function oneCompletion(completion, index, group) {
  const isRight = completion.breakdown.acc === 1;
  const isGraded = completion.reward !== null;
  const reward = isGraded ? make("span", {}, "reward ", make("data", { value: completion.reward }, String(Number(completion.reward.toPrecision(4))))) : null;
  return make("div", { class: `answer ${isRight ? "right" : "wrong"}` },
    make("p", { class: "verdict" }, make("span", { class: "mark" }, isGraded ? (isRight ? "✓ right" : "✗ wrong") : "? not graded"), reward,
      make("span", {}, `${completion.length} tokens, ${completion.finish_reason}, policy ${completion.policy_version}`)),
    make("pre", { tabindex: 0, role: "region", "aria-label": `Completion ${index + 1} of group ${group.group_id}` }, completion.text),
    make("p", { class: "verdict" }, "read as ", make("code", {}, completion.pred || "(nothing)"), completion.why ? ` — ${completion.why}` : null));
}

// A chart that is drawn already waits with what is new until it is about to be seen.
const inSight = new IntersectionObserver((found) => {
  for (const { target, isIntersecting } of found) {
    const chart = charts.get(target.parentElement.dataset.chart);
    if (!chart) continue;
    chart.isSeen = isIntersecting;
    chart.draw();
  }
}, { rootMargin: "200px" });

class Chart {
  constructor(key, panel) {
    this.place = make("div", { class: "chart", "data-title": panel.title });
    this.title = make("h3", {}, panel.title);
    this.caption = make("figcaption");
    this.table = make("table", { class: "numeric" }, make("caption", {}, panel.title), make("thead"), make("tbody"));
    this.data = make("details", {}, make("summary", {}, `Data of “${panel.title}”`),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Data: ${panel.title}` }, this.table));
    this.data.addEventListener("toggle", () => this.list());
    this.figure = make("figure", { "data-chart": key, "data-place": panel.place }, this.title, this.place, this.caption, this.data);
    this.rows = [];
    this.drawn = Promise.resolve();
    this.isOld = false;
    this.isSeen = true;
    inSight.observe(this.place);
    const home = page(`charts-${panel.section}`);
    const after = [...home.children].find((other) => Number(other.dataset.place) > panel.place);
    home.insertBefore(this.figure, after ?? null);
    home.closest("section").hidden = false;
  }

  tell(panel) {
    const spec = JSON.stringify(panel.spec);
    if (spec !== this.spec) this.view = null;
    this.spec = spec;
    this.isOld = true;
  }

  add({ drop, keep, rows }) {
    this.rows = [...this.rows.slice(drop, drop + keep), ...rows];
    this.isOld = true;
  }

  draw() {
    if (!this.isOld || document.hidden) return;
    this.list();
    if (this.view && !this.isSeen) return;
    this.isOld = false;
    this.drawn = this.drawn.then(async () => {
      const values = this.rows.map((row) => ({ ...row })); // Vega marks the rows that it is given
      if (this.view) {
        await this.view.data("rows", values).runAsync();
        return;
      }
      const made = await drawChart(this.place, { ...JSON.parse(this.spec), data: { name: "rows", values } });
      this.view = made?.view ?? null;
    });
  }

  list() {
    if (!this.data.open) return;
    const names = Object.keys(this.rows[0] ?? {});
    this.table.tHead.replaceChildren(heads(names));
    fill(this.table.tBodies[0], this.rows.map((row) => names.map((name) => [String(row[name])])));
  }

  remove() {
    inSight.unobserve(this.place);
    this.figure.remove();
    this.view?.finalize();
  }
}

function drawAll() {
  for (const chart of charts.values()) chart.draw();
}

function take({ now, first, panels = {}, rows = {} }) {
  ahead = now - Date.now() / 1000;
  if (first) {
    for (const name of Object.keys(told)) if (!(name in panels)) panels[name] = null;
  }
  told = { ...told, ...panels };
  for (const [name, panel] of Object.entries(panels)) {
    const [kind, key] = name.split("/");
    if (kind !== "chart") show[name]?.(panel);
    else if (panel === null) { charts.get(key)?.remove(); charts.delete(key); }
    else {
      if (!charts.has(key)) charts.set(key, new Chart(key, panel));
      charts.get(key).tell(panel);
    }
  }
  for (const [key, caption] of Object.entries(told.captions ?? {})) say(charts.get(key).caption, caption);
  for (const [key, part] of Object.entries(rows)) charts.get(key)?.add(part);
  drawAll();
  tick();
}

function connected() {
  say(page("connection"), told.header?.is_live ? "live: this page updates by itself" : "ended");
}

const events = new EventSource(`${location.pathname}/events`);
events.addEventListener("message", (event) => take(JSON.parse(event.data)));
events.addEventListener("open", connected);
events.addEventListener("error", () => {
  const isOver = events.readyState === EventSource.CLOSED;
  say(page("connection"), isOver ? "connection lost: open the URL that beamline dashboard prints" : "connection lost, trying again");
});
page("section-gauges").addEventListener("toggle", () => show.gauges(told.gauges ?? []));
page("sampled").addEventListener("change", showSamples);
document.addEventListener("visibilitychange", drawAll);
setInterval(tick, 1000);
