// The way to the service: one origin, one key for this tab.

const KEY = "attn-key";

/** The service refused; `problem` is its answer, `retryAfter` the seconds after which it may be asked again, or null. */
export class Refused extends Error {
  constructor(status, problem, retryAfter = null) {
    super(problem.detail ?? problem.title ?? `status ${status}`);
    Object.assign(this, { status, problem, retryAfter });
  }
}

/** Nobody answered. */
export class Unreachable extends Error {}

/** A path of the service as it is seen from this page, whatever stands before both. */
export function addressOf(path) {
  return new URL(path, document.baseURI).href.replaceAll("'", "%27").split("#")[0];
}

let keyInMemory = null;

export function keptKey() {
  try {
    return sessionStorage.getItem(KEY) ?? keyInMemory;
  } catch {
    return keyInMemory;
  }
}

/** For this tab alone; where the browser keeps nothing for it, until the page is left. */
export function keepKey(key) {
  keyInMemory = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Storage is switched off.
  }
}

/** POST JSON text. Throws Refused with the service's own words, Unreachable, or AbortError. */
export async function post(path, text, signal) {
  const headers = { "Content-Type": "application/json", Accept: "application/json, application/problem+json;q=0.9" };
  if (keptKey()) headers.Authorization = `Bearer ${keptKey()}`;
  const request = { method: "POST", body: text, headers, signal };
  const answer = await fetch(addressOf(path), request).catch((error) => {
    throw signal?.aborted ? error : new Unreachable(error.message);
  });
  const members = await answer.json().catch((error) => {
    if (signal?.aborted) throw error;
    return null;
  });
  const isObject = members !== null && typeof members === "object" && !Array.isArray(members);
  if (answer.ok && isObject) return members;
  const problem = isObject ? members : { detail: `the answer, ${answer.status}, was not a JSON object` };
  throw new Refused(answer.status, problem, answer.headers.get("Retry-After"));
}
