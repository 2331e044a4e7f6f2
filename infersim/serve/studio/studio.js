"use strict";
// The page sends the text and what was changed; the server answers with numbers and pictures. Nothing is computed here
// but where a slider's knob stands.
const $ = (id) => document.getElementById(id);
const page = { text: $("yaml").value, pin: null, points: [], values: new Map(), open: new Map(), inputs: "", changes: new Map(), typed: false,
  number: 0, waiting: false, dirty: true, stream: null, since: 0 };

async function* lines(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const pieces = (rest + value).split("\n");
    rest = pieces.pop();
    for (const piece of pieces) yield JSON.parse(piece);
  }
  if (rest.trim()) yield JSON.parse(rest);
}

const post = (path, body, signal) =>
  fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

// --- answers: one at a time, always for what stands there now; what is out of date is dropped ---------------------------

function ask() {
  if (!page.since) page.since = performance.now();
  page.dirty = true;
  pump();
}

async function pump() {
  if (page.waiting || !page.dirty) return;
  const number = ++page.number, since = page.since, stream = new AbortController();
  page.stream?.abort();
  page.stream = stream;
  const changes = [...page.changes].map(([key, value]) => ({ key, value }));
  page.changes.clear();
  page.dirty = page.typed = false;
  delete document.body.dataset.settled;
  page.waiting = true;
  page.since = 0;
  try {
    const reply = await post("/answer", { text: page.text, changes, pin: page.pin, points: page.points }, stream.signal);
    let first = true;
    for await (const message of lines(reply)) {
      if (number !== page.number) return;
      paint(message, first);
      if (first) {
        page.waiting = false;
        first = false;
        requestAnimationFrame(() => setTimeout(() => document.dispatchEvent(new CustomEvent("painted",
          { detail: { ms: since ? performance.now() - since : null, server: message.took_ms, errors: Boolean(message.errors) } }))));
        pump();
      }
      if (message.done) document.body.dataset.settled = number;
    }
  } catch (error) {
    if (error.name !== "AbortError" && number === page.number) problems(["infersim does not answer: is it still running?"]);
  } finally {
    if (number === page.number && page.waiting) { page.waiting = false; pump(); }
  }
}

function paint(message, first) {
  if (first) {
    problems(message.errors ?? []);
    if (!page.typed) { page.text = message.text; if ($("yaml").value !== message.text) $("yaml").value = message.text; }
    document.body.classList.toggle("old", Boolean(message.errors));
    if (message.errors) return;
    if (message.inputs !== page.inputs) { page.inputs = message.inputs; shape(message.inputs); }
    $("alone").textContent = message.alone.length ? ` Set in the text alone: ${message.alone.join(", ")}.` : "";
    const before = page.values;
    page.values = new Map(message.controls.map((control) => [control.key, control]));
    values(before);
  } else if (message.errors) problems(message.errors);
  if (message.head) head(message.head);
  if (message.at !== undefined && document.activeElement !== $("step-at")) $("step-at").value = Number(message.at.toFixed(1));
  if (first) for (const place of document.querySelectorAll(".follows")) place.classList.add("earlier");
  for (const [name, html] of Object.entries(message.parts ?? {})) part(name, html);
  if (first && !page.pin) part("compare", "");
  if (message.stage) $("stage").textContent = message.stage;
  $("progress").textContent = message.done ? "" : message.progress ? `· next: ${message.progress} …` : $("progress").textContent;
  $("share").hidden = message.share === undefined || message.share >= 1;
  $("share").value = message.share ?? 0;
  if (message.done) $("said").textContent = $("sentence").textContent;
}
new ResizeObserver(() => document.documentElement.style.setProperty("--answer-height", `${$("answer").offsetHeight}px`)).observe($("answer"));

function head(found) {
  $("title").textContent = found.title;
  document.title = `${found.title} – infersim studio`;
  $("sentence").textContent = found.sentence;
  $("sentence").className = `verdict ${found.mood}`;
  rows($("numbers"), found.numbers, 4, (cells, number, row) => {
    row.className = number.bad ? "bad" : "";
    row.dataset.key = number.key;
    row.dataset.value = JSON.stringify(number.value);
    [number.name, number.text, number.note, number.other].forEach((text, i) => { if (cells[i].textContent !== text) cells[i].textContent = text; });
    cells[3].className = "other";
  });
  rows($("lines"), found.lines, 2, (cells, line) => { cells[0].textContent = line.question; cells[1].textContent = line.answer; });
}

function rows(list, items, count, fill) {
  while (list.children.length < items.length) {
    const row = document.createElement("div");
    row.append(document.createElement("dt"), ...Array.from({ length: count - 1 }, () => document.createElement("dd")));
    list.append(row);
  }
  items.forEach((item, i) => fill(list.children[i].children, item, list.children[i]));
}

function part(name, html) {
  const place = $(`${name}-at`);
  place.classList.remove("earlier");
  const open = page.open.get(name) ?? new Set();  // some answers come without the numbers beneath their charts
  for (const details of place.querySelectorAll("details")) open[details.open ? "add" : "delete"](details.firstElementChild.textContent);
  page.open.set(name, open);
  place.innerHTML = html;
  if (open.size) for (const details of place.querySelectorAll("details")) details.open = open.has(details.firstElementChild.textContent);
}

function problems(found) {
  $("problems").hidden = !found.length;
  $("problems").textContent = found.join("\n");
  for (const place of document.querySelectorAll(".input")) {
    const mine = found.filter((line) => line.split(": ").some((word) => word === place.dataset.key || word.startsWith(`--set ${place.dataset.key}`)));
    place.querySelector(".wrong").textContent = mine.join("\n");
    place.classList.toggle("wrong-value", mine.length > 0);
  }
}

// --- inputs -----------------------------------------------------------------------------------------------------------------

function shape(html) {
  const focused = document.activeElement?.id, closed = new Map();
  for (const group of document.querySelectorAll(".group")) closed.set(group.dataset.group, group.open);
  const narrow = !closed.size && matchMedia("(max-width: 60rem)").matches;
  $("inputs").innerHTML = html;
  for (const group of document.querySelectorAll(".group")) {
    if (closed.has(group.dataset.group)) group.open = closed.get(group.dataset.group);
    else if (narrow && group.previousElementSibling) group.open = false;
  }
  if (focused) $(focused)?.focus();
}

function values(before = new Map()) {
  for (const place of document.querySelectorAll(".input")) {
    const control = page.values.get(place.dataset.key);
    if (!control || page.changes.has(control.key)) continue;
    if (!place.shown || JSON.stringify(before.get(control.key)) !== JSON.stringify(control)) show(place, control);
  }
}

const digits = (x) => Number(x.toPrecision(3));
const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });  // to make one takes longer than to use it
const neat = (x) => few.format(x);

function show(place, control) {
  const kind = place.dataset.kind, value = control.value;
  place.shown = true;
  const [field, exact] = [place.querySelector("input[type=range], select, input[type=text], input[type=checkbox]"), place.querySelector("input[type=number]")];
  if (kind === "range") {
    const { low, high } = control, at = value ?? low;
    const share = "log" in place.dataset ? Math.log(at / low) / Math.log(high / low) : (at - low) / (high - low || 1);
    field.value = String(Math.round(1000 * share));
    if (document.activeElement !== exact) exact.value = value === null ? "" : String(Number(value.toPrecision(6)));
    exact.placeholder = "none";
    place.querySelector(".limits").textContent = `${neat(low)} to ${neat(high)}`;
    field.setAttribute("aria-valuetext", `${value === null ? "none" : neat(value)} ${place.querySelector(".unit").textContent}`);
    field.classList.toggle("unset", value === null);
  } else if (kind === "switch") field.checked = Boolean(value);
  else if (document.activeElement !== field || kind === "choice") field.value = String(value ?? "");
  place.querySelector(".default").textContent = control.default ? `default ${control.default}` : "";
  place.querySelector(".reset").hidden = !control.given || !control.default && !control.key.startsWith("slo.");
}

function change(place, value) {
  const key = place.dataset.key;
  page.changes.set(key, value);
  const control = page.values.get(key);
  if (control && place.dataset.kind === "range") {
    control.value = value;
    if (value !== null) show(place, control);
  }
  ask();
}

function moved(event) {
  const place = event.target.closest(".input");
  if (!place) return;
  const control = page.values.get(place.dataset.key), field = event.target;
  if (field.type === "range") {
    const share = Number(field.value) / 1000, { low, high } = control;
    let value = "log" in place.dataset ? low * (high / low) ** share : low + (high - low) * share;
    value = share === 0 ? low : share === 1 ? high : digits(value);
    if ("whole" in place.dataset) value = Math.round(value);
    if (value !== control.value) change(place, value);
  } else if (field.type === "number") {
    if (event.type === "change" || event.inputType === undefined || event.inputType === "insertReplacementText") {
      change(place, field.value === "" ? null : Number(field.value));
    }
  } else if (event.type === "change") change(place, field.type === "checkbox" ? field.checked : field.value);
}
$("inputs").addEventListener("input", moved);
$("inputs").addEventListener("change", (event) => { if (event.target.type !== "range") moved(event); });
$("inputs").addEventListener("submit", (event) => event.preventDefault());
$("inputs").addEventListener("click", (event) => {
  const button = event.target.closest(".reset");
  if (!button) return;
  const place = button.closest(".input");
  page.changes.set(place.dataset.key, null);
  ask();
});

let pause = 0;
$("yaml").addEventListener("input", () => {
  page.typed = true;
  clearTimeout(pause);
  pause = setTimeout(() => { page.text = $("yaml").value; page.changes.clear(); page.typed = false; ask(); }, 250);
});

// --- take it away, compare ----------------------------------------------------------------------------------------------------

function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
$("yaml-file").addEventListener("click", () => save("scenario.yaml", page.text, "text/yaml"));
$("link").addEventListener("click", async () => {
  history.replaceState(null, "", `#scenario=${encodeURIComponent(page.text)}`);
  try { await navigator.clipboard.writeText(location.href); $("said").textContent = $("link").textContent = "Copied"; }
  catch { $("link").textContent = "It is in the address bar"; }
  setTimeout(() => { $("link").textContent = "Copy link"; }, 2000);
});
$("report").addEventListener("click", async () => {
  $("report").disabled = true;
  $("report").textContent = "Report …";
  try {
    for await (const message of lines(await post("/job/report", { text: page.text }))) {
      if (message.errors) problems(message.errors);
      if (message.file) save(message.name, message.file, "text/html");
    }
  } finally { $("report").disabled = false; $("report").textContent = "Report"; }
});
$("pin").addEventListener("click", () => { page.pin = page.text; $("unpin").hidden = false; ask(); });
$("unpin").addEventListener("click", () => { page.pin = null; $("unpin").hidden = true; ask(); });
function linked() {
  const text = location.hash.startsWith("#scenario=") ? location.hash.slice(10) : "";
  if (!text) return;
  try { page.text = decodeURIComponent(text); } catch { problems(["the link is damaged: its scenario cannot be read"]); return; }
  $("yaml").value = page.text;
}
addEventListener("hashchange", () => { if (location.hash.startsWith("#scenario=")) { linked(); ask(); } });

// --- plan ---------------------------------------------------------------------------------------------------------------------

let search = null;
function chosen() {
  const names = [...document.querySelectorAll("#plan-form [name=hardware]:checked")].map((box) => box.value);
  document.querySelector("#plan-form summary").textContent = `Hardware: ${names.join(", ") || "none chosen"}`;
}
$("plan-form").addEventListener("change", chosen);
chosen();
$("plan-cancel").addEventListener("click", () => search?.abort());
$("plan-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = new FormData($("plan-form"));
  search = new AbortController();
  $("plan-cancel").hidden = $("plan-share").hidden = false;
  const button = $("plan-form").querySelector("[type=submit]");
  button.disabled = true;
  $("plan-words").textContent = "searching …";
  const asked = { hardware: form.getAll("hardware"), max_gpus: Number(form.get("max_gpus")), objective: form.get("objective") };
  try {
    for await (const message of lines(await post("/job/plan", { text: page.text, asked }, search.signal))) {
      if (message.progress) { $("plan-words").textContent = message.progress; $("plan-share").value = message.share ?? 0; }
      if (message.errors) $("plan-words").textContent = message.errors.join("; ");
      if (message.plan) { candidates(message.plan); $("plan-words").textContent = ""; }
    }
  } catch (error) {
    $("plan-words").textContent = error.name === "AbortError" ? "cancelled" : "infersim does not answer";
  } finally { $("plan-cancel").hidden = $("plan-share").hidden = true; button.disabled = false; }
});

function candidates(plan) {
  $("plan-head").textContent = plan.head;
  $("plan-note").textContent = plan.note;
  const kinds = [...new Set(plan.rows.map((row) => row.hardware))], body = $("plan-table").tBodies[0];
  body.replaceChildren(...plan.rows.map((row) => {
    const line = document.createElement("tr");
    line.dataset.hardware = row.hardware;
    line.dataset.colour = kinds.indexOf(row.hardware) % 6;
    const cell = (text, value = text, kind = "") => {
      const made = line.insertCell();
      made.textContent = text;
      made.dataset.v = value;
      made.className = kind;
    };
    cell(row.hardware); cell(row.parallel); cell(row.replicas, row.replicas, "n"); cell(row.gpus, row.gpus, "n");
    cell(row.rate, row.rate, "n"); cell(row.usd, row.usd_value, "n"); cell(row.state, row.state, row.state === "met" ? "met" : "");
    cell(row.tightest, row.tightest_value, "n"); cell(row.limits, row.limits, "limits");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Load";
    button.setAttribute("aria-label", `Load ${row.replicas} times ${row.parallel} ${row.hardware} into the inputs`);
    button.addEventListener("click", () => {
      for (const [key, value] of Object.entries(row.load)) page.changes.set(key, value);
      ask();
      $("answer").focus();
      scrollTo({ top: 0 });
    });
    line.insertCell().append(button);
    return line;
  }));
  $("plan-table").hidden = !plan.rows.length;
  const filter = $("plan-filter");
  filter.hidden = kinds.length < 2;
  filter.replaceChildren(filter.firstElementChild, ...kinds.map((kind) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => { for (const line of body.rows) if (line.dataset.hardware === kind) line.hidden = !box.checked; });
    label.append(box, ` ${kind}`);
    return label;
  }));
}

// --- steps of one second --------------------------------------------------------------------------------------------------------

$("steps-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const number = page.number;
  for await (const message of lines(await post("/job/steps", { text: page.text, at: Number($("step-at").value) }))) {
    if (number !== page.number) return;  // something has moved since
    if (message.errors) problems(message.errors);
    if (message.parts) part("steps", message.parts.steps);
  }
});

// --- files, and single requests --------------------------------------------------------------------------------------------------

async function take(file) {
  const content = await file.text();
  $("file-words").textContent = `reading ${file.name} …`;
  if (/\.ya?ml$/i.test(file.name)) {
    $("yaml").value = page.text = content;
    page.changes.clear();
    $("file-words").textContent = `${file.name} is the scenario now`;
    ask();
    return;
  }
  let parsed = null;
  try { parsed = JSON.parse(content); } catch { /* a CSV */ }
  if (parsed?.model_type || parsed?.architectures) {
    const found = await (await post("/config", { name: file.name === "config.json" ? parsed.model_type : file.name, content })).json();
    if (found.errors) { $("file-words").textContent = found.errors.join("; "); return; }
    page.changes.set("model", found.model);
    $("file-words").textContent = `${file.name} is the model now, as long as this studio runs`;
    ask();
    return;
  }
  for await (const message of lines(await post("/job/measured", { text: page.text, name: file.name, content }))) {
    if (message.progress) $("file-words").textContent = message.progress;
    if (message.errors) $("file-words").textContent = message.errors.join("; ");
    if (message.parts) { part("measured", message.parts.measured); $("file-words").textContent = "its points are on the load curves"; $("measure").scrollIntoView(); }
    if (message.points) { page.points.push(...message.points); ask(); }
  }
}
$("file").addEventListener("change", () => { if ($("file").files[0]) take($("file").files[0]); $("file").value = ""; });
addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
addEventListener("dragleave", () => document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
});
$("requests-at").addEventListener("pointerover", (event) => {
  if (event.target.matches(".hit")) $("request").textContent = event.target.textContent;
});

linked();
ask();
