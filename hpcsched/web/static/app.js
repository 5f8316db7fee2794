// Keeps a page up to date, follows output, and sends actions to the API. Without it the pages are whole, and read only.
// Texts are set as text, never as markup; what replaces a section comes from our own pages.

const API = "/api/v1";
const REFRESH_MS = 1000; // from one refresh to the next
const GATHER_MS = 100; // changes within this time are one refresh
const RETRY_MS = 5000; // after the stream has ended
const MOST_CHARS = 1 << 20; // of output in the page
const KEYS = { o: "/", j: "/jobs", n: "/nodes", q: "/queue", u: "/use" };
const ESCAPES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]/g;

const status = document.getElementById("status");

function say(text, bad = false) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

// ----- a stream is open only while the page is visible: a browser has few connections to one host

function stream(address, on) {
  let source = null;
  let timer = 0;
  const stop = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const start = () => {
    if (document.hidden || source) return;
    source = new EventSource(address());
    for (const [name, handler] of Object.entries(on)) {
      source.addEventListener(name, (event) => {
        if (event.data) handler(JSON.parse(event.data), stop);
      });
    }
    source.onerror = () => {
      if (source?.readyState !== EventSource.CLOSED) return; // the browser connects again
      stop();
      timer = setTimeout(start, RETRY_MS);
    };
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  addEventListener("pagehide", stop);
  start();
}

// ----- sections that change

let refreshing = false;
let waiting = 0;
let refreshed = -REFRESH_MS;

function refreshSoon() {
  if (!waiting) waiting = setTimeout(refresh, Math.max(GATHER_MS, refreshed + REFRESH_MS - performance.now()));
}

async function refresh() {
  waiting = 0;
  if (refreshing) return refreshSoon();
  refreshing = true;
  refreshed = performance.now();
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
    if (answer.status === 401) return say("The session has ended: run hpcsched web for a new link.", true);
    if (!answer.ok) return say(`The page cannot be read (${answer.status}); it shows its last state.`, true);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const old of document.querySelectorAll("[data-live][id]")) {
      const now = fresh.getElementById(old.id);
      if (now && now.outerHTML !== old.dataset.shown && now.outerHTML !== old.outerHTML) replace(old, now);
    }
    showActions();
    say(`Up to date at ${new Date().toLocaleTimeString()}`);
  } catch {
    say("The cluster does not answer; the page shows its last state.", true);
  } finally {
    refreshing = false;
  }
}

function replace(old, now) {
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && [...old.querySelectorAll("a,button,summary,input")].indexOf(focused);
  const open = [...old.querySelectorAll("details")].map((one) => one.open);
  const text = now.outerHTML;
  const node = document.adoptNode(now);
  old.replaceWith(node);
  node.dataset.shown = text;
  node.querySelectorAll("details").forEach((one, at) => (one.open = open[at] ?? false));
  if (focused && place >= 0) node.querySelectorAll("a,button,summary,input")[place]?.focus();
}

// ----- actions

function showActions() {
  for (const button of document.querySelectorAll("button[data-verb]")) button.hidden = false;
}

async function act(button) {
  const { verb, job, command } = button.dataset;
  const ask = document.getElementById("ask");
  document.getElementById("ask-command").textContent = command;
  ask.returnValue = "no";
  ask.showModal();
  await new Promise((done) => ask.addEventListener("close", done, { once: true }));
  if (ask.returnValue !== "yes") return;
  const answer = await fetch(`${API}/${verb}`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-requested-with": "hpcsched", "idempotency-key": crypto.randomUUID() },
    body: JSON.stringify({ jobs: [job] }),
  });
  const values = await answer.json().catch(() => ({}));
  const wrong = values.error ?? values.errors?.[0]?.error;
  say(wrong ? `${command}: ${wrong}` : `Done: ${command}`, Boolean(wrong));
  if (!wrong) refreshSoon();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[data-verb]");
  if (button) act(button).catch(() => say("The cluster does not answer; nothing is known to have changed.", true));
});

// ----- output

function follow(log) {
  const filter = document.getElementById("filter");
  const follows = document.getElementById("follow");
  let whole = log.textContent;
  for (const label of document.querySelectorAll("label.script")) label.hidden = false;
  const show = () => {
    const wanted = filter.value.toLowerCase();
    const lines = wanted ? whole.split("\n").filter((line) => line.toLowerCase().includes(wanted)).join("\n") : whole;
    log.textContent = lines;
    if (follows.checked) log.scrollTop = log.scrollHeight;
  };
  filter.addEventListener("input", show);
  show();
  let offset = log.dataset.offset;
  const address = () =>
    `${API}/log/stream?${new URLSearchParams({ job: log.dataset.job, stream: log.dataset.stream, offset })}`;
  stream(address, {
    output: (piece) => {
      offset = String(piece.offset + new TextEncoder().encode(piece.data).length);
      whole = (whole + piece.data.replace(ESCAPES, "")).slice(-MOST_CHARS);
      show();
    },
    end: (_, stop) => {
      stop();
      say("The output is complete.");
    },
    error: (wrong) => say(wrong.error, true),
  });
}

// ----- keys

let first = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/") {
    const filter = document.getElementById("filter");
    if (filter) {
      event.preventDefault();
      filter.focus();
    }
  } else if (first === "g" && KEYS[event.key]) location.href = KEYS[event.key];
  first = event.key;
});

showActions();
const log = document.getElementById("log");
if (log) follow(log);
else if (document.querySelector("[data-live]")) stream(() => `${API}/events`, { job: refreshSoon });
