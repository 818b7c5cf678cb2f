// The number in focus, and where it comes from: the formula of the contract, with the numbers that the service gave.

import { broadcastAt, full, withRank } from "./nested.js";

const MAX_TERMS = 6;
const EMPTY_ROW = "= 0: the row is empty, it may attend no key";

/** Lines that say what a number is made of. `at` is {item, head, row, column}. */
export function formulaOf(matrix, at, problem) {
  return FORMULAS[matrix](at, problem);
}

function bracket(number) {
  return typeof number === "number" && number < 0 ? `(${full(number)})` : full(number);
}

function sumOf(lefts, rights) {
  if (!lefts || !rights) return null;
  const terms = lefts.slice(0, MAX_TERMS).map((left, index) => `${bracket(left)}·${bracket(rights[index])}`);
  if (lefts.length > MAX_TERMS) terms.push(`… ${lefts.length} terms`);
  return terms.join(" + ");
}

function keyHead(head, { H, K }) {
  return Math.floor(head / (H / K));
}

function isEmptyRow({ logits }, { item, head, row }) {
  return logits[item][head][row].every((logit) => logit === "-Infinity");
}

function lines(...parts) {
  return parts.filter(Boolean);
}

/** What may forbid a pair in this problem, in the words of its fields. */
function restrictions(body) {
  const said = [];
  if (body.causal) said.push(body.causal === true ? "causal" : `causal ${body.causal}`);
  for (const name of ["window", "allow_mask", "block_mask", "key_lengths", "query_lengths"]) {
    if (body[name] !== undefined) said.push(name);
  }
  if (body.bias !== undefined) said.push("−∞ in bias");
  return said.join(", ");
}

const FORMULAS = {
  scores({ item, head, row, column }, { inputs, axes }) {
    const kvHead = keyHead(head, axes);
    const terms = sumOf(inputs.query?.[item][head][row], inputs.key?.[item][kvHead][column]);
    return lines(`= query[${item},${head},${row},:] · key[${item},${kvHead},${column},:]`, terms && `= ${terms}`);
  },

  logits(at, problem) {
    const { body, outputs, axes } = problem;
    const { item, head, row, column } = at;
    const place = [item, head, row, column];
    const score = outputs.scores[item][head][row][column];
    const scale = body.scale === undefined ? `1/√${axes.D}` : full(body.scale);
    let symbols = "scale·scores";
    let numbers = `${scale}·${bracket(score)}`;
    if (body.softcap !== undefined) {
      symbols = `softcap·tanh(${symbols} / softcap)`;
      numbers = `${full(body.softcap)}·tanh(${numbers} / ${full(body.softcap)})`;
    }
    if (body.alibi_slopes !== undefined) {
      symbols += " − slope·|p(i) − j|";
      numbers += ` − ${bracket(body.alibi_slopes[head])}·|p(${row}) − ${column}|`;
    }
    if (body.bias !== undefined) {
      symbols += " + bias";
      numbers += ` + ${bracket(broadcastAt(body.bias, place) ?? "bias")}`;
    }
    if (outputs.logits[item][head][row][column] === "-Infinity") {
      return lines(`= −∞: a forbidden pair. Here may forbid: ${restrictions(body) || "nothing but a score of −∞"}`);
    }
    return lines(`= ${symbols}`, `= ${numbers}`);
  },

  weights(at, { outputs, body }) {
    const { item, head, row, column } = at;
    const logit = outputs.logits[item][head][row][column];
    if (logit === "-Infinity") {
      return lines(isEmptyRow(outputs, at) ? EMPTY_ROW : "= 0: exp(−∞), a forbidden pair");
    }
    const lse = outputs.logsumexp[item][head][row];
    return lines(
      "= exp(logits − logsumexp)" + (body.sinks === undefined ? "" : ", where the sum has exp(sink) in it"),
      `= exp(${full(logit)} − ${bracket(lse)})`,
    );
  },

  context(at, { inputs, outputs, axes }) {
    if (isEmptyRow(outputs, at)) return lines(EMPTY_ROW);
    const { item, head, row, column } = at;
    const kvHead = keyHead(head, axes);
    const values = inputs.value?.[item][kvHead].map((vector) => vector[column]);
    const terms = sumOf(outputs.weights[item][head][row], values);
    return lines(
      `= weights[${item},${head},${row},:] · value[${item},${kvHead},:,${column}], over allowed pairs`,
      terms && `= ${terms}`,
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
