// Vercel's AI SDK over its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";
import { baseUrl, main, test } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "outrider",
  baseURL: `${baseUrl}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const asked = { model: provider("default"), temperature: 0, maxRetries: 0 };
const Booking = z.object({ room: z.enum(["red", "blue"]) });

test("text", async () => {
  const request = { ...asked, prompt: "Write a function.", maxOutputTokens: 24 };
  const whole = await generateText(request);
  const stream = streamText(request);
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, 24);
});

test("completion", async () => {
  const model = provider.completionModel("default");
  assert.ok((await generateText({ ...asked, model, prompt: "def f(", maxOutputTokens: 8 })).text);
});

test("object", async () => {
  const answer = await generateObject({ ...asked, prompt: "Book.", schema: Booking });
  Booking.parse(answer.object);
});

test("tools", async () => {
  const book = tool({ description: "Book a room.", inputSchema: Booking });
  const request = { ...asked, prompt: "Book.", tools: { book }, toolChoice: "required" };
  const whole = await generateText({ ...request, maxOutputTokens: 100 });
  const stream = streamText({ ...request, maxOutputTokens: 100 });
  await stream.consumeStream();
  for (const calls of [whole.toolCalls, await stream.toolCalls]) {
    assert.ok(calls.length > 0);
    for (const call of calls) Booking.parse(call.input);
  }
});

test("embeddings", async () => {
  const model = provider.embeddingModel("default");
  await assert.rejects(embed({ model, value: "a", maxRetries: 0 }), /not embeddings/);
});

await main();
