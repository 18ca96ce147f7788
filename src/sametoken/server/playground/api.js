// The server as the page sees it: requests with a key, streams of events, and errors in words. Knows no elements.

const KEY = "sametoken-key";

export class Failure extends Error {
  /** @param {string} words for the person; @param {number} status of HTTP, 0 where the server was not reached. */
  constructor(words, status) {
    super(words);
    this.status = status;
  }

  /** Whether the server is gone or going, so that it is worth to look for it again. */
  get lost() {
    return this.status === 0 || this.status === 503;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export async function getJson(path) {
  return (await request(path, {})).json();
}

/** The events of a streamed answer; throws a Failure for whatever goes wrong, AbortError if `signal` ends it. */
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const reply = await request(path, { method: "POST", headers, signal, body: JSON.stringify(body) });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await heard(reader.read());
    if (done) {
      throw new Failure("The connection ended before the answer did.", 0);
    }
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") {
        return;
      }
      const said = JSON.parse(data);
      if (said.error) {
        throw new Failure(said.error.message, said.error.code === "server_stopped" ? 503 : 500);
      }
      yield said;
    }
  }
}

async function request(path, options) {
  const headers = key.get() ? { ...options.headers, Authorization: `Bearer ${key.get()}` } : options.headers;
  const address = new URL(`../${path}`, import.meta.url); // whatever prefix a proxy has put before it
  const reply = await heard(fetch(address, { ...options, headers }));
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new Failure(body.error?.message ?? `The server answered with status ${reply.status}.`, reply.status);
  }
  return reply;
}

/** What a promise of the network gives; a server that cannot be reached is a Failure, a stop of ours is not. */
async function heard(promise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("The server cannot be reached.", 0);
  }
}
