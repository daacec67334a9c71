// One figure of all placements by requests at a time.
(function () {
  for (const box of document.querySelectorAll(".agents")) {
    const rows = report.data("agents")[box.dataset.workload], scales = JSON.parse(box.dataset.scales);
    const controls = box.querySelector(".controls"), metric = box.querySelector("select");
    const slots = [...new Set(rows.map((row) => row.n))], series = [...new Set(rows.map((row) => [row.placement, row.home, row.clock].join("|")))];
    metric.addEventListener("change", () => {
      series.forEach((key, line) => {
        const cells = box.querySelectorAll("tbody tr")[line].querySelectorAll("td.n");
        slots.forEach((n, place) => {
          const row = rows.find((each) => each.n === n && [each.placement, each.home, each.clock].join("|") === key);
          const value = row[metric.value];
          cells[place].textContent = value === null ? "unknown" : report.number(value * scales[metric.value]);
          cells[place].title = row[metric.value + "_provenance"];
        });
      });
    });
    controls.hidden = false;
  }
})();
