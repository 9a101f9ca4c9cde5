"use strict";
// The verifier in plain JavaScript: the checks of medsilo-verify (privacy/verify/*.py), module by module, in the same
// words. It has no dependency; Ed25519 is the browser's own (WebCrypto). Nothing here opens a connection.

// ---- what does not hold ------------------------------------------------------------------------------------------

class EvidenceError extends Error {}
class UnreadableError extends EvidenceError {}
class FormError extends Error {}  // as Python's KeyError, TypeError and ValueError
class BrokenError extends EvidenceError {
  constructor(index, what, until) {
    super(what);
    this.index = index;
    this.until = until === undefined ? index : until;
  }
}

const cut = (text, most) => Array.from(String(text)).slice(0, most).join("");
const countOf = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const own = (held, name) => Object.prototype.hasOwnProperty.call(held, name);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => typeof value === "string";
const isWhole = (value) => Number.isSafeInteger(value);

function repr(value) {  // as Python shows a value
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (isText(value)) return value.includes("'") && !value.includes('"') ? `"${value}"` : `'${value.replaceAll("'", "\\'")}'`;
  return typeof value === "number" ? String(value) : JSON.stringify(value);
}

function at(held, name) {
  if (!isObject(held) || !own(held, name)) throw new FormError(`there is no ${name}`);
  return held[name];
}

// ---- bytes --------------------------------------------------------------------------------------------------------

const encoder = new TextEncoder();
const utf8 = (text) => encoder.encode(text);
const decodeText = (bytes) => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
const HEX = Array.from({ length: 256 }, (_, byte) => byte.toString(16).padStart(2, "0"));
const toHex = (bytes) => Array.from(bytes, (byte) => HEX[byte]).join("");
const fromHex = (text) => Uint8Array.from({ length: text.length / 2 }, (_, i) => parseInt(text.slice(2 * i, 2 * i + 2), 16));
const same = (left, right) => left.length === right.length && left.every((byte, i) => byte === right[i]);

function concat(...parts) {
  const found = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    found.set(part, place);
    place += part.length;
  }
  return found;
}

function fromBase64(text) {
  if (!isText(text) || text.length % 4 || !/^[A-Za-z0-9+/]*={0,2}$/.test(text)) throw new FormError("it is not base64");
  const held = atob(text), found = new Uint8Array(held.length);
  for (let i = 0; i < held.length; i++) found[i] = held.charCodeAt(i);
  return found;
}

function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
}

// SHA-256 (FIPS 180-4). WebCrypto's has to be waited for, which costs more than hashing short records does.
const PRIMES = [];
for (let n = 2; PRIMES.length < 64; n++) if (PRIMES.every((prime) => n % prime)) PRIMES.push(n);
const fraction = (value) => Math.floor((value - Math.floor(value)) * 2 ** 32) | 0;
const K = Int32Array.from(PRIMES, (prime) => fraction(Math.cbrt(prime)));
const START = Int32Array.from(PRIMES.slice(0, 8), (prime) => fraction(Math.sqrt(prime)));
const W = new Int32Array(64);

class Sha256 {
  constructor() {
    this.state = START.slice();
    this.block = new Uint8Array(64);
    this.held = 0;
    this.length = 0;
  }

  update(bytes) {
    this.length += bytes.length;
    let place = 0;
    if (this.held) {
      place = Math.min(64 - this.held, bytes.length);
      this.block.set(bytes.subarray(0, place), this.held);
      this.held += place;
      if (this.held < 64) return this;
      this.compress(this.block, 0);
      this.held = 0;
    }
    for (; place + 64 <= bytes.length; place += 64) this.compress(bytes, place);
    this.block.set(bytes.subarray(place), 0);
    this.held = bytes.length - place;
    return this;
  }

  digest() {
    const bits = this.length * 8;
    const end = new Uint8Array((this.held < 56 ? 64 : 128) - this.held);
    end[0] = 0x80;
    const view = new DataView(end.buffer);
    view.setUint32(end.length - 8, Math.floor(bits / 2 ** 32));
    view.setUint32(end.length - 4, bits >>> 0);
    this.update(end);
    const found = new DataView(new ArrayBuffer(32));
    this.state.forEach((word, i) => found.setInt32(4 * i, word));
    return new Uint8Array(found.buffer);
  }

  compress(bytes, place) {
    for (let i = 0, p = place; i < 16; i++, p += 4)
      W[i] = (bytes[p] << 24) | (bytes[p + 1] << 16) | (bytes[p + 2] << 8) | bytes[p + 3];
    for (let i = 16; i < 64; i++) {
      const x = W[i - 15], y = W[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      W[i] = (W[i - 16] + s0 + W[i - 7] + s1) | 0;
    }
    const state = this.state;
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const S1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + S1 + ((e & f) ^ (~e & g)) + K[i] + W[i]) | 0;
      const S0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (S0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t1) | 0; d = c; c = b; b = a; a = (t1 + t2) | 0;
    }
    state[0] += a; state[1] += b; state[2] += c; state[3] += d; state[4] += e; state[5] += f; state[6] += g; state[7] += h;
  }
}

const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), new Sha256()).digest();

// ---- canonical JSON (RFC 8785) ------------------------------------------------------------------------------------

function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (isObject(value))
    return `{${Object.keys(value).sort().map((name) => `${canonical(name)}:${canonical(value[name])}`).join(",")}}`;
  if (isText(value) && !value.isWellFormed()) throw new FormError("it holds half a surrogate pair");
  if (typeof value === "number" && !Number.isFinite(value)) throw new FormError("it holds a number that is none");
  if (typeof value === "number" && Math.abs(value) < 1e21 && Number.isInteger(value) && !Number.isSafeInteger(value))
    throw new FormError("it holds a number beyond 2^53");
  return JSON.stringify(value);
}

function readCanonical(bytes) {
  let text, found;
  try {
    text = decodeText(bytes);
    found = JSON.parse(text);
  } catch {
    throw new FormError("it is not JSON");
  }
  if (canonical(found) !== text) throw new FormError("it is not in canonical form (RFC 8785)");
  return found;
}

// ---- Merkle tree (RFC 6962, section 2.1) --------------------------------------------------------------------------

const EMPTY_ROOT = sha256(new Uint8Array(0));
const LEAF = Uint8Array.of(0), NODE = Uint8Array.of(1);
const nodeHash = (left, right) => sha256(NODE, left, right);

function rootOf(peaks) {
  if (!peaks.length) return EMPTY_ROOT;
  return peaks.slice(0, -1).reduceRight((root, peak) => nodeHash(peak, root), peaks[peaks.length - 1]);
}

class MerkleTree {
  constructor() {
    this.size = 0;
    this.peaks = [];
  }

  append(leaf) {
    this.appendSubtree(0, sha256(LEAF, leaf));
  }

  appendSubtree(level, root) {
    const width = 2 ** level;
    if (this.size % width) throw new FormError("a perfect subtree cannot begin there");
    const peaks = this.peaks.slice();
    for (let above = this.size / width; above % 2; above = Math.floor(above / 2)) root = nodeHash(peaks.pop(), root);
    peaks.push(root);
    this.peaks = peaks;
    this.size += width;
  }
}

function checkConsistency(first, firstRoot, second, secondRoot, proof) {  // RFC 9162, section 2.1.4.2
  if (first > second) return false;
  if (first === 0) return !proof.length && same(firstRoot, EMPTY_ROOT);
  if (first === second) return !proof.length && same(firstRoot, secondRoot);
  const half = (value) => Math.floor(value / 2);
  const path = Number.isInteger(Math.log2(first)) ? [firstRoot, ...proof] : proof.slice();
  if (!path.length) return false;
  let node = first - 1, last = second - 1;
  while (node % 2) [node, last] = [half(node), half(last)];
  let old = path[0], now = path[0];
  for (const sibling of path.slice(1)) {
    if (last === 0) return false;
    if (node % 2 || node === last) {
      [old, now] = [nodeHash(sibling, old), nodeHash(sibling, now)];
      while (node && node % 2 === 0) [node, last] = [half(node), half(last)];
    } else {
      now = nodeHash(now, sibling);
    }
    [node, last] = [half(node), half(last)];
  }
  return last === 0 && same(old, firstRoot) && same(now, secondRoot);
}

function perfectSubtrees(start, end) {
  const levels = [];
  while (start < end) {
    let level = Math.floor(Math.log2(end - start));
    if (start) {
      let low = 0;
      for (let rest = start; rest % 2 === 0; rest /= 2) low++;
      level = Math.min(level, low);
    }
    levels.push(level);
    start += 2 ** level;
  }
  return levels;
}

// ---- what is signed (signed notes, cosignatures, DSSE) ------------------------------------------------------------

const ATTESTATION = "application/vnd.medsilo.attestation+json";
const ROTATION = "application/vnd.medsilo.key-rotation+json";
const HEX16 = /^[0-9a-f]{32}$/, HEX32 = /^[0-9a-f]{64}$/;
const MOST_SIGNS = 16000, MOST_SIGNATURES = 64;
const keyId = (key) => toHex(sha256(key));
const keyHash = (name, key, kind) => sha256(utf8(name), Uint8Array.of(10, kind), key).subarray(0, 4);
const loaded = new Map();
let pending = null;  // signatures that are being checked while the reading goes on; null where each is waited for

async function holds(key, signature, data) {
  const name = toHex(key);
  if (!loaded.has(name)) loaded.set(name, crypto.subtle.importKey("raw", key, { name: "Ed25519" }, false, ["verify"]));
  if (signature.length !== 64) return false;
  const check = loaded.get(name).then((imported) => crypto.subtle.verify({ name: "Ed25519" }, imported, signature, data));
  if (pending === null) return check;
  pending.push(check.catch(() => false));
  return true;
}

function publicKey(text) {
  if (!isText(text) || !HEX32.test(text)) throw new FormError("a public key should be 64 hexadecimal digits");
  return fromHex(text);
}

const noteText = (note) => `${note.origin}\n${note.size}\n${toBase64(note.root)}\n`;

function readNote(note) {
  const fail = (why) => new EvidenceError(`the checkpoint cannot be used: ${why}`);
  if (!isText(note)) throw new FormError("a checkpoint should be text");
  const lines = note.split("\n");
  if (lines.length < 5 || lines[3]) throw fail("it does not have the three lines of a checkpoint and a signature");
  let root;
  try {
    root = fromBase64(lines[2]);
  } catch {
    throw fail("its root is not base64");
  }
  const found = { origin: lines[0], size: Number(lines[1]), root };
  if (!/^[0-9]+$/.test(lines[1])) throw fail("its size is no number");
  if (!note.startsWith(noteText(found) + "\n")) throw fail("it is not in canonical form");
  if (!isWhole(found.size) || root.length !== 32 || !found.origin)
    throw fail("it does not name a journal, its size and its root hash");
  return found;
}

function signatureLine(line) {
  const first = line.indexOf(" "), last = line.lastIndexOf(" ");
  if (line.slice(0, first) !== "—" || last <= first + 1) throw new FormError("it has a line that is no signature");
  const encoded = line.slice(last + 1), blob = fromBase64(encoded);
  if (toBase64(blob) !== encoded || blob.length < 5) throw new FormError("its signature is not in canonical base64");
  return [line.slice(first + 1, last), blob];
}

async function verifyNote(note, key) {
  const checkpoint = readNote(note), text = noteText(checkpoint), lines = note.slice(text.length + 1);
  let ours;
  try {
    if (lines.length > MOST_SIGNS || lines.split("\n").length - 1 > MOST_SIGNATURES)
      throw new FormError("it has more signatures than a note may have");
    if (!lines.endsWith("\n")) throw new FormError("it does not end with a signature");
    const found = lines.slice(0, -1).split("\n").map(signatureLine).filter(([name]) => name === checkpoint.origin);
    if (!found.length) throw new FormError(`it has no signature by ${checkpoint.origin}`);
    const name = keyHash(checkpoint.origin, key, 1);
    ours = found.map(([, blob]) => blob).filter((blob) => same(blob.subarray(0, 4), name));
    if (!ours.length) throw new FormError("it was not signed with this key");
  } catch (error) {
    if (error instanceof FormError) throw new EvidenceError(`the checkpoint cannot be used: ${error.message}`);
    throw error;
  }
  for (const blob of ours)
    if (!(await holds(key, blob.subarray(4), utf8(text))))
      throw new EvidenceError(`the checkpoint's signature does not hold for ${checkpoint.origin}`);
}

async function verifyCosignature(line, note, name, key) {
  const fail = (why) => new EvidenceError(`the cosignature of ${name} cannot be used: ${why}`);
  let found, blob;
  try {
    [found, blob] = signatureLine(line);
  } catch (error) {
    throw fail(error.message);
  }
  if (found !== name) throw fail(`it has no signature by ${name}`);
  if (!same(blob.subarray(0, 4), keyHash(name, key, 4)) || blob.length !== 76) throw fail("it was not made with this key");
  const time = new DataView(blob.buffer).getBigUint64(4), text = note.split("\n\n")[0];
  if (!(await holds(key, blob.subarray(12), utf8(`cosignature/v1\ntime ${time}\n${text}\n`))))
    throw new EvidenceError(`the cosignature of ${name} is not for this checkpoint`);
}

function payloadOf(envelope) {
  try {
    const signatures = new Map(envelope.signatures.map((one) => [at(one, "keyid"), fromBase64(at(one, "sig"))]));
    const kind = at(envelope, "payloadType"), payload = fromBase64(at(envelope, "payload"));
    const again = {
      payload: toBase64(payload),
      payloadType: kind,
      signatures: Array.from(signatures, ([keyid, sig]) => ({ keyid, sig: toBase64(sig) })),
    };
    if (isText(kind) && canonical(again) === canonical(envelope)) return { kind, payload, signatures };
  } catch {
    // it is something else
  }
  throw new EvidenceError("a signed document is not a DSSE envelope");
}

async function unseal(envelope, payloadType, key) {
  const { kind, payload, signatures } = payloadOf(envelope);
  if (kind !== payloadType) throw new EvidenceError(`the signed document is of type ${repr(kind)}, not ${repr(payloadType)}`);
  const name = utf8(kind), signature = signatures.get(keyId(key));
  const data = concat(utf8(`DSSEv1 ${name.length} `), name, utf8(` ${payload.length} `), payload);
  if (signature === undefined || !(await holds(key, signature, data)))
    throw new EvidenceError(`the signature does not hold for the audit key ${keyId(key).slice(0, 16)}…`);
  let document = null;
  try {
    document = readCanonical(payload);
  } catch {
    // said below
  }
  if (!isObject(document))
    throw new EvidenceError("the signed document is not a JSON object in canonical form (RFC 8785)");
  return document;
}

async function follow(statement, party, known) {
  const document = await unseal(statement, ROTATION, known);
  if (!isText(document.new_key) || !HEX32.test(document.new_key))
    throw new EvidenceError("the signed change of keys names no new key");
  const key = fromHex(document.new_key);
  await unseal(statement, ROTATION, key);
  if (document.party !== party) throw new EvidenceError(`the signed change of keys is not one of ${cut(party, 200)}`);
  if (own(document, "old_key") && document.old_key !== toHex(known))
    throw new EvidenceError("the signed change of keys is from another key");
  return key;
}

// ---- the stored schema (protobuf descriptors) ---------------------------------------------------------------------

const EXPOSURE = 52014;

function* protobuf(data) {
  let place = 0;
  const varint = () => {
    let value = 0;
    for (let shift = 0; place < data.length && shift < 70; shift += 7) {
      const byte = data[place++];
      value += (byte & 0x7f) * 2 ** shift;
      if (byte < 0x80) return value;
    }
    throw new FormError("a number in it is cut short");
  };
  while (place < data.length) {
    const tag = varint(), number = Math.floor(tag / 8), wire = tag % 8;
    if (wire === 0) {
      yield [number, varint()];
      continue;
    }
    if (![1, 2, 5].includes(wire)) throw new FormError("it is no protobuf message");
    const length = wire === 2 ? varint() : wire === 1 ? 8 : 4;
    if (place + length > data.length) throw new FormError("a field in it is cut short");
    yield [number, data.subarray(place, place + length)];
    place += length;
  }
}

const textOf = (value) => {
  if (!(value instanceof Uint8Array)) throw new FormError("a name in it is a number");
  return decodeText(value);
};
const bare = (name, prefix) => (name.startsWith(prefix) ? name.slice(prefix.length) : name);
const NOTHING = new Uint8Array(0);

class StoredSchema {
  constructor(stored) {
    this.names = new Map();
    this.messages = new Map();
    let files;
    try {
      files = stored.map(fromBase64);
      for (const file of files) this.read(file);
    } catch (error) {
      throw new EvidenceError(`the stored schema cannot be read: ${error.message}`);
    }
    this.sha256 = toHex(sha256(...files));
    this.known = new Map();
  }

  classes(messageType, fields) {
    const found = {};
    for (const [path, count] of Object.entries(fields)) {
      const key = `${messageType}\n${path}`;
      if (!this.known.has(key)) this.known.set(key, this.classOf(messageType, path));
      if (!isWhole(count) || count < 1)
        throw new EvidenceError(`field ${path} of ${messageType} has ${cut(repr(count), 40)} bytes`);
      const name = this.known.get(key);
      found[name] = (found[name] || 0) + count;
    }
    return found;
  }

  classOf(messageType, path) {
    const where = `field ${cut(path, 200)} of ${cut(messageType, 200)}`;
    let typeName = messageType, number = 0;
    for (const part of path.split(".")) {
      const message = this.messages.get(typeName);
      if (!message) throw new EvidenceError(`${where}: the schema has no message ${cut(typeName, 200)}`);
      if (!message.has(part))
        throw new EvidenceError(`${where} is not in the schema, so its bytes have no exposure class`);
      [typeName, number] = message.get(part);
    }
    const name = this.names.get(number);
    if (!name) throw new EvidenceError(`${where} has no exposure class that this release knows`);
    return name;
  }

  read(file) {
    const parts = [...protobuf(file)];
    const scope = parts.filter(([number]) => number === 2).map(([, value]) => textOf(value)).join("");
    for (const [number, value] of parts) {
      if (number === 4) this.add(scope, value);
      if (number === 5 && textOf(new Map(protobuf(value)).get(1) || NOTHING) === "ExposureClass")
        for (const [tag, item] of protobuf(value))
          if (tag === 2) {
            const one = new Map(protobuf(item)), name = bare(textOf(one.get(1)), "EXPOSURE_CLASS_");
            this.names.set(one.get(2) || 0, name === "UNSPECIFIED" ? "" : name);
          }
    }
  }

  add(scope, message) {
    const parts = [...protobuf(message)], name = `${scope}.${textOf(new Map(parts).get(1))}`, fields = new Map();
    this.messages.set(name, fields);
    for (const [number, value] of parts) {
      if (number === 2) {
        const field = new Map(protobuf(value)), options = new Map(protobuf(field.get(8) || NOTHING));
        fields.set(textOf(field.get(1)), [bare(textOf(field.get(6) || NOTHING), "."), options.get(EXPOSURE) || 0]);
      }
      if (number === 3) this.add(name, value);
    }
  }
}

// ---- attestations -------------------------------------------------------------------------------------------------

const MOST_CALLS = 500;
const text = (most = 2 ** 24) => (value) => isText(value) && (value.length <= most || Array.from(value).length <= most);
const whole = (least) => (value) => isWhole(value) && value >= least;
const matching = (pattern) => (value) => isText(value) && pattern.test(value);
const list = (most, each = () => true) => (value) => Array.isArray(value) && value.length <= most && value.every(each);
const ATTESTATION_FORM = {
  v: (value) => value === 1, by: text(), to: text(), exchanges: list(MOST_CALLS), checkpoint: text(MOST_SIGNS),
  consistency: isObject,
};
const LATER = {  // what may be left out
  witnessed: (value) => value === null || isObject(value), shown: list(4, isObject),
};
const EXCHANGE_FORM = {
  rpc: text(100), call_id: matching(HEX16), direction: (value) => value === "sent" || value === "received",
  messages: whole(1), length: whole(0), sha256: matching(HEX32), last_index: whole(0),
};
const CONSISTENCY_FORM = { size: whole(0), proof: list(128, matching(HEX32)) };
const WITNESSED_FORM = { size: whole(1), cosignature: text(1000) };

function checked(content, form, optional = {}) {
  if (!isObject(content)) throw new EvidenceError("an attestation cannot be used: it is not in its form");
  const wrong = Object.keys(form).filter((name) => !own(content, name) || !form[name](content[name]));
  for (const name of Object.keys(content))
    if (!own(form, name) && !(own(optional, name) && optional[name](content[name]))) wrong.push(name);
  if (wrong.length)
    throw new EvidenceError(`an attestation cannot be used: ${cut(wrong.sort()[0], 100)} is not in its form`);
  return content;
}

function readAttestation(document) {
  const held = checked(document, ATTESTATION_FORM, LATER);
  held.exchanges.forEach((one) => checked(one, EXCHANGE_FORM));
  checked(held.consistency, CONSISTENCY_FORM);
  if (held.witnessed !== undefined && held.witnessed !== null) checked(held.witnessed, WITNESSED_FORM);
  return { ...held, witnessed: held.witnessed === undefined ? null : held.witnessed };
}

// ---- receipts -----------------------------------------------------------------------------------------------------

const BEFORE_KEYS = ["Enrol", "GetPlan"], REMEMBERED_CALLS = 4 * MOST_CALLS;
const OTHER = { sent: "received", received: "sent" };
const keyOf = (callId, direction) => `${callId} ${direction}`;

class Messages {
  constructor(rpc) {
    Object.assign(this, { rpc, digests: [], length: 0, ownSize: null, attested: 0, confirmed: 0, claim: null });
  }

  sha256(count) {
    return toHex(sha256(...this.digests.slice(0, count)));
  }

  compare(item, whose) {
    const held = this.digests.length;
    if (
      item.messages > held || item.rpc !== this.rpc || this.sha256(item.messages) !== item.sha256 ||
      (item.messages === held && item.length !== this.length)
    )
      throw new EvidenceError(
        `${whose} is not for the bytes in the record: ${item.rpc}, call ${item.call_id}, ${item.messages} messages`,
      );
  }
}

class PeerReceipts {
  constructor(owner, peer) {
    Object.assign(this, { owner, peer, key: null, seen: { origin: "", size: 0, root: EMPTY_ROOT } });
    Object.assign(this, { acknowledged: 0, cosignature: "", cosignedWith: null, attestations: 0 });
    for (const name of ["notes", "open", "complete", "calls", "unlisted", "shown"]) this[name] = new Map();
    this.settled = new Set();
    this.seenSizes = new Set();
  }

  async take(record, ownKey) {
    const { direction, call_id: callId, index } = record, key = keyOf(callId, direction);
    if (!this.calls.has(callId))
      this.calls.set(callId, { rpc: record.rpc, began: direction, sent: [], answered: false, repeated: false, attested: 0 });
    const call = this.calls.get(callId);
    if (call.rpc !== record.rpc)
      throw new EvidenceError(`call ${callId} was ${call.rpc} before, and is ${record.rpc} here`);
    const document = await this.check(record, call, ownKey);
    if (!this.open.has(key)) this.open.set(key, new Messages(record.rpc));
    const messages = this.open.get(key);
    messages.digests.push(fromHex(record.sha256));
    messages.length += record.length;
    this.complete.delete(key);
    let settled = [];
    if (document !== null) settled = direction === "received" ? this.heard(document) : this.said(document);
    if (this.frames(key) !== record.frame + 1)
      throw new EvidenceError(`it is message ${record.frame} of its call, and another was due`);
    this.unlisted.delete(key);  // in the order of their last records
    this.unlisted.set(key, index);
    if (direction === "sent") {
      call.sent.push(index);
    } else if (call.began === "sent") {
      call.answered = true;
      call.repeated = call.repeated || own(record.fields, "repeated");
    }
    call.attested = this.attestations;
    if (document !== null) {
      if (direction === "sent") this.given(document, callId, call);
      else this.received(document);
    }
    settled.forEach((one) => this.settle(one));
    return document;
  }

  async outstanding() {
    if (this.cosignature)
      await verifyCosignature(this.cosignature, this.notes.get(this.acknowledged), this.seen.origin, this.cosignedWith);
    const found = { calls: 0, messages: 0, cut: 0, repeated: 0, unsigned: 0, fault: null };
    for (const [key, messages] of this.open) {
      const [callId, direction] = key.split(" "), sent = messages.digests.length, attested = messages.confirmed;
      if (attested >= sent) continue;
      if (direction === "received") {
        found.unsigned++;
        continue;
      }
      const call = this.calls.get(callId);
      found.calls++;
      found.messages += sent - attested;
      if (call.began === "received") continue;
      if (!call.answered) {
        found.cut++;
      } else if (BEFORE_KEYS.includes(messages.rpc) && call.attested === this.attestations) {
        continue;
      } else if (call.repeated && attested) {
        found.repeated++;
      } else {
        const index = call.sent[call.sent.length - sent + attested];
        if (found.fault === null || index < found.fault[0]) {
          const later = call.attested < this.attestations ? ", nor later" : "";
          const what =
            `${this.peer} has answered it (${messages.rpc}, call ${callId}) and given no receipt for it in ` +
            `the answer${later}: ${attested} of ${sent} messages are acknowledged`;
          found.fault = [index, what];
        }
      }
    }
    return found;
  }

  async check(record, call, ownKey) {
    if (record.direction === "received") this.checkClaim(record);
    const envelope = record.attestation === undefined ? null : record.attestation;
    if (envelope === null) return null;
    if (record.direction === "received") {
      if (this.key === null)
        throw new EvidenceError(`${this.peer} gives its word on journals before its audit key is known`);
      return this.checkReceived(readAttestation(await unseal(envelope, ATTESTATION, this.key)));
    }
    const document = readAttestation(await unseal(envelope, ATTESTATION, ownKey));
    for (const item of document.exchanges) {
      const messages = this.open.get(keyOf(item.call_id, item.direction));
      if (messages) messages.compare(item, "this party's own attestation");
    }
    this.checkGiven(document, record.call_id, call);
    return document;
  }

  checkClaim(record) {
    const messages = this.open.get(keyOf(record.call_id, "received")) || new Messages("");
    const held = messages.digests.length, claim = messages.claim;
    if (record.frame !== held || (claim !== null && held >= claim.messages))
      throw new EvidenceError(
        `${record.rpc} (call ${record.call_id}): message ${record.frame} came from ${this.peer}, which ` +
          `has signed for no more than ${held}`,
      );
    if (
      claim !== null && held + 1 === claim.messages &&
      toHex(sha256(...messages.digests, fromHex(record.sha256))) !== claim.sha256
    )
      throw new EvidenceError(
        `the signature of ${this.peer} is not for the bytes that came after it: ${claim.rpc}, call ` +
          `${claim.call_id}, ${claim.messages} messages`,
      );
  }

  checkReceived(document) {
    const peer = this.peer;
    if (document.by !== peer || document.to !== this.owner)
      throw new EvidenceError(`an attestation by ${document.by} to ${document.to} came from ${peer}`);
    const note = readNote(document.checkpoint);
    if (this.seen.size && note.origin !== this.seen.origin)
      throw new EvidenceError(`${peer} shows the journal ${note.origin}; it was ${this.seen.origin} before`);
    this.checkContinues(note, document.consistency);
    const witnessed = document.witnessed;
    if (witnessed !== null && !this.notes.has(witnessed.size))
      throw new EvidenceError(
        `${peer} witnesses a checkpoint over ${witnessed.size} records that it was not shown from here`,
      );
    for (const item of document.exchanges) {
      const messages = this.open.get(keyOf(item.call_id, OTHER[item.direction]));
      const held = messages ? messages.digests.length : 0;
      if (!messages) {
        if (item.direction === "received")
          throw new EvidenceError(
            `${peer} acknowledges ${item.rpc} (call ${item.call_id}), which was not sent to it by this journal`,
          );
      } else if (item.direction === "received") {
        messages.compare(item, `the receipt of ${peer}`);
      } else if (item.messages === held) {
        messages.compare(item, `the signature of ${peer}`);
      } else if (item.messages < held) {
        throw new EvidenceError(
          `${item.rpc} (call ${item.call_id}): ${held} messages came from ${peer}, which owns up to ${item.messages}`,
        );
      }
    }
    return document;
  }

  checkContinues(note, given) {
    const { seen, peer } = this;
    if (note.size < seen.size)
      throw new EvidenceError(
        `${peer} shows a journal of ${note.size} records; ${seen.size} were seen before: its past was ` +
          "rewritten or put back to an earlier state",
      );
    if (given.size !== seen.size)
      throw new EvidenceError(`${peer} proves its journal from ${given.size} records, not from ${seen.size}`);
    if (!checkConsistency(seen.size, seen.root, note.size, note.root, given.proof.map(fromHex)))
      throw new EvidenceError(
        `the journal of ${peer} with ${note.size} records does not continue the one with ${seen.size} ` +
          "that it showed before: its past was rewritten",
      );
  }

  checkGiven(document, callId, call) {
    if (document.by !== this.owner || document.to !== this.peer)
      throw new EvidenceError(`its attestation is by ${cut(document.by, 200)} to ${cut(document.to, 200)}`);
    if (document.witnessed !== null && !this.seenSizes.has(document.witnessed.size))
      throw new EvidenceError("it witnesses a checkpoint that the other side had not shown");
    const listed = new Set(document.exchanges.map((item) => keyOf(item.call_id, item.direction)));
    for (const key of listed)
      if (!this.unlisted.has(key) && !this.settled.has(key) && !this.frames(key))
        throw new EvidenceError(`its attestation speaks of call ${key.split(" ")[0]}, which is not in the journal`);
    if (document.exchanges.length >= MOST_CALLS) return;
    const size = readNote(document.checkpoint).size;
    for (const [key, index] of this.unlisted) {
      if (index >= size) break;
      const [id, direction] = key.split(" ");
      const answered = this.calls.has(id) && this.calls.get(id).answered;
      const owed = call.began === "sent" ? answered : key === keyOf(callId, "received");
      if (owed && !listed.has(key))
        throw new EvidenceError(`its attestation leaves out call ${id} (${direction}), which had ended`);
    }
  }

  said(document) {
    const size = readNote(document.checkpoint).size;
    this.notes.set(size, document.checkpoint);
    for (const item of document.exchanges) {
      const key = keyOf(item.call_id, item.direction), messages = this.open.get(key);
      if (messages && (messages.ownSize === null || messages.attested < item.messages)) {
        messages.ownSize = size;
        messages.attested = item.messages;
        this.noteComplete(key, messages);
      }
    }
    return [];
  }

  heard(document) {
    this.seen = readNote(document.checkpoint);
    for (const item of document.exchanges) {
      const key = keyOf(item.call_id, OTHER[item.direction]), messages = this.open.get(key);
      if (messages) {
        if (item.direction === "sent" && item.messages >= messages.confirmed) messages.claim = item;
        messages.confirmed = Math.max(messages.confirmed, item.messages);
        this.noteComplete(key, messages);
      }
    }
    const witnessed = document.witnessed;
    if (witnessed === null || witnessed.size < this.acknowledged) return [];
    this.acknowledged = witnessed.size;
    this.cosignature = witnessed.cosignature;
    this.cosignedWith = this.key;
    for (const size of [...this.notes.keys()]) if (size < witnessed.size) this.notes.delete(size);
    const done = [...this.complete].filter(([, size]) => size <= witnessed.size).map(([key]) => key);
    for (const key of done) {
      this.open.delete(key);
      this.complete.delete(key);
    }
    return done;
  }

  noteComplete(key, messages) {
    const held = messages.digests.length;
    if (messages.ownSize !== null && messages.attested === held && messages.confirmed === held)
      this.complete.set(key, messages.ownSize);
  }

  given(document, callId, call) {
    for (const item of document.exchanges) {
      const key = keyOf(item.call_id, item.direction);
      if (this.frames(key) === item.messages) this.unlisted.delete(key);
    }
    if (call.began === "received") {
      const size = readNote(document.checkpoint).size;
      this.shown.set(size, [...(this.shown.get(size) || []), callId]);
    }
  }

  received(document) {
    const full = document.exchanges.length >= MOST_CALLS;
    if (!full) this.attestations++;
    this.seenSizes.add(readNote(document.checkpoint).size);
    if (this.seenSizes.size > REMEMBERED_CALLS) this.seenSizes.delete(this.seenSizes.values().next().value);
    if (document.witnessed === null) return;
    const size = document.witnessed.size, calls = this.shown.get(size) || [];
    if (calls.length && !full && !calls.some((callId) => this.isOwnedTo(callId)))
      throw new EvidenceError(
        `${this.peer} has cosigned what only the answer to call ${calls[0]} showed it (${size} records), and ` +
          "does not acknowledge that answer",
      );
    for (const shown of [...this.shown.keys()]) if (shown <= size) this.shown.delete(shown);
  }

  isOwnedTo(callId) {
    const key = keyOf(callId, "sent"), messages = this.open.get(key);
    return this.settled.has(key) || (messages !== undefined && messages.confirmed > 0);
  }

  frames(key) {
    const messages = this.open.get(key);
    return messages ? messages.digests.length : 0;
  }

  settle(key) {
    this.settled.add(key);
    if (this.settled.size > REMEMBERED_CALLS) this.settled.delete(this.settled.values().next().value);
    this.unlisted.delete(key);
    const callId = key.split(" ")[0];
    if (!this.frames(keyOf(callId, "sent")) && !this.frames(keyOf(callId, "received"))) this.calls.delete(callId);
  }
}

class Receipts {
  constructor(result) {
    this.result = result;
    this.peers = new Map();
    this.foreign = new Map();
    this.left = new Set();
    this.asked = this.cosignatures = 0;
  }

  of(peer) {
    if (!isText(peer)) throw new FormError("peer should be text");
    if (!this.peers.has(peer)) this.peers.set(peer, new PeerReceipts(this.result.party, peer));
    return this.peers.get(peer);
  }

  async enrol(record) {
    if (this.foreign.has(record.peer))
      throw new BrokenError(record.index, `${record.peer} has a key, and was said to sign nothing`);
    const receipts = this.of(record.peer), key = publicKey(record.public_key);
    if (!Array.isArray(record.rotations)) throw new FormError("rotations should be a list");
    let known = receipts.key;
    for (const statement of record.rotations) known = await follow(statement, record.peer, known || NOTHING);
    if (known !== null && !same(known, key))
      throw new BrokenError(record.index, `${record.peer} has another audit key without a signed change`);
    receipts.key = key;
  }

  excuse(record) {
    const { peer, protocol } = record;
    if (!isText(peer) || !isText(protocol)) throw new FormError("peer and protocol should be text");
    if (this.peers.has(peer))
      throw new BrokenError(record.index, `it excuses ${cut(peer, 200)} from receipts, with which was exchanged before`);
    if (!this.foreign.has(peer)) this.foreign.set(peer, [protocol, 0]);
  }

  isExcused(record) {
    if (record.peer.startsWith(WITNESS_PEER)) {
      if ((record.attestation ?? null) !== null || record.frame !== 0 || record.direction !== "sent")
        throw new BrokenError(record.index, `it is not a question to the witness ${cut(record.peer, 200)}`);
      this.asked++;
      return true;
    }
    const found = this.foreign.get(record.peer);
    if (!found) return false;
    if ((record.attestation ?? null) !== null || record.frame !== 0)
      throw new BrokenError(record.index, `it is not a message to or from ${cut(record.peer, 200)}, which signs nothing`);
    found[1] += record.direction === "sent";
    return true;
  }

  cosigned(record) {
    if (!Array.isArray(record.witnesses)) throw new FormError("witnesses should be a list");
    this.cosignatures += record.witnesses.length;
  }

  withdrawn(record) {
    this.left.add(record.silo ?? record.self);
  }

  joined(record) {
    this.left.delete(record.self);
    this.left.delete(record.peer);
  }

  async conclude() {
    const result = this.result, found = new Map();
    try {
      for (const [peer, receipts] of this.peers) found.set(peer, await receipts.outstanding());
    } catch (error) {
      if (error instanceof EvidenceError) throw new BrokenError(null, error.message);
      throw error;
    }
    const all = [...found.values()], sum = (name) => all.reduce((total, item) => total + item[name], 0);
    const faults = all.map((item) => item.fault).filter((fault) => fault !== null).sort((a, b) => a[0] - b[0]);
    if (faults.length) throw new BrokenError(...faults[0]);
    const missing = sum("messages");
    result.acknowledged = result.sent - missing - [...this.foreign.values()].reduce((total, [, sent]) => total + sent, 0);
    const unanswered = Math.max(this.asked - this.cosignatures, 0);
    if (unanswered) {
      result.acknowledged -= unanswered;
      result.remarks.push(
        `Of ${countOf(this.asked, "question")} to witnesses ${unanswered} were not answered by a cosignature.`,
      );
    }
    for (const [peer, [protocol, sent]] of this.foreign)
      result.remarks.push(
        `${cut(peer, 200)} speaks ${cut(protocol, 200)} and signs no receipts: that the ${countOf(sent, "message")} to ` +
          `it arrived, and that there were no others, is the word of ${result.party} alone. This journal can be ` +
          "held against nobody else's.",
      );
    if (missing) {
      const calls = sum("calls"), cutShort = sum("cut"), repeated = sum("repeated");
      const ways = [
        ["cut or refused", cutShort],
        ["with an update that was there already", repeated],
        ["answered here, and the other side has not said that the answer arrived", calls - cutShort - repeated],
      ];
      result.remarks.push(
        `${countOf(missing, "message")} in ${countOf(calls, "call")} without a receipt, and none was due: ` +
          ways.filter(([, count]) => count).map(([way, count]) => `${countOf(count, "call")} ${way}`).join("; ") +
          ". They count as having left.",
      );
    }
    for (const [ended, ending] of [
      [false, "that comes with its next message."],
      [true, "as the consent was withdrawn, and nothing more is exchanged, that stays open."],
    ]) {
      let unsigned = 0;
      for (const [peer, item] of found)
        if (ended === (this.left.has(result.party) || this.left.has(peer))) unsigned += item.unsigned;
      if (unsigned)
        result.remarks.push(
          `The other side has not signed yet for what it sent in ${countOf(unsigned, "call")}: ${ending}`,
        );
    }
  }
}

// ---- what was allowed to leave ------------------------------------------------------------------------------------

const ALWAYS = ["PROTOCOL", "IDENTITY"], UNDER_ROSTER = ["MASKED_UPDATE", "SEALED_MODEL"];
const MODEL = ["MODEL_PARAMETERS_EXTRACTOR", "MODEL_PARAMETERS_CLASSIFIER"];
const WITNESS_PEER = "witness:", LARGEST_QUESTION = 32768;
const UPDATES = ["SubmitUpdate", "PushMessages"];
const WEAK_EPSILON = 8, WEAK_DELTA = 1e-3, MIDNIGHT = 60000;
const setOf = (values) => {
  if (!Array.isArray(values)) throw new FormError("a list was due");
  return new Set(values);
};
const sameSet = (left, right) => left.size === right.size && [...left].every((one) => right.has(one));
const named = (silos) => [...silos].sort().join(", ");

class Permissions {
  constructor() {
    Object.assign(this, { party: "", consent: null, withdrawn: false, onlyAnew: false });
    for (const name of ["plans", "rosters", "sums", "boundedSums", "roundsWith"]) this[name] = new Map();
  }

  get isSilo() {
    return /^spiffe:\/\/[^/]+\/silo\/[^/]+$/.test(this.party);
  }

  consented(record) {
    const content = record.consent, expires = at(content, "expires");
    const end = expires === null || expires === "9999-12-31" ? null : Date.parse(`${expires}T23:59:59.999Z`);
    if (Number.isNaN(end)) throw new FormError("expires should be a day");
    let trusts = null;
    if (content.trusts) trusts = at(content.trusts, "honest").split(" of ").map(Number);
    this.consent = {
      classes: setOf([...setOf(at(content, "exposures"))].flatMap((name) => (name === "MODEL_PARAMETERS" ? MODEL : name))),
      coordinator: at(content, "coordinator"),
      methods: setOf(at(content, "methods")),
      rounds: Math.trunc(Number(at(content, "rounds"))),
      totalRounds: content.total_rounds ?? null,
      trusts,
      witnesses: new Set(((content.witnesses || {}).keys || []).map((key) => WITNESS_PEER + String(key).split("+")[0])),
      lastMoment: end === null ? null : end + MIDNIGHT,
    };
    if (record.given || !this.onlyAnew) this.withdrawn = this.onlyAnew = false;
  }

  withdraw(record) {
    if (!this.isSilo) return;
    this.withdrawn = true;
    this.onlyAnew = record.cause === "withdrawn by the hospital";
  }

  joined(record) {
    const plan = record.plan, digest = record.plan_sha256;
    if (toHex(sha256(utf8(canonical(plan)))) !== digest)
      throw new EvidenceError("its plan does not have the hash that it is named by");
    const required = setOf(at(plan, "required")), privacy = plan.privacy ?? null;
    const up = new Set([...required, ...ALWAYS, ...setOf(at(plan, "optional"))]);
    const down = new Set([...ALWAYS, ...setOf(at(plan, "downlink"))]);
    const rounds = at(plan, "rounds");
    const bounded = privacy !== null && Number(at(privacy, "epsilon")) <= WEAK_EPSILON && Number(at(privacy, "delta")) <= WEAK_DELTA;
    if (!this.plans.has(digest)) this.plans.set(digest, { up, down, rounds, bounded, lastRound: -1, roundsBegun: 0 });
    if (!this.isSilo) return;
    const consent = this.consent;
    if (consent === null || this.withdrawn)
      throw new EvidenceError(`run ${record.run} was joined without a consent that is in force`);
    const method = at(at(plan, "method"), "name");
    const weights = (plan.model ?? {}).weights ?? null;
    const fromHospitals = weights !== null && weights.public !== true && weights.brought !== true;
    const needed = fromHospitals ? [...required, "PEER_INITIAL_MODEL"] : [...required];
    if (!consent.methods.has(method) || !needed.every((name) => consent.classes.has(name)))
      throw new EvidenceError(`run ${record.run} (method ${method}) was joined, and the consent does not hold it`);
    const honest = privacy === null ? null : privacy.honest ?? null;
    if (honest !== null) {
      const of = at(at(plan, "secure_aggregation"), "minimum"), trusts = consent.trusts;
      if (trusts === null || !(trusts[1] <= of && trusts[0] >= honest))
        throw new EvidenceError(
          `run ${record.run}, whose noise is shared out, relies on ${honest} of ${of} hospitals to be honest, ` +
            "and the consent trusts in no such thing",
        );
    }
  }

  masked(record) {
    const silos = setOf(record.silos), place = `${record.plan_sha256} ${record.round}`;
    const away = ": the difference of the two sums gives single updates away";
    const remembered = (map, key) => {
      if (!map.has(key)) map.set(key, silos);
      return map.get(key);
    };
    const before = remembered(this.rosters, place);
    if (!sameSet(before, silos))
      throw new EvidenceError(`round ${record.round} was masked for ${named(silos)}, and before for ${named(before)}${away}`);
    const received = record.received_sha256 ?? null, plan = this.plans.get(record.plan_sha256 ?? "");
    if (received === null || !plan) return;
    const models = "an update from the same models", found = [[this.sums.get(received), models]];
    if (plan.bounded) {
      remembered(this.boundedSums, received);
    } else {
      remembered(this.sums, received);
      found.push([this.boundedSums.get(received), models]);
      found.push([remembered(this.sums, `run ${record.run}`), "a round of the run"]);
    }
    for (const [earlier, what] of found.reverse())
      if (earlier && !sameSet(earlier, silos))
        throw new EvidenceError(
          `round ${record.round} of run ${record.run} was masked for ${named(silos)}, and ${what} for ${named(earlier)}${away}`,
        );
  }

  check(record, classes, whole) {
    if (record.peer.startsWith(WITNESS_PEER)) {
      this.checkWitness(record, classes, whole);
      return;
    }
    const telling = classes.filter((name) => !ALWAYS.includes(name));
    const plan = this.plans.get(record.plan_sha256 ?? "");
    if (this.isSilo) {
      this.checkConsent(record, classes, telling, whole);
      if (plan) this.countRound(record, plan);
      if (telling.some((name) => UNDER_ROSTER.includes(name)) && whole && !this.rosters.has(`${record.plan_sha256} ${record.round}`))
        throw new EvidenceError("a masked update left, and no roster is on record that it was masked for");
    }
    if (!telling.length) return;
    if (!plan) {
      if (whole && this.isSilo) throw new EvidenceError(`${telling.join(", ")} left, for no run that was joined`);
      return;
    }
    const extra = telling.filter((name) => !(this.isSilo ? plan.up : plan.down).has(name));
    if (extra.length) throw new EvidenceError(`${extra.join(", ")} left, which the run's plan does not announce`);
  }

  checkConsent(record, classes, telling, whole) {
    const consent = this.consent;
    if (this.withdrawn && telling.length)
      throw new EvidenceError(`${telling.join(", ")} left after the consent was withdrawn`);
    if (consent === null) {
      if (whole) throw new EvidenceError("it left before there was a consent");
      return;
    }
    const farewell = record.rpc === "Withdraw" || (this.withdrawn && record.rpc === "Attest");
    if (farewell && !telling.length) return;
    const extra = classes.filter((name) => !consent.classes.has(name));
    if (extra.length) throw new EvidenceError(`${extra.join(", ")} left without consent`);
    if (record.peer !== consent.coordinator)
      throw new EvidenceError(`it left for ${record.peer}; the consent is for ${repr(consent.coordinator).replace(/^'|'$/g, "")}`);
    if (consent.lastMoment !== null && Date.parse(record.time) > consent.lastMoment)
      throw new EvidenceError("it left after the consent had expired");
  }

  checkWitness(record, classes, whole) {
    const consent = this.consent, whom = cut(record.peer, 200);
    if (classes.join() !== "CHECKPOINT" || record.length > LARGEST_QUESTION)
      throw new EvidenceError(`what left for ${whom} is not a checkpoint and its proof`);
    if (!this.isSilo || (consent === null && !whole)) return;
    if (consent === null || this.withdrawn)
      throw new EvidenceError(`a checkpoint left for ${whom} without a consent that is in force`);
    if (!consent.witnesses.has(record.peer) || !consent.classes.has("CHECKPOINT"))
      throw new EvidenceError(`a checkpoint left for ${whom}, and the consent does not hold that`);
    if (consent.lastMoment !== null && Date.parse(record.time) > consent.lastMoment)
      throw new EvidenceError("it left after the consent had expired");
  }

  countRound(record, plan) {
    const number = record.round;
    if (!UPDATES.includes(record.rpc) || number === null || number <= plan.lastRound) return;
    if (plan.rounds !== null && number >= plan.rounds) return;
    plan.lastRound = number;
    plan.roundsBegun++;
    const consent = this.consent;
    if (consent !== null && plan.roundsBegun > consent.rounds)
      throw new EvidenceError(
        `updates of ${plan.roundsBegun} rounds left; the consent holds ${consent.rounds} rounds of a run`,
      );
    const taken = (this.roundsWith.get(record.peer) || 0) + 1, total = consent === null ? null : consent.totalRounds;
    this.roundsWith.set(record.peer, taken);
    if (total !== null && taken > total)
      throw new EvidenceError(`updates of ${taken} rounds left; the consent holds ${total} rounds of all runs together`);
  }
}

// ---- the signed tree ----------------------------------------------------------------------------------------------

const REMEMBERED = 8192;

function originOf(party) {
  const [scheme, rest] = [party.split("://")[0], party.split("://").slice(1).join("://")];
  return scheme === "spiffe" ? `medsilo/${rest}` : "";
}

class SignedTree {
  constructor(result) {
    Object.assign(this, { result, records: new MerkleTree(), index: null, keys: [], peaks: [] });
    Object.assign(this, { oldestRoot: 0, confirmed: 0, origin: "", segment: [0, new Sha256()] });
  }

  get size() {
    return this.records.size;
  }

  begin(header) {
    for (const part of header.before) this.records.appendSubtree(part.level, fromHex(part.root));
    this.oldestRoot = header.first + 1;
    if (header.public_key !== null) this.keys.push([0, fromHex(header.public_key)]);
  }

  append(line) {
    this.records.append(line);
    this.remember();
  }

  taken(line) {
    this.segment[1].update(line).update(Uint8Array.of(10));
  }

  async endBundle(header) {
    for (const part of header.behind) this.records.appendSubtree(part.level, fromHex(part.root));
    this.remember();
    this.origin = this.origin || originOf(header.party) || header.origin;
    const checkpoint = readNote(header.checkpoint);
    if (header.origin !== this.origin || checkpoint.size !== header.size)
      throw new BrokenError(null, "the checkpoint in its header is not the one over its records");
    await this.checkNote(header.checkpoint, checkpoint);
    this.result.signed = checkpoint.size;
    this.result.root = toHex(checkpoint.root);
  }

  beginKeys(record) {
    if (this.index !== 0) throw new BrokenError(this.index, "it names the journal's first key a second time, or too late");
    const origin = record.origin;
    if (!isText(origin) || !["", origin].includes(originOf(this.result.party)))
      throw new BrokenError(this.index, `it names the journal ${cut(repr(origin), 200)}, which is not one of its owner`);
    this.origin = origin;
    this.keys.push([0, publicKey(record.public_key)]);
  }

  async rotate(record) {
    if (!this.keys.length) throw new BrokenError(this.index, "a key is changed before there is one");
    const key = publicKey(record.public_key), known = this.keys[this.keys.length - 1][1];
    if (!same(await follow(record.statement, record.self, known), key))
      throw new BrokenError(this.index, "the signed change of keys is for another key");
    this.keys.push([record.index + 2, key]);
  }

  async takeSegment(record) {
    const [first, digest] = this.segment;
    this.segment = [this.size - 1, new Sha256()];
    const checkpoint = readNote(record.checkpoint);
    if (record.first + record.records !== record.index || checkpoint.size !== record.index)
      throw new BrokenError(this.index, "it does not join the segment before it");
    if (!this.result.whole) return;
    await this.checkNote(record.checkpoint, checkpoint);
    if (record.first !== first || record.sha256 !== toHex(digest.digest()))
      throw new BrokenError(this.index, "it names another segment than the one that stands before it");
  }

  async checkShown(note) {
    const checkpoint = readNote(note);
    if (checkpoint.size > this.size)
      throw new BrokenError(this.index, `its checkpoint is over ${checkpoint.size} records, which stand behind it`);
    if (this.result.whole) await this.checkNote(note, checkpoint);
    else if (checkpoint.size >= this.oldestRoot) this.checkRoot(checkpoint);
  }

  remember() {
    this.peaks[this.size % REMEMBERED] = this.records.peaks;
  }

  async checkNote(note, checkpoint) {
    await verifyNote(note, this.keyFor(checkpoint.size));
    this.checkRoot(checkpoint);
  }

  checkRoot(checkpoint) {
    const size = checkpoint.size;
    if (this.origin && checkpoint.origin !== this.origin)
      throw new BrokenError(this.index, `a checkpoint of ${checkpoint.origin} stands in the journal ${this.origin}`);
    if (size && !(Math.max(this.oldestRoot, this.size - REMEMBERED + 1) <= size && size <= this.size))
      throw new BrokenError(this.index, `the checkpoint over ${size} records is out of its place`);
    if (!same(checkpoint.root, size ? rootOf(this.peaks[size % REMEMBERED]) : EMPTY_ROOT)) {
      const before = this.confirmed;
      throw new BrokenError(before, `one of the records ${before} to ${size - 1} is not the one that was signed`, size - 1);
    }
    this.confirmed = Math.max(this.confirmed, size);
  }

  keyFor(size) {
    const found = this.keys.filter(([first]) => first <= size);
    if (!found.length) throw new BrokenError(this.index, "the journal does not begin with its public key");
    return found[found.length - 1][1];
  }
}

// ---- the bundle's file --------------------------------------------------------------------------------------------

const number = (least) => (value) => isWhole(value) && value >= least;
const subtrees = (most) =>
  list(most, (part) => isObject(part) && Object.keys(part).length === 2 && isWhole(part.level) && part.level >= 0 &&
    part.level <= 62 && isText(part.root) && HEX32.test(part.root));
const HEADER_FORM = {
  v: (value) => value === 1, party: isText, federation: isText, origin: isText, size: number(1), first: number(0),
  count: number(1), before: subtrees(64), behind: subtrees(128), checkpoint: isText,
  public_key: (value) => value === null || (isText(value) && HEX32.test(value)),
  schemas: (value) => Array.isArray(value) && value.every((files) => Array.isArray(files) && files.every(isText)),
};

function openBundle(bytes) {
  let place = 0;
  const starts = (line, prefix) => same(line.subarray(0, prefix.length), utf8(prefix));
  const line = () => {
    const end = bytes.indexOf(10, place);
    if (end < 0 || end - place >= 16 * 2 ** 20) throw new UnreadableError("is cut off, or has a line that is too long");
    const found = bytes.subarray(place, end);
    place = end + 1;
    return found;
  };
  const expect = (what, complaint) => {
    if (!same(line(), utf8(what))) throw new UnreadableError(complaint);
  };
  expect("{", "does not begin as a bundle");
  const content = line(), length = content.length;
  if (!starts(content, '"header":{') || content[length - 1] !== 44 || content[length - 2] !== 125)
    throw new UnreadableError("has no header");
  let header;
  try {
    header = readCanonical(content.subarray(9, length - 1));
  } catch {
    throw new UnreadableError("its header is not as `audit export` writes it");
  }
  const wrong = Object.keys(HEADER_FORM).filter((name) => !own(header, name) || !HEADER_FORM[name](header[name]));
  if (wrong.length || Object.keys(header).length !== Object.keys(HEADER_FORM).length)
    throw new UnreadableError(`header.${wrong[0] || "it"} is not in its form`);
  header.whole = header.first === 0 && header.count === header.size;
  function* lines() {
    expect('"records":[', "has no records");
    for (let more = true; more; ) {
      const record = line();
      more = record[record.length - 1] === 44;
      yield more ? record.subarray(0, -1) : record;
    }
    expect("]}", "does not end as a bundle");
    if (place < bytes.length) throw new UnreadableError("does not end as a bundle");
  }
  return { header, lines: lines() };
}

function checkHeader(header) {
  const end = header.first + header.count;
  const levels = (parts) => parts.map((part) => part.level).join();
  if (
    end > header.size || levels(header.before) !== perfectSubtrees(0, header.first).join() ||
    levels(header.behind) !== perfectSubtrees(end, header.size).join()
  )
    throw new FormError("its parts do not make up the journal");
  if (header.whole !== (header.public_key === null) || (header.whole && header.schemas.length))
    throw new FormError("a range names its key and schemas, a whole journal has them in its records");
}

// ---- reading it all -----------------------------------------------------------------------------------------------

const MOST_REMARKS = 5;
const OF_WHOLE = ["run", "key", "key-rotation", "peer-key", "foreign-peer", "void"];
const TIME = /^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$/;

class Reader {
  constructor(header, lines, result, along) {
    Object.assign(this, { header, lines, result, along, backwards: 0 });
    this.tree = new SignedTree(result);
    this.receipts = new Receipts(result);
    this.permissions = new Permissions();
    this.schemas = new Map();
    this.unused = new Set();
    this.unknown = new Set();
  }

  async read(key) {
    const result = this.result;
    try {
      await this.readAll();
      if (key && !same(this.tree.keys[this.tree.keys.length - 1][1], key))
        throw new BrokenError(
          null,
          `it is signed with the audit key ${result.key.slice(0, 16)}…, not with ${keyId(key).slice(0, 16)}…, the one that ` +
            "was given",
        );
    } catch (error) {
      if (!(error instanceof BrokenError)) throw error;
      Object.assign(result, { problem: error.message, index: error.index, until: error.until });
    }
  }

  async readAll() {
    const { header, result, tree } = this;
    try {
      this.begin();
      tree.begin(header);
      for (const line of this.lines) {
        tree.index = tree.size;
        const record = this.parse(line, tree.index);
        tree.append(line);
        await this.take(record);
        result.records++;
        tree.taken(line);
        if (this.along) await this.along(record);
      }
      tree.index = null;
      await this.end();
    } catch (error) {
      if (error instanceof BrokenError || error instanceof UnreadableError) throw error;
      if (error instanceof EvidenceError) throw new BrokenError(tree.index, error.message);
      throw new BrokenError(tree.index, `it is not in the form of a record (${cut(error.message, 200)})`);
    }
    if (!result.records) throw new BrokenError(null, "it holds no record");
    if (!result.signed) throw new BrokenError(null, "none of it is signed, so it proves nothing yet");
    result.key = keyId(tree.keys[tree.keys.length - 1][1]);
    await this.conclude();
  }

  begin() {
    const { header, result } = this;
    result.whole = header.whole;
    try {
      checkHeader(header);
      for (const files of header.schemas) {
        const schema = new StoredSchema(files);
        this.schemas.set(schema.sha256, schema);
      }
      const names = [...this.schemas.keys()];
      if (names.length < header.schemas.length || names.join() !== names.slice().sort().join())
        throw new FormError("its schemas are not in order");
      this.unused = new Set(names);
    } catch (error) {
      throw new BrokenError(null, `the header does not hold together: ${error.message}`);
    }
    if (!header.whole)
      result.remarks.push(
        `It is a range: records ${header.first} to ${header.first + header.count - 1} of ${header.size}. ` +
          "Receipts, and changes of keys, are checked in a bundle of the whole journal. The key is the one that " +
          "the range names: hold it against the owner's audit.pub (--key).",
      );
  }

  async end() {
    const { header, result, tree } = this, size = tree.size;
    if (size !== header.first + header.count)
      throw new BrokenError(null, `it announces ${header.count} records and holds ${size - header.first}`);
    if (header.party !== result.party || header.federation !== result.federation)
      throw new BrokenError(
        null,
        `its header names ${header.party} in ${header.federation}, its records ${result.party} in ${result.federation}`,
      );
    await tree.endBundle(header);
    if (this.unused.size) throw new BrokenError(null, "its header holds a schema that no record of the range uses");
  }

  parse(line, place) {
    const held = readCanonical(line), result = this.result;
    if (!isObject(held)) throw new FormError("it is not a JSON object");
    const index = at(held, "index"), time = at(held, "time"), version = at(held, "v");
    if (!isWhole(index) || index !== place) throw new BrokenError(place, `it calls itself record ${cut(repr(index), 40)}`);
    if (version !== 1)
      throw new BrokenError(place, `its form is version ${cut(repr(version), 40)}, which this release does not know`);
    const { self: party, federation, kind } = held;
    if (!isText(party) || !isText(federation) || !isText(kind)) throw new FormError("self, federation and kind should be text");
    if (!isText(time) || !TIME.test(time))
      throw new BrokenError(place, `its time ${cut(repr(time), 40)} is not in the form 2026-01-31T12:00:00.000Z`);
    if (result.last_time === null) {
      Object.assign(result, { party, federation, first_time: time });
      this.permissions.party = party;
    } else if (party !== result.party || federation !== result.federation) {
      throw new BrokenError(
        place,
        `it is a record of ${cut(party, 200)} in ${cut(federation, 200)}, in a journal of ${cut(result.party, 200)} in ` +
          `${cut(result.federation, 200)}`,
      );
    } else if (time < result.last_time) {
      this.backwards = this.backwards || place;
    }
    result.last_time = time;
    result.kinds[kind] = (result.kinds[kind] || 0) + 1;
    return held;
  }

  async take(record) {
    const kind = record.kind;
    if (kind === "message") {
      await this.takeMessage(record);
    } else if (kind === "refusal") {
      if (!isText(record.reason)) throw new FormError("a refusal's reason should be text");
      this.result.refused++;
    } else if (kind === "consent") {
      this.permissions.consented(record);
    } else if (kind === "withdrawal") {
      this.permissions.withdraw(record);
      this.receipts.withdrawn(record);
    } else if (kind === "roster") {
      this.permissions.masked(record);
    } else if (kind === "schema") {
      if (!Array.isArray(record.files)) throw new FormError("files should be a list");
      const schema = new StoredSchema(record.files);
      if (schema.sha256 !== record.schema_sha256)
        throw new BrokenError(record.index, "the stored schema does not have the hash that it is named by");
      this.schemas.set(schema.sha256, schema);
    } else if (kind === "segment") {
      await this.tree.takeSegment(record);
    } else if (kind === "cosigned") {
      await this.tree.checkShown(record.checkpoint);
      this.receipts.cosigned(record);
    } else if (["approval", "ledger", "mix", "egress"].includes(kind)) {
      // what they say, `audit verify` checks
    } else if (!OF_WHOLE.includes(kind)) {
      if (this.unknown.size < MOST_REMARKS) this.unknown.add(cut(kind, 40));
    } else if (this.result.whole) {
      if (kind === "run") this.permissions.joined(record);
      else if (kind === "key") this.tree.beginKeys(record);
      else if (kind === "key-rotation") await this.tree.rotate(record);
      else if (kind === "peer-key") await this.receipts.enrol(record);
      else if (kind === "foreign-peer") this.receipts.excuse(record);
    }
  }

  async takeMessage(record) {
    checkForm(record);
    const { result, tree } = this, sent = record.direction === "sent";
    const classes = this.attribute(record);
    if (sent) {
      this.permissions.check(record, Object.keys(classes), result.whole);
      for (const [name, count] of Object.entries(classes)) result.left[name] = (result.left[name] || 0) + count;
    }
    if (record.rpc === "Join") this.receipts.joined(record);
    result.sent += sent;
    result.received += !sent;
    if (!result.whole) {
      if ((record.attestation ?? null) !== null) readAttestation(readCanonical(payloadOf(record.attestation).payload));
      return;
    }
    if (this.receipts.isExcused(record)) return;
    const document = await this.receipts.of(record.peer).take(record, tree.keyFor(tree.size));
    if (sent && document !== null) tree.checkRoot(readNote(document.checkpoint));
  }

  attribute(record) {
    const name = record.schema_sha256, schema = this.schemas.get(name);
    if (!schema) throw new BrokenError(record.index, `its schema ${name.slice(0, 16)}… is not in the journal`);
    this.unused.delete(name);
    const classes = schema.classes(record.message_type, record.fields);
    const missing = record.length - Object.values(classes).reduce((sum, count) => sum + count, 0);
    if (missing) throw new BrokenError(record.index, `${missing} of its ${record.length} bytes are unaccounted for`);
    if (canonical(record.classes) !== canonical(classes))
      throw new BrokenError(record.index, "its exposure classes are not those of its fields");
    return classes;
  }

  async conclude() {
    const result = this.result;
    if (this.backwards)
      result.remarks.push(`The clock went back at record ${this.backwards}: its time is before the last one.`);
    if (this.unknown.size)
      result.remarks.push(
        `Of kinds that this release does not know (${[...this.unknown].sort().join(", ")}) only place and ` +
          "signature were checked.",
      );
    if (result.whole) await this.receipts.conclude();
  }
}

function checkForm(held) {
  const need = (name, good, what) => {
    if (!good(at(held, name))) throw new FormError(what);
  };
  need("direction", (value) => value === "sent" || value === "received", "a message is sent or received");
  for (const [name, pattern] of [["call_id", HEX16], ["sha256", HEX32], ["schema_sha256", HEX32]])
    need(name, matching(pattern), `${name} should be ${pattern === HEX16 ? 32 : 64} hexadecimal digits`);
  for (const name of ["frame", "length"]) need(name, whole(0), `${name} should be a whole number`);
  for (const name of ["rpc", "peer", "message_type"]) need(name, isText, `${name} should be text`);
  for (const name of ["plan_sha256", "run"]) need(name, (value) => value === null || isText(value), `${name} should be text or null`);
  need("round", (value) => value === null || isWhole(value), "round should be a whole number or null");
  for (const name of ["fields", "classes"]) need(name, isObject, `${name} should be an object`);
}

// Whether the browser checks Ed25519: RFC 8032, section 7.1, test 2, and the same with another message.
async function canVerify() {
  const key = fromHex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
  const signature = fromHex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da" +
      "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
  );
  try {
    return (await holds(key, signature, Uint8Array.of(0x72))) && !(await holds(key, signature, Uint8Array.of(0x73)));
  } catch {
    return false;
  }
}

// Verifies a bundle's bytes; `key`: the owner's public audit key in hexadecimal digits, if it is known; `along` is given
// each record as it is read; it may be read twice.
async function verifyBundle(bytes, key = null, along = null) {
  // At first the reading waits for no signature. If anything at all does not hold then, that counts for nothing: all is
  // read again with every check in its place, so that what is found first is what stands first.
  let found = null;
  pending = [];
  try {
    found = await readBundle(bytes, key, along);
    if (!(await Promise.all(pending)).every(Boolean) || found.problem || found.unreadable) found = null;
  } catch {
    found = null;
  } finally {
    pending = null;
  }
  return found || readBundle(bytes, key, along);
}

async function readBundle(bytes, key, along) {
  const result = {
    party: "", federation: "", key: "", records: 0, signed: 0, whole: true, root: "", first_time: null, last_time: null,
    sent: 0, received: 0, refused: 0, acknowledged: 0, left: {}, kinds: {}, remarks: [], problem: "", index: null,
    until: null, unreadable: "",
  };
  try {
    const { header, lines } = openBundle(bytes);
    await new Reader(header, lines, result, along).read(key === null ? null : fromHex(key));
  } catch (error) {
    if (!(error instanceof UnreadableError)) throw error;
    result.unreadable = error.message;
  }
  return result;
}
