// A matrix as colours. It is drawn for the eye alone: the table beside it has the same numbers for everybody.

import { short } from "./nested.js";

const MAX_LABELS = 16;
const MAX_TEXT_ROWS = 24;
const TEXT_PX = 46;
const LETTER_PX = 6.5;
const BESIDE_PX = 110;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// plotly reads tags in what it writes.
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function cut(text) {
  const letters = [...text];
  return letters.length > 11 ? `${letters.slice(0, 10).join("")}…` : text;
}

function ticksOf(names) {
  const step = Math.ceil(names.length / MAX_LABELS);
  const shown = names.map((name, index) => [index, name]).filter(([index]) => index % step === 0);
  return { tickvals: shown.map(([index]) => index), ticktext: shown.map(([, name]) => plain(cut(name))) };
}

export class Heatmap {
  /** `range` is "unit" for numbers from 0 to 1, "signed" for those around 0. Without plotly it says so and draws nothing. */
  constructor(host, { range, onSelect, onPick }) {
    this.host = host;
    this.range = range;
    this.onSelect = onSelect;
    this.onPick = onPick;
    this.marks = [];
    this.isListening = false;
  }

  /** `numbers` [rows][columns] as the service gave them; `isForbidden(row, column)` are pairs that do not count. */
  show({ numbers, rowNames, columnNames, isForbidden }) {
    if (!window.Plotly) {
      this.host.textContent = "No picture: plotly.min.js did not load. The table has the same numbers.";
      return undefined;
    }
    this.last = { numbers, rowNames, columnNames, isForbidden };
    const finite = numbers.map((row, i) =>
      row.map((number, j) => (typeof number === "number" && !isForbidden(i, j) ? number : null)),
    );
    const others = finite.map((row) => row.map((number) => (number === null ? 0 : null)));
    const cellPx = this.#cellPx(columnNames);
    const isSmall = cellPx >= TEXT_PX && rowNames.length <= MAX_TEXT_ROWS;
    const longest = Math.max(...columnNames.map((name) => cut(name).length));
    // A text is drawn where there is no number too: each trace has only its own.
    const textsOf = (shown) =>
      numbers.map((row, i) => row.map((number, j) => (shown[i][j] === null ? "" : short(number, 3))));
    const common = {
      type: "heatmap",
      texttemplate: isSmall ? "%{text}" : "",
      hoverinfo: "none",
      xgap: isSmall ? 2 : 0,
      ygap: isSmall ? 2 : 0,
      // One colour for all: the scales are light, or dark, enough for it everywhere.
      textfont: { size: 11, color: colour("--text") },
    };
    const scale = scaleOf(finite.flat().filter((number) => number !== null), this.range, columnNames.length);
    const traces = [
      {
        ...common,
        ...scale,
        z: finite,
        text: textsOf(finite),
        colorbar: { thickness: 8, outlinewidth: 0, nticks: 4, tickfont: { size: 10 }, xpad: 4, ypad: 0 },
      },
      {
        ...common,
        z: others,
        text: textsOf(others),
        showscale: false,
        zmin: 0,
        zmax: 1,
        colorscale: [[0, colour("--forbidden")], [1, colour("--forbidden")]],
        textfont: { size: 11, color: colour("--muted") },
      },
    ];
    const axis = { ticklabelstandoff: 3, showgrid: false, zeroline: false, ticks: "", fixedrange: true, automargin: true };
    const layout = {
      autosize: true,
      height: Math.max(150, Math.min(420, 60 + 30 * rowNames.length)),
      margin: { l: 8, r: 8, t: 8, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), size: 11, family: "system-ui, sans-serif" },
      dragmode: false,
      hovermode: "closest",
      xaxis: { ...axis, side: "top", tickangle: longest * LETTER_PX < cellPx ? 0 : -90, ...ticksOf(columnNames), range: [-0.5, columnNames.length - 0.5] },
      yaxis: { ...axis, ...ticksOf(rowNames), range: [rowNames.length - 0.5, -0.5] },
      shapes: this.#shapes(),
    };
    this.shown = window.Plotly.react(this.host, traces, layout, { displayModeBar: false, responsive: true });
    if (!this.isListening) {
      this.isListening = true;
      this.host.on("plotly_hover", ({ points }) => this.onSelect(points[0].y, points[0].x));
      this.host.on("plotly_click", ({ points }) => this.onPick(points[0].y, points[0].x));
    }
    return this.shown;
  }

  /** About how wide a cell is drawn. */
  #cellPx(columnNames) {
    return (this.host.clientWidth - BESIDE_PX) / columnNames.length;
  }

  /** The same in the colours and the width of now. */
  redraw() {
    if (this.last) this.show(this.last);
  }

  clear() {
    this.last = null;
    window.Plotly?.purge(this.host);
    this.isListening = false;
    this.host.replaceChildren();
  }

  /** Frame a cell; with a null column the whole row. */
  mark(row, column) {
    this.marked = { row, column };
    if (this.last) window.Plotly.relayout(this.host, { shapes: this.#shapes() });
  }

  #shapes() {
    if (!this.marked || !this.last) return [];
    const { row, column } = this.marked;
    const [first, last] = column === null ? [0, this.last.columnNames.length - 1] : [column, column];
    const frame = { type: "rect", x0: first - 0.5, x1: last + 0.5, y0: row - 0.5, y1: row + 0.5 };
    return [{ ...frame, line: { color: colour("--mark"), width: column === null ? 2 : 3 }, fillcolor: "rgba(0,0,0,0)" }];
  }
}

/** One share of very many is small: by its square root it is seen all the same. */
export function goesByRoot(numColumns) {
  return numColumns > MAX_LABELS;
}

/** Colours from the smallest to the largest number, with 0 always in the one of nothing. */
function scaleOf(numbers, range, numColumns) {
  const [none, plus, minus] = ["--heat-0", "--heat-plus", "--heat-minus"].map(colour);
  const steps = goesByRoot(numColumns) ? [0, 1 / 8, 1 / 4, 1 / 2, 1] : [0, 1];
  if (range === "unit") return { zmin: 0, zmax: 1, colorscale: steps.map((root) => [root ** 2, mixed(none, plus, root)]) };
  const [least, most] = numbers.reduce(([low, high], number) => [Math.min(low, number), Math.max(high, number)], [0, 0]);
  if (least === 0) return { zmin: 0, zmax: most || 1, colorscale: [[0, none], [1, plus]] };
  if (most === 0) return { zmin: least, zmax: 0, colorscale: [[0, minus], [1, none]] };
  const largest = Math.max(-least, most);
  return { zmin: -largest, zmax: largest, colorscale: [[0, minus], [0.5, none], [1, plus]] };
}

/** A share of the way from one colour, #rrggbb, to another. */
function mixed(from, to, share) {
  const parts = [1, 3, 5].map((at) => {
    const [low, high] = [from, to].map((text) => Number.parseInt(text.slice(at, at + 2), 16));
    return Math.round(low + share * (high - low));
  });
  return `rgb(${parts.join(", ")})`;
}
