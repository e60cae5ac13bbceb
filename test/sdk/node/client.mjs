// What openai-node makes of Millrace: main.mjs runs its steps, and the Go tests beside it judge what they give.

import OpenAI, { toFile } from "../../../examples/openai-node/node_modules/openai/index.mjs";

const model = "test/model-8b";
// main.mjs loads this module anew for each task, with the task in its query.
const { id: task, url, key } = Object.fromEntries(new URL(import.meta.url).searchParams);
const baseURL = url + "/v1";
const client = new OpenAI({ baseURL, apiKey: key });
const chat = (text, max_tokens, more) => ({ model, messages: [{ role: "user", content: text }], max_tokens, ...more });
const unchanged = { maxRetries: 0 };
const ask = (input, max_output_tokens, more) => ({ model, input, max_output_tokens, ...more });

// ended polls a response until it has ended.
async function ended(id) {
  for (;;) {
    const r = await client.responses.retrieve(id, {}, { headers: { Prefer: "wait=5" } });
    if (r.status !== "queued" && r.status !== "in_progress") return r;
  }
}

const line = (custom_id, text, max_tokens) => JSON.stringify({ custom_id, method: "POST", url: "/v1/chat/completions", body: chat(text, max_tokens) }) + "\n";
const upload = async (text) => await client.files.create({ file: await toFile(Buffer.from(text), "in.jsonl"), purpose: "batch" });
const window = { endpoint: "/v1/chat/completions", completion_window: "24h" };

// batchEnd polls a batch until it has ended.
async function batchEnd(id) {
  for (;;) {
    const b = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(b.status)) return b;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

// collect reads a stream to its end.
async function collect(stream) {
  const got = { text: [], chunks: 0, empty: 0, usage: null, arguments: "" };
  for await (const chunk of stream) {
    got.chunks++;
    if (chunk.choices.length === 0) got.empty++;
    if (chunk.usage) got.usage = chunk.usage;
    for (const c of chunk.choices) {
      got.text[c.index] = (got.text[c.index] ?? "") + (c.delta?.content ?? c.text ?? "");
      got.arguments += c.delta?.tool_calls?.[0]?.function?.arguments ?? "";
    }
  }
  return got;
}

const tools = [
  {
    type: "function",
    function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } },
  },
];

export const steps = {
  // --- against a server that answers ---

  async models() {
    const ids = [];
    for await (const m of client.models.list()) ids.push(m.id);
    return { ids, one: await client.models.retrieve(model) };
  },
  async chat() {
    const whole = await client.chat.completions.create(chat("Why is the sky <blue> & deep?", 12));
    const plain = await collect(await client.chat.completions.create(chat("Why is the sky <blue> & deep?", 12, { stream: true })));
    const tailed = await collect(
      await client.chat.completions.create(chat("Why is the sky <blue> & deep?", 12, { stream: true, stream_options: { include_usage: true } })),
    );
    return { whole, plain, tailed };
  },
  async helper() {
    const runner = client.chat.completions.stream(chat("Why is the sky <blue> & deep?", 12));
    return { content: (await runner.finalMessage()).content };
  },
  async choices() {
    const whole = await client.chat.completions.create(chat("Give me two.", 6, { n: 2 }));
    const streamed = await collect(await client.chat.completions.create(chat("Give me two.", 6, { n: 2, stream: true })));
    return { whole: whole.choices.map((c) => c.message.content), streamed: streamed.text };
  },
  async tools() {
    const question = chat("What is the weather in Ulm?", 200, { tools, tool_choice: "required" });
    const whole = await client.chat.completions.create(question);
    const streamed = await collect(await client.chat.completions.create({ ...question, stream: true }));
    return { call: whole.choices[0].message.tool_calls[0], finish: whole.choices[0].finish_reason, streamed: streamed.arguments };
  },
  async completion() {
    const question = { model, prompt: "Once upon a time", max_tokens: 8 };
    const whole = await client.completions.create(question);
    const streamed = await collect(await client.completions.create({ ...question, stream: true }));
    return { whole: whole.choices[0].text, streamed: streamed.text[0] };
  },
  async embeddings() {
    const input = ["a mill", "a race"];
    const byDefault = await client.embeddings.create({ model, input }); // asks for base64 and decodes it
    const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
    const base64 = await client.embeddings.create({ model, input, encoding_format: "base64" });
    return {
      byDefault: byDefault.data.map((d) => Array.from(d.embedding)),
      floats: floats.data.map((d) => d.embedding),
      base64: base64.data.map((d) => d.embedding),
    };
  },
  async unknown() {
    const answer = await client.chat.completions.create(chat("Unknown fields.", 2, { vendor: { html: "<b>&</b>", none: null }, top_k: 3 }));
    return { content: answer.choices[0].message.content };
  },
  async silence() {
    return await collect(await client.chat.completions.create(chat("[[emulator:delay=600ms]] Be slow to begin.", 4, { stream: true })));
  },
  async broken() {
    return await collect(await client.chat.completions.create(chat("[[emulator:error-after=3]] Break off.", 20, { stream: true })));
  },
  async cut() {
    return await collect(await client.chat.completions.create(chat("[[emulator:reset-after=3]] Break off.", 20, { stream: true })));
  },
  async abort() {
    const stream = await client.chat.completions.create(chat("[[emulator:hang-after=3]] I leave the stream.", 100, { stream: true }));
    for await (const _ of stream) break;
    const controller = new AbortController();
    const call = client.chat.completions.create(chat("[[emulator:hang]] I leave the call.", 100), { signal: controller.signal });
    setTimeout(() => controller.abort(), 300);
    try {
      await call;
    } catch (err) {
      return { name: err.constructor.name };
    }
  },
  async async() {
    const question = chat("[[emulator:delay=200ms]] Answer me later.", 9);
    const { data, response } = await client.post("/chat/completions", { body: question, headers: { Prefer: "respond-async" } }).withResponse();
    let job = data;
    while (job.status === "queued" || job.status === "running") job = await client.get(`/jobs/${job.id}`, { query: { wait: "10s" } });
    const direct = await client.chat.completions.create(question);
    return {
      status: response.status,
      location: response.headers.get("location"),
      id: data.id,
      job: job.status,
      content: job.result.body.choices[0].message.content,
      direct: direct.choices[0].message.content,
    };
  },

  // --- responses ---

  async responses() {
    const r = await client.responses.create(ask("[[emulator:tokens=9]] What is a <mill>?", 50));
    return { id: r.id, status: r.status, text: r.output_text };
  },
  async responseStream() {
    const runner = client.responses.stream(ask("[[emulator:tokens=9]] What is a <mill>?", 50));
    const types = [];
    let deltas = "";
    runner.on("event", (e) => types.push(e.type));
    runner.on("response.output_text.delta", (e) => {
      deltas += e.delta;
      if (e.snapshot !== deltas) throw new Error(`the snapshot is ${e.snapshot}, the deltas are ${deltas}`);
    });
    const r = await runner.finalResponse();
    return { id: r.id, status: r.status, text: r.output_text, types, deltas };
  },
  async background() {
    const first = await client.responses.create(ask("[[emulator:delay=200ms]] [[emulator:tokens=7]] Later.", 30, { background: true }));
    const r = await ended(first.id);
    return { id: r.id, status: r.status, text: r.output_text };
  },
  async backgroundStream() {
    const stream = await client.responses.create(
      ask("[[emulator:token-delay=10ms]] [[emulator:tokens=20]] I leave the stream.", 40, { background: true, stream: true }),
    );
    const seen = [];
    for await (const e of stream) {
      seen.push(e);
      if (seen.length === 8) break; // which closes the connection
    }
    const id = seen[0].response.id;
    const after = seen.at(-1).sequence_number;
    for await (const e of await client.responses.retrieve(id, { stream: true, starting_after: after })) seen.push(e);
    const deltas = seen.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta);
    const resumed = [];
    const helper = client.responses.stream({ response_id: id, starting_after: after });
    helper.on("event", (e) => resumed.push(e.type));
    const r = await helper.finalResponse();
    const whole = seen.filter((e) => e.sequence_number > after).map((e) => e.type);
    return { id, status: r.status, text: r.output_text, deltas: deltas.join(""), numbers: seen.map((e) => e.sequence_number), whole, resumed };
  },
  async responseCancel() {
    const { id } = await client.responses.create(ask("[[emulator:hang]] I am cancelled.", 50, { background: true }));
    await client.responses.cancel(id);
    const r = await client.responses.cancel(id);
    return { id: r.id, status: r.status };
  },
  async responseDelete() {
    const { id } = await client.responses.create(ask("[[emulator:tokens=3]] I am deleted.", 50, { background: true }));
    await ended(id);
    await client.responses.delete(id);
    await client.responses.retrieve(id);
  },
  async responseTools() {
    const r = await client.responses.create(
      ask("[[emulator:tokens=3]] What is the weather in Ulm, Node?", 50, { tools: [{ type: "function", strict: false, ...tools[0].function }] }),
    );
    return { id: r.id, status: r.status };
  },

  // --- files and batches ---

  async files() {
    const text = line("a", "<b>&é</b>", 1) + "\r\n" + line("b", "hi", 1);
    const file = await client.files.create({
      file: await toFile(Buffer.from(text), "in.jsonl"),
      purpose: "batch",
      expires_after: { anchor: "created_at", seconds: 3600 },
    });
    await client.files.waitForProcessing(file.id);
    const again = await client.files.retrieve(file.id);
    let listed = false;
    for await (const f of client.files.list({ purpose: "batch", limit: 3 })) listed ||= f.id === file.id;
    const content = Buffer.from(await (await client.files.content(file.id)).arrayBuffer());
    if (content.toString() !== text) throw new Error(`the content is ${content}`);
    const deleted = await client.files.delete(file.id);
    const gone = await client.files.retrieve(file.id).then(
      () => 0,
      (err) => err.status,
    );
    return { file, again, content: content.toString("latin1"), listed, deleted, gone };
  },
  async batch() {
    const question = "What does Node ask?";
    const input = await upload(line("a", question, 5) + line("bad", "[[emulator:status=400]]", 5) + line("b", "Hello from a file.", 5));
    const created = await client.batches.create({ input_file_id: input.id, ...window, metadata: { from: "node" } });
    const ended = await batchEnd(created.id);
    const output = await (await client.files.content(ended.output_file_id)).text();
    const errors = await (await client.files.content(ended.error_file_id)).text();
    const direct = await client.chat.completions.create(chat(question, 5));
    return { created, ended, output, errors, direct: direct.choices[0].message.content };
  },
  async batchCancel() {
    const input = await upload(line("a", "[[emulator:hang]] Node cancels me.", 50));
    const { id } = await client.batches.create({ input_file_id: input.id, ...window });
    const first = await client.batches.cancel(id);
    const second = await client.batches.cancel(id);
    return { first, second, ended: await batchEnd(id) };
  },
  async batchPages() {
    const ids = [];
    for await (const b of client.batches.list({ limit: 10 })) ids.push(b.id);
    let pages = 0;
    for await (const _ of (await client.batches.list({ limit: 10 })).iterPages()) pages++;
    return { ids, pages };
  },
  async batchOnce() {
    return await client.batches.create({ input_file_id: "file-none", ...window });
  },
  async batchRefused() {
    await client.batches.create({ input_file_id: "file-none", ...window, completion_window: "0h" });
  },
  async batchMissing() {
    await client.batches.retrieve("batch_none");
  },
  async batchLimit() {
    await client.batches.list({ limit: 101 });
  },

  // --- against a server that refuses ---

  async key() {
    await new OpenAI({ baseURL, apiKey: "sk-wrong" }).models.list();
  },
  async model() {
    await client.chat.completions.create({ model: "no-such-model", messages: [{ role: "user", content: "Hello?" }] });
  },
  async route() {
    await client.images.generate({ prompt: "A mill" });
  },
  async body() {
    await client.chat.completions.create({ model });
  },
  async engine() {
    await client.chat.completions.create({ model, messages: [] });
  },
  async large() {
    await client.chat.completions.create(chat("word ".repeat(20_000), 1));
  },
  async reset() {
    await client.chat.completions.create(chat("[[emulator:reset-after=0]]", 1), unchanged);
  },
  async full() {
    await client.chat.completions.create(chat("Is there room?", 1), unchanged);
  },

  // --- what the client does by itself ---

  async returns() {
    const answer = await client.chat.completions.create(chat("I come back.", 1), { maxRetries: 10 });
    return { content: answer.choices[0].message.content };
  },
  async retries() {
    const body = chat("Once only, from Node.", 2);
    const keyed = chat("Once only, keyed, from Node.", 2);
    const jobs = [
      await client.post("/chat/completions", { body, headers: { Prefer: "respond-async" } }),
      await client.post("/jobs", { body: { body, priority: "batch" } }),
      await client.post("/jobs", { body: { body }, headers: { "Idempotency-Key": "node-" + task } }),
    ];
    await client.chat.completions.create(keyed, { headers: { "Idempotency-Key": "plain-node-" + task } });
    return { ids: jobs.map((j) => j.id) };
  },
  async conflict() {
    const headers = { "Idempotency-Key": "one-node" };
    await client.chat.completions.create(chat("The first.", 1), { headers });
    await client.chat.completions.create(chat("Another.", 1), { headers });
  },
};
