// A table of numbers that is walked through with the arrow keys: one stop of Tab, whose cell is always in focus order.

const PAGE = 32;
const STEPS = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
  PageUp: [-10, 0],
  PageDown: [10, 0],
};

export class NumberGrid {
  /** `onSelect(row, column)` is called when a cell takes the focus. */
  constructor(host, { label, onSelect }) {
    this.host = host;
    this.label = label;
    this.onSelect = onSelect;
    this.row = 0;
    this.column = 0;
    // Undefined: nothing is marked; null: a row without a cell of it.
    this.markedColumn = undefined;
    host.addEventListener("keydown", (event) => this.#walk(event));
    host.addEventListener("focusin", (event) => this.#focused(event.target));
    host.addEventListener("click", (event) => event.target.closest("td")?.focus());
  }

  /** `cell(row, column)` gives {text, full, kind}; names are those of rows and columns. */
  show({ rowNames, columnNames, cell, corner }) {
    Object.assign(this, { rowNames, columnNames, cell, corner });
    this.row = Math.min(this.row, rowNames.length - 1);
    this.column = Math.min(this.column, columnNames.length - 1);
    this.#draw();
  }

  clear(text) {
    const note = document.createElement("p");
    note.textContent = text;
    this.host.replaceChildren(note);
    this.rowNames = [];
  }

  /** Make a cell the one that Tab comes to. Null: the row alone is marked; undefined: nothing is. */
  mark(row, column) {
    if (!this.rowNames?.length) return;
    const isElsewhere = this.#pageOf(row, column ?? this.column) !== this.page;
    this.row = row;
    this.column = column ?? this.column;
    this.markedColumn = column;
    if (isElsewhere) this.#draw();
    else this.#stamp();
  }

  #pageOf(row, column) {
    return `${Math.floor(row / PAGE)},${Math.floor(column / PAGE)}`;
  }

  #draw() {
    const [firstRow, firstColumn] = [this.row, this.column].map((index) => Math.floor(index / PAGE) * PAGE);
    this.page = this.#pageOf(this.row, this.column);
    const rows = this.rowNames.slice(firstRow, firstRow + PAGE);
    const columns = this.columnNames.slice(firstColumn, firstColumn + PAGE);
    const table = document.createElement("table");
    table.setAttribute("role", "grid");
    table.setAttribute("aria-label", this.label);
    table.setAttribute("aria-rowcount", this.rowNames.length + 1);
    table.setAttribute("aria-colcount", this.columnNames.length + 1);
    const head = table.createTHead().insertRow();
    head.append(headOf(this.corner, "col"), ...columns.map((name) => headOf(name, "col")));
    const body = table.createTBody();
    rows.forEach((name, i) => {
      const line = body.insertRow();
      line.setAttribute("aria-rowindex", firstRow + i + 2);
      line.append(headOf(name, "row"));
      columns.forEach((_, j) => {
        const { text, full, kind } = this.cell(firstRow + i, firstColumn + j);
        const cell = line.insertCell();
        cell.textContent = text;
        cell.title = full;
        cell.className = kind ?? "";
        cell.dataset.row = firstRow + i;
        cell.dataset.column = firstColumn + j;
        cell.setAttribute("aria-colindex", firstColumn + j + 2);
      });
    });
    const parts = [table];
    if (rows.length < this.rowNames.length || columns.length < this.columnNames.length) {
      const note = document.createElement("p");
      note.className = "hint";
      note.textContent =
        `Rows ${firstRow} to ${firstRow + rows.length - 1} of ${this.rowNames.length}, columns ${firstColumn} to ` +
        `${firstColumn + columns.length - 1} of ${this.columnNames.length}; the arrow keys go on.`;
      parts.push(note);
    }
    this.host.replaceChildren(...parts);
    this.#stamp();
  }

  #stamp() {
    for (const cell of this.host.querySelectorAll("td")) {
      const isRow = Number(cell.dataset.row) === this.row;
      const isCurrent = isRow && Number(cell.dataset.column) === this.column;
      const isHere = isCurrent && Number.isInteger(this.markedColumn);
      cell.tabIndex = isCurrent ? 0 : -1;
      cell.classList.toggle("marked", isHere || (isRow && this.markedColumn === null));
      cell.classList.toggle("here", isHere);
      if (isHere) cell.setAttribute("aria-selected", "true");
      else cell.removeAttribute("aria-selected");
    }
  }

  #focused(cell) {
    if (cell.dataset.row === undefined) return;
    this.onSelect(Number(cell.dataset.row), Number(cell.dataset.column));
  }

  focus() {
    this.host.querySelector("td[tabindex='0']")?.focus();
  }

  #walk(event) {
    if (event.altKey || event.metaKey || event.target.dataset.row === undefined) return;
    const last = [this.rowNames.length - 1, this.columnNames.length - 1];
    let goal;
    if (event.key in STEPS && !event.ctrlKey) {
      const step = STEPS[event.key];
      goal = [this.row + step[0], this.column + step[1]];
    } else if (event.key === "Home") goal = [event.ctrlKey ? 0 : this.row, 0];
    else if (event.key === "End") goal = [event.ctrlKey ? last[0] : this.row, last[1]];
    else return;
    event.preventDefault();
    const [row, column] = goal.map((index, axis) => Math.max(0, Math.min(last[axis], index)));
    this.mark(row, column);
    this.focus();
  }
}

function headOf(name, scope) {
  const cell = document.createElement("th");
  cell.scope = scope;
  cell.textContent = name;
  // Long names are cut in sight.
  cell.title = name;
  return cell;
}
