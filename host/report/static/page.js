// The page works without this; with it: colours, contents, tooltips, data to take along.
"use strict";
const report = {
  // Tables of a section, as its data has them.
  data(section) {
    const held = document.getElementById("data-" + section);
    return held ? JSON.parse(held.textContent) : {};
  },
  number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "unknown";
    return Number(value).toLocaleString("en-US", { maximumSignificantDigits: digits });
  },
  bytes(value) {
    if (value === null || value === undefined) return "unknown";
    const [size, unit] = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : value >= 1e3 ? [1e3, "kB"] : [1, "B"];
    return report.number(value / size, 3) + " " + unit;
  },
  // Said by a screen reader.
  say(text) { document.getElementById("said").textContent = text; },
  csv(rows) {
    const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const cell = (value) => {
      const text = value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
      return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
    };
    return [names, ...rows.map((row) => names.map((name) => row[name]))].map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
  },
};

(function () {
  const root = document.documentElement;
  root.classList.add("scripted");

  const themes = ["system", "light", "dark"];
  const theme = document.getElementById("theme");
  const show = (name) => {
    if (name === "system") delete root.dataset.theme; else root.dataset.theme = name;
    theme.textContent = "Colours: " + name;
    theme.setAttribute("aria-label", "Colours: " + (name === "system" ? "as the system has them" : name) + "; press for the next");
  };
  show(root.dataset.theme || "system");
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % themes.length];
    show(next);
    try { if (next === "system") localStorage.removeItem("emufpga-theme"); else localStorage.setItem("emufpga-theme", next); } catch (error) { /* not kept */ }
    report.say("Colours: " + next);
  });

  const menu = document.getElementById("menu"), contents = document.getElementById("contents");
  const open = (yes) => { contents.classList.toggle("open", yes); menu.setAttribute("aria-expanded", String(yes)); };
  menu.addEventListener("click", () => open(!contents.classList.contains("open")));
  contents.addEventListener("click", (event) => { if (event.target.closest("a")) open(false); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { if (contents.classList.contains("open")) { open(false); menu.focus(); } hide(); }
  });

  const links = new Map([...contents.querySelectorAll("a")].map((link) => [link.hash.slice(1), link]));
  if ("IntersectionObserver" in window) {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        const link = links.get(entry.target.id);
        if (link) link.setAttribute("aria-current", "true");
      }
    }, { rootMargin: "-20% 0px -70% 0px" });
    for (const section of document.querySelectorAll("main > section")) seen.observe(section);
  }

  // A term's tooltip is its glossary entry; the link leads there.
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const tell = (link) => {
    const entry = document.getElementById(link.hash.slice(1));
    if (!entry) return;
    tip.textContent = entry.nextElementSibling.textContent;
    tip.hidden = false;
    link.setAttribute("aria-describedby", "tip");
    const box = link.getBoundingClientRect(), width = tip.offsetWidth;
    tip.style.left = Math.max(8, Math.min(box.left, root.clientWidth - width - 8)) + window.scrollX + "px";
    tip.style.top = box.bottom + window.scrollY + 6 + "px";
  };
  for (const link of document.querySelectorAll("a.term")) {
    for (const event of ["mouseenter", "focus"]) link.addEventListener(event, () => tell(link));
    for (const event of ["mouseleave", "blur"]) link.addEventListener(event, hide);
  }

  const save = (text, type, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000); // a busy machine may begin late
  };
  for (const button of document.querySelectorAll(".take-json, .take-csv")) {
    button.addEventListener("click", () => {
      const { section, table } = button.dataset, rows = report.data(section)[table];
      if (button.classList.contains("take-json")) save(JSON.stringify(rows, null, 1) + "\n", "application/json", `emufpga-${section}-${table}.json`);
      else save(report.csv(rows), "text/csv", `emufpga-${section}-${table}.csv`);
      report.say(table + " saved");
    });
  }
})();
