// The page talks to this server alone, by the routes that any client uses, and by /plan and /stats.
"use strict";

const POLL_MILLISECONDS = 1000;
const SPEED_POINTS = 120;
const COUNTERS = [
  ["Requests running", "running"],
  ["Requests waiting", "waiting"],
  ["Finished", "finished"],
  ["Cancelled", "cancelled"],
  ["Failed", "failed"],
  ["New tokens", "new_tokens"],
  ["Blocks used", (s) => `${number(s.blocks_used)} of ${number(s.blocks_allocated)}`],
  ["Blocks of prompts found in the cache", "prefix_hits"],
  ["Preemptions", "preemptions"],
  ["Drafted tokens accepted", (s) => (s.speculation?.drafted ? share(s.speculation.accepted / s.speculation.drafted) : "–")],
];

const at = (id) => document.getElementById(id);
const number = (value) => (typeof value === "number" ? value.toLocaleString("en") : "–");
const share = (value) => `${(100 * value).toFixed(1)} %`;
const speeds = [];
let served = null; // what /plan said
let history = [];
let running = null; // the AbortController of the answer that is streamed now
let seen = null; // the counters of the last poll, and when they came

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  at("key-label").hidden = response.status !== 401 && at("key-label").hidden;
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? body.error ?? body.detail ?? response.statusText;
  throw new Error(typeof message === "string" ? message : JSON.stringify(message));
}

// -- the server's state ----------------------------------------------------------------------------

async function poll() {
  try {
    const chosen = at("served").value;
    const named = chosen && `?model=${encodeURIComponent(chosen)}`;
    const [plan, stats] = [served ?? (await (await ask(`plan${named}`)).json()), await (await ask(`stats${named}`)).json()];
    if (chosen === at("served").value) {  // or another one was chosen meanwhile
      if (served === null) show(plan);
      count(stats);
    }
    at("status").textContent = "";
  } catch (error) {
    at("status").textContent = error.message;
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

function show(plan) {
  served = plan;
  if (!at("served").options.length) {
    at("served").append(...plan.models.map((name) => new Option(name)));
    at("served").hidden = plan.models.length < 2;
  }
  at("model").textContent = plan.description;
  document.title = `hf_accel: ${plan.model}`;
  at("plan").tBodies[0].replaceChildren(...plan.choices.map(({ topic, what, choice, reason }) => {
    const row = document.createElement("tr");
    const [first, second, third] = [0, 1, 2].map(() => row.insertCell());
    const why = document.createElement("small");
    [first.textContent, second.textContent, third.textContent, why.textContent] = [topic, what, choice, reason];
    third.append(why);
    return row;
  }));
}

function count(stats) {
  at("counters").replaceChildren(...COUNTERS.flatMap(([label, value]) => {
    const [term, shown] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = label;
    shown.textContent = typeof value === "string" ? number(stats[value]) : value(stats);
    return [term, shown];
  }));
  const now = performance.now();
  const tokens = stats.new_tokens;
  const speed = seen && tokens >= seen.tokens ? (1000 * (tokens - seen.tokens)) / (now - seen.now) : 0;
  seen = { tokens, now };
  speeds.push(speed);
  speeds.splice(0, speeds.length - SPEED_POINTS);
  const top = Math.max(1, ...speeds);
  const points = speeds.map((value, index) => `${(index * 240) / (SPEED_POINTS - 1)},${58 - (56 * value) / top}`);
  at("speed").firstElementChild.setAttribute("points", points.join(" "));
  at("speed-now").textContent = speed.toFixed(1);
}

// -- the chat --------------------------------------------------------------------------------------

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  at("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function body() {
  const shared = {
    model: served.model,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(at("tokens").value),
    temperature: Number(at("temperature").value),
  };
  if (served.chat) return ["v1/chat/completions", { ...shared, messages: history }];
  // a model without a chat template continues a text
  return ["v1/completions", { ...shared, prompt: history.map((message) => message.content).join("") }];
}

async function answer() {
  const [path, request] = body();
  const own = history; // "New chat" begins another one
  const item = add("assistant", "");
  const start = performance.now();
  let first = null;
  let text = "";
  let tokens = 0;
  running = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  try {
    const response = await ask(path, { method: "POST", body: JSON.stringify(request), signal: running.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message ?? event.error);
      const choice = event.choices?.[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      tokens = event.usage?.completion_tokens ?? tokens;
      if (!piece) continue;
      first ??= performance.now();
      text += piece;
      item.firstChild ? (item.firstChild.data = text) : item.append(text);
      at("messages").scrollTop = at("messages").scrollHeight;
    }
    const seconds = (performance.now() - start) / 1000;
    const note = document.createElement("small");
    note.textContent = `first token after ${(((first ?? performance.now()) - start) / 1000).toFixed(2)} s, `
      + `${tokens ? `${tokens} tokens` : `${text.length} characters`} in ${seconds.toFixed(2)} s`;
    item.append(note);
    at("messages").scrollTop = at("messages").scrollHeight;
  } catch (error) {
    if (error.name !== "AbortError") add("error", error.message);
  } finally {
    own.push({ role: "assistant", content: text });
    running = null;
    at("send").hidden = false;
    at("stop").hidden = true;
  }
}

// The data of a stream of server-sent events, one object after the other.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line.trim() !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (!text.trim() || running || served === null) return;
  at("prompt").value = "";
  history.push({ role: "user", content: text });
  add("user", text);
  answer();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
function clear() {
  running?.abort();
  history = [];
  at("messages").replaceChildren();
}

at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", clear);
at("served").addEventListener("change", () => {
  clear();
  [served, seen] = [null, null];
  speeds.length = 0;
});
poll();
