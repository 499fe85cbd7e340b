// Agents that call two tools, one after the other, and then answer; see tool_loops.py.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { z } from "zod";
import { baseUrl, main, test } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const answer = "Sunny, then rain.";
const expected = [
  ["weather", "Paris"],
  ["forecast", "Paris", 2],
];

function aiTools(called) {
  return {
    weather: tool({
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => called.push(["weather", city]) && "sunny",
    }),
    forecast: tool({
      inputSchema: z.object({ city: z.string(), days: z.number() }),
      execute: async ({ city, days }) => called.push(["forecast", city, days]) && "rain",
    }),
  };
}

test("AI SDK", async () => {
  const provider = createOpenAICompatible({ name: "outrider", baseURL: `${baseUrl}/v1` });
  for (const stream of [false, true]) {
    const called = [];
    const result = await (stream ? streamText : generateText)({
      model: provider("default"),
      prompt: "Weather in Paris?",
      tools: aiTools(called),
      stopWhen: stepCountIs(5),
      maxRetries: 0,
    });
    assert.equal(await result.text, answer);
    assert.deepEqual(called, expected);
  }
});

test("openai's runTools", async () => {
  const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });
  for (const stream of [false, true]) {
    const called = [];
    const functions = {
      weather: ({ city }) => called.push(["weather", city]) && "sunny",
      forecast: ({ city, days }) => called.push(["forecast", city, days]) && "rain",
    };
    const runner = client.chat.completions.runTools({
      model: "default",
      stream,
      messages: [{ role: "user", content: "Weather in Paris?" }],
      tools: Object.entries(functions).map(([name, run]) => ({
        type: "function",
        function: { name, function: run, parse: JSON.parse, parameters: { type: "object" } },
      })),
    });
    assert.equal(await runner.finalContent(), answer);
    assert.deepEqual(called, expected);
  }
});

await main();
