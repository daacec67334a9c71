// What fits: the floors of one model at one context.
(function () {
  const box = document.getElementById("capacity-controls");
  if (!box) return;
  const sizes = new Map(report.data("capacity").sizes.map((size) => [size.model, size]));
  const model = document.getElementById("capacity-model"), context = document.getElementById("capacity-context");
  const said = document.getElementById("capacity-context-out"), result = document.getElementById("capacity-result");
  const update = () => {
    const size = sizes.get(model.value), tokens = Number(context.value), kv = tokens * size.kv_token;
    const serial = size.input + size.others + kv;
    const floors = { resident: size.file + kv, cached: serial + size.half_cache, serial };
    said.textContent = tokens.toLocaleString("en-US");
    context.setAttribute("aria-valuetext", said.textContent + " tokens");
    const rows = Object.entries(floors).map(([name, bytes]) => {
      const fits = [4, 6, 8, 12, 16, 24, 32, 48].find((gb) => bytes <= gb * 1e9);
      return `<tr><th scope="row">${name}</th><td class="n" data-placement="${name}">${(bytes / 1e9).toFixed(2)} GB</td>` +
        `<td>${fits ? "fits " + fits + " GB" : "fits none up to 48 GB"}</td></tr>`;
    });
    result.innerHTML = `<table><tbody>${rows.join("")}</tbody></table>` + (tokens > size.context_length
      ? `<small>Beyond the model's own context of ${size.context_length.toLocaleString("en-US")}.</small>` : "");
  };
  model.addEventListener("change", update);
  context.addEventListener("input", update);
  box.hidden = false;
  update();
})();
