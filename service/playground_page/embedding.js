// Tokens to vectors: a fixed hash, which the page states. No model, no meaning, no position.

export const RULE =
  "Coordinate d of a token is (FNV-1a mod 401 − 200) / 100, where FNV-1a (32 bits) is taken of the UTF-8 bytes of the " +
  "token, “#” and d: numbers from −2 to 2, the same everywhere. Head h has coordinates h·D to (h+1)·D. Keys and values " +
  "are the same vectors. No position goes in: only masks know the order.";

/** FNV-1a of the text's UTF-8 bytes, 32 bits. */
export function fnv1a(text) {
  let hash = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) {
    hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  }
  return hash;
}

/** One coordinate of a token. */
export function coordinate(token, d) {
  return ((fnv1a(`${token}#${d}`) % 401) - 200) / 100;
}

/** Tokens as [1, heads, tokens, headDim]. */
export function embed(tokens, heads, headDim) {
  const rows = (head) => tokens.map((token) => steps(headDim, (d) => coordinate(token, head * headDim + d)));
  return [steps(heads, rows)];
}

function steps(count, make) {
  return Array.from({ length: count }, (_, index) => make(index));
}
