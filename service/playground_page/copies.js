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
    // The client takes arrays, not the bytes of one in base64.
    return Object.values(body).some(isBase64) ? withHttpx(body, asksForKey) : withClient(body, asksForKey);
  },
};

function isBase64(member) {
  return member !== null && typeof member === "object" && "data" in member;
}

function withClient(body, asksForKey) {
  const key = asksForKey ? ', api_key=os.environ["ATTN_CLIENT_KEY"]' : "";
  const service = JSON.stringify(addressOf(".").replace(/\/$/, ""));
  const keywords = Object.entries(body).map(([name, value]) => `        ${name}=${toPython(value, name.length + 9)},\n`);
  return (
    (asksForKey ? "import os\n\n" : "") +
    "from service.client import AttentionClient\n\n" +
    `with AttentionClient(${service}${key}) as client:\n` +
    `    answer = client.attention(\n${keywords.join("")}    )\n` +
    'for name, numbers in answer.outputs.items():\n    print(name, numbers)\nprint("info", answer.info)\n'
  );
}

function withHttpx(body, asksForKey) {
  const imports = asksForKey ? "import os\n\nimport httpx\n" : "import httpx\n";
  const key = asksForKey ? '    headers={"Authorization": "Bearer " + os.environ["ATTN_CLIENT_KEY"]},\n' : "";
  return (
    `${imports}\nproblem = ${toPython(body)}\n` +
    `answer = httpx.post(\n    ${JSON.stringify(addressOf(PATH))},\n    json=problem,\n${key}    timeout=60,\n)\n` +
    "if answer.is_error:\n    raise SystemExit(answer.text)\n" +
    "for name, numbers in answer.json().items():\n    print(name, numbers)\n"
  );
}
