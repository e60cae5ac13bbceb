// Talks to Millrace with OpenAI's own Node client: only the base URL and the key are Millrace's.
//
//   npm ci && OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=any npm start

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8080/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "any",
});

async function main() {
  const models = await client.models.list();
  if (models.data.length === 0) throw new Error("no model is served yet: is a worker running?");
  const model = models.data[0].id;
  console.log("model: ", model);

  const question = {
    model,
    messages: [{ role: "user", content: "Why is the sky blue?" }],
    max_tokens: 48, // not every engine knows max_completion_tokens
  };
  const chat = await client.chat.completions.create(question);
  console.log("answer:", chat.choices[0].message.content);

  process.stdout.write("stream: ");
  for await (const chunk of await client.chat.completions.create({ ...question, stream: true })) {
    process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
  }
  process.stdout.write("\n");

  // An error has its type: what went wrong is a field, not a text to search.
  try {
    const vectors = await client.embeddings.create({ model, input: ["a mill", "a race"] });
    console.log(`vectors: ${vectors.data.length} of ${vectors.data[0].embedding.length} numbers`);
  } catch (err) {
    if (!(err instanceof OpenAI.APIError) || err.status === undefined) throw err;
    console.log(`vectors: none from this model: ${err.message}`);
  }
  try {
    await client.chat.completions.create({ model: "no-such-model", messages: [{ role: "user", content: "Hello?" }] });
    throw new Error("asking a model that is not there: want an error");
  } catch (err) {
    if (!(err instanceof OpenAI.NotFoundError)) throw err;
    console.log(`error:  ${err.code}: ${err.message}`);
  }
}

main().catch((err) => {
  console.error("openai-node:", err.message, err.cause?.message ?? "");
  process.exitCode = 1;
});
