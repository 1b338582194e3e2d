"""The report's style sheet: light and dark, readable without colour vision, printable."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1d2330; --soft: #5b6475; --paper: #ffffff;
  --card: #f4f6fa; --line: #d5dae4; --f0: #2f6fde; --f1: #5a8fe8; --b0: #d9822b; --b1: #e6a45f;
  --t: #7a869c; --idle: #eceff5; --good: #1a7f4b; --bad: #b3261e; --in: #ffffff;
  --m0: #2f6fde; --m1: #d9822b; --m2: #8a5bd1; --m3: #2a9d8f; --m4: #8d99ae; --m5: #c2528b;
  --m6: #b8a13a; --m7: #6b7f2a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #a2abbd; --paper: #14171f;
  --card: #1d212c; --line: #343b4b; --idle: #222735; --t: #8894ab; --good: #5cc68d; --bad: #ff8a80;
  --in: #0f1218; --f0: #6ea0f5; --f1: #8fb6f8; --b0: #eda45c; --b1: #f3bd86; --m0: #6ea0f5;
  --m1: #eda45c; --m2: #b08cf0; --m3: #55c2b4; --m4: #98a3b7; --m5: #e07fb0; --m6: #d6c25e;
  --m7: #a9bd62; } }
* { box-sizing: border-box }
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
.cards dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px; overflow-x: auto }
figcaption, .key { color: var(--soft); font-size: 13px; margin-top: 8px }
.key span { display: inline-block; margin-right: 16px }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px }
svg { display: block; width: 100%; min-width: 640px; height: auto }
.axis { fill: var(--soft); font-size: 12px }
.in { fill: var(--in); font-size: 11px; text-anchor: middle; pointer-events: none }
.idle { fill: var(--idle) } .tick { stroke: var(--line); stroke-dasharray: 2 4; fill: none }
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
.l { text-align: left; width: auto; white-space: normal; overflow-wrap: anywhere }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 999px;
  padding: 1px 10px; font-size: 13px; font-weight: 600; color: var(--good) }
.badge.open { color: var(--b0) }
@media print { body { font-size: 12px } figure, .cards div { break-inside: avoid } }
"""
