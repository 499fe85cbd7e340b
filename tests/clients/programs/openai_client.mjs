// The official client for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import assert from "node:assert/strict";
import { z } from "zod";
import { baseUrl, main, test } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Write a function." }];
const chat = { model: "default", messages, max_tokens: 24, temperature: 0 };
const Booking = z.object({ room: z.enum(["red", "blue"]) });
const parameters = {
  type: "object",
  properties: { room: { enum: ["red", "blue"] } },
  required: ["room"],
  additionalProperties: false,
};

test("chat", async () => {
  const whole = await client.chat.completions.create(chat);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.ok(text);
});

test("leaving early", async () => {
  const stream = await client.chat.completions.create({ ...chat, max_tokens: 500, stream: true });
  for await (const _ of stream) break;
  assert.ok((await client.chat.completions.create(chat)).choices[0].message.content);
});

test("parse", async () => {
  const answer = await client.chat.completions.parse({
    model: "default",
    messages,
    response_format: zodResponseFormat(Booking, "booking"),
  });
  Booking.parse(answer.choices[0].message.parsed);
});

test("tools", async () => {
  const request = {
    model: "default",
    messages,
    tools: [{ type: "function", function: { name: "book", parameters, strict: true } }],
    tool_choice: "required",
    parallel_tool_calls: false,
    temperature: 0,
  };
  const whole = await client.chat.completions.create(request);
  const streamed = await client.chat.completions.stream(request).finalChatCompletion();
  for (const answer of [whole, streamed]) {
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    Booking.parse(JSON.parse(call.function.arguments));
  }
});

test("responses", async () => {
  const request = { model: "default", input: "Write.", max_output_tokens: 24, temperature: 0 };
  const whole = await client.responses.create(request);
  const streamed = await client.responses.stream(request).finalResponse();
  assert.equal(streamed.output_text, whole.output_text);
  assert.ok(whole.output_text);
});

await main();
