// The number in focus, and where it comes from: the formula of the contract, with the numbers that the service gave.

import { broadcastAt, full, withRank } from "./nested.js";

const MAX_TERMS = 6;
const MAY_FORBID = ["window", "allow_mask", "block_mask", "key_lengths", "query_lengths"];
const OF_EMPTY = {
  empty: "= 0: the row is empty, it may attend no key",
  padding: "= 0: the query is padding, at or after query_lengths",
};

/** Lines that say what a number is made of. `at` is {item, head, row, column}. */
export function formulaOf(matrix, at, problem) {
  return FORMULAS[matrix](at, problem);
}

/** Whether masks keep query `row` from key `column`: a logit of −∞ that is not just what the score became. */
export function isForbidden({ restrictions, outputs }, { item, head, row, column }) {
  if (outputs.logits[item][head][row][column] !== "-Infinity" || !restrictions) return false;
  return !["Infinity", "-Infinity"].includes(outputs.scores[item][head][row][column]);
}

/** "padding" beyond query_lengths, "empty" where no key may be attended, else "". Numbers alone make no row empty. */
export function kindOfRow({ body, restrictions, outputs }, { item, head, row }) {
  const lengths = body.query_lengths;
  if (Array.isArray(lengths) && row >= lengths[item]) return "padding";
  const isBare = outputs.logits[item][head][row].every((logit) => logit === "-Infinity");
  const isNaN = outputs.weights[item][head][row].includes("NaN");
  return isBare && !isNaN && restrictions ? "empty" : "";
}

function bracket(number) {
  const text = full(number);
  return text.startsWith("−") ? `(${text})` : text;
}

function sumOf(pairs) {
  const terms = pairs.slice(0, MAX_TERMS).map(([left, right]) => `${bracket(left)}·${bracket(right)}`);
  if (pairs.length > MAX_TERMS) terms.push(`… (${pairs.length} terms)`);
  return `= ${terms.join(" + ")}`;
}

function keyHead(head, { H, K }) {
  return Math.floor(head / (H / K));
}

function lines(...parts) {
  return parts.filter(Boolean);
}

/** What may forbid a pair in this problem, in the words of its fields; empty: nothing. */
export function restrictionsOf(body) {
  const said = [];
  if (body.causal) said.push(body.causal === true ? "causal" : `causal ${body.causal}`);
  said.push(...MAY_FORBID.filter((name) => body[name] !== undefined));
  if (body.bias !== undefined) said.push("−∞ in bias");
  return said.join(", ");
}

/** p(i), the place of a query among the keys, as far as it is to be read here. */
function placeOf({ item, row }, { body, axes }) {
  const unsaid = `p(${row})`;
  if (body.query_offset !== undefined) {
    const offsets = [body.query_offset].flat();
    const offset = offsets.length > 1 ? offsets[item] : offsets[0];
    return typeof offset === "number" ? `(${row} + ${bracket(offset)})` : unsaid;
  }
  if (body.causal !== "lower_right") return String(row);
  const read = (given, whole) => (given === undefined ? whole : given[item]);
  const [keys, queries] = [read(body.key_lengths, axes.S), read(body.query_lengths, axes.T)];
  return keys === undefined || queries === undefined ? unsaid : `(${row} + ${keys} − ${queries})`;
}

/** What half types do to the numbers of a line, which are shown as they were given. */
function rounding({ info }, text) {
  return ["float16", "bfloat16"].includes(info.dtype) && text.replace("DTYPE", info.dtype);
}

const FORMULAS = {
  scores({ item, head, row, column }, problem) {
    const { inputs, axes } = problem;
    const kvHead = keyHead(head, axes);
    const [left, right] = [inputs.query?.[item][head][row], inputs.key?.[item][kvHead][column]];
    return lines(
      `= query[${item},${head},${row},:] · key[${item},${kvHead},${column},:]`,
      left && right && sumOf(left.map((number, d) => [number, right[d]])),
      rounding(problem, "query and key were rounded to DTYPE first"),
    );
  },

  logits(at, problem) {
    const { body, outputs, axes } = problem;
    const { item, head, row, column } = at;
    if (isForbidden(problem, at)) return lines(`= −∞: a forbidden pair. Here may forbid: ${problem.restrictions}`);
    const scale = body.scale === undefined ? `1/√${axes.D}` : full(body.scale);
    let symbols = "scale·scores";
    let numbers = `${scale}·${bracket(outputs.scores[item][head][row][column])}`;
    if (body.softcap !== undefined) {
      symbols = `softcap·tanh(${symbols} / softcap)`;
      numbers = `${full(body.softcap)}·tanh(${numbers} / ${full(body.softcap)})`;
    }
    if (body.alibi_slopes !== undefined) {
      symbols += " − slope·|p(i) − j|";
      numbers += ` − ${bracket(body.alibi_slopes[head] ?? "slope")}·|${placeOf(at, problem)} − ${column}|`;
    }
    if (body.bias !== undefined) {
      symbols += " + bias";
      numbers += ` + ${bracket(broadcastAt(body.bias, [item, head, row, column]) ?? "bias")}`;
    }
    return lines(`= ${symbols}`, `= ${numbers}`);
  },

  weights(at, problem) {
    const { body, outputs } = problem;
    const { item, head, row, column } = at;
    const kind = kindOfRow(problem, at);
    if (kind) return lines(OF_EMPTY[kind]);
    if (isForbidden(problem, at)) return lines("= 0: exp(−∞), a forbidden pair");
    const lse = outputs.logsumexp[item][head][row];
    return lines(
      "= exp(logits − logsumexp)" + (body.sinks === undefined ? "" : ", where the sum has exp(sink) in it"),
      `= exp(${full(outputs.logits[item][head][row][column])} − ${bracket(lse)})`,
    );
  },

  context(at, problem) {
    const { inputs, outputs, axes } = problem;
    const { item, head, row, column } = at;
    const kind = kindOfRow(problem, at);
    if (kind) return lines(OF_EMPTY[kind]);
    const kvHead = keyHead(head, axes);
    const values = inputs.value?.[item][kvHead];
    const pairs = outputs.weights[item][head][row]
      .map((weight, key) => [weight, values?.[key][column], key])
      .filter(([, , key]) => !isForbidden(problem, { ...at, column: key }));
    return lines(
      `= weights[${item},${head},${row},:] · value[${item},${kvHead},:,${column}], over allowed pairs`,
      values && sumOf(pairs),
      rounding(problem, "value was rounded to DTYPE first; weights are shown rounded"),
    );
  },
};

/** The three inputs with four axes, or null where their numbers are not to be read here. */
export function inputsOf(body) {
  const query = withRank(body.query, 4);
  return {
    query,
    key: body.key === undefined ? query : withRank(body.key, 4),
    value: body.value === undefined ? query : withRank(body.value, 4),
  };
}
