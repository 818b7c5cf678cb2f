// What the same problem would take at another length: asked of the service, from shapes alone.

import { post, Refused } from "./api.js";
import { buildPlan } from "./fields.js";

const SMALLEST_POWER = 4;

/** The length that a place of the slider stands for. */
export function lengthOf(place) {
  return 2 ** (Number(place) + SMALLEST_POWER);
}

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

function inUnits(bytes) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  return `${Number((bytes / 1024 ** power).toPrecision(3))} ${UNITS[power]}`;
}

function inTime(ms) {
  if (ms >= 60_000) return `${Number((ms / 60_000).toPrecision(3))} min`;
  return ms >= 1000 ? `${Number((ms / 1000).toPrecision(3))} s` : `${Number(ms.toPrecision(3))} ms`;
}

function counted(number) {
  return number.toLocaleString("en-US");
}

export class PlanPanel {
  constructor(root) {
    this.root = root;
    this.out = root.querySelector("#plan-answer");
  }

  /** Ask for the plan of a problem that was answered, or of none yet, at the length where the slider stands. */
  async ask(problem, place, outputs) {
    this.asking?.abort();
    this.asking = new AbortController();
    const { signal } = this.asking;
    const length = lengthOf(place);
    const text = `T = S = ${counted(length)} tokens`;
    this.root.querySelector("#plan-length").textContent = text;
    this.root.querySelector("#plan").setAttribute("aria-valuetext", text);
    if (!problem) {
      this.out.textContent = "There is no problem to plan for yet.";
      return;
    }
    const { body, axes } = problem;
    this.root.dataset.state = "busy";
    const plan = buildPlan(body, axes, length, outputs.split(" "));
    try {
      const answer = await post("v1/attention/plan", JSON.stringify(plan), signal);
      this.#show(answer, length);
    } catch (error) {
      if (signal.aborted) return;
      const faults = error instanceof Refused ? (error.problem.errors ?? []) : [];
      const why = faults.map(({ field, expected, received }) => `${field}: expected ${expected}; received ${received}`);
      this.out.textContent = `No plan at this length: ${why.join(". ") || error.message}`;
    }
    this.root.dataset.state = "answered";
  }

  #show(answer, length) {
    this.out.dataset.length = length;
    const verdict = document.createElement("p");
    verdict.className = answer.admitted ? "verdict" : "verdict refused";
    verdict.textContent = answer.admitted
      ? `Would be let in, and take about ${inTime(answer.paths[answer.path].estimated_ms)} on the path ${answer.path}: ${answer.why}.`
      : `Would not be let in: ${answer.why}.`;
    const list = document.createElement("dl");
    const rows = [
      ["memory needed", answer.needed_bytes, inUnits],
      ["memory allowed", answer.allowed_bytes, inUnits],
      ["size of the answer", answer.answer_bytes, inUnits],
      ["longest T = S that would fit", answer.max_seq_len, null],
    ];
    for (const [name, number, unit] of rows) {
      const pair = document.createElement("div");
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      term.textContent = name;
      value.textContent = unit ? unit(number) : counted(number);
      value.title = `${counted(number)}${unit ? " bytes" : ""}`;
      value.dataset.number = number;
      pair.append(term, value);
      list.append(pair);
    }
    this.out.replaceChildren(verdict, list, tableOf(answer.paths, answer.path));
  }
}

function tableOf(paths, chosen) {
  const holder = document.createElement("div");
  holder.className = "scroll";
  holder.tabIndex = 0;
  holder.setAttribute("role", "region");
  holder.setAttribute("aria-label", "The plan of each path");
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["path", "peak memory", "estimated time", "bytes moved", "flops", "why"]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const [path, one] of Object.entries(paths)) {
    const line = body.insertRow();
    line.className = path === chosen ? "chosen" : "";
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = path === chosen ? `${path} (chosen)` : path;
    line.append(name);
    const figures = one.supported
      ? [inUnits(one.peak_bytes), inTime(one.estimated_ms), inUnits(one.bytes_moved), one.flops.toExponential(2)]
      : ["–", "–", "–", "–"];
    for (const text of [...figures, one.why]) line.insertCell().textContent = text;
  }
  holder.append(table);
  return holder;
}
