'use strict';
// What try.html computes, in a worker: a network that draws what one types, and names what one
// draws. The first part says what nano.py says, by the same names and in the same order, with what
// model.py adds for pictures: the latent is a grid of patches, and reads the bag of the words, too.
//
// A tensor is a Float32Array, row by row; "(B, S, C)" behind a line says of which shape.
// Letters: B rows, L tokens, N patches of D numbers, K tokens of the latent, S = K + L, C width of
// a stream, V vocabulary.

// ---- the network: two streams that meet in one attention (an MMDiT)

// x (n, columns) times the transposed weight (rows, columns), plus the bias: (n, rows). Four rows
// of the weight lie side by side while all of x goes by, two rows at a time. Nearly all time is
// here.
function linear(x, {weight, bias}) {
  const {rows, columns, numbers} = weight, n = x.length / columns, last = rows - 1;
  const y = new Float32Array(n * rows), four = new Float64Array(4 * columns);
  for (let j = 0; j < rows; j += 4) {
    // at the end the last row may come again
    const j1 = Math.min(j + 1, last), j2 = Math.min(j + 2, last), j3 = Math.min(j + 3, last);
    for (let m = 0; m < 4 * columns; m++) {
      four[m] = numbers[Math.min(j + (m & 3), last) * columns + (m >> 2)];
    }
    for (let i = 0; i < n; i += 2) {
      const i1 = Math.min(i + 1, n - 1), x0 = i * columns, x1 = i1 * columns;
      let s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0;
      for (let k = 0, m = 0; k < columns; k++, m += 4) {
        const a = x[x0 + k], b = x[x1 + k];
        const c = four[m], d = four[m + 1], e = four[m + 2], f = four[m + 3];
        s00 += a * c; s01 += a * d; s02 += a * e; s03 += a * f;
        s10 += b * c; s11 += b * d; s12 += b * e; s13 += b * f;
      }
      const y0 = i * rows, y1 = i1 * rows;
      y[y0 + j] = s00; y[y0 + j1] = s01; y[y0 + j2] = s02; y[y0 + j3] = s03;
      y[y1 + j] = s10; y[y1 + j1] = s11; y[y1 + j2] = s12; y[y1 + j3] = s13;
    }
  }
  return bias ? y.map((value, i) => value + bias[i % rows]) : y;
}

// Row i of a table (n, width).
function rowOf(x, i, width) { return x.subarray(i * width, (i + 1) * width); }

// x (n, the sum of sizes) as tensors (n, size), one for each size.
function split(x, sizes) {
  const width = sizes.reduce((sum, size) => sum + size, 0), n = x.length / width;
  let first = 0;
  return sizes.map((size) => {
    const part = new Float32Array(n * size);
    for (let i = 0; i < n; i++) {
      part.set(rowOf(x, i, width).subarray(first, first + size), i * size);
    }
    first += size;
    return part;
  });
}

// The way back, for two: a (B, ...) and b (B, ...), row by row one behind the other.
function cat(a, b, B) {
  const x = new Float32Array(a.length + b.length), m = a.length / B, n = b.length / B;
  for (let i = 0; i < B; i++) {
    x.set(rowOf(a, i, m), i * (m + n));
    x.set(rowOf(b, i, n), i * (m + n) + m);
  }
  return x;
}

// A layer norm whose gain and bias come from the clocks: x (B, S, C), shift and scale (B, C).
function modulate(x, shift, scale, C) {
  const y = new Float32Array(x.length), S = x.length / shift.length;
  for (let i = 0; i < x.length; i += C) {
    let mean = 0, variance = 0;
    for (let c = 0; c < C; c++) { mean += x[i + c] / C; }
    for (let c = 0; c < C; c++) { variance += (x[i + c] - mean) ** 2 / C; }
    const factor = 1 / Math.sqrt(variance + 1e-5), of = Math.floor(i / C / S) * C;
    for (let c = 0; c < C; c++) {
      y[i + c] = (x[i + c] - mean) * factor * (1 + scale[of + c]) + shift[of + c];
    }
  }
  return y;
}

// x + gate * change: x and change (B, S, C), gate (B, C).
function gated(x, gate, change, C) {
  const y = new Float32Array(x.length), S = x.length / gate.length;
  for (let i = 0; i < x.length; i++) {
    y[i] = x[i] + gate[Math.floor(i / C / S) * C + i % C] * change[i];
  }
  return y;
}

// Each head's row of x (B, S, heads, size) has the mean square 1, and then the gain (size,).
function normOfHeads(x, gain) {
  const y = new Float32Array(x.length), size = gain.length;
  for (let i = 0; i < x.length; i += size) {
    let square = 0;
    for (let c = 0; c < size; c++) { square += x[i + c] ** 2 / size; }
    const factor = 1 / Math.sqrt(square + 2 ** -23);
    for (let c = 0; c < size; c++) { y[i + c] = x[i + c] * factor * gain[c]; }
  }
  return y;
}

function silu(x) { return x.map((value) => value / (1 + Math.exp(-value))); }

// A clock (B,) as sines and cosines of many frequencies, (B, 256), and then as a vector (B, C).
function clockEmbedding(t, {up, down}) {
  const sinusoids = new Float32Array(256 * t.length).map((_, i) => {
    const angle = 1000 * t[i >> 8] * 10000 ** -(i % 128 / 128);
    return i % 256 < 128 ? Math.cos(angle) : Math.sin(angle);
  });
  return linear(silu(linear(sinusoids, up)), down);
}

// Rotary positions: each pair of channels of x (B, L, heads, size) turns with the position, at its
// own speed.
function rotate(x, L, heads, size) {
  const y = new Float32Array(x.length), half = size / 2;
  for (let i = 0; i < L * heads * half; i++) {
    const l = Math.floor(i / half / heads), angle = l * 10000 ** -(i % half / half);
    const cos = Math.cos(angle), sin = Math.sin(angle);
    for (let j = Math.floor(i / half) * size + i % half; j < x.length; j += L * heads * size) {
      y[j] = x[j] * cos - x[j + half] * sin;
      y[j + half] = x[j] * sin + x[j + half] * cos;
    }
  }
  return y;
}

function softmax(x) {
  const most = x.reduce((a, b) => Math.max(a, b)), y = x.slice();
  let total = 0;
  for (let i = 0; i < x.length; i++) { total += y[i] = Math.exp(x[i] - most); }
  for (let i = 0; i < x.length; i++) { y[i] /= total; }
  return y;
}

// softmax(q k' / sqrt(size)) v over (B, S, heads, size). In causal rows a position sees the K
// tokens of the latent, which come first, and what is not after it.
function attention(q, k, v, B, heads, size, K, isCausal) {
  const S = q.length / B / heads / size, y = new Float32Array(q.length);
  const [ofQ, ofK, ofV] = [0, 0, 0].map(() => new Float32Array(S * size));
  for (let head = 0; head < B * heads; head++) {
    // of one head of one row: (S, size), and v the other way round
    const first = Math.floor(head / heads) * S * heads * size + head % heads * size;
    for (let s = 0; s < S; s++) {
      for (let c = 0, at = first + s * heads * size; c < size; c++, at++) {
        ofQ[s * size + c] = q[at] / Math.sqrt(size);
        ofK[s * size + c] = k[at];
        ofV[c * S + s] = v[at];
      }
    }
    const p = linear(ofQ, {weight: {rows: S, columns: size, numbers: ofK}});       // (S, S)
    for (let s = 0; s < S; s++) {
      const row = rowOf(p, s, S);
      if (isCausal) { row.fill(-Infinity, Math.max(K, s + 1)); }
      row.set(softmax(row));
    }
    const found = linear(p, {weight: {rows: size, columns: S, numbers: ofV}});
    for (let s = 0; s < S; s++) { y.set(rowOf(found, s, size), first + s * heads * size); }
  }
  return y;
}

// One modality's half of a block: all but the attention. C: its width.
class Stream {
  constructor(weights, C) { Object.assign(this, weights, {C}); }

  // Queries, keys and values of x (B, S, C), and what `finish` needs of the modulation. shared: six
  // tensors (B, C), the modulation of all blocks, to which each adds its own table.
  begin(x, shared) {
    const {C} = this, table = this.scale_shift_table.numbers;
    const [shift, scale, ...rest] = shared.map(
      (part, i) => part.map((value, j) => value + table[i * C + j % C]));
    const qkv = linear(modulate(x, shift, scale, C), this.qkv);
    const [q, k, v] = split(qkv, Array(3).fill(this.qkv.weight.rows / 3));
    return [normOfHeads(q, this.q_gain), normOfHeads(k, this.k_gain), v, rest];
  }

  // Adds to x what the attention has found, and then an MLP of it.
  finish(x, attended, [gate, mlpShift, mlpScale, mlpGate]) {
    x = gated(x, gate, linear(attended, this.out), this.C);
    const hidden = linear(modulate(x, mlpShift, mlpScale, this.C), this.up);
    for (let i = 0; i < hidden.length; i++) { hidden[i] = Math.max(hidden[i], 0) ** 2; }
    return gated(x, mlpGate, linear(hidden, this.down), this.C);
  }
}

class Network {
  constructor(config, weights) {
    Object.assign(this, weights, {config});
    this.text = weights.blocks.map((block) => new Stream(block.text, config.width));
    this.latent = weights.blocks.map((block) => new Stream(block.latent, config.latent_width));
  }

  // A weighted sum of the tokens' rows, of each text: ids (B, L) -> (B, N D). The weights are in
  // proportion to exp(score), and their squares add up to 1.
  bagOf(x) {
    const width = this.bag_values.weight.columns, bag = new Float32Array(x.length * width);
    x.forEach((ids, row) => {
      const shares = softmax(ids.map((id) => this.bag_scores.weight.numbers[id]));
      const length = Math.hypot(...shares);
      ids.forEach((id, l) => {
        rowOf(this.bag_values.weight.numbers, id, width).forEach((value, i) => {
          bag[row * width + i] += shares[l] / length * value;
        });
      });
    });
    return bag;
  }

  // Ids x (B, L), patches z (B, N, D), clocks (B,) -> logits (B, L, V), and the prediction of the
  // latent, (B, N, D). If isCausal, a position sees the latent and what is before it.
  forward(x, z, tText, tLatent, isCausal = false) {
    const {vocab_size: V, latent_dim: D, latent_width: latentWidth, heads, width} = this.config;
    const {rows: K, numbers: place} = this.latent_pos_emb;
    const B = x.length, L = x[0].length, size = width / heads;

    // both clocks, as one vector, modulate both streams
    const clock = clockEmbedding(tLatent, this.latent_clock);
    const textClock = this.text_clock ? clockEmbedding(tText, this.text_clock) : [];
    const condition = silu(clock.map(
      (value, i) => value + (textClock[i] || 0) + this.bias[i % width]));        // (B, C)
    const ofText = split(linear(condition, this.text_modulation), Array(8).fill(width));
    const sizes = [...Array(8).fill(latentWidth), this.config.bag ? D : 0];
    const ofLatent = split(linear(condition, this.latent_modulation), sizes);

    // input i is token i - 1, MASK first, and output i predicts token i
    let text = new Float32Array(B * L * width);                                  // (B, L, C)
    x.map((ids) => [V, ...ids.slice(0, -1)]).flat().forEach((id, i) => {
      text.set(rowOf(this.embed.weight.numbers, id, width), i * width);
    });

    // each patch becomes latent_tokens tokens, which know their place. They read the bag, but where
    // a text is written: it would say its words
    let latent = linear(z, this.latent_in);                                      // (B, K, C)
    const bag = this.config.bag ? this.bagOf(x) : null;                          // (B, N D)
    const read = bag && !isCausal ? linear(bag, this.bag_in) : [];
    latent = latent.map(
      (value, i) => value + (read[i] || 0) + place[i % place.length]);

    // the blocks: one attention over both, and then each stream goes on by itself
    this.text.forEach((onText, i) => {
      const onLatent = this.latent[i];
      const [q, k, v, textRest] = onText.begin(text, ofText.slice(0, 6));
      const [qZ, kZ, vZ, latentRest] = onLatent.begin(latent, ofLatent.slice(0, 6));
      const attended = attention(
        cat(qZ, rotate(q, L, heads, size), B), cat(kZ, rotate(k, L, heads, size), B),
        cat(vZ, v, B), B, heads, size, K, isCausal);                             // (B, S, C)
      const [toLatent, toText] = split(attended, [K * width, L * width]);
      text = onText.finish(text, toText, textRest);
      latent = onLatent.finish(latent, toLatent, latentRest);
    });

    // the heads; the latent's adds the bag, by a gate that the clocks set
    const [shift, scale] = ofText.slice(6);
    const [shiftZ, scaleZ, bagGate] = ofLatent.slice(6);
    const logits = linear(modulate(text, shift, scale, width), this.text_head);
    const found = linear(modulate(latent, shiftZ, scaleZ, latentWidth), this.latent_head);
    return [logits, bag ? gated(found, bagGate.map((gate) => 1 + gate), bag, D) : found];
  }
}

// ---- the run: what sampling/try_page.py writes into the page

let run, network;

function start(given) {
  run = given;
  network = new Network(run.config, unpacked(run.weights));
}

function bytesOf(base64) {
  const text = atob(base64);
  return new Uint8Array(text.length).map((_, i) => text.charCodeAt(i));
}

// The weights by their names, one inside the other: blocks[0].text.qkv.weight. A matrix has 8 bits
// a number, and a scale for each row.
function unpacked({shapes, floats, bytes}) {
  const allFloats = new Float32Array(bytesOf(floats).buffer);
  const allBytes = new Int8Array(bytesOf(bytes).buffer);
  const weights = {blocks: []};
  let float = 0, byte = 0;
  for (const [name, [rows, columns]] of Object.entries(shapes)) {
    const vector = allFloats.subarray(float, float += rows);
    let value = vector;
    if (columns) {
      const matrix = allBytes.subarray(byte, byte += rows * columns);
      const numbers = new Float32Array(matrix);
      numbers.forEach((x, i) => { numbers[i] = x * vector[Math.floor(i / columns)]; });
      value = {rows, columns, numbers};
    }
    const path = name.split('.'), last = path.pop();
    path.reduce((inside, part) => inside[part] = inside[part] || {}, weights)[last] = value;
  }
  return weights;
}

// ---- a text and its ids: byte-level BPE, as in corpora/tokenizers.py

const WORD = new RegExp("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+" +
  '| ?[^\\p{White_Space}\\p{L}\\p{N}]+' +
  '|\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+', 'gu');
const LONGEST_PIECE = 252;                                 // bytes that are joined at most

function encode(text) {
  const {idOfByte, merges} = run.tokenizer;
  const rank = new Map(merges.map(([a, b], i) => [a + ' ' + b, i]));
  return (text.match(WORD) || []).flatMap((word) => {
    const ids = [...new TextEncoder().encode(word)].map((byte) => idOfByte[byte]);
    const pieces = [];
    while (ids.length) { pieces.push(joined(ids.splice(0, LONGEST_PIECE), rank)); }
    return pieces.flat();
  });
}

// Of all neighbours that may be joined, those come first that were joined first in the fitting.
function joined(ids, rank) {
  for (;;) {
    let best = Infinity, at = 0;
    for (let i = 0; i + 1 < ids.length; i++) {
      const found = rank.get(ids[i] + ' ' + ids[i + 1]);
      if (found < best) { best = found; at = i; }
    }
    if (best === Infinity) { return ids; }
    ids.splice(at, 2, run.tokenizer.merges[best][2]);
  }
}

function decode(ids) {
  const {idOfByte, merges} = run.tokenizer, bytes = new Map(idOfByte.map((id, i) => [id, [i]]));
  merges.forEach(([a, b, id]) => { bytes.set(id, [...bytes.get(a), ...bytes.get(b)]); });
  return new TextDecoder().decode(Uint8Array.from(ids.flatMap((id) => bytes.get(id) || [])));
}

// The ids of a text as the network reads them, (L,): an EOS after the text, and then PAD.
function pack(text) {
  const {eos, pad} = run.tokenizer, L = run.config.seq_len, ids = encode(text);
  if (ids.length >= L) {
    throw new Error(`This name has ${ids.length} tokens. The network reads at most ${L - 1}.`);
  }
  return [...ids, eos, ...Array(L).fill(pad)].slice(0, L);
}

// ---- patches and pixels

// What stands where: f(place in the latents, its dimension d, place in the RGBA pixels) for each
// number of a latent.
function eachNumber(f) {
  const {image_size: side, patch, channels} = run.image, D = run.config.latent_dim;
  for (let y = 0; y < side; y++) {
    for (let x = 0; x < side; x++) {
      const n = Math.floor(y / patch) * (side / patch) + Math.floor(x / patch);
      for (let c = 0; c < channels; c++) {
        const d = (y % patch * patch + x % patch) * channels + c;
        f(n * D + d, d, (y * side + x) * 4 + c);
      }
    }
  }
}

// Latents (N, D) as RGBA pixels: 1 is white, -1 is black.
function pixelsOf(z) {
  const {mean, std, live} = run.stats, {image_size: side, channels} = run.image;
  const pixels = new Uint8ClampedArray(side * side * 4).fill(255);
  eachNumber((i, d, at) => {
    const value = (z[i] * live[d] * std[d] + mean[d] + 1) * 127.5;
    pixels.fill(value, at, channels === 1 ? at + 3 : at + 1);
  });
  return pixels;
}

function latentsOf(pixels) {
  const {mean, std, live} = run.stats;
  const z = new Float32Array(network.config.n_latents * network.config.latent_dim);
  eachNumber((i, d, at) => {
    z[i] = (pixels[at] / 127.5 - 1 - mean[d]) / std[d] * live[d];
  });
  return z;
}

// ---- drawing: from noise, by the solver dpmpp_2m

// n normal numbers of a seed, each of two uniform ones (Box and Muller).
function normals(n, seed) {
  function uniform() {                                     // mulberry32
    seed = seed + 0x6D2B79F5 | 0;
    let x = Math.imul(seed ^ seed >>> 15, seed | 1);
    x ^= x + Math.imul(x ^ x >>> 7, x | 61);
    return ((x ^ x >>> 14) >>> 0) / 2 ** 32;
  }
  return new Float32Array(n).map(() =>
    Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
}

// From texts x (n, L) and noise z (n, N, D) at clock 1 to clean latents at clock 0. After each call
// of the network it yields {t, z, clean}: the clock, z at this clock, and what the network thinks
// clean; and at last t = 0.
function* solve(x, z) {
  const {schedule, guidance: g} = run.latent, n = x.length;
  const live = z.map((_, i) => run.stats.live[i % run.stats.live.length]);
  const nothing = x.map((ids) => ids.map(() => run.config.vocab_size));
  let clean, cleanBefore, h, hBefore;
  z = z.map((value, i) => value * live[i]);

  for (let k = 0; k + 1 < schedule.length; k++) {
    // with the texts, and with every token MASK, whose clock is 1; guidance mixes both
    const [t, alpha, sigma, a, b] = schedule[k], [, alphaNext, sigmaNext] = schedule[k + 1];
    const tText = [...Array(n).fill(0), ...Array(n).fill(1)], tLatent = Array(2 * n).fill(t);
    const [, both] = network.forward([...x, ...nothing], cat(z, z, 1), tText, tLatent);
    const out = z.map((_, i) => g * both[i] + (1 - g) * both[z.length + i]);

    // z = alpha clean + sigma e, and the network has said out = a clean + b e
    cleanBefore = clean;
    clean = z.map(
      (value, i) => (b * value - sigma * out[i]) / (alpha * b - sigma * a) * live[i]);
    yield {t, z, clean};

    // second order: the change from step to step goes on
    const expMinusH = alpha * sigmaNext / (alphaNext * sigma);
    hBefore = h;
    h = -Math.log(expMinusH);
    const more = cleanBefore && sigmaNext > 0 ? 0.5 * h / hBefore : 0;
    z = z.map((value, i) => {
      const ahead = more ? clean[i] + more * (clean[i] - cleanBefore[i]) : clean[i];
      return sigmaNext / sigma * value - alphaNext * (expMinusH - 1) * ahead;
    });
  }
  yield {t: 0, z, clean};
}

function* drawing({text, seed}) {
  const {n_latents, latent_dim} = run.config;
  for (const {t, z, clean} of solve([pack(text)], normals(n_latents * latent_dim, seed))) {
    yield {t, now: pixelsOf(z), clean: pixelsOf(clean)};
  }
}

// ---- naming: token by token, from left to right

// After each token it yields what is likely there, the likeliest first: [[text, probability]].
function* naming({pixels}) {
  const {eos, pad} = run.tokenizer, {seq_len: L, vocab_size: V} = run.config;
  const z = latentsOf(pixels), ids = [];
  while (ids.length < L && ids[ids.length - 1] !== eos) {
    const [logits] = network.forward([[...ids, V]], z, [0], [0], true);
    const last = Array.from(logits.subarray(ids.length * V));
    last[pad] = -Infinity;                                 // PAD was never learned
    const p = softmax(last), order = p.map((_, i) => i).sort((i, j) => p[j] - p[i]).slice(0, 4);
    ids.push(order[0]);
    yield {
      text: decode(ids),
      isFirst: ids.length === 1,
      likely: order.map((i) => [i === eos ? 'end' : decode([i]), p[i]]),
    };
  }
}

// ---- the messages of the page: a later one ends what an earlier one asked for

const TASKS = {draw: drawing, name: naming};
let newest = 0;

onmessage = async function ({data}) {
  const mine = ++newest;
  try {
    for (const found of TASKS[data.task](data)) {
      postMessage({job: data.job, ...found});
      await new Promise((done) => setTimeout(done));       // lets a later message in
      if (mine !== newest) { return; }
    }
  } catch (error) {
    postMessage({job: data.job, error: error.message});
  }
};
