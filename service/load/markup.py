"""HTML of the report's parts. Whatever text comes in is escaped here, and only here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.load.figures import Figure

_TEXT = ' class="text"'


@dataclass(frozen=True, slots=True)
class Cell:
    """``look`` is a class of the page's style; ``below`` stands under the text, smaller."""

    text: str
    look: str = ""
    below: str = ""

    def html(self) -> str:
        below = f"<br><small>{html.escape(self.below)}</small>" if self.below else ""
        look = f' class="{self.look}"' if self.look else ""
        return f"<td{look}>{html.escape(self.text)}{below}</td>"


@dataclass(frozen=True, slots=True)
class Row:
    """``name`` and, smaller below it, ``detail`` and ``warning`` head the row."""

    name: str
    detail: str
    cells: Sequence[str | Cell]
    warning: str = ""

    def html(self) -> str:
        detail = f"<small>{html.escape(self.detail)}</small>" if self.detail else ""
        if self.warning:
            detail += f'<small class="fault">{html.escape(self.warning)}</small>'
        cells = "".join((cell if isinstance(cell, Cell) else Cell(cell)).html() for cell in self.cells)
        return f'<tr><th scope="row">{html.escape(self.name)}{detail}</th>{cells}</tr>'


def table(caption: str, headings: Sequence[str], rows: Iterable[Row], *, texts: Sequence[str] = ()) -> str:
    """A table that scrolls in itself where the screen is narrow. ``texts`` are headings of columns without numbers."""
    heads = "".join(
        f'<th scope="col"{_TEXT if heading in texts else ""}>{html.escape(heading)}</th>' for heading in headings
    )
    body = "\n".join(row.html() for row in rows)
    said = html.escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{said}"><table><caption>{said}</caption>'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def chart(name: str, figure: Figure, description: str, numbers: str = "") -> str:
    """A chart, mute to a screen reader but for ``description``, and its numbers under it, folded.

    Without ``numbers`` where they stand on the page already.
    """
    # Nothing in the JSON may end the script element that holds it.
    drawn = json.dumps(figure, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    folded = f"<details><summary>Numbers: {html.escape(description)}</summary>{numbers}</details>" if numbers else ""
    return (
        f'<figure><div class="plot" id="{name}" role="img" aria-label="{html.escape(description)}"></div>'
        f'<script type="application/json" id="{name}-figure">{drawn}</script></figure>\n{folded}'
    )


def section(heading: str, *parts: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n{body}\n</section>" if body else ""


def subheading(text: str) -> str:
    return f"<h3>{html.escape(text)}</h3>"


def paragraph(text: str, look: str = "") -> str:
    return f"<p{f' class={chr(34)}{look}{chr(34)}' if look else ''}>{html.escape(text)}</p>"


def note(text: str) -> str:
    return paragraph(text, "note")


def facts(known: Iterable[tuple[str, str]], *, code: frozenset[str] = frozenset()) -> str:
    """Names and what they are; those in ``code`` as written on a command line."""
    items = []
    for name, value in known:
        said = html.escape(value)
        items.append(f"<dt>{html.escape(name)}</dt><dd>{f'<code>{said}</code>' if name in code else said}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def warning(heading: str, reasons: Sequence[str], meaning: str) -> str:
    items = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
    listed = f"<ul>{items}</ul>" if items else ""
    return f'<div class="caveat">{subheading(heading)}{listed}<p>{html.escape(meaning)}</p></div>'


def side_by_side(parts: Iterable[str]) -> str:
    return f'<div class="pair">{"".join(f"<div>{part}</div>" for part in parts)}</div>'
