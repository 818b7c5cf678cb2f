// Tensors as nested lists: what stands where, and how they are written down.

/** The axes of nested lists, or of a tensor that says them itself. */
export function shapeOf(tensor) {
  if (tensor !== null && typeof tensor === "object" && !Array.isArray(tensor)) {
    return Array.isArray(tensor.shape) ? tensor.shape : [];
  }
  return Array.isArray(tensor) ? [tensor.length, ...shapeOf(tensor[0])] : [];
}

/** The same numbers with axes of 1 before them; null where they are not lists. */
export function withRank(tensor, rank) {
  if (!Array.isArray(tensor)) return null;
  let wrapped = tensor;
  for (let missing = rank - shapeOf(tensor).length; missing > 0; missing -= 1) wrapped = [wrapped];
  return wrapped;
}

/** The number of a tensor that is broadcast to where `at` points; undefined where it has none. */
export function broadcastAt(tensor, at) {
  let part = withRank(tensor, at.length);
  for (const index of at) {
    if (!Array.isArray(part)) return undefined;
    part = part.length === 1 ? part[0] : part[index];
  }
  return part;
}

const JSON_WORDS = { true: "true", false: "false", null: "null" };
const PYTHON_WORDS = { true: "True", false: "False", null: "None" };

/** JSON with one line for each innermost list. */
export function toJson(value) {
  return written(value, 0, JSON_WORDS);
}

/** The same as an expression of Python, of which the first line begins at column `at`. */
export function toPython(value, at = 0) {
  return written(value, at, PYTHON_WORDS);
}

function written(value, at, words) {
  if (typeof value === "number") return Object.is(value, -0) ? "-0.0" : JSON.stringify(value);
  if (value === null || typeof value === "boolean") return words[String(value)];
  if (typeof value === "string") return JSON.stringify(value);
  if (Array.isArray(value)) {
    const between = value.some((part) => Array.isArray(part)) ? `,\n${" ".repeat(at + 1)}` : ", ";
    return `[${value.map((part) => written(part, at + 1, words)).join(between)}]`;
  }
  const indent = " ".repeat(at);
  const members = Object.entries(value).map(([name, part]) => {
    const start = `${indent}  ${JSON.stringify(name)}: `;
    return start + written(part, start.length, words);
  });
  return `{\n${members.join(",\n")}\n${indent}}`;
}

/**
 * A number as it is shown among others: one that is whole without a point, every other to the same width, so that 1 is
 * told from 0.99999; NaN and infinities by their usual signs.
 */
export function short(number, digits = 4) {
  if (typeof number !== "number" || (Number.isInteger(number) && Math.abs(number) < 10 ** digits)) return full(number);
  const size = Math.abs(Number(number.toPrecision(digits)));
  const isOdd = size >= 10 ** digits || size < 0.001;
  const before = size < 1 ? 0 : Math.floor(Math.log10(size)) + 1;
  return (isOdd ? number.toExponential(1) : number.toFixed(digits - before)).replace("e+", "e").replaceAll("-", "−");
}

/** A number with every digit that the service gave. */
export function full(number) {
  if (number === "Infinity") return "∞";
  if (number === "-Infinity") return "−∞";
  return String(number).replace(/^-/, "−");
}
