// The request as text that runs somewhere else as it stands.

import { addressOf } from "./api.js";
import { toJson, toPython } from "./nested.js";

const PATH = "v1/attention";

/** `asksForKey`: the copy reads the key from ATTN_CLIENT_KEY, so that none gets into a text that is passed on. */
export function copyOf(kind, body, asksForKey) {
  return COPIES[kind](body, asksForKey);
}

const COPIES = {
  json: (body) => `${toJson(body)}\n`,

  curl(body, asksForKey) {
    const key = asksForKey ? ' \\\n  -H "Authorization: Bearer $ATTN_CLIENT_KEY"' : "";
    // A text that no quote in it can end, however long it is.
    return (
      `curl -sS '${addressOf(PATH)}' -H 'Content-Type: application/json'${key} \\\n` +
      `  --data-binary @- <<'END'\n${toJson(body)}\nEND\n`
    );
  },

  python(body, asksForKey) {
    const imports = asksForKey ? "import os\n\nimport httpx\n" : "import httpx\n";
    const key = asksForKey ? "    headers={\"Authorization\": \"Bearer \" + os.environ[\"ATTN_CLIENT_KEY\"]},\n" : "";
    return (
      `${imports}\nproblem = ${toPython(body)}\n` +
      `answer = httpx.post(\n    ${JSON.stringify(addressOf(PATH))},\n    json=problem,\n${key}    timeout=60,\n)\n` +
      "if answer.is_error:\n    raise SystemExit(answer.text)\n" +
      "for name, numbers in answer.json().items():\n    print(name, numbers)\n"
    );
  },
};
