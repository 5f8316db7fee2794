// Keeps a page up to date, follows output, and sends actions to the API. Without it the pages are whole, and read only.
// Texts are set as text, never as markup; what replaces a section comes from our own pages.

const API = "/api/v1";
const REFRESH_MS = 1000; // from one refresh to the next, at least: the gateway asks for more if many pages are open
const GATHER_MS = 100; // changes within this time are one refresh
const RETRY_MS = 5000; // after the stream has ended
const LOOK_MS = 60_000; // nodes, alerts and clocks change without an event
const MOST_CHARS = 1 << 20; // of output in the page
const KEYS = { o: "/", j: "/jobs", n: "/nodes", q: "/queue", v: "/services", u: "/use", s: "/submit", p: "/plan", m: "/network", l: "/alerts", a: "/admin" };
const ESCAPES = /\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]/g;

const status = document.getElementById("status");

function say(text, bad = false) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

// ----- a stream is open only while the page is visible: a browser has few connections to one host

function stream(address, on, opened = null) {
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
    source.onopen = opened; // what happened before is in no event
    for (const [name, handler] of Object.entries(on)) {
      source.addEventListener(name, (event) => {
        if (event.data) handler(JSON.parse(event.data), stop, event.lastEventId);
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
let pace = REFRESH_MS;

function refreshSoon() {
  if (!waiting) waiting = setTimeout(refresh, Math.max(GATHER_MS, refreshed + pace - performance.now()));
}

async function refresh() {
  waiting = 0;
  if (refreshing) return refreshSoon();
  refreshing = true;
  refreshed = performance.now();
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
    pace = Math.max(REFRESH_MS, Number(answer.headers.get("x-hpcsched-refresh-ms")));
    if (answer.status === 401) return say("The session has ended: run hpcsched web for a new link.", true);
    if (answer.status === 429) {
      pace = Math.max(pace, 1000 * Number(answer.headers.get("retry-after")));
      return refreshSoon();
    }
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
  for (const one of document.querySelectorAll("button[data-verb], form[data-verb]")) one.hidden = false;
}

function confirmed(command) {
  const ask = document.getElementById("ask");
  document.getElementById("ask-command").textContent = command;
  ask.returnValue = "no";
  ask.showModal();
  return new Promise((done) => ask.addEventListener("close", () => done(ask.returnValue === "yes"), { once: true }));
}

function post(address, body, more = {}) {
  return fetch(address, {
    method: "POST",
    headers: { "content-type": "application/json", "x-requested-with": "hpcsched", ...more },
    body: JSON.stringify(body),
  });
}

async function act(verb, body, command) {
  if (!(await confirmed(command))) return;
  const answer = await post(`${API}/${verb}`, body, { "idempotency-key": crypto.randomUUID() });
  const values = await answer.json().catch(() => ({}));
  const wrong = values.error ?? values.errors?.[0]?.error;
  say(wrong ? `${command}: ${wrong}` : `Done: ${command}`, Boolean(wrong));
  if (!wrong) refreshSoon();
}

// ----- forms of administration: the command is made of the fields, as a user would type it

function quoted(word) {
  return /^[\w.,:=@%+/[\]-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

function commandOf(form, fields) {
  const words = fields.filter(([input, value]) => input.dataset.word && value);
  const named = form.dataset.command.replace(/{(\w+)}/g, (_, name) => quoted(form.elements[name].value.trim()));
  return [named, ...words.map(([input, value]) => `${input.dataset.word}=${quoted(value)}`)].join(" ");
}

function bodyOf(fields) {
  const body = {};
  for (const [input, value] of fields) {
    const [name, inner] = input.name.split(".");
    if (!inner) body[name] = input.type === "number" ? Number(value) : value;
    else if (value) (body[name] ??= {})[inner] = value;
  }
  return body;
}

document.addEventListener("submit", (event) => {
  const form = event.target.closest("form[data-verb]");
  if (!form) return;
  event.preventDefault();
  const fields = [...form.elements].filter((one) => one.name).map((one) => [one, one.value.trim()]);
  act(form.dataset.verb, bodyOf(fields), commandOf(form, fields)).catch(unknown);
});

function unknown() {
  say("The cluster does not answer; nothing is known to have changed.", true);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[data-verb]");
  if (button) act(button.dataset.verb, JSON.parse(button.dataset.body), button.dataset.command).catch(unknown);
});

// ----- submit: the form is checked while it is filled in

const CHECK_MS = 500;

function submission(form) {
  const send = document.getElementById("send");
  const check = document.getElementById("check");
  const script = document.getElementById("script");
  let requestId = form.dataset.requestId;
  let asked = 0;
  let timer = 0;
  const values = (test) => {
    const options = Object.fromEntries(new FormData(form));
    const { script: text, more, work_dir } = options;
    for (const name of ["script", "more", "work_dir"]) delete options[name];
    return { script: text, more, work_dir, options, test, request_id: requestId };
  };
  const show = (answer) => {
    document.getElementById("command").textContent = answer.command || "hsub job.sh";
    check.textContent = answer.error ?? answer.text;
    check.classList.toggle("bad", Boolean(answer.error));
    const items = (answer.notes ?? []).map((note) => Object.assign(document.createElement("li"), { textContent: note }));
    document.getElementById("notes").replaceChildren(...items);
  };
  const ask = async (test) => {
    const mine = ++asked;
    const answer = await post("/submit", values(test));
    const found = await answer.json().catch(() => ({ error: `The form cannot be sent (${answer.status}).` }));
    if (mine === asked) show(found);
    return found;
  };
  const checkSoon = () => {
    clearTimeout(timer);
    timer = setTimeout(() => ask(true).catch(unknown), CHECK_MS);
  };
  form.addEventListener("input", checkSoon);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    send.disabled = true;
    try {
      const found = await ask(false);
      if (found.job) location.href = `/job/${found.job}${form.dataset.opens ? `/${form.dataset.opens}` : ""}`;
      else requestId = crypto.randomUUID();
    } catch {
      unknown(); // the same request id again: a job is submitted once
    } finally {
      send.disabled = false;
    }
  });
  complete(script, document.getElementById("completions"), document.getElementById("completed"));
  send.hidden = false;
  ask(true).catch(unknown);
}

// ----- options of directives: the line up to the caret decides which are offered

const MOST_OFFERED = 8;

function complete(area, list, told) {
  const known = [...document.querySelectorAll("#directives option")].map((one) => [one.value, one.label]);
  let chosen = 0;
  const begun = () => {
    const line = area.value.slice(0, area.selectionStart).split("\n").at(-1);
    return area.selectionStart === area.selectionEnd && /^#(?:HSUB|SBATCH)\s(?:.*\s)?(--?[a-z-]*)$/.exec(line)?.[1];
  };
  const close = () => {
    list.hidden = true;
    area.removeAttribute("aria-activedescendant");
    told.textContent = "";
  };
  const mark = () => {
    [...list.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === chosen)));
    area.setAttribute("aria-activedescendant", `completion-${chosen}`);
  };
  const offer = () => {
    const word = begun();
    const found = word ? known.filter(([name]) => name.startsWith(word) && name !== word).slice(0, MOST_OFFERED) : [];
    if (!found.length) return close();
    list.replaceChildren(
      ...found.map(([name, help], at) => {
        const item = document.createElement("li");
        Object.assign(item, { id: `completion-${at}`, role: "option", textContent: `${name} ${help}` });
        item.dataset.name = name;
        return item;
      }),
    );
    chosen = 0;
    list.hidden = false;
    told.textContent = `${found.length} options: arrows choose, Enter takes one, Escape closes`;
    mark();
  };
  const take = (item) => {
    area.setRangeText(item.dataset.name.slice(begun().length), area.selectionStart, area.selectionStart, "end");
    close();
    area.focus();
    area.dispatchEvent(new Event("input", { bubbles: true }));
  };
  area.addEventListener("input", offer);
  area.addEventListener("blur", close);
  list.addEventListener("pointerdown", (event) => {
    event.preventDefault(); // the caret stays where it is
    const item = event.target.closest("li");
    if (item) take(item);
  });
  area.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) chosen = (chosen + step + list.children.length) % list.children.length;
    else if (event.key === "Enter") take(list.children[chosen]);
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
    if (step) mark();
  });
}

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
    output: (piece, _, next) => {
      offset = next;
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

// ----- what a job serves: its server is asked until it answers; then a button leads to the job's own origin

const ASK_MS = 2000;

function opening(told) {
  const button = document.getElementById("open");
  const ask = () => post(`/job/${encodeURIComponent(told.dataset.job)}/open`, {}).then((answer) => answer.json());
  let timer = 0;
  const look = async () => {
    const state = document.getElementById("state").textContent.trim();
    try {
      if (state === "RUNNING" && !document.hidden) {
        const found = await ask();
        button.hidden = !found.ready;
        told.textContent = found.ready ? "The server in the job answers." : `Not yet: ${found.why ?? found.error}`;
        if (found.ready) return;
      }
    } catch {
      unknown();
    }
    timer = setTimeout(look, ASK_MS);
  };
  button.addEventListener("click", async () => {
    clearTimeout(timer);
    const found = await ask().catch(unknown);
    if (found?.ready) location.href = `${found.address}#${found.ticket}`;
    else look();
  });
  look();
}

// ----- a terminal: keys go out, lines come back as texts with styles

const SPECIAL = {
  Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Insert: "\x1b[2~", Delete: "\x1b[3~", Home: "\x1b[1~", End: "\x1b[4~",
  PageUp: "\x1b[5~", PageDown: "\x1b[6~", F1: "\x1b[[A", F2: "\x1b[[B", F3: "\x1b[[C", F4: "\x1b[[D", F5: "\x1b[[E", F6: "\x1b[17~",
  F7: "\x1b[18~", F8: "\x1b[19~", F9: "\x1b[20~", F10: "\x1b[21~", F11: "\x1b[23~", F12: "\x1b[24~",
};
const ARROWS = { ArrowUp: "A", ArrowDown: "B", ArrowRight: "C", ArrowLeft: "D" };
const MOST_KEYS = 8000; // in one message
const STYLE = /^[a-z -]*$/;

function keyOf(event, application) {
  if (event.metaKey || event.isComposing || (event.key === "Tab" && event.shiftKey)) return null;
  if (ARROWS[event.key]) return `\x1b${application ? "O" : "["}${ARROWS[event.key]}`;
  if (SPECIAL[event.key]) return (event.altKey ? "\x1b" : "") + SPECIAL[event.key];
  if (event.ctrlKey && !event.altKey && /^[a-z@[\\\]^_ ]$/i.test(event.key)) {
    return event.shiftKey && "cv".includes(event.key.toLowerCase()) ? null : String.fromCharCode(event.key.toUpperCase().charCodeAt(0) & 31);
  }
  return event.altKey && !event.ctrlKey && event.key.length === 1 ? `\x1b${event.key}` : null;
}

function terminal(place) {
  const screen = document.getElementById("screen");
  const keys = document.getElementById("keys");
  const again = document.getElementById("again");
  let socket = null;
  let application = false;
  const send = (message) => socket?.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));
  const type = (text) => {
    for (let at = 0; at < text.length; at += MOST_KEYS) send({ keys: text.slice(at, at + MOST_KEYS) });
  };
  const measure = () => {
    const probe = Object.assign(document.createElement("span"), { textContent: "M".repeat(50) });
    screen.append(probe);
    const box = probe.getBoundingClientRect();
    probe.remove();
    const columns = Math.floor((screen.clientWidth - 16) / (box.width / 50 || 8));
    return [Math.max(10, Math.min(50, Math.floor((innerHeight - 200) / (box.height || 18)))), Math.max(20, Math.min(300, columns))];
  };
  const draw = (rows, size) => {
    while (screen.children.length > size) screen.lastChild.remove();
    while (screen.children.length < size) screen.append(document.createElement("div"));
    for (const [at, runs] of Object.entries(rows)) {
      const spans = runs.map(([text, style]) => {
        const span = Object.assign(document.createElement("span"), { textContent: text });
        if (STYLE.test(style)) span.className = style;
        return span;
      });
      screen.children[at]?.replaceChildren(...spans);
    }
  };
  const open = () => {
    again.hidden = true;
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    socket = new WebSocket(`${scheme}://${location.host}/job/${encodeURIComponent(place.dataset.job)}/terminal/socket`);
    let why = "The terminal cannot be opened: the job does not run, or is not yours.";
    socket.addEventListener("open", () => {
      why = "The connection to the gateway has ended.";
      screen.replaceChildren();
      send({ size: measure() });
      say("The terminal is open.");
      keys.focus();
    });
    socket.addEventListener("message", (event) => {
      const found = JSON.parse(event.data);
      if (found.end) why = found.end;
      else {
        application = found.application;
        draw(found.rows, found.size);
      }
    });
    socket.addEventListener("close", () => {
      say(why, true);
      again.hidden = false;
    });
  };
  keys.addEventListener("keydown", (event) => {
    const key = keyOf(event, application);
    if (key === null) return;
    event.preventDefault();
    type(key);
  });
  keys.addEventListener("input", (event) => {
    if (event.isComposing) return;
    type(keys.value.replaceAll("\n", "\r"));
    keys.value = "";
  });
  keys.addEventListener("compositionend", () => {
    type(keys.value);
    keys.value = "";
  });
  screen.addEventListener("click", () => getSelection().isCollapsed && keys.focus());
  addEventListener("resize", () => send({ size: measure() }));
  again.addEventListener("click", open);
  if (place.dataset.runs) open();
  else say("The job does not run: a terminal can be opened when it does.", true);
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
const SUBJECTS = {};
for (const about of ["job", "node", "reservation", "configuration", "alert"]) SUBJECTS[about] = refreshSoon;
const log = document.getElementById("log");
const form = document.getElementById("submit");
if (form) submission(form);
const served = document.getElementById("served");
const place = document.getElementById("terminal");
if (served) opening(served);
if (place) terminal(place);
if (log) follow(log);
else if (document.querySelector("[data-live]")) {
  stream(() => `${API}/events`, SUBJECTS, refreshSoon);
  setInterval(() => document.hidden || refreshSoon(), LOOK_MS);
}
