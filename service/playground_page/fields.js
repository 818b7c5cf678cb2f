// The form: its fields, their place in the address, and the request that they make.

import { embed } from "./embedding.js";
import { shapeOf } from "./nested.js";
import { readList, readScalar, readTensor, Unreadable } from "./pasted.js";

/** Every field and what it holds on an empty page. */
export const DEFAULTS = {
  source: "tokens",
  tokens: "",
  memory_tokens: "",
  heads: "1",
  kv_heads: "",
  head_dim: "4",
  query: "",
  key: "",
  value: "",
  causal: "",
  scale: "",
  softcap: "",
  window_left: "",
  window_right: "",
  dtype: "float32",
  sinks: "",
  key_lengths: "",
  query_lengths: "",
  query_offset: "",
  allow_mask: "",
  block_mask: "",
  bias: "",
  alibi_slopes: "",
};

/** What is looked at, which is in the address too. */
export const VIEW_DEFAULTS = { item: "0", head: "0", at: "weights.0.0", plan: "12", plan_outputs: "context", copy: "curl" };

const TENSORS = ["allow_mask", "block_mask", "bias"];
const LISTS = ["key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks"];
export const OUTPUTS = ["context", "weights", "scores", "logits", "logsumexp", "entropy", "weight_totals"];

const MAX_PAIRS = 2 ** 18;

const CHOICES = {
  source: ["tokens", "tensors"],
  causal: ["", "true", "upper_left", "lower_right"],
  dtype: ["float32", "float64", "float16", "bfloat16"],
  plan_outputs: ["context", "context weights"],
  copy: ["curl", "python", "json"],
};

/** Fields and view as the part of an address behind #: what differs from an empty page. */
export function toFragment(fields, view) {
  const said = new URLSearchParams();
  for (const [name, empty] of Object.entries(DEFAULTS)) {
    if (fields[name] !== empty) said.set(name, fields[name]);
  }
  for (const [name, empty] of Object.entries(VIEW_DEFAULTS)) {
    if (view[name] !== empty) said.set(name, view[name]);
  }
  // Nothing behind # stands for a page that was just opened, which shows the first example.
  return said.toString() || "tokens=";
}

/** The way back. `strange` is what the address says and no field can hold, in its words. */
export function fromFragment(fragment) {
  const pairs = [...new URLSearchParams(fragment.replace(/^#/, ""))];
  const known = { ...DEFAULTS, ...VIEW_DEFAULTS };
  const isSecond = (name, index) => pairs.findIndex(([other]) => other === name) < index;
  const isNoChoice = (name, value) => Object.hasOwn(CHOICES, name) && !CHOICES[name].includes(value);
  const strange = pairs.filter(
    ([name, value], index) => !Object.hasOwn(known, name) || isNoChoice(name, value) || isSecond(name, index),
  );
  const said = new Map(pairs.filter((pair) => !strange.includes(pair)));
  const read = (defaults) =>
    Object.fromEntries(Object.entries(defaults).map(([name, empty]) => [name, said.get(name) ?? empty]));
  return {
    fields: read(DEFAULTS),
    view: read(VIEW_DEFAULTS),
    strange: strange.map(([name, value]) => (value ? `${name}=${value}` : name)),
  };
}

/** The request that the fields make, and the faults that keep them from being one. */
export function buildRequest(fields) {
  const faults = [];
  const body = {};
  const names = fields.source === "tokens" ? fromTokens(fields, body, faults) : fromTensors(fields, body, faults);
  for (const name of TENSORS) if (fields[name].trim()) body[name] = readWith(readTensor, fields, name, faults);
  for (const name of LISTS) if (fields[name].trim()) body[name] = readWith(readList, fields, name, faults);
  if (fields.causal) body.causal = fields.causal === "true" ? true : fields.causal;
  for (const name of ["scale", "softcap"]) {
    if (fields[name].trim()) body[name] = readScalar(fields[name]);
  }
  const window = {};
  for (const side of ["left", "right"]) {
    if (fields[`window_${side}`].trim()) window[side] = readScalar(fields[`window_${side}`]);
  }
  if (Object.keys(window).length) body.window = window;
  if (fields.dtype !== DEFAULTS.dtype) body.dtype = fields.dtype;
  const isObject = (tensor) => tensor !== null && typeof tensor === "object" && !Array.isArray(tensor);
  if (isObject(body.query)) body.encoding = "list";
  body.outputs = OUTPUTS;
  const pairs = numPairs(body);
  if (pairs > MAX_PAIRS) {
    const field = fields.source === "tokens" ? "tokens" : "query";
    const expected = `at most ${MAX_PAIRS} pairs over all heads, which is as much as this page draws; the API takes more`;
    faults.push({ field, expected, received: String(pairs) });
  }
  return { body, faults, names };
}

/** Numbers in the weights of a request: B·H·T·S. */
function numPairs({ query, key }) {
  const shape = shapeOf(query);
  return shape.slice(0, -1).reduce((product, axis) => product * axis, 1) * (shapeOf(key ?? query).at(-2) ?? 0);
}

function fromTokens(fields, body, faults) {
  const split = (text) => text.split(/\s+/).filter(Boolean);
  const tokens = split(fields.tokens);
  if (!tokens.length) faults.push({ field: "tokens", expected: "at least one token", received: "none" });
  const heads = readCount(fields, "heads", 64, faults);
  const kvHeads = fields.kv_heads.trim() ? readCount(fields, "kv_heads", 64, faults) : heads;
  const headDim = readCount(fields, "head_dim", 256, faults);
  const memory = split(fields.memory_tokens);
  const keys = memory.length ? memory : tokens;
  if (!faults.length) {
    body.query = embed(tokens, heads, headDim);
    if (memory.length || kvHeads !== heads) {
      body.key = embed(keys, kvHeads, headDim);
      body.value = body.key;
    }
  }
  return { queries: tokens, keys };
}

function fromTensors(fields, body, faults) {
  for (const name of ["query", "key", "value"]) {
    if (fields[name].trim()) body[name] = readWith(readTensor, fields, name, faults);
  }
  return { queries: null, keys: null };
}

function readCount(fields, field, most, faults) {
  const count = Number(fields[field]);
  if (fields[field].trim() && Number.isInteger(count) && count >= 1 && count <= most) return count;
  faults.push({ field, expected: `a whole number from 1 to ${most}`, received: fields[field] || "nothing" });
  return 1;
}

function readWith(read, fields, field, faults) {
  try {
    return read(fields[field]);
  } catch (error) {
    if (!(error instanceof Unreadable)) throw error;
    faults.push({ field, expected: error.expected, received: error.received });
    return null;
  }
}

/** The field at which a fault of the service's answer is shown; null: none has it. */
export function fieldOf(fault, fields) {
  const [name, part] = fault.field.split(".");
  if (name === "window") return part === "right" ? "window_right" : "window_left";
  if (fields.source === "tokens") {
    if (name === "query") return "tokens";
    if (name === "key" || name === "value") return fields.kv_heads.trim() ? "kv_heads" : "memory_tokens";
  }
  return isField(name) ? name : null;
}

/** Whether a fault can stand beside a field of this name. */
export function isField(name) {
  return Object.hasOwn(DEFAULTS, name) && name !== "source";
}

/** A plan's request: the same problem with n tokens on both sides, said by shapes alone. */
export function buildPlan(body, axes, length, outputs) {
  const dtype = body.query.dtype ?? body.dtype ?? "float32";
  const { B, H, K, D, V } = axes;
  const plan = { query: { dtype, shape: [B, H, length, D] } };
  if (body.key !== undefined) {
    plan.key = { dtype, shape: [B, K, length, D] };
    plan.value = { dtype, shape: [B, K, length, V] };
  }
  for (const name of TENSORS) {
    if (body[name] === undefined) continue;
    const given = shapeOf(body[name]);
    const shape = [...Array(4 - given.length).fill(1), ...given];
    for (const axis of [2, 3]) if (shape[axis] !== 1) shape[axis] = length;
    plan[name] = { dtype: name === "bias" ? dtype : "bool", shape };
  }
  for (const name of ["key_lengths", "query_lengths"]) {
    if (body[name] !== undefined) plan[name] = { dtype: "int64", shape: [B] };
  }
  if (body.query_offset !== undefined) plan.query_offset = { dtype: "int64", shape: [1] };
  for (const name of ["alibi_slopes", "sinks"]) {
    if (body[name] !== undefined) plan[name] = { dtype: "float32", shape: [H] };
  }
  for (const name of ["causal", "scale", "softcap", "window"]) {
    if (body[name] !== undefined) plan[name] = body[name];
  }
  plan.outputs = outputs;
  return plan;
}
