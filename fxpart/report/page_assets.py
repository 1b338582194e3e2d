"""Style and script of the report's page.

The script needs no network: it shows details of the block under the pointer, selects ranks, and
switches between light and dark. Without it the page is complete, with short plain tooltips.
"""

from __future__ import annotations

import base64
import hashlib

_LIGHT = """
--ink: #1d2330; --soft: #5b6475; --paper: #ffffff;
  --card: #f4f6fa; --line: #d5dae4; --f0: #2f6fde; --f1: #5a8fe8; --b0: #d9822b; --b1: #e6a45f;
  --t: #7a869c; --idle: #eceff5; --good: #1a7f4b; --bad: #b3261e; --in: #ffffff;
  --m0: #2f6fde; --m1: #d9822b; --m2: #8a5bd1; --m3: #2a9d8f; --m4: #8d99ae; --m5: #c2528b;
  --m6: #b8a13a; --m7: #6b7f2a;
"""
_DARK = """
--ink: #e6e9f0; --soft: #a2abbd; --paper: #14171f;
  --card: #1d212c; --line: #343b4b; --idle: #222735; --t: #8894ab; --good: #5cc68d; --bad: #ff8a80;
  --in: #0f1218; --f0: #6ea0f5; --f1: #8fb6f8; --b0: #eda45c; --b1: #f3bd86; --m0: #6ea0f5;
  --m1: #eda45c; --m2: #b08cf0; --m3: #55c2b4; --m4: #98a3b7; --m5: #e07fb0; --m6: #d6c25e;
  --m7: #a9bd62;
"""

# Light and dark, readable without color vision, printable.
CSS = (
    f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {_DARK} }} }}
:root[data-theme="dark"] {{ color-scheme: dark; {_DARK} }}
:root[data-theme="light"] {{ color-scheme: light }}
"""
    """* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 56px }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 18px; margin: 36px 0 10px }
p { margin: 6px 0; max-width: 78ch }
.lead, .note { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px;
  margin: 20px 0 0; padding: 0 }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px }
dt { color: var(--soft); font-size: 13px }
.cards dd { margin: 2px 0 0; overflow-wrap: anywhere; font-size: 21px; font-weight: 600;
  font-variant-numeric: tabular-nums }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px; overflow-x: auto }
figcaption, .key { color: var(--soft); font-size: 13px; margin-top: 8px }
.key span { display: inline-block; margin-right: 16px }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px }
svg { display: block; width: 100%; min-width: 920px; height: auto }
.axis { fill: var(--soft); font-size: 12px }
.in { fill: var(--in); font-size: 11px; text-anchor: middle; pointer-events: none }
.idle { fill: var(--idle); fill-opacity: .7 }
.tick { stroke: var(--line); stroke-dasharray: 2 4; fill: none }
.f0 { fill: var(--f0) } .f1 { fill: var(--f1) } .b0 { fill: var(--b0) } .b1 { fill: var(--b1) }
.t { fill: var(--t) } .u { fill: var(--m2) }
.limit { stroke: var(--bad); stroke-width: 2; fill: none }
.m0 { fill: var(--m0) } .m1 { fill: var(--m1) } .m2 { fill: var(--m2) } .m3 { fill: var(--m3) }
.m4 { fill: var(--m4) } .m5 { fill: var(--m5) } .m6 { fill: var(--m6) }
.m7 { fill: var(--m7) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 600; white-space: nowrap }
th, td { width: 1%; white-space: nowrap }
.l { text-align: left; width: auto }
td.l { white-space: normal; overflow-wrap: anywhere; min-width: 8em }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 999px;
  padding: 1px 10px; font-size: 13px; font-weight: 600; color: var(--good) }
.badge.open { color: var(--b0) }
@media print { body { font-size: 12px } figure, .cards div { break-inside: avoid } }
.tools { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin: 14px 0 0;
  color: var(--soft); font-size: 13px }
.tools label { display: flex; flex-wrap: wrap; gap: 8px; align-items: center }
.tools input, .tools button { font: inherit; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: 5px 10px; min-height: 32px }
.tools input { width: 12em } .tools input:invalid { border-color: var(--bad) }
#detail { position: fixed; z-index: 9; pointer-events: none; max-width: min(340px, 92vw);
  background: var(--card); color: var(--ink); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 10px; font-size: 13px; line-height: 1.45; white-space: pre-line;
  box-shadow: 0 4px 14px rgba(0, 0, 0, .25); font-variant-numeric: tabular-nums }
#detail[hidden] { display: none }
.on { stroke: var(--ink); stroke-width: 1.5 }
@media (max-width: 600px) { main { padding: 18px 12px 40px } .cards dd { font-size: 16px }
  .cards { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) } }
@media print { .tools, #detail { display: none } }
"""
)

SCRIPT = """
"use strict";
(() => {
  const root = document.documentElement;
  const make = (name, parent, text) => {
    const found = document.createElement(name);
    if (text) found.textContent = text;
    parent.append(found);
    return found;
  };
  const pictures = [...document.querySelectorAll("svg[data-row]")];
  const detail = make("div", document.body);
  detail.id = "detail";
  detail.hidden = true;
  detail.setAttribute("role", "status");

  // Plain tooltips become texts of the panel, so that only one of them is shown. Those of the
  // timeline have an action and times only.
  const kinds = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
  for (const title of document.querySelectorAll("svg rect > title")) {
    const block = title.parentNode;
    const known = /^((\\d+)([A-Z_]+)(\\d+)\\S*): (.*), (.* to .*)/.exec(title.textContent);
    block.dataset.text = title.textContent;
    if (known) {
      const [whole, action, stage, letters, number, time, times] = known;
      block.dataset.text = `${action}: ${kinds[letters] || "transfer"} of microbatch ${number}\n` +
        `stage ${stage}, rank ${block.closest("g").dataset.ranks}\npredicted ${time}, from ` +
        times + title.textContent.slice(whole.length);
    }
    title.remove();
  }

  const seconds = (value) => {
    const units = [[1, "s"], [1e-3, "ms"], [1e-6, "\u00b5s"], [1e-9, "ns"]];
    const [size, name] = units.find(([size]) => value >= size) || [1e-9, "ns"];
    return value === 0 ? "0 s" : `${(value / size).toPrecision(3)} ${name}`;
  };

  // In pictures of many blocks those of one kind are one path; its microbatches are listed.
  const inPath = (path, event) => {
    const svg = path.ownerSVGElement;
    const at = new DOMPoint(event.clientX, event.clientY);
    const x = at.matrixTransform(path.getScreenCTM().inverse()).x;
    const blocks = path.getAttribute("d").split("M").slice(1);
    const index = blocks.findIndex((block) => {
      const [left, , width] = block.split(/[ hv]/).map(Number);
      return left <= x && x <= left + width;
    });
    if (index < 0) return "";
    const [left, , width] = blocks[index].split(/[ hv]/).map(Number);
    const unit = Number(svg.dataset.unit);
    const begin = (left - Number(svg.dataset.left)) * unit;
    const number = path.dataset.microbatches.split(" ")[index];
    const ranks = path.closest("g").dataset.ranks;
    return `${path.dataset.kind} of microbatch ${number}\nstage ${path.dataset.stage}, rank ` +
      `${ranks}\nabout ${seconds(width * unit)}, from ${seconds(begin)}`;
  };

  let marked = null;
  const hide = () => {
    detail.hidden = true;
    if (marked) marked.classList.remove("on");
    marked = null;
  };
  const show = (event) => {
    const target = event.target.closest ? event.target.closest("rect, path[data-kind]") : null;
    const text = target && (target.dataset.text || (target.dataset.kind && inPath(target, event)));
    if (marked !== target) hide();
    if (!text) return hide();
    if (target.dataset.text) (marked = target).classList.add("on");
    detail.textContent = text;
    detail.hidden = false;
    const box = detail.getBoundingClientRect();
    const right = root.clientWidth - box.width - 8;
    const below = event.clientY + 16;
    const fits = below + box.height < root.clientHeight;
    detail.style.left = `${Math.max(8, Math.min(event.clientX + 14, right))}px`;
    detail.style.top = `${fits ? below : Math.max(8, event.clientY - box.height - 12)}px`;
  };
  for (const svg of document.querySelectorAll("svg")) {
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }

  // "0-3,8" as a function of a rank; null if it is not such a text.
  const parse = (text) => {
    const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
    const ranges = parts.map((part) => /^(\\d+)(?:-(\\d+))?$/.exec(part));
    if (ranges.some((range) => !range)) return null;
    const bounds = ranges.map(([, first, last]) => [Number(first), Number(last || first)]);
    return (low, high) => !bounds.length || bounds.some(([a, b]) => low <= b && a <= high);
  };
  const filter = (text) => {
    const wanted = parse(text);
    if (!wanted) return false;
    for (const svg of pictures) {
      const row = Number(svg.dataset.row);
      let shown = 0, hidden = 0;
      for (const group of svg.querySelectorAll("g[data-ranks]")) {
        const own = group.dataset.ranks.split(",").some((part) => {
          const [low, high] = part.split("-").map(Number);
          return wanted(low, high === undefined ? low : high);
        });
        group.style.display = own ? "" : "none";
        group.setAttribute("transform", `translate(0 ${-hidden * row})`);
        own ? shown++ : hidden++;
      }
      svg.querySelector("g.time").setAttribute("transform", `translate(0 ${-hidden * row})`);
      const [, , width] = svg.getAttribute("viewBox").split(" ");
      const bottom = Number(svg.dataset.bottom);
      svg.setAttribute("viewBox", `0 0 ${width} ${shown * row + bottom}`);
    }
    return true;
  };

  const first = document.querySelector("h2");
  if (!first) return;
  const tools = document.createElement("div");
  tools.className = "tools";
  first.parentNode.insertBefore(tools, document.querySelector(".cards").nextSibling);
  if (pictures.length) {
    const label = make("label", tools, "Ranks");
    const input = make("input", label);
    input.placeholder = "all, or 0-3,8";
    input.addEventListener("input", () => {
      input.setCustomValidity(filter(input.value) ? "" : "Write ranks as 0-3,8.");
    });
  }
  const themes = ["automatic", "light", "dark"];
  const button = make("button", tools);
  button.type = "button";
  const paint = (theme) => {
    if (theme === "automatic") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = `Colors: ${theme}`;
  };
  button.addEventListener("click", () => {
    const now = themes.indexOf(root.dataset.theme || "automatic");
    paint(themes[(now + 1) % themes.length]);
  });
  paint("automatic");
})();
"""

_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# Nothing is fetched; no script runs but this one.
SECURITY_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'; base-uri 'none'"
)
