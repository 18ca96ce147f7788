// What a program with OpenAI's client for Node sees of a server: node openai_node.cjs URL MODEL REQUESTS, all of them
// JSON but the first two. It prints an object with what each request by name came to.
'use strict';

const { OpenAI, APIError } = require('openai');

const [url, model, requests] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
const create = (body) => client.chat.completions.create({ model, ...body });

async function streamed(body) {
  const seen = { text: '', chunks: 0, finish_reason: null, usage: null };
  for await (const chunk of await create({ ...body, stream: true, stream_options: { include_usage: true } })) {
    seen.chunks += 1;
    seen.usage = chunk.usage ?? seen.usage;
    seen.text += chunk.choices[0]?.delta.content ?? '';
    seen.finish_reason = chunk.choices[0]?.finish_reason ?? seen.finish_reason;
  }
  return seen;
}

// The client's own accumulator of a stream, which refuses chunks that do not fit together.
async function accumulated(body) {
  const stream = client.chat.completions.stream({ model, ...body });
  return (await stream.finalChatCompletion()).choices[0];
}

async function failed(body) {
  try {
    await create(body);
  } catch (error) {
    if (!(error instanceof APIError)) throw error;
    const { status, code, param, message } = error;
    return { class: error.constructor.name, status, code, param, message };
  }
  throw new Error('the request was answered');
}

async function aborted(body) {
  const stream = await create({ ...body, stream: true });
  let text = '';
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? '';
    if (text) stream.controller.abort();
  }
  return { text };
}

// The client's own loop: it calls what the model asks for and sends the results back, twice.
async function looped(body, stream) {
  const calls = [];
  const run = (args) => { calls.push(args); return 'It will rain.'; };
  const tools = body.tools.map((tool) => ({
    ...tool, function: { ...tool.function, function: run, parse: JSON.parse, description: 'The weather.' },
  }));
  const asked = { model, ...body, tools, stream, parallel_tool_calls: false };
  const runner = client.chat.completions.runTools(asked, { maxChatCompletions: 2 });
  await runner.done();
  return { calls, roles: runner.messages.map((message) => message.role) };
}

const ran = (body) => looped(body, false);
const ran_streamed = (body) => looped(body, true);

// Several turns; each reply goes back as the client has it.
async function conversed({ texts, ...body }) {
  const messages = [];
  const said = [];
  for (const text of texts) {
    messages.push({ role: 'user', content: text });
    const { message } = (await create({ ...body, messages })).choices[0];
    messages.push(message);
    said.push(message.content);
  }
  return { said };
}

async function main() {
  const ways = { streamed, accumulated, failed, aborted, ran, ran_streamed, conversed };
  const told = {};
  for (const [name, { way, body }] of Object.entries(JSON.parse(requests))) told[name] = await ways[way](body);
  console.log(JSON.stringify(told));
}

main();
