// Runs the steps of client.mjs for the Go tests beside it. Each line of its input is a task, {"id", "url", "key", "steps"}: tasks run at once, the steps of one after the other. For each step it writes a
// line: {"id", "step", "value"} or {"id", "step", "error"}. It ends with its input.

import { createInterface } from "node:readline";

async function run({ id, url, key, steps }) {
  const client = await import("./client.mjs?" + new URLSearchParams({ id, url, key }));
  for (const step of steps) {
    let line;
    try {
      line = { id, step, value: (await client.steps[step]()) ?? null };
    } catch (err) {
      const { status, code, param, type, message } = err;
      line = { id, step, error: { name: err.constructor.name, status, code, param, type, message } };
    }
    console.log(JSON.stringify(line));
  }
}

for await (const line of createInterface({ input: process.stdin })) run(JSON.parse(line));
process.exit();
