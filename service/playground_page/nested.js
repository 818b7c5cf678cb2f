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
  return written(value, "", JSON_WORDS);
}

/** The same as an expression of Python. */
export function toPython(value, indent = "") {
  return written(value, indent, PYTHON_WORDS);
}

function written(value, indent, words) {
  if (typeof value === "number") return Object.is(value, -0) ? "-0.0" : JSON.stringify(value);
  if (value === null || typeof value === "boolean") return words[String(value)];
  if (typeof value === "string") return JSON.stringify(value);
  const deeper = `${indent}  `;
  if (Array.isArray(value)) {
    if (!value.some((part) => Array.isArray(part))) {
      return `[${value.map((part) => written(part, deeper, words)).join(", ")}]`;
    }
    return `[\n${value.map((part) => deeper + written(part, deeper, words)).join(",\n")}\n${indent}]`;
  }
  const members = Object.entries(value).map(
    ([name, part]) => `${deeper}${JSON.stringify(name)}: ${written(part, deeper, words)}`,
  );
  return `{\n${members.join(",\n")}\n${indent}}`;
}

/** A number as tables show it: four digits; NaN and infinities by their usual signs. */
export function short(number) {
  if (number === "Infinity") return "∞";
  if (number === "-Infinity") return "−∞";
  if (typeof number !== "number") return String(number);
  const rounded = Number(number.toPrecision(4));
  return String(rounded).replace("-", "−");
}

/** A number with every digit that the service gave. */
export function full(number) {
  if (number === "Infinity") return "∞";
  if (number === "-Infinity") return "−∞";
  return String(number).replace(/^-/, "−");
}
