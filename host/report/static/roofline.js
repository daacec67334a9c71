// The arithmetic of host/seconds.py, for scenarios of one's own. The tables and the picture are there without this.
(function () {
  const held = document.getElementById("roofline-facts");
  if (!held) return;
  const facts = JSON.parse(held.textContent), N = facts.numbers, L = facts.limits, P = facts.picture;
  const get = (name) => document.getElementById("roofline-" + name);

  // What host.seconds.layer does, in its order of operations.
  const parts = (ask) => {
    const model = facts.models[ask.model], board = { ...facts.boards[ask.board] };
    const shape = { ...model, experts: ask.experts ?? model.experts, used: ask.used ?? model.used };
    const changed = shape.experts !== model.experts || shape.used !== model.used;
    const unions = changed ? null : model.unions;
    if (ask.clock !== undefined) board.clock = ask.clock;
    const find = (name) => (name === "uart" ? board.uart : facts.homes[name]);
    const home = { ...find(ask.home) };
    if (ask.bandwidth !== undefined) home.bandwidth = ask.bandwidth;
    return { model, shape, unions, board, home, link: home.kind === "link" ? home : find(board.own[0]) };
  };
  const layer = (ask) => {
    const { shape, unions, board, home, link } = parts(ask);
    const blocks = Math.floor((3 * shape.width * shape.expert_width) / N.block_weights);
    const expertBytes = blocks * N.block_bytes, bus = N.block_bytes / board.link_bytes;
    const union = (batch) => unions?.[batch] ?? shape.experts * (1 - (1 - shape.used / shape.experts) ** batch);
    const passes = (batch) => {
      if (board.lanes === 1) return batch * shape.used;
      const whole = Math.floor(batch / board.lanes), left = batch % board.lanes;
      return whole * union(board.lanes) + (left ? union(left) : 0);
    };
    const rest = (batch) => ((batch * facts.rest * shape.width) / N.granite_width) * Math.max(1, shape.used / N.granite_used);
    const cyclesOf = (batch) => {
      const wanted = union(batch);
      let cycles = blocks * Math.max(N.sub_blocks * passes(batch), bus * wanted);
      if (ask.mode === "tape") cycles += blocks * bus * (shape.experts - wanted);
      return cycles + rest(batch);
    };
    const vectorBytes = (batch) => {
      const load = Math.floor(shape.width / N.block_weights) * (N.header_bytes + 2 * N.block_weights);
      const routes = N.header_bytes + 8 * batch * shape.used, output = N.header_bytes + 8 * shape.width;
      return N.header_bytes + 48 + routes + batch * (load + output) + N.header_bytes;
    };
    const sizes = Array(Math.floor(ask.batch / board.max_batch)).fill(board.max_batch);
    if (ask.batch % board.max_batch) sizes.push(ask.batch % board.max_batch);
    const share = facts.shares[home.share] ?? 1, bandwidth = home.bandwidth * share;
    const total = { union: 0, bytes: 0, cycles: 0, transfer: 0, compute: 0, vectors: 0, both: 0, vectorBytes: 0, passes: 0, rest: 0 };
    for (const size of sizes) {
      const wanted = union(size), bytes = (ask.mode === "selected" ? wanted : shape.experts) * expertBytes;
      const cycles = cyclesOf(size), transfer = bytes / bandwidth, compute = board.clock ? cycles / board.clock : 0;
      total.union += wanted; total.bytes += bytes; total.cycles += cycles; total.transfer += transfer; total.compute += compute;
      total.vectors += vectorBytes(size) / link.bandwidth; total.both += Math.max(transfer, compute);
      total.vectorBytes += vectorBytes(size); total.passes += passes(size); total.rest += rest(size);
    }
    const waits = sizes.length * (home.kind === "link" ? 2 : 1), trips = waits * (link.latency ?? 0);
    const atLeast = total.both + total.vectors + trips, known = Boolean(board.clock);
    const named = [[home.kind, total.transfer], ["multipliers", total.compute], ["vectors", total.vectors], ["round trips", trips]];
    const binds = named.reduce((best, each) => (each[1] > best[1] ? each : best))[0];
    const own = board.own.includes(ask.home), bank = shape.layers * shape.experts * expertBytes;
    const fits = !(own && home.kind === "memory" && board.memory_bytes > 0 && board.memory_bytes < bank);
    const atMost = ask.batch / (shape.layers * atLeast);
    return {
      ...total, trips, waits, blocks, share, bandwidth, sizes, atLeast, atMost, fits, own, bank,
      compute: known ? total.compute : null, seconds: known ? atLeast : null,
      rate: known && fits ? atMost : null, binds: known && fits ? binds : null,
    };
  };

  // The page against host/seconds.py: every scenario of the grid.
  const near = (one, other) => one === other || Math.abs(one - other) <= 1e-9 * Math.max(Math.abs(one), Math.abs(other));
  const wrong = facts.grid.filter((row) => {
    const got = layer(row);
    return !(near(got.atLeast, row.at_least) && near(got.bytes, row.bytes) && near(got.cycles, row.cycles)
      && (row.compute === null ? got.compute === null : near(got.compute, row.compute))
      && (row.rate === null ? got.rate === null : near(got.rate, row.rate)) && got.binds === row.binds);
  });
  const check = get("check");
  check.textContent = `This page's arithmetic equals host/seconds.py's in ${facts.grid.length - wrong.length} of ${facts.grid.length} scenarios.`;
  check.dataset.wrong = String(wrong.length);
  if (wrong.length) check.classList.add("missing");
  report.roofline = layer; // for whoever wants to ask in the console, and for the tests

  const short = (value) => {
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e4) return Math.round(value).toLocaleString("en-US");
    return Math.abs(value) >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(3);
  };
  const rateText = (rate) => {
    const rounded = Number(rate.toPrecision(3));
    return rounded.toFixed(Math.max(0, 2 - Math.floor(Math.log10(rounded))));
  };
  const tag = (element, provenance) => {
    const word = provenance.split(/[: ]/)[0];
    const mark = document.createElement("span"), sign = document.createElement("span");
    mark.className = "tag " + word;
    mark.title = provenance;
    sign.setAttribute("aria-hidden", "true");
    sign.textContent = facts.marks[word];
    mark.append(sign, " " + word);
    element.replaceChildren(mark);
  };

  // The slider of the bandwidth is logarithmic.
  const [low, high] = L.mbs.map(Math.log10);
  const megabytes = (step) => Number((10 ** (low + ((high - low) * step) / 1000)).toPrecision(3));
  const stepOf = (mbs) => Math.round(((Math.log10(mbs) - low) / (high - low)) * 1000);

  // The scenario: what is undefined is as the board, its link or the model has it.
  const choices = { model: facts.models, board: facts.boards, home: { uart: 1, ...facts.homes }, mode: { selected: 1, tape: 1 } };
  const numbers = {
    batch: [1, L.batch, 1], bandwidth: [L.mbs[0], L.mbs[1], 0], clock: [L.mhz[0], L.mhz[1], 0], experts: [1, L.experts, 1], used: [1, L.used, 1],
  };
  const units = { bandwidth: 1e6, clock: 1e6 };
  const keys = { bandwidth: "mbs", clock: "mhz", used: "k" };
  let ask = { ...facts.first };

  const toHash = () => {
    const words = new URLSearchParams();
    for (const name of [...Object.keys(choices), ...Object.keys(numbers)]) {
      if (ask[name] !== undefined) words.set(keys[name] ?? name, String(ask[name] / (units[name] ?? 1) || ask[name]));
    }
    return "#roofline?" + words;
  };
  const fromHash = () => {
    if (!location.hash.startsWith("#roofline?")) return null;
    const words = new URLSearchParams(location.hash.slice("#roofline?".length)), found = { ...facts.first }, bad = [];
    for (const [name, known] of Object.entries(choices)) {
      if (!words.has(name)) continue;
      if (Object.hasOwn(known, words.get(name))) found[name] = words.get(name); else bad.push(`${name}=${words.get(name)}`);
    }
    if (words.has("board") && !words.has("home")) found.home = facts.boards[found.board].own[0];
    for (const [name, [least, most, whole]] of Object.entries(numbers)) {
      const key = keys[name] ?? name, text = words.get(key), value = Number(text);
      if (text === null) continue;
      if (text !== "" && value >= least && value <= most && (!whole || Number.isInteger(value))) found[name] = value * (units[name] ?? 1);
      else bad.push(`${key}=${text}`);
    }
    const shape = facts.models[found.model];
    if ((found.used ?? shape.used) > (found.experts ?? shape.experts)) {
      bad.push(`k=${found.used ?? shape.used} of ${found.experts ?? shape.experts} experts`);
      delete found.used; delete found.experts;
    }
    return { found, bad };
  };

  const place = (mbs, rate) => {
    const [bottom, top] = P.rates.map(Math.log10), inside = Math.min(Math.max(Math.log10(rate), bottom), top);
    return [
      P.left + ((Math.log10(mbs) - low) / (high - low)) * (P.width - P.left - P.right),
      P.top + ((top - inside) / (top - bottom)) * (P.height - P.top - P.bottom),
    ];
  };
  const path = (scenario) => {
    const points = [];
    for (let number = 0; number < P.points; number++) {
      const mbs = 10 ** (low + ((high - low) * number) / (P.points - 1));
      points.push(place(mbs, layer({ ...scenario, bandwidth: mbs * 1e6 }).atMost).map((each) => each.toFixed(1)).join(" "));
    }
    return "M" + points.join("L");
  };
  const make = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const draw = (now) => {
    for (const batch of [1, 16]) get("line-" + batch).setAttribute("d", path({ ...ask, batch }));
    get("line").setAttribute("d", path(ask));
    // Names of batches where the lines end, joined where they would overlap.
    const groups = [];
    for (const batch of [...new Set([1, ask.batch, 16])].sort((a, b) => a - b)) {
      const y = place(L.mbs[1], layer({ ...ask, batch, bandwidth: L.mbs[1] * 1e6 }).atMost)[1], group = groups.at(-1);
      if (group && Math.abs(group.y - y) < 11) group.names.push(batch); else groups.push({ y, names: [batch] });
    }
    const end = P.width - P.right;
    const labels = groups.map((group) => make("text", { x: end, y: (group.y - 6).toFixed(1), class: "tick name", "text-anchor": "end" }, "batch " + group.names.join(", ")));
    const dots = [], taken = { link: [], memory: [] };
    for (const name of [...P.named].sort((a, b) => (b === ask.home) - (a === ask.home))) {
      const scenario = { ...ask, home: name };
      delete scenario.bandwidth;
      const { home } = parts(scenario), [x, y] = place(home.bandwidth / 1e6, layer(scenario).atMost);
      const dot = make("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 3.5, class: "home" });
      dot.append(make("title", {}, name));
      dots.push(dot);
      if (taken[home.kind].some((other) => Math.abs(other - x) < P.room)) continue;
      taken[home.kind].push(x);
      const [turn, down] = home.kind === "link" ? [-38, -8] : [38, 12]; // links above their rings, memories below
      dots.push(make("text", { class: "tick name", transform: `translate(${(x + 2).toFixed(1)} ${(y + down).toFixed(1)}) rotate(${turn})` }, name));
    }
    get("homes").replaceChildren(...dots);
    get("labels").replaceChildren(...labels);
    const [x, y] = place(parts(ask).home.bandwidth / 1e6, now.atMost);
    get("dot").setAttribute("cx", x.toFixed(1));
    get("dot").setAttribute("cy", y.toFixed(1));
    get("d").textContent = `${said(now)} The line rises with the bandwidth and levels off where something else binds.`;
  };
  const said = (now) => {
    const { shape, board } = parts(ask), who = `${ask.board}, ${ask.home}, batch ${ask.batch}`;
    if (!now.fits) return `${who}: ${short(now.bank)} B of experts do not fit the board's ${short(board.memory_bytes)} B.`;
    if (now.rate === null) return `${who}: unknown, for nobody knows the clock yet; the transfer alone allows no more than ${rateText(now.atMost)} tokens/s.`;
    const more = now.rate < 1 ? ` (${short(ask.batch / now.rate)} s for ${ask.batch > 1 ? "the batch" : "a token"})` : "";
    const set = [["bandwidth", "bandwidth"], ["clock", "clock"], ["experts", "experts a layer"], ["used", "experts a token"]].filter(([name]) => ask[name] !== undefined);
    const assumed = set.length ? ` Assumed, as set here: ${set.map((each) => each[1]).join(", ")}.` : "";
    const not = now.own ? "" : " The board does not have it: what if it had.";
    return `${who}: ${rateText(now.rate)} tokens/s${more}; the ${now.binds} ${now.binds === "link" || now.binds === "memory" ? "binds" : "bind"}.${not}${assumed}`;
  };
  const equation = (now) => {
    const { shape, board, home, link } = parts(ask);
    const runs = now.sizes.length > 1 ? `${now.sizes.length} runs: ` : "";
    const bus = N.block_bytes / board.link_bytes, clock = board.clock ? short(board.clock) + " Hz" : "unknown clock";
    const passing = ask.mode === "selected" ? now.union : shape.experts * now.sizes.length;
    const texts = {
      bytes: `${runs}${N.block_bytes} × ${short(now.blocks)} × ${short(passing)}`,
      transfer: `${short(now.bytes)} / (${short(home.bandwidth)} × ${short(now.share)})`,
      cycles: `${runs}${short(now.blocks)} × max(${N.sub_blocks} × ${short(now.passes)}, ${short(bus)} × ${short(now.union)})` + (ask.mode === "tape" ? ` + ${short(bus)} × ${short(now.blocks)} × ${short(passing - now.union)}` : "") + ` + ${short(now.rest)}`,
      compute: `${short(now.cycles)} / ${clock}`,
      vectors: `${short(now.vectorBytes)} / ${short(link.bandwidth)}`,
      trips: link.latency === null ? `${now.waits} × unknown, taken as 0` : `${now.waits} × ${short(link.latency)}`,
      seconds: `max(${short(now.transfer)}, ${now.compute === null ? "unknown" : short(now.compute)}) + ${short(now.vectors)} + ${short(now.trips)}`,
      rate: now.seconds === null ? "" : `${ask.batch} / (${shape.layers} × ${short(now.seconds)})`,
    };
    const values = { bytes: [now.bytes, "B"], transfer: [now.transfer, "s"], cycles: [now.cycles, "cycles"], compute: [now.compute, "s"], vectors: [now.vectors, "s"], trips: [now.trips, "s"], seconds: [now.seconds, "s"], rate: [now.rate, "tokens/s"] };
    for (const [name, [value, unit]] of Object.entries(values)) {
      const cell = get(name + "-value");
      get("with-" + name).textContent = texts[name];
      cell.textContent = value === null ? (name === "rate" && !now.fits ? "does not fit" : "unknown") : `${short(value)} ${unit}`;
      if (value === null) delete cell.dataset.value; else cell.dataset.value = String(value);
    }
    get("scenario").textContent = `${ask.board}, ${ask.home}, ${shape.name}, ${ask.mode}, batch ${ask.batch}; ${short(home.bandwidth / 1e6)} MB/s, clock ${board.clock ? short(board.clock / 1e6) + " MHz" : "unknown"}`;
  };
  const table = () => {
    for (const cell of document.querySelectorAll("#roofline .rate")) {
      const { board, home, batch } = cell.dataset;
      const found = layer({ model: ask.model, mode: ask.mode, board, home, batch: Number(batch) });
      const [text, binds] = !found.fits ? ["does not fit", ""] : found.rate === null ? ["< " + rateText(found.atMost), "clock unknown"] : [rateText(found.rate), found.binds];
      const small = document.createElement("small");
      small.textContent = binds;
      cell.replaceChildren(text, small);
    }
    const which = `${facts.models[ask.model].name}, ${ask.mode === "selected" ? "selected experts" : "all experts as tape"}`;
    const [own, other] = document.querySelectorAll("#roofline .roof-table caption");
    own.textContent = `Tokens a second and what binds: ${which}, each board with its own links`;
    other.textContent = `Tokens a second and what would bind: ${which}`;
  };
  const fields = () => {
    const { model, shape, board, home, unions } = parts(ask);
    for (const name of Object.keys(choices)) get(name).value = ask[name];
    for (const option of get("home").options) option.textContent = option.value + (board.own.includes(option.value) ? "" : " (not on this board)");
    const fill = (name, value, text, provenance) => {
      get(name).value = String(value);
      get(name).setAttribute("aria-valuetext", text);
      get(name + "-out").textContent = text;
      tag(get(name + "-tag"), provenance);
    };
    const set = "assumed: set here";
    fill("mbs", stepOf(home.bandwidth / 1e6), short(home.bandwidth / 1e6) + " MB/s", ask.bandwidth === undefined ? home.provenance : set);
    const small = [shape.width, shape.expert_width, shape.experts].some((need, n) => need > board.limits[n]);
    const lent = `assumed: the clock of a build that is too small for this model; that was ${board.clock_provenance}`;
    fill("mhz", board.clock ? board.clock / 1e6 : L.mhz[0], board.clock ? short(board.clock / 1e6) + " MHz" : "unknown", ask.clock !== undefined ? set : board.clock && small ? lent : board.clock_provenance);
    const measured = ask.batch <= board.max_batch ? unions && unions[ask.batch] !== undefined : unions && unions[board.max_batch] !== undefined && (!(ask.batch % board.max_batch) || unions[ask.batch % board.max_batch] !== undefined);
    fill("batch", ask.batch, `${ask.batch}: ${short(layer(ask).union)} experts fetched`, measured ? model.unions_provenance : "derived: E (1 - (1 - k/E)^B), experts chosen uniformly and independently; no routes of this batch");
    get("used").max = String(Math.min(L.used, shape.experts));
    fill("experts", shape.experts, String(shape.experts), ask.experts === undefined ? "reported: the model's published configuration" : set);
    fill("used", shape.used, String(shape.used), ask.used === undefined ? "reported: the model's published configuration" : set);
  };
  let before = "";
  const show = (bad = []) => {
    const now = layer(ask);
    fields();
    draw(now);
    equation(now);
    if (before !== ask.model + ask.mode) table();
    before = ask.model + ask.mode;
    get("said").textContent = (bad.length ? `Not understood and left out: ${bad.join(", ")}. ` : "") + said(now);
    get("link").href = toHash();
  };
  const keep = () => {
    try { history.replaceState(null, "", toHash()); } catch (error) { /* the link is there all the same */ }
  };
  const change = (name, value) => {
    ask = { ...ask, [name]: value };
    if (name === "board") { ask.home = facts.boards[value].own[0]; delete ask.bandwidth; delete ask.clock; }
    if (name === "home") delete ask.bandwidth;
    if (name === "model") { delete ask.experts; delete ask.used; }
    const { shape } = parts(ask);
    if (shape.used > shape.experts) ask.used = shape.experts;
    show();
    keep();
  };
  for (const name of Object.keys(choices)) get(name).addEventListener("change", (event) => change(name, event.target.value));
  const slide = (id, name, value) => get(id).addEventListener("input", (event) => change(name, value(Number(event.target.value))));
  slide("mbs", "bandwidth", (step) => megabytes(step) * 1e6);
  slide("mhz", "clock", (mhz) => mhz * 1e6);
  slide("batch", "batch", (batch) => batch);
  slide("experts", "experts", (experts) => experts);
  slide("used", "used", (used) => used);
  get("reset").addEventListener("click", () => {
    ask = { board: ask.board, home: ask.home, model: ask.model, mode: ask.mode, batch: ask.batch };
    show();
    keep();
  });
  const follow = () => {
    const asked = fromHash();
    if (!asked) return false;
    ask = asked.found;
    show(asked.bad);
    document.getElementById("roofline").scrollIntoView({ behavior: "instant" });
    return true;
  };
  window.addEventListener("hashchange", follow);
  if (!follow()) show();
})();
