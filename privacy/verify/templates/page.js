"use strict";
// The page around the verifier: takes files, shows what was found. All text is set as text, never as markup.

const WORDS = JSON.parse(document.getElementById("words").textContent);
let chosen = [];
const MOST_ROWS = 2000, PAUSE = 250;
const byId = (id) => document.getElementById(id);
const grouped = (value) => value.toLocaleString("en-GB");

function make(name, content = "", attributes = {}) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  for (const one of [].concat(content)) found.append(one);
  return found;
}

function table(caption, head, rows) {
  const cells = (name, values) =>
    make("tr", values.map((value, i) => make(name, value, { ...(head[i][1] ? { class: "number" } : {}), ...(name === "th" ? { scope: "col" } : {}) })));
  const found = make("table", [
    make("caption", caption),
    make("thead", cells("th", head.map(([title]) => title))),
    make("tbody", rows.map((row) => cells("td", row))),
  ]);
  return make("div", found, { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
}

const day = (time) => (time ? `${time.slice(0, 10)} ${time.slice(11, 19)} UTC` : "");
const fingerprint = (hex) => (hex.match(/.{1,4}/g) || []).join(" ");

function verdict(result, name) {
  if (result.unreadable)
    return ["unreadable", "Not readable", [`${name} is no evidence bundle as “audit export” writes it: it ${result.unreadable}. Get the file again.`]];
  if (result.problem) {
    let where = "";
    if (result.index !== null)
      where = result.until === result.index ? ` The first bad record is number ${result.index}.` :
        ` The first bad record is one of the numbers ${result.index} to ${result.until}.`;
    return ["broken", "NOT sound", [`The evidence does not hold: ${result.problem}.${where}`, "Nothing below is to be relied on."]];
  }
  const extent = result.whole ? `All ${grouped(result.records)} records` : `The ${grouped(result.records)} records of this range`;
  const said = [
    `${extent} are in place and unchanged: they give the root that ${result.party} signed.`,
    "Every byte of every message has its field and its class, and nothing left that the recorded consent and plan did not hold.",
  ];
  if (result.whole)
    said.push(`${grouped(result.acknowledged)} of ${grouped(result.sent)} messages sent have the other side’s signed receipt.`);
  return ["sound", "Sound", said];
}

function show(name, size, result, rows, seconds, known) {
  const [kind, title, said] = verdict(result, name);
  const heading = make("h2", title, { tabindex: "-1" });
  const parts = [make("div", [heading, ...said.map((one) => make("p", one))], { class: `verdict ${kind}` })];
  const facts = [["File", `${name}, ${grouped(size)} bytes`], ["Read", `${new Date().toISOString().slice(0, 19).replace("T", " ")} UTC, in ${seconds.toFixed(1)} s`]];
  if (!result.unreadable) {
    facts.unshift(["Whose journal", result.party], ["Federation", result.federation]);
    facts.push(["Records", `${grouped(result.records)}, from ${day(result.first_time)} to ${day(result.last_time)}`]);
    facts.push(["Messages", `${grouped(result.sent)} sent, ${grouped(result.received)} received, ${grouped(result.refused)} refused`]);
  }
  if (result.key)
    facts.push(["Key’s fingerprint", make("span", fingerprint(result.key), { class: "hash" })],
      ["Key known", known ? "yes: it is the one that was given" : "no: hold the fingerprint against the owner’s"],
      ["Root", make("span", result.root, { class: "hash" })]);
  parts.push(make("dl", facts.flatMap(([what, value]) => [make("dt", what), make("dd", value)])));
  if (result.remarks.length) parts.push(make("h3", "To be known"), make("ul", result.remarks.map((one) => make("li", one))));
  const total = Object.values(result.left).reduce((sum, count) => sum + count, 0);
  if (total) {
    const entries = Object.entries(result.left).sort((a, b) => b[1] - a[1]);
    parts.push(make("h3", "What was sent"), table(
      `${grouped(total)} bytes, by what they tell`, [["Class"], ["Bytes", true], ["Share"], ["In words"]],
      entries.map(([one, count]) => [
        one, grouped(count),
        make("meter", "", { min: 0, max: total, value: count, "aria-label": `${(100 * count / total).toFixed(1)} %` }),
        WORDS.classes[one] || "a class that this page does not know",
      ])));
  }
  const kinds = Object.entries(result.kinds);
  if (kinds.length)
    parts.push(make("h3", "Which records"), table("By kind", [["Kind"], ["How many", true], ["In words"]],
      kinds.map(([one, count]) => [one, grouped(count), WORDS.kinds[one] || "a kind that this page does not know"])));
  if (rows.length) {
    const note = rows.length >= MOST_ROWS ? ` (the first ${grouped(MOST_ROWS)})` : "";
    parts.push(make("details", [make("summary", `The records${note}`), table(
      "Record by record", [["Number", true], ["Time"], ["Kind"], ["What"], ["Bytes", true]],
      rows.map((one) => [String(one.index), day(one.time), one.kind, one.what, one.length === null ? "" : grouped(one.length)]))]));
  }
  byId("results").append(make("article", parts, { "data-verdict": kind }));
  heading.focus();
}

function row(record) {
  const what = record.kind === "message"
    ? `${record.direction === "sent" ? "to" : "from"} ${record.peer}: ${record.rpc}${record.round === null ? "" : `, round ${record.round + 1}`}`
    : String(record.run || record.reason || record.peer || "").slice(0, 200);
  return { index: record.index, time: record.time, kind: record.kind, what, length: record.kind === "message" ? record.length : null };
}

// An audit.pub (PEM, Ed25519), or 64 hexadecimal digits; null for anything else.
function keyIn(text) {
  const plain = text.replace(/-----[A-Z ]+-----/g, "").replace(/\s/g, "");
  if (/^[0-9a-fA-F]{64}$/.test(plain)) return plain.toLowerCase();
  try {
    const hex = toHex(fromBase64(plain));
    return hex.startsWith("302a300506032b6570032100") && hex.length === 88 ? hex.slice(24) : null;
  } catch {
    return null;
  }
}

async function examine(file) {
  const known = keyIn(byId("key").value);
  const bytes = new Uint8Array(await file.arrayBuffer()), rows = [], begun = performance.now();
  const along = async (record) => {
    if (rows.length < MOST_ROWS) rows.push(row(record));
    if (record.index % PAUSE === 0) {
      byId("status").textContent = `${file.name}: ${grouped(record.index)} records read …`;
      await new Promise((resume) => setTimeout(resume));
    }
  };
  const result = await verifyBundle(bytes, known, along);
  show(file.name, file.size, result, rows, (performance.now() - begun) / 1000, known !== null);
}

async function examineAll(files) {
  byId("results").replaceChildren();
  const bundles = [];
  for (const file of files) {
    const start = file.size < 1000 ? await file.text() : "";
    if (start.startsWith("-----BEGIN PUBLIC KEY-----")) byId("key").value = keyIn(start) || start;
    else bundles.push(file);
  }
  const typed = byId("key").value.trim() !== "", known = !typed || keyIn(byId("key").value) !== null;
  byId("key").setAttribute("aria-invalid", String(!known));
  if (!known) {
    byId("status").textContent = "Nothing was verified: the public key should be an audit.pub, or 64 hexadecimal digits.";
    return;
  }
  try {
    if (!(await canVerify())) throw new Error("this browser cannot check Ed25519 signatures; use a newer one");
    for (const file of bundles) {
      byId("status").textContent = `${file.name}: reading …`;
      await examine(file);
    }
    byId("status").textContent = bundles.length ? "Done." : "There is no bundle there.";
  } catch (error) {
    byId("status").textContent = `Nothing was verified: ${error.message}.`;
  }
}

async function filesIn(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader(), found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return found;
    for (const one of some) found.push(...(await filesIn(one)));
  }
}

async function isBundle(file) {
  return /^({\n"header":|-----BEGIN PUBLIC KEY)/.test(await file.slice(0, 30).text());
}

byId("ask").addEventListener("submit", (event) => event.preventDefault());
byId("file").addEventListener("change", async (event) => {
  chosen = [...event.target.files];
  event.target.value = "";  // so that the same file can be chosen again
  if (chosen.length) await examineAll(chosen);
});
byId("key").addEventListener("change", () => chosen.length && examineAll(chosen));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
document.addEventListener("dragleave", () => byId("drop").classList.remove("over"));
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  const single = entries.length === 1 && entries[0].isFile, files = [];
  for (const entry of entries) for (const file of await filesIn(entry)) if (single || (await isBundle(file))) files.push(file);
  chosen = files;
  await examineAll(files);
});
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
