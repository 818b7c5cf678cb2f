// What the service answered: four linked matrices of one head, its rows and keys, and the number in focus.

import { formulaOf, inputsOf, isForbidden, kindOfRow, restrictionsOf } from "./formulas.js";
import { goesByRoot, Heatmap } from "./heatmap.js";
import { full, shapeOf, short, withRank } from "./nested.js";
import { NumberGrid } from "./number_grid.js";

const MATRICES = ["scores", "logits", "weights", "context"];
const RANKS = { logsumexp: 3, entropy: 3, weight_totals: 3 };
const EMPTY = "∅ ";
/** With more columns than this a matrix has the whole width of the page. */
const MAX_NARROW = 6;

export class Results {
  /** `onView({item, head, at})` is called when another number, head or item is looked at. */
  constructor(root, onView) {
    this.root = root;
    this.onView = onView;
    this.readout = root.querySelector("#readout");
    this.panels = new Map(
      MATRICES.map((name) => {
        const panel = root.querySelector(`[data-matrix="${name}"]`);
        const select = (row, column) => this.select(name, row, column);
        const grid = new NumberGrid(panel.querySelector(".grid"), { label: `${name}, numbers`, onSelect: select });
        const onPick = (row, column) => {
          select(row, column);
          grid.focus();
        };
        const range = name === "weights" ? "unit" : "signed";
        return [name, { grid, map: new Heatmap(panel.querySelector(".heatmap"), { range, onSelect: select, onPick }) }];
      }),
    );
    const ofRow = (row) => this.select(this.matrix, row, this.column);
    this.rows = new NumberGrid(root.querySelector("#rows"), { label: "rows, numbers", onSelect: ofRow });
    this.keys = new NumberGrid(root.querySelector("#keys"), {
      label: "keys, numbers",
      onSelect: (key) => this.select(this.matrix === "context" ? "weights" : this.matrix, this.row, key),
    });
    const redraw = () => {
      for (const { map } of this.panels.values()) map.redraw();
    };
    matchMedia("screen and (prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("resize", redraw);
  }

  /** `sums` [B,H,T] are those of the weights, by the service too. `view` says what is looked at. */
  async show({ body, names, answer, sums }, view) {
    const { info, ...given } = answer;
    const outputs = Object.fromEntries(
      Object.entries(given).map(([name, tensor]) => [name, withRank(tensor, RANKS[name] ?? 4)]),
    );
    if (outputs.weights === null || outputs.context === null) {
      this.clear(`An axis is 0: weights have the shape [${shapeOf(given.weights).join(", ")}], so there is nothing to see.`);
      return;
    }
    const inputs = inputsOf(body);
    const [B, H, T, S] = shapeOf(outputs.weights);
    const keyShape = shapeOf(body.key ?? body.query);
    const K = keyShape.length === 4 ? keyShape[1] : keyShape.length === 3 ? keyShape[0] : 1;
    const axes = { B, H, K, T, S, D: shapeOf(body.query).at(-1), V: shapeOf(outputs.context)[3] };
    this.problem = { body, names, outputs, inputs, axes, info, sums, restrictions: restrictionsOf(body) };
    [this.item, this.head] = [clamp(view.item, B), clamp(view.head, H)];
    const [matrix, row, column] = view.at.split(".");
    this.matrix = MATRICES.includes(matrix) ? matrix : "weights";
    this.row = clamp(row, T);
    this.column = clamp(column, this.matrix === "context" ? axes.V : S);
    this.root.hidden = false;
    this.#choices("#items", "item", B);
    this.#choices("#heads-shown", "head", H);
    await this.#draw();
  }

  clear(text) {
    this.problem = null;
    this.root.hidden = false;
    const note = document.createElement("p");
    note.textContent = text;
    this.readout.replaceChildren(note);
    for (const { grid, map } of this.panels.values()) {
      map.clear();
      grid.clear("No numbers.");
    }
    this.rows.clear("No rows.");
    this.keys.clear("No keys.");
  }

  /** Look at one number. */
  select(matrix, row, column) {
    if (!this.problem) return;
    const isSame = this.matrix === matrix && this.row === row && this.column === column;
    Object.assign(this, { matrix, row, column });
    if (!isSame) this.#mark();
  }

  #choices(id, name, count) {
    const fieldset = this.root.querySelector(id);
    fieldset.hidden = count === 1;
    const buttons = Array.from({ length: count }, (_, index) => {
      const label = document.createElement("label");
      const radio = document.createElement("input");
      Object.assign(radio, { type: "radio", name, value: String(index), checked: this[name] === index });
      radio.addEventListener("change", () => {
        this[name] = index;
        this.#draw();
      });
      label.append(radio, ` ${index}`);
      return label;
    });
    fieldset.replaceChildren(fieldset.querySelector("legend"), ...buttons);
  }

  async #draw() {
    const { axes, outputs, names, sums } = this.problem;
    const { item, head } = this;
    const kinds = outputs.logits[item][head].map((_, row) => kindOfRow(this.problem, { item, head, row }));
    const queries = kinds.map((kind, i) => (kind === "empty" ? EMPTY : "") + named(names.queries, i));
    const keys = Array.from({ length: axes.S }, (_, j) => named(names.keys, j));
    const values = Array.from({ length: axes.V }, (_, c) => String(c));
    const drawn = MATRICES.map((name) => {
      const { grid, map } = this.panels.get(name);
      const isContext = name === "context";
      const numbers = outputs[name][item][head];
      const columnNames = isContext ? values : keys;
      const isOut = (row, column) =>
        kinds[row] !== "" || (!isContext && isForbidden(this.problem, { item, head, row, column }));
      const isGrey = (row, column) => name !== "scores" && isOut(row, column);
      grid.host.closest(".panel").classList.toggle("wide", columnNames.length > MAX_NARROW);
      grid.show({
        rowNames: queries,
        columnNames,
        corner: isContext ? "query \\ value" : "query \\ key",
        cell: (row, column) => ({
          text: short(numbers[row][column]),
          full: full(numbers[row][column]),
          kind: isGrey(row, column) ? "forbidden" : "",
        }),
      });
      return map.show({ numbers, rowNames: queries, columnNames, isForbidden: isGrey });
    });
    const ofRows = [
      ["sum", sums?.[item][head]],
      ["entropy", outputs.entropy[item][head]],
      ["logsumexp", outputs.logsumexp[item][head]],
    ].filter(([, numbers]) => numbers);
    this.rows.show({
      rowNames: queries,
      columnNames: [...ofRows.map(([name]) => name), "empty"],
      corner: "query",
      cell: (row, column) => {
        const kind = kinds[row] && "empty";
        if (column === ofRows.length) {
          const text = { empty: "∅ empty", padding: "padding", "": "no" }[kinds[row]];
          return { text, full: text, kind };
        }
        const number = ofRows[column][1][row];
        return { text: short(number), full: full(number), kind };
      },
    });
    const totals = outputs.weight_totals[item][head];
    this.keys.show({
      rowNames: keys,
      columnNames: ["weight"],
      corner: "key",
      cell: (row) => ({ text: short(totals[row]), full: full(totals[row]) }),
    });
    this.root.querySelector("#root-note").hidden = !goesByRoot(axes.S);
    const about = this.root.querySelector("#empty-note");
    about.hidden = !kinds.includes("empty");
    about.textContent = `${EMPTY}marks a row that may attend no key: its weights, context and entropy are 0.`;
    this.#mark();
    await Promise.all(drawn);
  }

  /** The same place in words. */
  #place() {
    const { names, axes } = this.problem;
    const place = document.createElement("div");
    place.className = "hint";
    const column = this.matrix === "context" ? `value ${this.column}` : `key ${named(names.keys, this.column)}`;
    const head = axes.H > 1 ? [`head ${this.head}`] : [];
    place.textContent = [...head, `query ${named(names.queries, this.row)}`, column].join(", ");
    return place;
  }

  #mark() {
    const { outputs } = this.problem;
    const { matrix, item, head, row, column } = this;
    const isContext = matrix === "context";
    for (const [name, { grid, map }] of this.panels) {
      const marked = (name === "context") === isContext ? column : null;
      grid.mark(row, marked);
      map.mark(row, marked);
    }
    this.rows.mark(row, null);
    this.keys.mark(isContext ? this.keys.row : column, isContext ? undefined : null);
    const number = outputs[matrix][item][head][row][column];
    const first = document.createElement("p");
    const name = document.createElement("span");
    const value = document.createElement("strong");
    name.textContent = `${matrix}[${item},${head},${row},${column}] = `;
    value.id = "number";
    value.textContent = full(number);
    first.append(name, value);
    const rest = formulaOf(matrix, { item, head, row, column }, this.problem).map((text) => {
      const line = document.createElement("p");
      line.className = "formula";
      line.textContent = text;
      return line;
    });
    this.readout.replaceChildren(first, ...rest, this.#place());
    this.onView({ item: String(item), head: String(head), at: `${matrix}.${row}.${column}` });
  }
}

function named(tokens, index) {
  return tokens ? `${index} ${tokens[index]}` : String(index);
}

function clamp(text, count) {
  const index = Number.parseInt(text, 10);
  return Number.isNaN(index) ? 0 : Math.max(0, Math.min(count - 1, index));
}
