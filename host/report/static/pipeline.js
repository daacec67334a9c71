// The pipeline's cycles, one at a time. The pictures are there without this.
(function () {
  const get = (name) => document.getElementById("pipeline-" + name);
  const slider = get("at");
  if (!slider) return;
  const { cycles, blocks } = report.data("pipeline");
  const all = get("all"), seen = get("seen"), here = get("here"), cursor = get("cursor"), now = get("now"), play = get("play");
  const left = Number(all.dataset.left), scale = Number(all.dataset.scale);
  const cell = Number(seen.dataset.cell), shown = Number(seen.dataset.shown), height = seen.getAttribute("height");
  const stages = { fetch: "Fetch", align: "Align", drain: "Drain", mac: "Decode and MAC", sum: "Block sum", row: "Row" };
  const verbs = {
    fetch: "16 bytes arrive for", align: "a word goes into the buffer,", drain: "a word is dropped,",
    mac: "16 weights are decoded and multiplied,", sum: "the sum leaves,", row: "the row leaves after",
  };
  let at = Number(slider.value), timer = 0;

  const said = (row) => {
    const parts = [];
    for (const [stage, title] of Object.entries(stages)) {
      const state = row[stage];
      if (state === "idle") continue;
      const block = blocks[row[stage + "_block"]], part = row[stage + "_of"] > 1 ? ` (${row[stage + "_part"]} of ${row[stage + "_of"]})` : "";
      const name = `${block.kind} block ${block.block} of expert ${block.expert}${part}`;
      parts.push(`${title}: ${state === "waits" ? "waits with" : verbs[stage]} ${name}.`);
    }
    return [`Cycle ${row.cycle}.`, ...(parts.length ? parts : ["Nothing moves."])].join("\n"); // a line for each
  };
  const show = (cycle) => {
    at = Math.max(0, Math.min(cycles.length - 1, cycle));
    slider.value = String(at);
    get("cycle").textContent = String(at);
    const text = said(cycles[at]);
    slider.setAttribute("aria-valuetext", text);
    now.textContent = text;
    const first = Math.max(0, Math.min(cycles.length - shown, at - shown / 2));
    seen.setAttribute("viewBox", `${first * cell} 0 ${shown * cell} ${height}`);
    here.setAttribute("x", String(at * cell));
    cursor.setAttribute("x", String(left + at * scale));
    const held = all.parentElement, x = ((left + at * scale) * all.clientWidth) / all.viewBox.baseVal.width;
    if (x < held.scrollLeft || x > held.scrollLeft + held.clientWidth) held.scrollLeft = x - held.clientWidth / 2;
    get("close-t").textContent = `Close-up of cycles ${first} to ${first + shown - 1}, each stage with its block and transfer`;
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ Play";
    play.setAttribute("aria-label", "Play");
    now.setAttribute("aria-live", "polite");
  };
  const start = () => {
    if (at === cycles.length - 1) show(0);
    now.setAttribute("aria-live", "off"); // not a sentence for every cycle that runs by
    play.textContent = "⏸ Stop";
    play.setAttribute("aria-label", "Stop");
    timer = setInterval(() => {
      show(at + 1);
      if (at === cycles.length - 1) stop();
    }, 1000 / Number(get("speed").value));
  };
  const go = (name, where) => get(name).addEventListener("click", () => { stop(); show(where()); });
  go("first", () => 0);
  go("back", () => at - 1);
  go("on", () => at + 1);
  go("edge", () => Number(slider.dataset.edge));
  play.addEventListener("click", () => (timer ? stop() : start()));
  get("speed").addEventListener("change", () => { if (timer) { stop(); start(); } });
  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  all.addEventListener("click", (event) => {
    const box = all.getBoundingClientRect(), x = (event.clientX - box.left) * (all.viewBox.baseVal.width / box.width);
    if (x >= left) { stop(); show(Math.floor((x - left) / scale)); }
  });
  cursor.removeAttribute("hidden");
  now.setAttribute("aria-live", "off");
  show(at);
  now.setAttribute("aria-live", "polite");
})();
