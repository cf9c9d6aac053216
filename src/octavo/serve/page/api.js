// Our own HTTP API: requests with the key, errors as exceptions, server-sent events one by one.

let key = "";
export const useKey = value => { key = value.trim(); };

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function ask(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), credentials: "omit" });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, told.error?.message ?? `The server answered ${answer.status}.`);
}

export async function* events(answer) {  // the JSON of each; an error inside the stream is thrown
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
        const event = JSON.parse(part.slice(6));
        if (event.error) throw new Refused(200, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
