"""The binary door: a binary body that lies whole in memory, and the pieces of its answer.

It does for the road without ASGI what ``rest`` does on the other one for safetensors, and ``open_inference`` for
requests of the Open Inference Protocol whose JSON part is known, with the same checks, errors and figures.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import Prepared
from service.admission import Admission, BytePermit
from service.attend import Attend, Waiting
from service.authentication import Authentication
from service.deadline import Deadline
from service.doors.answers import count_answer, info_of, is_worth_gzip, refusal_reason
from service.doors.exchange import Exchange, record
from service.doors.inference import FAILED
from service.doors.receive_buffers import ReceiveBuffer, ReceiveBuffers
from service.doors.refusals import refusal_of
from service.doors.rest import RestLimits
from service.lifecycle import Lifecycle
from service.request_queue import Answer, Outcome
from service.statistics import Statistics
from service.telemetry import Metrics
from service.wire import open_inference_json, safetensors_format
from service.wire.plain_recipes import MAX_HEADER_BYTES, InferenceTemplate, PlainRecipe, PlainRecipes, split_id
from service.wire.requests import ATTENTION, GRADIENTS, LAYER, LAYER_GRADIENTS, WEIGHTED_SUM, Call
from service.wire.tensors import bytes_of, memory_of

CALLS: Mapping[bytes, Call] = {
    b"/v1/attention": ATTENTION,
    b"/v1/attention/gradients": GRADIENTS,
    b"/v1/weighted_sum": WEIGHTED_SUM,
    b"/v1/layer": LAYER,
    b"/v1/layer/gradients": LAYER_GRADIENTS,
}
Piece = bytes | memoryview
_END_OF_HEAD = (
    b"%bcontent-length: %d\r\nx-request-id: %b\r\nserver-timing: read;dur=%.3f, parse;dur=%.3f, queue;dur=0.000, "
    b"compute;dur=%.3f, encode;dur=%.3f\r\n\r\n%b"
)


_JSON_BYTES = b"inference-header-content-length: %d\r\n"
INFERENCE_MEDIA_TYPE = open_inference_json.BINARY.encode()
INFER_ROUTE = "/v2/models/{model}/infer"
Known = tuple[PlainRecipe, bytes]
"""What is known of a request before it is read, and the id in it."""


@dataclass(slots=True)
class Head:
    """What the head of a request says, as far as this road needs it.

    ``json_bytes`` is the length of the JSON part of a request of the Open Inference Protocol, 0 for safetensors.
    """

    target: bytes
    content_length: int
    keep_alive: bool
    sent_id: bytes | None
    accepts_gzip: bool
    json_bytes: int = 0


@dataclass(slots=True)
class Reply:
    """An answer as it will be written: status, its own headers, and the body's pieces."""

    status: int
    content_type: bytes
    pieces: list[Piece]
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces)


class BinaryDoor:
    """Shared by all connections of one loop. ``began`` and all times are on the monotonic clock."""

    def __init__(
        self,
        *,
        attend: Attend,
        admission: Admission,
        lifecycle: Lifecycle,
        authentication: Authentication,
        metrics: Metrics,
        limits: RestLimits,
        buffers: ReceiveBuffers,
        recipes: PlainRecipes,
        statistics: Statistics,
    ) -> None:
        self.admission = admission
        self.lifecycle = lifecycle
        self.authentication = authentication
        self.limits = limits
        self.buffers = buffers
        self._attend = attend
        self._metrics = metrics
        self._recipes = recipes
        self._statistics = statistics
        self._latest_key: tuple[bytes, bytes, tuple[bytes, bytes]] = b"", b"", (b"", b"")
        self._first_half_of_id = secrets.token_hex(8).encode()
        self._num_ids = 0
        routes = ("/v1/attention", INFER_ROUTE)
        self._ok = [metrics.requests.labels(route, "ok") for route in routes]
        self._seconds = [metrics.request_seconds.labels(route) for route in routes]

    def id_of(self, head: Head) -> bytes:
        """The id that was sent, or a new one: half of it is this server's, the other half counts."""
        if head.sent_id is not None:
            return head.sent_id
        self._num_ids += 1
        return b"%b%016x" % (self._first_half_of_id, self._num_ids)

    def takes(self, head: Head) -> bool:
        """Whether a body of this length is taken here; one that is too long is refused on the other road."""
        return head.content_length <= self.limits.max_body_bytes

    def enter(self, head: Head, exchange: Exchange, give_up: Callable[[], object]) -> BytePermit:
        """Let a request in at its head, before its body is read; to be undone by ``leave``.

        Raises: Draining, Unavailable, Overloaded.
        """
        self.lifecycle.check_open()
        self.admission.check_wait(self._attend.wait_s())
        self._attend.check_room()
        permit = self.admission.enter()
        try:
            permit.hold(head.content_length)
            self.lifecycle.enter(exchange, give_up)
        except BaseException:
            permit.leave()
            raise
        self._metrics.in_flight.inc()
        return permit

    def enter_anyway(self, unsent_bytes: int) -> BytePermit:
        """Count an answer that is there and that its client is slow to read: others are refused meanwhile."""
        permit = self.admission.enter_anyway()
        permit.count(unsent_bytes)
        self._metrics.in_flight.inc()
        return permit

    def leave(self, exchange: Exchange | None, permit: BytePermit) -> None:
        self._metrics.in_flight.dec()
        if exchange is not None:
            self.lifecycle.leave(exchange)
        permit.leave()

    def answer_at_once(
        self, head: Head, buffer: ReceiveBuffer, body_at: int, began: float, read_s: float = 0.0
    ) -> tuple[bytes, memoryview] | None:
        """The answer to a plain request, computed here and now; None where it has to take the longer way.

        Gives the end of the head with the beginning of the body, and the rest of the body.
        """
        found = self._recipe(head, buffer, body_at)
        if found is None:
            return None
        recipe, data_at, id_text = found
        if recipe.timeout_s is not None:
            return None
        form = recipe.form
        estimated_s = self._attend.may_run_plain_at_once(form)
        if estimated_s is None:
            return None
        tensors = buffer.views(recipe, data_at)
        parsed = time.monotonic()
        context = self._attend.run_plain_at_once(form, *tensors, estimated_s)
        if context is None:
            return None
        data = memory_of(context)
        if head.accepts_gzip and is_worth_gzip([data.cast("B")]):
            return None
        computed = time.monotonic()
        beginning = recipe.answer.beginning(queue_s=0.0, compute_s=computed - parsed, id_text=id_text)
        size = len(beginning) + recipe.context_bytes
        ended = time.monotonic()
        is_inference = head.json_bytes > 0
        text = _END_OF_HEAD % (
            _JSON_BYTES % len(beginning) if is_inference else b"",
            size,
            self.id_of(head),
            read_s * 1e3,
            (parsed - began - read_s) * 1e3,
            (computed - parsed) * 1e3,
            (ended - computed) * 1e3,
            beginning,
        )
        metrics = self._metrics
        self._ok[is_inference].inc()
        self._seconds[is_inference].observe(ended - began)
        if isinstance(recipe.answer, InferenceTemplate):
            self._statistics.succeeded(
                recipe.answer.model_name,
                total_s=ended - began - read_s,
                queue_s=0.0,
                input_s=parsed - began - read_s,
                infer_s=computed - parsed,
                output_s=ended - computed,
            )
        metrics.plain_answered(
            read_s=read_s,
            parse_s=parsed - began - read_s,
            compute_s=computed - parsed,
            encode_s=ended - computed,
            received_bytes=head.content_length,
            sent_bytes=size,
            path=form.path,
            flops=form.cost.flops,
        )
        return text, data

    def begin(
        self,
        head: Head,
        exchange: Exchange,
        buffer: ReceiveBuffer,
        body_at: int,
        deliver: Callable[[Known | None, Outcome], None],
    ) -> Waiting | None:
        """Read a whole body and have its problem computed, at once or by the engine; ``deliver`` gets the outcome.

        A body of the Open Inference Protocol is one that ``knows`` knew. Raises: whatever a refusal says.
        """
        known: Known | None = None
        with exchange.stage("parse"):
            found = self._recipe(head, buffer, body_at)
            if found is not None:
                recipe, data_at, id_text = found
                known = recipe, id_text
                prepared, timeout_s = recipe.prepared(buffer.views(recipe, data_at)), recipe.timeout_s
            else:
                assert not head.json_bytes
                prepared, timeout_s = self._read(head, buffer, body_at)
        deadline = Deadline(exchange.began + (self.limits.default_timeout_s if timeout_s is None else timeout_s))
        return self._attend.begin(
            prepared, deadline, more_bytes=0, deliver=functools.partial(deliver, known), held=buffer
        )

    def knows(self, head: Head, begun: memoryview) -> bool:
        """Whether a request of the Open Inference Protocol can be served here, by the JSON part with which its body
        has ``begun``."""
        recipe = self._recipes.get(self._key(head, begun)[1])
        return recipe is not None and head.json_bytes + recipe.data_bytes == head.content_length

    def _recipe(self, head: Head, buffer: ReceiveBuffer, body_at: int) -> tuple[PlainRecipe, int, bytes] | None:
        """What is known of a body with this header, where its numbers begin, and the id in it."""
        view = buffer.view
        if head.json_bytes:
            data_at = body_at + head.json_bytes
            id_text, key = self._key(head, view[body_at:data_at])
        else:
            header_at = body_at + 8
            header_bytes = int.from_bytes(view[body_at:header_at], "little")
            if header_bytes > MAX_HEADER_BYTES or head.target != b"/v1/attention":
                # Not looked up: it may claim all of a long body.
                return None
            data_at = header_at + header_bytes
            id_text, key = b"", bytes(view[header_at:data_at])
        recipe = self._recipes.get(key)
        if recipe is None or data_at % ALIGNMENT_BYTES or data_at + recipe.data_bytes != body_at + head.content_length:
            return None
        return recipe, data_at, id_text

    def _key(self, head: Head, begun: memoryview) -> tuple[bytes, bytes]:
        """The id in a JSON part, and what a recipe for the rest goes by: the model is in the target."""
        json_part = bytes(begun[: head.json_bytes])
        target, latest, found = self._latest_key
        if json_part != latest or head.target != target:
            # Each is asked for twice: whether it is known, and what is known of it.
            id_text, rest = split_id(json_part)
            found = id_text, head.target + rest
            self._latest_key = head.target, json_part, found
        return found

    def _read(self, head: Head, buffer: ReceiveBuffer, body_at: int) -> tuple[Prepared, float | None]:
        """A safetensors body with a header that is not known, and its deadline. Raises: Malformed, InvalidProblem."""
        call = CALLS[head.target]
        body = buffer.view[body_at : body_at + head.content_length]
        decoded = safetensors_format.decode(body, call, self.limits.read)
        prepared = self._attend.prepare(decoded.problem)
        if call is ATTENTION:
            header_bytes = int.from_bytes(body[:8], "little")
            self._recipes.remember(bytes(body[8 : 8 + header_bytes]), decoded, prepared)
        return prepared, decoded.timeout_s

    def reply(self, known: Known | None, answer: Answer, exchange: Exchange) -> Reply:
        """An answer, written out."""
        exchange.stages["queue"], exchange.stages["compute"] = answer.queue_s, answer.compute_s
        count_answer(self._metrics, answer)
        info = info_of(answer)
        exchange.status = 200
        if known is None or not isinstance(known[0].answer, InferenceTemplate):
            with exchange.stage("encode"):
                pieces = safetensors_format.encode(answer.result.outputs, info)
            return Reply(200, safetensors_format.MEDIA_TYPE.encode(), pieces)
        recipe, id_text = known
        template = known[0].answer
        with exchange.stage("encode"):
            json_part = template.written(recipe.form, info, id_text)
            pieces = [json_part, bytes_of(answer.result.outputs["context"])]
        self._statistics.succeeded(
            template.model_name,
            total_s=time.monotonic() - exchange.began - exchange.stages.get("read", 0.0),
            queue_s=answer.queue_s,
            input_s=exchange.stages.get("parse", 0.0),
            infer_s=answer.compute_s,
            output_s=exchange.stages["encode"],
        )
        headers = [(b"inference-header-content-length", b"%d" % len(json_part))]
        return Reply(200, INFERENCE_MEDIA_TYPE, pieces, headers)

    def refusal(self, head: Head, error: BaseException, exchange: Exchange) -> Reply:
        """An error as its answer."""
        reason = refusal_reason(error)
        if reason is not None:
            self._metrics.refused.labels(reason).inc()
        refusal = refusal_of(error, exchange.request_id, path=head.target.decode("latin-1"))
        exchange.outcome, exchange.status = refusal.failure.name, refusal.status
        if head.json_bytes and refusal.failure.name in FAILED:
            model = head.target.decode("latin-1").split("/")[3]
            self._statistics.failed(model, total_s=time.monotonic() - exchange.began)
        raw = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
        return Reply(refusal.status, refusal.media_type.encode(), [refusal.body], raw)

    def record(self, head: Head, exchange: Exchange) -> None:
        """Count and log a request that is over."""
        record(self._metrics, "POST", INFER_ROUTE if head.json_bytes else head.target.decode(), exchange)
