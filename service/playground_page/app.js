// The page: fields to request to answer to pictures, and the address that holds them all.

import { keepKey, keptKey, post, Refused, Unreachable } from "./api.js";
import { copyOf } from "./copies.js";
import { RULE } from "./embedding.js";
import { EXAMPLES } from "./examples.js";
import { buildRequest, DEFAULTS, fieldOf, fromFragment, isField, toFragment } from "./fields.js";
import { shapeOf, toJson, withRank } from "./nested.js";
import { PlanPanel } from "./plan.js";
import { Results } from "./results.js";

const PAUSE_MS = 150;
const ADDRESS_PAUSE_MS = 200;
/** Answers that may be others a moment later. */
const PASSING = [408, 429, 500, 502, 503, 504];
const page = document.documentElement;
const at = (id) => document.getElementById(id);
const control = (name) => (name === "source" ? document.querySelector("input[name=source]:checked") : at(name));

let view = fromFragment("").view;
let built = null;
let timer = null;
let asking = null;
let asksForKey = false;

const results = new Results(at("results"), (looked) => {
  view = { ...view, ...looked };
  keepAddress();
});
const plan = new PlanPanel(at("plan-section"));

function readFields() {
  return Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, control(name).value]));
}

function writeFields(fields) {
  for (const [name, value] of Object.entries(fields)) {
    if (name === "source") continue;
    at(name).value = value;
  }
  check("source", fields.source);
  showSource();
  const inMore = [...at("more").querySelectorAll("[data-field]")].some(({ dataset }) => fields[dataset.field].trim());
  if (inMore) at("more").open = true;
}

function check(name, value) {
  document.querySelector(`input[name=${name}][value="${value}"]`).checked = true;
}

function checked(name) {
  return document.querySelector(`input[name=${name}]:checked`).value;
}

function writeView() {
  at("plan").value = view.plan;
  check("plan_outputs", view.plan_outputs);
  check("copy", view.copy);
  // The slider has its own idea of a number that it cannot show.
  view = { ...view, plan: at("plan").value };
}

function showSource() {
  for (const part of document.querySelectorAll("[data-source]")) part.hidden = part.dataset.source !== checked("source");
}

let addressTimer = null;
let written = null;

/** At once, but not for each step of a key that is held down: browsers count such changes. */
function keepAddress() {
  if (addressTimer !== null) return;
  writeAddress();
  addressTimer = setTimeout(() => {
    addressTimer = null;
    // Another one has been entered since, and is about to be read.
    if (location.hash === written) writeAddress();
  }, ADDRESS_PAUSE_MS);
}

/** `isNew`: a place of its own, to which Back comes from the next one. */
function writeAddress({ isNew = false } = {}) {
  const fragment = `#${toFragment(readFields(), view)}`;
  try {
    if (fragment === location.hash) return;
    if (isNew) history.pushState(null, "", fragment);
    else history.replaceState(null, "", fragment);
  } catch {
    note("This is too much for an address, or it changed too often: the address has an older state of the page.");
  } finally {
    written = location.hash;
  }
}

/** What is to be known of the address; no text: nothing. */
function note(text) {
  at("address-note").textContent = text;
  at("address-note").hidden = !text;
}

function setState(state) {
  page.dataset.state = state;
}

function say(text) {
  at("status").textContent = text;
}

function edited() {
  note("");
  // An answer to what the fields said before would come too late.
  asking?.abort();
  setState("busy");
  keepAddress();
  clearTimeout(timer);
  timer = setTimeout(run, PAUSE_MS);
}

async function run() {
  clearTimeout(timer);
  asking?.abort();
  asking = new AbortController();
  const { signal } = asking;
  setState("busy");
  keepAddress();
  const fields = readFields();
  try {
    built = buildRequest(fields);
    markExample(fields);
    showCopy();
    if (built.faults.length) {
      refuse(built.faults, "The request cannot be made", fields);
      return;
    }
    const answer = await post("v1/attention", toJson(built.body), signal);
    const sums = await sumsOf(answer, built.body, signal);
    clearFaults();
    at("key-form").hidden = true;
    sayInfo(answer.info);
    await results.show({ ...built, answer, sums }, view);
    await askPlan();
    if (!signal.aborted) setState("answered");
  } catch (error) {
    if (signal.aborted) return;
    failed(error, fields);
  }
}

/** The sums of the rows, by the service: the weights times a column of ones. */
async function sumsOf(answer, body, signal) {
  const weights = withRank(answer.weights, 4);
  if (weights === null) return null;
  const [B, , , S] = shapeOf(weights);
  const ones = Array.from({ length: B }, () => [Array.from({ length: S }, () => [1])]);
  const dtype = answer.info.dtype === "float64" ? "float64" : "float32";
  const asked = post("v1/weighted_sum", toJson({ weights, value: ones, dtype }), signal);
  const { context } = await asked.catch((error) => {
    // The fields of that call are none of this page.
    if (error instanceof Refused) delete error.problem.errors;
    throw error;
  });
  return context.map((item) => item.map((head) => head.map(([sum]) => sum)));
}

function sayInfo(info) {
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const rows = [plural(info.empty_rows, "empty row"), plural(info.nonfinite_rows, "non-finite row")].join(", ");
  const ms = Number(info.compute_ms.toPrecision(2));
  say(`Answered on the path ${info.path} (${info.why}), ${info.device}, ${info.dtype}, in ${ms} ms; ${rows}.`);
}

function failed(error, fields) {
  if (!(error instanceof Refused)) {
    const isAway = error instanceof Unreachable;
    setState(isAway ? "unreachable" : "failed");
    clearFaults();
    general([isAway ? `The service did not answer: ${error.message}` : `This page failed: ${error.message}`], true);
    say(`No answer.${older()}`);
    return;
  }
  if (error.status === 401) {
    askForKey();
    return;
  }
  const title = error.problem.title ?? "Refused";
  const faults = error.problem.errors ?? [];
  if (faults.length) {
    refuse(faults, title, fields);
    return;
  }
  setState("refused");
  clearFaults();
  const patience = error.retryAfter ? [`It may be asked again in ${error.retryAfter} s.`] : [];
  general([`${title}: ${error.message}`, ...patience], PASSING.includes(error.status));
  say(`No answer.${older()}`);
}

function askForKey() {
  setState("locked");
  asksForKey = true;
  showCopy();
  clearFaults();
  say("This service asks for a key.");
  at("key-form").hidden = false;
  if (keptKey()) showFault("api_key", { expected: "a key that this service knows", received: "another one" });
  askPlan();
  at("api_key").focus();
}

function refuse(faults, title, fields) {
  setState("refused");
  clearFaults();
  const elsewhere = [];
  for (const fault of faults) {
    const isOwn = isField(fault.field) && !Object.hasOwn(built.body, fault.field);
    const field = isOwn ? fault.field : fieldOf(fault, fields);
    const isShown = field !== null && at(field).closest("[data-source][hidden]") === null;
    if (isShown) showFault(field, fault);
    else elsewhere.push(`${fault.field || "the request"}: expected ${fault.expected}; received ${fault.received}`);
  }
  if (elsewhere.length) general([title, ...elsewhere]);
  say(`${title}: ${faults.length > 1 ? `${faults.length} faults` : "1 fault"}.${older()}`);
  if (!results.problem) askPlan();
}

/** What stands below is not of the fields as they are now. */
function older() {
  return at("results").hidden ? "" : " What is shown below is the last problem that was answered.";
}

function showFault(field, { field: path, expected, received }) {
  const holder = document.querySelector(`.field[data-field="${field}"]`);
  let note = at(`${field}-fault`);
  if (!note) {
    note = document.createElement("ul");
    note.className = "fault";
    note.id = `${field}-fault`;
    holder.append(note);
  }
  const line = document.createElement("li");
  const where = path && path !== field ? `${path}: ` : "";
  line.textContent = `${where}expected ${expected}; received ${received}`;
  note.append(line);
  at(field).setAttribute("aria-invalid", "true");
  describe(field);
  const folded = at(field).closest("details");
  if (folded) folded.open = true;
}

function describe(field) {
  const notes = [`${field}-fault`, `${field}-hint`].filter((id) => at(id));
  if (notes.length) at(field).setAttribute("aria-describedby", notes.join(" "));
  else at(field).removeAttribute("aria-describedby");
}

function clearFaults() {
  at("general-fault").hidden = true;
  at("again").hidden = true;
  for (const note of document.querySelectorAll(".fault")) {
    const field = note.id.replace(/-fault$/, "");
    note.remove();
    at(field).removeAttribute("aria-invalid");
    describe(field);
  }
}

function general(texts, mayPass = false) {
  const parts = texts.map((text) => {
    const part = document.createElement("p");
    part.textContent = text;
    return part;
  });
  at("general-fault").replaceChildren(...parts);
  at("general-fault").hidden = false;
  at("again").hidden = !mayPass;
}

/** Of what was answered last: a body that is refused has no axes. */
function askPlan() {
  return plan.ask(results.problem, view.plan, view.plan_outputs);
}

function showCopy() {
  const hasFaults = built.faults.length > 0;
  const isKeyed = asksForKey || Boolean(keptKey());
  at("copy-button").disabled = hasFaults;
  at("copy-done").textContent = "";
  at("copy-hint").textContent = isKeyed
    ? "The key is not in it: it is read from the variable ATTN_CLIENT_KEY."
    : "What this page asked, with all outputs that it shows. JSON is the body of POST /v1/attention.";
  at("copy-text").textContent = hasFaults ? "There is no request yet." : copyOf(view.copy, built.body, isKeyed);
}

async function copy() {
  const text = at("copy-text");
  try {
    await navigator.clipboard.writeText(text.textContent);
    at("copy-done").textContent = "Copied.";
  } catch {
    // Not over plain HTTP from another machine: the browser gives such pages no clipboard.
    getSelection().selectAllChildren(text);
    at("copy-done").textContent = "Selected: copy it with Ctrl+C.";
  }
}

function markExample(fields) {
  const filled = (example) => ({ ...DEFAULTS, ...example.fields });
  const chosen = EXAMPLES.find((example) =>
    Object.entries(filled(example)).every(([name, value]) => fields[name] === value),
  );
  for (const button of at("examples").children) {
    button.setAttribute("aria-pressed", String(button.value === chosen?.name));
  }
  at("example-about").textContent = chosen?.about ?? "";
}

/** An example is a place to come back to, and so is what was there before it. */
function pickExample(example) {
  writeAddress();
  fillIn(example);
  writeAddress({ isNew: true });
  run();
}

function fillIn(example) {
  note("");
  view = { ...view, item: "0", head: "0", at: "weights.0.0" };
  at("more").open = false;
  writeFields({ ...DEFAULTS, ...example.fields });
}

function fromAddress() {
  if (location.hash.length < 2) {
    fillIn(EXAMPLES[0]);
    run();
    return;
  }
  const said = fromFragment(location.hash);
  view = said.view;
  writeView();
  writeFields(said.fields);
  const strange = said.strange.slice(0, 3).map((text) => (text.length > 40 ? `${text.slice(0, 40)}…` : text));
  note(strange.length ? `The address says what this page does not know, and which is left out: ${strange.join(", ")}.` : "");
  run();
}

function start() {
  at("embedding-rule").textContent = RULE;
  at("examples").append(
    ...EXAMPLES.map((example) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", value: example.name, textContent: example.title });
      button.addEventListener("click", () => pickExample(example));
      return button;
    }),
  );
  for (const name of Object.keys(DEFAULTS)) if (name !== "source") describe(name);
  describe("api_key");
  at("problem").addEventListener("input", (event) => {
    if (event.target.id === "api_key") return;
    if (event.target.name === "source") showSource();
    edited();
  });
  at("problem").addEventListener("submit", (event) => event.preventDefault());
  const useKey = () => {
    const key = at("api_key").value.trim();
    at("api_key").value = "";
    if (!/^[\x21-\x7e]+$/.test(key)) {
      clearFaults();
      showFault("api_key", { expected: "printable ASCII without spaces, as headers take it", received: "something else" });
      return;
    }
    keepKey(key);
    run();
  };
  at("key-use").addEventListener("click", useKey);
  at("api_key").addEventListener("keydown", (event) => {
    if (event.key === "Enter") useKey();
  });
  at("plan-section").addEventListener("input", () => {
    view = { ...view, plan: at("plan").value, plan_outputs: checked("plan_outputs") };
    keepAddress();
    askPlan();
  });
  at("copy-kinds").addEventListener("input", () => {
    view = { ...view, copy: checked("copy") };
    keepAddress();
    showCopy();
  });
  at("copy-button").addEventListener("click", copy);
  at("again").addEventListener("click", run);
  addEventListener("hashchange", fromAddress);
  at("to-results").addEventListener("click", () => at("answer").scrollIntoView());
  writeView();
  fromAddress();
}

start();
