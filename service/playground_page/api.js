// The way to the service: one origin, one key for this tab.

const KEY = "attn-key";

/** The service refused; `problem` is its answer. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? problem.title ?? `status ${status}`);
    this.status = status;
    this.problem = problem;
  }
}

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

/** POST JSON text. Throws Refused with the service's own words, or what fetch throws. */
export async function post(path, text, signal) {
  const headers = { "Content-Type": "application/json", Accept: "application/json, application/problem+json;q=0.9" };
  if (keptKey()) headers.Authorization = `Bearer ${keptKey()}`;
  const answer = await fetch(addressOf(path), { method: "POST", body: text, headers, signal });
  let members;
  try {
    members = await answer.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    members = { detail: `the answer, ${answer.status}, was not JSON` };
    throw new Refused(answer.status, members);
  }
  if (!answer.ok) throw new Refused(answer.status, members);
  return members;
}
