"""JSON text in: by pysimdjson, which hands nested lists over as one buffer, or by a slower road to the same answer.

pysimdjson flattens ragged lists without a word, refuses "NaN" strings in a list of numbers and integers beyond 64
bits, and has no wheel for Python 3.14; so lists are walked and compared, and whatever it cannot take, or takes in a
way that is not certain, goes through orjson.
"""

from __future__ import annotations

import abc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from attn_core.errors import MAX_FAULTS, Fault, InvalidProblem
from service.errors import Malformed
from service.wire.arrays import Buffer, Limits

try:
    import simdjson
except ImportError:  # Python 3.14 has no wheel of it yet.
    simdjson = None  # type: ignore[assignment]

NAN_ADVICE = 'NaN and infinities are written as the strings "NaN", "Infinity" and "-Infinity"'
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BARE_WORD = re.compile(rb"[\[,:\s](?:NaN|[-+]?Infinity)\s*[\],}]")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?', re.DOTALL)
_MAX_DEPTH = 8
MAX_LEVELS = 100
"""Lists and objects within each other, where a body is read as a tree."""
_FAST_FROM_BYTES = 2048
MAX_MEMBERS = 1000
"""Of the one object that a body is: no call knows a tenth of it, and a million strangers take seconds to look at."""
_MAX_FAST_NAMES = 64
"""pysimdjson looks for a member from the first one on, each time."""
SIMDJSON_MAX_COUNT = 2**24 - 2

ReadRow = Callable[[list[Any], tuple[int, ...], list[Fault]], list[Any]]


class ListFault(Exception):
    """A nested list that is no tensor: each misfit with its dotted path below the tensor's name, at most fifty."""

    def __init__(self, misfits: list[Fault]) -> None:
        self.misfits = misfits[:MAX_FAULTS]
        super().__init__("; ".join(str(misfit) for misfit in self.misfits))


class BareWord(float):
    """NaN or an infinity that stood in the text as a word: not JSON, and some protocols' custom."""

    __slots__ = ()


class NestedList(abc.ABC):
    """A list of the body, read as what its field holds: numbers, booleans or whole numbers."""

    @abc.abstractmethod
    def numbers(self) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        """Flat float64 numbers and the shape. Raises: ListFault."""

    @abc.abstractmethod
    def plain(self) -> list[Any]:
        """Python lists, for small things and booleans."""

    def strict_numbers(self) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        """As ``numbers``; NaN and infinities are bare words, and no string is a number. Raises: ListFault."""
        return _flat_of(self.plain(), _strict_row, np.float64)

    def booleans(self) -> tuple[NDArray[np.bool_], tuple[int, ...]]:
        """Flat booleans and the shape. Raises: ListFault."""
        return _flat_of(self.plain(), _bool_row, np.bool_)

    def whole_numbers(self) -> tuple[NDArray[np.int64], tuple[int, ...]]:
        """Flat whole numbers and the shape. Raises: ListFault."""
        return _flat_of(self.plain(), _whole_row, np.int64)


class _PlainList(NestedList):
    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def plain(self) -> list[Any]:
        return self._items

    def numbers(self) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        return _flat_of(self._items, _number_row, np.float64)


class _SimdList(NestedList):
    def __init__(self, array: Any) -> None:
        self._array = array
        self._flat: tuple[NDArray[np.float64], tuple[int, ...]] | None = None

    def plain(self) -> list[Any]:
        items: list[Any] = self._array.as_list()
        return items

    def take(self) -> int:
        """Read the numbers now; gives how many lists they stood in. Raises: ListFault, TypeError for non-numbers."""
        shape = []
        level = self._array
        while isinstance(level, simdjson.Array):
            shape.append(len(level))
            if not shape[-1] or len(shape) > _MAX_DEPTH:
                # An empty or very deep list: the other road words the fault.
                raise TypeError
            level = level[0]
        num_lists = _count_regular(self._array, shape)
        flat = np.frombuffer(self._array.as_buffer(of_type="d"), dtype=np.float64)
        if flat.size != math.prod(shape):
            raise TypeError
        self._flat = flat, tuple(shape)
        return num_lists

    def numbers(self) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        if self._flat is None:
            return _flat_of(self.plain(), _number_row, np.float64)
        return self._flat

    def strict_numbers(self) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        return super().strict_numbers() if self._flat is None else self._flat


def _count_regular(node: Any, shape: list[int]) -> int:
    """How many lists a node is made of; their objects are never all there at once. Raises: TypeError."""
    if not isinstance(node, simdjson.Array) or len(node) != shape[0]:
        raise TypeError
    if len(shape) == 1:
        return 1
    below = shape[1:]
    if len(below) > 1:
        return 1 + sum(_count_regular(child, below) for child in node)
    size = below[0]
    for child in node:
        if not isinstance(child, simdjson.Array) or len(child) != size:
            raise TypeError
    return 1 + shape[0]


def read_object(
    body: Buffer,
    number_fields: frozenset[str],
    other_fields: frozenset[str],
    *,
    max_lists: int = Limits().max_json_lists,
) -> tuple[dict[str, Any], list[Fault]]:
    """The members of the one object that a body must be, nested lists as ``NestedList``, and the repeated names.

    ``number_fields`` are the members that are read as numbers when they are lists, ``other_fields`` those that may
    be lists or objects besides. Raises: Malformed, InvalidProblem where it is no object or has more lists than are
    worth walking; a ListFault is raised later, by reading the list.
    """
    if _may_be_fast(body, max_lists):
        fast = _read_fast(body, number_fields, other_fields)
        if fast is not None:
            return fast, []
    return _read_slowly(body)


def read_tree(
    body: Buffer, list_name: str, *, max_lists: int = Limits().max_json_lists
) -> tuple[dict[str, Any], list[Fault]]:
    """The one object that a body must be, and its repeated names, at whatever depth.

    Each list that is a member called ``list_name``, of whichever object, is a ``NestedList``, and may hold bare words.
    Raises: as ``read_object``.
    """
    if _may_be_fast(body, max_lists) and len(body) >= _FAST_FROM_BYTES:
        fast = _tree_fast(body, list_name)
        if fast is not None:
            return fast, []
    document = _load(body, takes_words=True)
    if not isinstance(document, dict):
        raise InvalidProblem([Fault("", "one JSON object", short(document))])
    tree: dict[str, Any] = _marked(document, list_name, 1)
    return tree, _repeated_names(body, document, takes_words=True)


def _may_be_fast(body: Buffer, max_lists: int) -> bool:
    """Whether pysimdjson may have a body. Raises: Malformed, InvalidProblem for one that nobody should read."""
    if bytes(body[:3]) == b"\xef\xbb\xbf":
        raise Malformed("a byte order mark", faults=[Fault("", "JSON in UTF-8 without a byte order mark", "one")])
    written = np.frombuffer(body, dtype=np.uint8)
    num_lists = int(np.count_nonzero(written == ord("[")))
    if num_lists > max_lists:
        expected = f"at most {max_lists} lists in one body; binary forms have no such limit"
        raise InvalidProblem([Fault("", expected, str(num_lists))])
    # Where an array may have 2^24 elements pysimdjson miscounts it, and writes past the list that it makes of it.
    return simdjson is not None and int(np.count_nonzero(written == ord(","))) < SIMDJSON_MAX_COUNT


class _FastTree:
    """Reads what pysimdjson has parsed, and counts; TypeError where the other road must decide."""

    def __init__(self, list_name: str) -> None:
        self._list_name = list_name
        self.num_lists = self.num_objects = 0

    def object(self, node: Any, level: int) -> dict[str, Any]:
        names = list(node.keys())
        if level > MAX_LEVELS or len(names) > _MAX_FAST_NAMES or len(set(names)) != len(names):
            raise TypeError
        self.num_objects += 1
        return {name: self._value(name, node[name], level + 1) for name in names}

    def _value(self, name: str | None, node: Any, level: int) -> Any:
        if isinstance(node, simdjson.Object):
            return self.object(node, level)
        if not isinstance(node, simdjson.Array):
            return node
        if name == self._list_name:
            return self._numbers(node)
        if level > MAX_LEVELS:
            raise TypeError
        self.num_lists += 1
        return [self._value(None, child, level + 1) for child in node]

    def _numbers(self, node: Any) -> NestedList:
        read = _SimdList(node)
        try:
            self.num_lists += read.take()
        except TypeError:
            plain = read.plain()
            self.num_lists += _count_lists(plain)
            return _PlainList(plain)
        return read


def _tree_fast(body: Buffer, list_name: str) -> dict[str, Any] | None:
    """The tree by pysimdjson; None where the other road must decide."""
    tree = _FastTree(list_name)
    try:
        document = simdjson.Parser().parse(body)
        if not isinstance(document, simdjson.Object):
            return None
        members = tree.object(document, 1)
    except (TypeError, ValueError, RuntimeError, KeyError, UnicodeDecodeError, RecursionError):
        return None
    return members if _has_all(body, tree.num_lists, tree.num_objects) else None


def _has_all(body: Buffer, num_lists: int, num_objects: int) -> bool:
    """Whether as many lists and objects were read as the text has brackets: otherwise a list where a number should be
    was flattened, or the names of an object in a list were not compared; or a string holds a bracket."""
    written = np.frombuffer(body, dtype=np.uint8)
    return bool(
        np.count_nonzero(written == ord("[")) == num_lists and np.count_nonzero(written == ord("{")) == num_objects
    )


def _marked(node: Any, list_name: str, level: int) -> Any:
    """A tree of plain objects, its lists called ``list_name`` marked. Raises: InvalidProblem where it is too deep."""
    if level > MAX_LEVELS:
        raise InvalidProblem([Fault("", f"lists and objects of at most {MAX_LEVELS} levels", "more")])
    if isinstance(node, dict):
        return {
            name: _PlainList(child)
            if name == list_name and isinstance(child, list)
            else _marked(child, list_name, level + 1)
            if isinstance(child, dict | list)
            else child
            for name, child in node.items()
        }
    return [_marked(child, list_name, level + 1) if isinstance(child, dict | list) else child for child in node]


def _read_fast(body: Buffer, number_fields: frozenset[str], other_fields: frozenset[str]) -> dict[str, Any] | None:
    """The members by pysimdjson; None where the other road must decide."""
    try:
        document = simdjson.Parser().parse(body)
    except (ValueError, RuntimeError, UnicodeDecodeError):
        return None
    if not isinstance(document, simdjson.Object):
        return None
    names = list(document.keys())
    if len(names) > _MAX_FAST_NAMES or len(set(names)) != len(names):
        return None
    members: dict[str, Any] = {}
    num_lists, num_objects = 0, 1
    try:
        for name in names:
            node = document[name]
            is_known = name in number_fields or name in other_fields
            if not is_known and isinstance(node, simdjson.Array | simdjson.Object):
                # Nobody will read it, and only the other road can count what is in it.
                return None
            if isinstance(node, simdjson.Array):
                members[name] = read = _SimdList(node)
                if name in number_fields:
                    num_lists += read.take()
                else:
                    plain = read.plain()
                    num_lists += _count_lists(plain)
                    members[name] = _PlainList(plain)
            elif isinstance(node, simdjson.Object):
                keys = list(node.keys())
                if len(set(keys)) != len(keys):
                    return None
                members[name] = member = node.as_dict()
                num_lists += _count_lists(member)
                num_objects += 1
            else:
                members[name] = node
    except (TypeError, ValueError, RuntimeError, KeyError, UnicodeDecodeError):
        return None
    return members if _has_all(body, num_lists, num_objects) else None


def _read_slowly(body: Buffer) -> tuple[dict[str, Any], list[Fault]]:
    document = _load(body)
    if not isinstance(document, dict):
        raise InvalidProblem([Fault("", "one JSON object", short(document))])
    if len(document) > MAX_MEMBERS:
        raise InvalidProblem(
            [Fault("", f"at most {MAX_MEMBERS} members, of which a few dozen are known", str(len(document)))]
        )
    repeated = _repeated_names(body, document)
    return {name: _PlainList(v) if isinstance(v, list) else v for name, v in document.items()}, repeated


def _load(body: Buffer, *, takes_words: bool = False) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        has_words = _BARE_WORD.search(body) is not None
        if "infinity" in str(error) or (takes_words and has_words):
            # A number beyond float64: readable, and refused later at its place.
            document = load_small(body, takes_words=takes_words)[0]
            _check_surrogates(document)
            return document
        received = str(error)
        expected = f"JSON, in which {NAN_ADVICE}" if has_words and not takes_words else "JSON"
        raise Malformed(f"not JSON: {received}", faults=[Fault("", expected, received)]) from None


def _check_surrogates(document: Any) -> None:
    """Refuse half a surrogate pair, which the standard library reads and no UTF-8 can say. Raises: Malformed."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        fault = Fault("", "text that UTF-8 can say", "half of a surrogate pair")
        raise Malformed("not JSON: half of a surrogate pair", faults=[fault]) from None


def load_small(text: Buffer | str, *, takes_words: bool = False) -> tuple[Any, list[str]]:
    """A short JSON text by the standard library, and the dotted paths of the names that an object in it repeats.

    Raises: Malformed.
    """
    found = False

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        members = dict(pairs)
        found = found or len(members) != len(pairs)
        return members

    options: dict[str, Any] = {
        "parse_int": _whole_or_infinite,
        "parse_constant": BareWord if takes_words else _refuse_word,
    }
    try:
        plain = text if isinstance(text, str) else str(text, "utf-8")
        document = json.loads(plain, object_pairs_hook=unique, **options)
        return document, _repetitions(json.loads(plain, object_pairs_hook=_Pairs, **options), "") if found else []
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}", faults=[Fault("", "JSON", str(error) or "too deep")]) from None


def _whole_or_infinite(digits: str) -> int | float:
    # Not every number of more digits can be made a float, and none of them is a whole number that counts.
    return int(digits) if len(digits) < 300 else float(digits)


class _Pairs(list[tuple[str, Any]]):
    """The members of an object as they were written, repeated ones too."""


def _refuse_word(word: str) -> Any:
    raise Malformed(f"the word {word}", faults=[Fault("", f"JSON, in which {NAN_ADVICE}", word)])


def _repetitions(node: Any, path: str) -> list[str]:
    """The dotted path of every name that stands more than once in its object."""
    found: list[str] = []
    if isinstance(node, _Pairs):
        counts = Counter(name for name, _ in node)
        found += [f"{path}{name}" for name, count in counts.items() if count > 1]
        for name, child in node:
            found += _repetitions(child, f"{path}{name}.")
    elif isinstance(node, list) and any(isinstance(child, list) for child in node):
        # _Pairs are lists too; lists of numbers are passed over.
        for index, child in enumerate(node):
            found += _repetitions(child, f"{path}{index}.")
    return found[:MAX_FAULTS]


def repeated_fault(name: str) -> Fault:
    return Fault(short_name(name), "each name once", "it more than once")


def _repeated_names(body: Buffer, document: Any, *, takes_words: bool = False) -> list[Fault]:
    """A colon follows a string only in an object, so the names in the text can be counted without reading it."""
    written = sum(1 for match in _STRING.finditer(body) if match.group(1))
    if written == _count_names(document):
        return []
    return [repeated_fault(name) for name in load_small(body, takes_words=takes_words)[1]]


def _count_names(node: Any) -> int:
    if isinstance(node, dict):
        return len(node) + sum(_count_names(child) for child in node.values())
    if isinstance(node, list):
        # Tensors have no objects in them: look only where one could be.
        return sum(_count_names(child) for child in node if isinstance(child, dict | list))
    return 0


def _count_lists(node: Any) -> int:
    if isinstance(node, dict):
        return sum(_count_lists(child) for child in node.values())
    if isinstance(node, list):
        if node and not isinstance(node[0], list | dict):
            return 1 + sum(_count_lists(child) for child in node if isinstance(child, list | dict))
        return 1 + sum(map(_count_lists, node))
    return 0


def _flat_of(items: list[Any], read_row: ReadRow, dtype: Any) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Nested lists as one flat array, every row compared with the first. Raises: ListFault with every misfit."""
    shape: list[int] = []
    level: Any = items
    while isinstance(level, list):
        shape.append(len(level))
        if not level:
            path = ".".join("0" for _ in shape[:-1])
            expected = 'a list with something in it; a shape with a 0 is said as {"dtype", "shape", "data"}'
            raise ListFault([Fault(path, expected, "[]")])
        if len(shape) > _MAX_DEPTH:
            raise ListFault([Fault("", "at most 4 axes", f"more than {_MAX_DEPTH}")])
        level = level[0]
    flat = np.empty(math.prod(shape), dtype=dtype)
    start = 0
    misfits: list[Fault] = []
    for place, row in _rows(items, shape, (), misfits):
        numbers = read_row(row, place, misfits)
        if len(misfits) >= MAX_FAULTS:
            break
        if not misfits:
            flat[start : start + len(numbers)] = numbers
            start += len(numbers)
    if misfits:
        raise ListFault(misfits)
    return flat, tuple(shape)


def _rows(
    node: Any, shape: list[int], path: tuple[int, ...], misfits: list[Fault]
) -> Iterator[tuple[tuple[int, ...], list[Any]]]:
    depth = len(path)
    if not isinstance(node, list):
        misfits.append(Fault(_dotted(path), f"a list of {shape[depth]}", short(node)))
    elif len(node) != shape[depth]:
        expected = f"{shape[depth]} entries, as {_dotted((0,) * depth) or 'the first list'} has"
        misfits.append(Fault(_dotted(path), expected, f"{len(node)} entries"))
    elif depth + 1 == len(shape):
        yield path, node
    else:
        for index, child in enumerate(node):
            yield from _rows(child, shape, (*path, index), misfits)


def _number_row(row: list[Any], path: tuple[int, ...], misfits: list[Fault]) -> list[float]:
    if set(map(type, row)) <= {int, float} and math.inf not in row and -math.inf not in row:
        return row
    numbers = []
    for index, item in enumerate(row):
        number = math.nan
        if isinstance(item, int | float) and not isinstance(item, bool):
            number = float(item)
            if math.isinf(number):
                misfits.append(Fault(_dotted((*path, index)), "a number that float64 can hold", "one beyond it"))
        elif isinstance(item, str) and item in _SPECIAL:
            number = _SPECIAL[item]
        else:
            expected = 'a number, "NaN", "Infinity" or "-Infinity"'
            misfits.append(Fault(_dotted((*path, index)), expected, short(item)))
        numbers.append(number)
    return numbers


def _strict_row(row: list[Any], path: tuple[int, ...], misfits: list[Fault]) -> list[float]:
    if set(map(type, row)) <= {int, float} and math.inf not in row and -math.inf not in row:
        return row
    for index, item in enumerate(row):
        if isinstance(item, bool) or not isinstance(item, int | float):
            misfits.append(Fault(_dotted((*path, index)), "a number", short(item)))
        elif math.isinf(item) and not isinstance(item, BareWord):
            misfits.append(Fault(_dotted((*path, index)), "a number that float64 can hold", "one beyond it"))
    return row


def _bool_row(row: list[Any], path: tuple[int, ...], misfits: list[Fault]) -> list[bool]:
    if set(map(type, row)) != {bool}:
        expected = "true or false (a number to add is bias, 0 and 1 are not a mask)"
        _name_misfits(row, path, misfits, lambda item: isinstance(item, bool), expected)
    return row


def _whole_row(row: list[Any], path: tuple[int, ...], misfits: list[Fault]) -> list[int]:
    def fits(item: Any) -> bool:
        return type(item) is int and -(2**63) <= item < 2**63

    _name_misfits(row, path, misfits, fits, "a whole number that int64 can hold")
    return row


def _name_misfits(
    row: list[Any], path: tuple[int, ...], misfits: list[Fault], fits: Callable[[Any], bool], expected: str
) -> None:
    for index, item in enumerate(row):
        if not fits(item):
            misfits.append(Fault(_dotted((*path, index)), expected, short(item)))


def _dotted(path: tuple[int, ...]) -> str:
    return ".".join(str(index) for index in path)


class Shown(str):
    """The short text of a value that itself is not kept: ``short`` of the one is ``short`` of the other."""

    __slots__ = ()


def short_name(name: str, limit: int = 100) -> str:
    """A caller's name for a thing, cut where it gets long."""
    return name if len(name) <= limit else name[:limit] + "…"


def short(value: Any, limit: int = 80) -> str:
    """A value as JSON text, cut where it gets long."""
    if isinstance(value, Shown):
        return str(value)
    if isinstance(value, NestedList):
        value = value.plain()
    if isinstance(value, str) and len(value) > limit:
        return json.dumps(value[:limit], ensure_ascii=False)[:-1] + "…"
    if isinstance(value, list | dict) and len(value) > limit:
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)}"
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= limit else text[:limit] + "…"
