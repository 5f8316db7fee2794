// Answers, streams, schemas, embeddings and errors through OpenAI's client for JavaScript; NODE_PATH says where it is.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const { BadRequestError, NotFoundError, OpenAI } = createRequire(import.meta.url)("openai");
const client = new OpenAI({ maxRetries: 0 }); // address and key are in the environment
const asked = { model: "tiny", messages: [{ role: "user", content: "hello" }], temperature: 0, max_tokens: 8 };

const whole = await client.chat.completions.create(asked);
let text = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
assert.ok(usage.completion_tokens <= 8);

const schema = { type: "object", properties: { sunny: { type: "boolean" } }, required: ["sunny"], additionalProperties: false };
const parsed = await client.chat.completions.parse({
  ...asked,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "weather", strict: true, schema } },
});
assert.equal(typeof JSON.parse(parsed.choices[0].message.content).sunny, "boolean");

assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["tiny"]);
const embedded = await client.embeddings.create({ model: "tiny", input: ["one", "two"] }); // asks for base64
assert.equal(embedded.data.length, 2);
assert.ok(embedded.data[0].embedding.every(Number.isFinite));
await assert.rejects(client.models.retrieve("other"), NotFoundError);
await assert.rejects(client.completions.create({ model: "tiny", prompt: "x", temperature: -1 }), BadRequestError);
