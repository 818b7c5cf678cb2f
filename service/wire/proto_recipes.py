"""What the head of a plain gRPC request says, remembered: the same head again means the same checks, kernel and cost.

As ``plain_recipes`` does for requests over HTTP. A head is all of the message but its id and its raw contents, byte for
byte, so two requests with one head differ in their numbers alone.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import PlainForm, Prepared
from service.wire import open_inference_pb2 as pb
from service.wire.inference import CheckedInference, response_parameters
from service.wire.inference_models import DATATYPE_OF, VERSION
from service.wire.open_inference_proto import FINAL_PIECE, Frame, raw_output_head, split, write_parameters
from service.wire.plain_recipes import COMPUTE_MS, QUEUE_MS, PlainRecipe, info_of_template, plain_recipe

MAX_RECIPES = 1024
MAX_HEAD_BYTES = 2048
"""A longer head is read anew each time."""
_DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class ProtoTemplate:
    """An answer up to the context's bytes, cut where the times go."""

    model_name: str
    ignored: tuple[str, ...]
    parts: tuple[bytes, bytes, bytes]
    behind: list[bytes]
    """What stands behind an answer that is written anew; it is in the last of the ``parts``."""
    are_times_swapped: bool

    def beginning(self, *, queue_s: float, compute_s: float, id_text: bytes) -> bytes:
        """``id_text`` is the whole field of the id, which requests and answers have alike."""
        times = _DOUBLE.pack(round(queue_s * 1e3, 3)), _DOUBLE.pack(round(compute_s * 1e3, 3))
        first, second = times[::-1] if self.are_times_swapped else times
        before, between, behind = self.parts
        return b"".join((before, first, between, second, behind, id_text))


@dataclass(frozen=True, slots=True, eq=False)
class ProtoRecipe:
    """``plain`` says how the numbers lie once they are put together: each raw content, of so many bytes, from its
    ``begin`` on; between them are ``gaps``, to be filled with 0."""

    plain: PlainRecipe
    template: ProtoTemplate
    sizes: tuple[int, ...]
    begins: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    data_head: bytes

    def fill(self, view: memoryview, message: memoryview, frame: Frame) -> None:
        """Put the numbers of a message together, from the beginning of ``view`` on."""
        for (start, stop), begin in zip(frame.spans, self.begins, strict=True):
            view[begin : begin + stop - start] = message[start:stop]
        for begin, end in self.gaps:
            view[begin:end] = bytes(end - begin)


@dataclass(slots=True)
class Received:
    """The bytes of a request; ``frame`` is None where they are out of the ordinary, ``recipe`` where they are new."""

    data: bytes
    frame: Frame | None
    recipe: ProtoRecipe | None


@dataclass(frozen=True, slots=True)
class _Likely:
    """What the next message of the same length may be, too: a head, and what precedes each raw content."""

    frame: Frame
    recipe: ProtoRecipe
    marks: tuple[tuple[int, bytes], ...]

    def fits(self, message: bytes) -> bool:
        return message.startswith(self.frame.head) and all(message.startswith(mark, at) for at, mark in self.marks)


class ProtoRecipes:
    """The latest ``MAX_RECIPES`` recipes, by the bytes of their head."""

    def __init__(self, *, device: str) -> None:
        self._device = device
        self._recipes: OrderedDict[bytes, ProtoRecipe] = OrderedDict()
        self._likely: OrderedDict[int, _Likely] = OrderedDict()

    def find(self, message: bytes) -> Received:
        """A message, taken apart where it can be, and what is known of its head."""
        likely = self._likely.get(len(message))
        if likely is not None and likely.fits(message):
            return Received(message, likely.frame, likely.recipe)
        frame = split(message)
        recipe = None if frame is None else self.get(frame)
        if frame is not None and recipe is not None and not frame.id_field:
            ends = len(frame.head), *(stop for _, stop in frame.spans[:-1])
            marks = tuple((end, message[end:start]) for end, (start, _) in zip(ends, frame.spans, strict=True))
            if len(self._likely) >= MAX_RECIPES:
                self._likely.popitem(last=False)
            self._likely[len(message)] = _Likely(frame, recipe, marks)
        return Received(message, frame, recipe)

    def get(self, frame: Frame) -> ProtoRecipe | None:
        recipe = self._recipes.get(frame.key)
        if (
            recipe is None
            or recipe.sizes != tuple([stop - start for start, stop in frame.spans])
            or not _is_plain_id(frame.id_field)
        ):
            return None
        return recipe

    def remember(
        self,
        frame: Frame,
        sizes: Mapping[str, int],
        checked: CheckedInference,
        prepared: Prepared,
        *,
        asks_final: bool = False,
    ) -> None:
        """Keep what was found out about a head, if its requests are plain ones. ``sizes`` has the bytes of each input,
        all of them raw; ``asks_final``: each answer is to say that it is the last one."""
        form = prepared.plain
        if (
            form is None
            or len(frame.key) > MAX_HEAD_BYTES
            or checked.timeout_s is not None
            or checked.queue_timeout_s is not None
        ):
            return
        begins, gaps, end = {}, [], 0
        for name, size in sizes.items():
            begins[name], end = end, end + size
            if end % ALIGNMENT_BYTES:
                gaps.append((end, end - end % -ALIGNMENT_BYTES))
                end = gaps[-1][1]
        template = self._template(form, checked, behind=[FINAL_PIECE] if asks_final else [])
        plain = plain_recipe(prepared, begins=begins, data_bytes=end, timeout_s=None, answer=template)
        if plain is None:
            return
        if len(self._recipes) >= MAX_RECIPES:
            self._recipes.popitem(last=False)
        self._recipes[frame.key] = ProtoRecipe(
            plain=plain,
            template=template,
            sizes=tuple(sizes.values()),
            begins=tuple(begins.values()),
            gaps=tuple(gaps),
            data_head=raw_output_head(plain.context_bytes),
        )

    def _template(self, form: PlainForm, checked: CheckedInference, *, behind: list[bytes]) -> ProtoTemplate:
        info = info_of_template(form, device=self._device)
        message = pb.ModelInferResponse(model_name=checked.model.name, model_version=VERSION)
        write_parameters(message.parameters, response_parameters(info, checked.ignored))
        datatype = DATATYPE_OF[form.dtype].name
        message.outputs.add(name="context", datatype=datatype, shape=form.result_shape)
        text = message.SerializeToString()
        queue_at, compute_at = text.index(_DOUBLE.pack(QUEUE_MS)), text.index(_DOUBLE.pack(COMPUTE_MS))
        first, second = sorted((queue_at, compute_at))
        end = b"".join([text[second + _DOUBLE.size :], *behind])
        parts = text[:first], text[first + _DOUBLE.size : second], end
        return ProtoTemplate(checked.model.name, checked.ignored, parts, behind, compute_at < queue_at)


def _is_plain_id(id_field: bytes) -> bool:
    """Whether the field of an id can be sent back unread: it is text, its length one byte long."""
    if id_field.isascii():
        return True
    try:
        id_field[2:].decode()
    except UnicodeDecodeError:
        return False
    return id_field[1] < 128
