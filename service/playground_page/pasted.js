// Tensors as people have them: JSON, what Python, numpy and torch print, or plain rows with a line for each.

/** Far more axes than any tensor has, and far fewer than would exhaust the stack. */
const MAX_DEPTH = 32;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const WORDS = new Map([
  ["nan", "NaN"],
  ["inf", "Infinity"],
  ["+inf", "Infinity"],
  ["-inf", "-Infinity"],
  ["infinity", "Infinity"],
  ["-infinity", "-Infinity"],
  ["true", true],
  ["false", false],
]);
const FORMS = "JSON, or a row of numbers in each line";

/** The text is no tensor: what must hold, and what came. */
export class Unreadable extends Error {
  constructor(expected, received) {
    super(`expected ${expected}; received ${received}`);
    Object.assign(this, { expected, received });
  }
}

/** Nested lists, or whatever else the JSON is, for the service to judge. Throws Unreadable. */
export function readTensor(text) {
  if (depthOf(text) > MAX_DEPTH) throw new Unreadable("at most 4 axes", `more than ${MAX_DEPTH} brackets, one in another`);
  const tensor = readAny(text);
  const flat = Array.isArray(tensor) ? tensor.flat(MAX_DEPTH) : [tensor];
  // JSON has numbers that a double has not, and no way to write down what they become.
  if (flat.some((number) => typeof number === "number" && !Number.isFinite(number))) {
    throw new Unreadable("numbers that float64 can hold", cut(text));
  }
  return tensor;
}

/** The same, where one number or one line of them is a list. */
export function readList(text) {
  const isLine = !/[[\n{]/.test(text.trim());
  const tensor = readTensor(text);
  if (typeof tensor === "number") return [tensor];
  return isLine && Array.isArray(tensor) && tensor.length === 1 ? tensor[0] : tensor;
}

/** A number where it is one; else the text as it stands, which the service refuses by name. */
export function readScalar(text) {
  const word = text.trim();
  if (NUMBER.test(word) && Number.isFinite(Number(word))) return Number(word);
  return word === "null" ? null : word;
}

function cut(text) {
  const trimmed = text.trim();
  return trimmed.length > 60 ? `${trimmed.slice(0, 60)}…` : trimmed;
}

/** How many brackets stand one in another at most. */
function depthOf(text) {
  let depth = 0;
  let most = 0;
  for (const [sign] of text.matchAll(/[[\]{}]/g)) {
    depth += sign === "[" || sign === "{" ? 1 : -1;
    most = Math.max(most, depth);
  }
  return most;
}

function readAny(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const tensor = readPrinted(text) ?? readRows(text);
    if (tensor === undefined) throw new Unreadable(FORMS, `${cut(text)} (${error.message})`);
    return tensor;
  }
}

/** Brackets with words in them, whatever separates those; a dtype beside them is not ours to drop. */
function readPrinted(text) {
  const [, name, inside] = /^(?:(?:\w+\.)?(tensor|array)\()?([^]*?)\)?$/.exec(text.trim());
  const [, brackets, more] = /^([^]*\])\s*,?\s*([^\]]*)$/.exec(inside) ?? [];
  if (brackets === undefined || !brackets.startsWith("[")) return undefined;
  if (more) throw new Unreadable(name ? "the brackets alone; dtype is a field of its own" : "one tensor", cut(more));
  if (brackets.includes("...")) throw new Unreadable("all numbers; this print leaves some out", "...");
  const open = [[]];
  for (const [sign] of brackets.matchAll(/[[\]]|[^\s,[\]]+/g)) {
    if (sign === "[") {
      const list = [];
      open.at(-1).push(list);
      open.push(list);
    } else if (sign === "]") {
      open.pop();
      if (!open.length) return undefined;
    } else {
      const word = readWord(sign);
      if (word === undefined) throw new Unreadable("numbers, NaN, inf, true or false", cut(sign));
      open.at(-1).push(word);
    }
  }
  return open.length === 1 && open[0].length === 1 ? open[0][0] : undefined;
}

function readRows(text) {
  const rows = text
    .trim()
    .split(/\n+/)
    .map((line) => line.trim().split(/[\s,;]+/).map(readWord));
  return rows.flat().includes(undefined) ? undefined : rows;
}

function readWord(word) {
  return NUMBER.test(word) ? Number(word) : WORDS.get(word.toLowerCase());
}
