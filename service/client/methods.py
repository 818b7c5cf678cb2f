"""Every call of the service as a method, once: the client that waits and the one that awaits differ in sending."""

from __future__ import annotations

import difflib
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    Generic,
    Literal,
    Required,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from service.client import calls
from service.client.calls import Call

Tensor = Any
"""A numpy array (bfloat16: ``ml_dtypes.bfloat16``), a torch tensor on any device with any strides, or nested lists."""
Window = Mapping[str, int | None] | tuple[int | None, int | None]
Causal = bool | Literal["upper_left", "lower_right"]
Layout = Literal["bhtd", "bthd", "btd"]
WeightLayout = Literal["in_out", "out_in"]
Path = Literal["fused", "manual", "blocked"]
FloatName = Literal["float64", "float32", "float16", "bfloat16"]

AnswerT = TypeVar("AnswerT")
PlanT = TypeVar("PlanT")
LayerT = TypeVar("LayerT")
LayersT = TypeVar("LayersT")
InfoT = TypeVar("InfoT")
BoolT = TypeVar("BoolT")
NoneT = TypeVar("NoneT")
F = TypeVar("F", bound=Callable[..., Any])


class Asking(TypedDict, total=False):
    """What every call takes.

    ``timeout_s`` limits this call, all tries counted in; the service is told what is left of it. ``request_id``, 1 to
    128 printable characters without spaces, is what the service's log will call it; else one is made.
    """

    timeout_s: float | None
    request_id: str | None


class Reading(Asking, total=False):
    """``dtype``: what nested lists are rounded to by the service, float32 where nothing is said; of lists alone."""

    dtype: FloatName | None


class Rules(Reading, total=False):
    """Who attends whom, and how: the same for an attention, for a layer and for the gradients of both.

    ``allow_mask`` (True = may attend), ``block_mask`` (True = must not) and ``bias`` (added to the logits) broadcast
    from the right to [B,H,T,S]; ``key_lengths`` and ``query_lengths`` [B] mark padding; ``query_offset`` [B], [1] or a
    number is the first query's place among the keys; ``alibi_slopes`` and ``sinks`` [H]. ``window``: keys kept on each
    side besides the query's own place, as (left, right) or a mapping, None = open. ``path`` asks for one kernel;
    ``verify`` computes in float64 as well and tells the error in ``info``.
    """

    allow_mask: Tensor
    block_mask: Tensor
    bias: Tensor
    key_lengths: Tensor
    query_lengths: Tensor
    query_offset: Tensor
    alibi_slopes: Tensor
    sinks: Tensor
    causal: Causal
    scale: float | None
    softcap: float | None
    window: Window | None
    empty_rows: Literal["zeros", "error"]
    path: Path | None
    verify: bool


class _Heads(TypedDict, total=False):
    num_heads: Required[int]
    num_kv_heads: int | None
    weight_layout: Required[WeightLayout]


class _Weights(_Heads, total=False):
    w_query: Required[Tensor]
    w_key: Required[Tensor]
    w_value: Required[Tensor]
    w_output: Required[Tensor]
    b_query: Tensor
    b_key: Tensor
    b_value: Tensor
    b_output: Tensor


class Weights(_Weights, Reading, total=False):
    """A layer without its input.

    ``weight_layout`` "in_out" is y = x W: ``w_query`` [E,H*D], ``w_key`` [M,K*D], ``w_value`` [M,K*V], ``w_output``
    [H*V,O]; "out_in" is y = x W^T, as nn.Linear stores them. Biases ``b_query``, ... are optional, each by itself.
    """


class LayerRules(_Weights, Rules, total=False):
    """``Weights`` and ``Rules`` together."""


_RULE_TENSORS = (
    *("allow_mask", "block_mask", "bias", "key_lengths", "query_lengths", "query_offset", "alibi_slopes", "sinks"),
)
_WEIGHTS = ("w_query", "w_key", "w_value", "w_output", "b_query", "b_key", "b_value", "b_output")
_ASKING = ("timeout_s", "request_id")


def _spelled_out(method: F) -> F:
    """The method with each keyword of its TypedDict in its signature, for help() and editors, and none besides."""
    hints = get_type_hints(method)
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())
    (packed,) = get_args(hints.pop(parameters[-1].name))
    assert is_typeddict(packed)
    # Annotations are texts here, in which __required_keys__ does not see what is required.
    required = {
        name for name, hint in get_type_hints(packed, include_extras=True).items() if get_origin(hint) is Required
    }
    spelled = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in required else calls.DEFAULTS.get(name),
            annotation=annotation,
        )
        for name, annotation in get_type_hints(packed).items()
    ]
    spelled.sort(key=lambda parameter: parameter.name not in required)
    known = frozenset(parameter.name for parameter in (*parameters[:-1], *spelled))

    @functools.wraps(method)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise TypeError(f"{method.__name__}() got an unexpected keyword argument {name!r}{hint}")
        return method(*args, **keywords)

    checked.__signature__ = signature.replace(parameters=[*parameters[:-1], *spelled])  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


class Methods(ABC, Generic[AnswerT, PlanT, LayerT, LayersT, InfoT, BoolT, NoneT]):
    """The calls of the contract. The type parameters are what a call gives: the thing itself, or a coroutine of it.

    Arrays may be numpy, torch or nested lists; the first one says what comes back (torch: on its device). Where it is
    an array and others are lists, lists of truth values and whole numbers join it as arrays, and a list of numbers
    makes the whole body JSON. Options at their defaults are not sent. Names, shapes and meanings are those of the
    HTTP interface. ``Rules``, ``Weights`` and ``Asking`` in ``service.client.methods`` say what further keywords mean.

    Each call raises the classes of ``service.client.errors``; a TypeError or ValueError before anything is sent.
    """

    @abstractmethod
    def _perform(self, make: Callable[[], Call[Any]]) -> Any:
        """What the call that ``make`` makes gives, sooner or later."""

    @_spelled_out
    def attention(
        self,
        query: Tensor,
        key: Tensor = None,
        value: Tensor = None,
        *,
        layout: Layout = "bhtd",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        outputs: str | Sequence[str] | None = None,
        select: Mapping[str, Any] | None = None,
        **rules: Unpack[Rules],
    ) -> AnswerT:
        """softmax(scale * query @ key^T) @ value over the allowed pairs, and what else of it ``outputs`` asks for.

        ``query`` [B,H,T,D], ``key`` [B,K,S,D], ``value`` [B,K,S,V] in ``layout`` "bhtd"; all of them with rank 3 or 2
        too; "bthd" [B,T,H,D], "btd" [B,T,H*D] with ``num_heads``. Key and value left out together are the query.
        ``outputs``: context (alone where nothing is said), weights, scores, logits, logsumexp, entropy, top_weights
        (with ``select={"top_k": n}``; brings top_keys), weight_totals. ``select={"heads": [...], "rows": [...]}``
        answers only these lines of weights and the like.
        """
        return self._computed(
            "/v1/attention",
            {"query": query, "key": key, "value": value},
            _layout_options(layout, num_heads, num_kv_heads) | {"outputs": outputs, "select": select},
            rules,
            layout=layout,
        )

    @_spelled_out
    def gradients(
        self,
        query: Tensor,
        key: Tensor = None,
        value: Tensor = None,
        *,
        grad_context: Tensor = None,
        grad_logsumexp: Tensor = None,
        layout: Layout = "bhtd",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        outputs: str | Sequence[str] | None = None,
        **rules: Unpack[Rules],
    ) -> AnswerT:
        """The gradients of sum(grad_context * context) + sum(grad_logsumexp * logsumexp); one of the two may be absent.

        Each has the shape and dtype of its tensor. ``outputs``: grad_query, grad_key, grad_value, and grad_bias,
        grad_sinks where given (all of these where nothing is said), and on request grad_weights and grad_logits.
        """
        return self._computed(
            "/v1/attention/gradients",
            {
                "query": query,
                "key": key,
                "value": value,
                "grad_context": grad_context,
                "grad_logsumexp": grad_logsumexp,
            },
            _layout_options(layout, num_heads, num_kv_heads) | {"outputs": outputs},
            rules,
            layout=layout,
        )

    @_spelled_out
    def weighted_sum(self, weights: Tensor, value: Tensor, **asking: Unpack[Reading]) -> AnswerT:
        """weights @ value by the plain product, as ``.context``: ``weights`` [B,H,T,S] need not add up to 1."""
        return self._computed("/v1/weighted_sum", {"weights": weights, "value": value}, {}, asking)

    @_spelled_out
    def plan(
        self,
        query: Tensor,
        key: Tensor = None,
        value: Tensor = None,
        *,
        grad_context: Tensor = None,
        grad_logsumexp: Tensor = None,
        layout: Layout = "bhtd",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        outputs: str | Sequence[str] | None = None,
        select: Mapping[str, Any] | None = None,
        **rules: Unpack[Rules],
    ) -> PlanT:
        """What an attention would take, or with ``grad_context`` or ``grad_logsumexp`` its gradients.

        No numbers are sent: each tensor may be an array (torch's meta tensors too), nested lists, a shape as a tuple
        such as ``(1, 8, 32768, 64)``, of ``dtype`` (float32 where nothing is said; masks are bool, lengths int64), or
        ``{"dtype": ..., "shape": ...}``. Here ``timeout_s`` is for the asking alone.
        """
        tensors, options, asking = _parted(rules)
        given = {"query": query, "key": key, "value": value, **tensors}
        given |= {"grad_context": grad_context, "grad_logsumexp": grad_logsumexp}
        options |= _layout_options(layout, num_heads, num_kv_heads) | {"outputs": outputs, "select": select}
        dtype = options.pop("dtype", None)
        made: PlanT = self._perform(lambda: calls.plan(given, options, layout=layout, dtype=dtype, **asking))
        return made

    @_spelled_out
    def layer(
        self,
        input: Tensor,
        memory: Tensor = None,
        *,
        outputs: str | Sequence[str] | None = None,
        select: Mapping[str, Any] | None = None,
        **weights_and_rules: Unpack[LayerRules],
    ) -> AnswerT:
        """Attention between learned projections: ``.output`` [B,T,O] of ``input`` [B,T,E] or [T,E].

        Keys and values come from ``memory`` [B,S,M], where it is given. Besides output ``outputs`` may name context
        (merged, before w_output), query, key, value (projected and split) and every output of ``attention``.
        """
        return self._computed(
            "/v1/layer", {"input": input, "memory": memory}, {"outputs": outputs, "select": select}, weights_and_rules
        )

    @_spelled_out
    def layer_gradients(
        self,
        input: Tensor,
        memory: Tensor = None,
        *,
        grad_output: Tensor,
        outputs: str | Sequence[str] | None = None,
        **weights_and_rules: Unpack[LayerRules],
    ) -> AnswerT:
        """The gradients of sum(grad_output * output) of a layer: of all that was given, or of what ``outputs`` names.

        Names are grad_input, grad_memory, grad_w_query, ..., grad_b_query, ..., grad_bias, grad_sinks; gradients of
        weights lie as the weights do.
        """
        tensors = {"input": input, "memory": memory, "grad_output": grad_output}
        return self._computed("/v1/layer/gradients", tensors, {"outputs": outputs}, weights_and_rules)

    @_spelled_out
    def put_layer(self, name: str, *, replace: bool = False, **weights: Unpack[Weights]) -> LayerT:
        """Have the service keep a layer's weights under ``name``; ``is_new`` of the answer says that it was free.

        The same content again is no fault; other content is a Conflict unless ``replace``. A name is 1 to 64 of
        a-z A-Z 0-9 . _ -, beginning with a letter. A ``replace`` whose connection broke underway is not sent again.
        """
        tensors, options, asking = _parted(weights)
        made: LayerT = self._perform(lambda: calls.put_layer(name, tensors, options, replace=replace, **asking))
        return made

    @_spelled_out
    def get_layer(self, name: str, **asking: Unpack[Asking]) -> LayerT:
        """What the service says of a layer that it keeps; not its weights. Raises: NotFound."""
        made: LayerT = self._perform(lambda: calls.get_layer(name, **asking))
        return made

    @_spelled_out
    def list_layers(self, **asking: Unpack[Asking]) -> LayersT:
        """Every layer that is kept, by name."""
        made: LayersT = self._perform(lambda: calls.list_layers(**asking))
        return made

    @_spelled_out
    def delete_layer(self, name: str, **asking: Unpack[Asking]) -> NoneT:
        """Have the service forget a layer; requests that run finish on it. Raises: NotFound.

        If the connection breaks underway it is not sent again: the layer may be gone already, or be another's.
        """
        made: NoneT = self._perform(lambda: calls.delete_layer(name, **asking))
        return made

    @_spelled_out
    def forward(
        self,
        name: str,
        input: Tensor,
        memory: Tensor = None,
        *,
        outputs: str | Sequence[str] | None = None,
        select: Mapping[str, Any] | None = None,
        **rules: Unpack[Rules],
    ) -> AnswerT:
        """``layer`` with the weights that the service keeps under ``name``. Raises: NotFound."""
        return self._computed(
            _layer_call(name, "forward"),
            {"input": input, "memory": memory},
            {"outputs": outputs, "select": select},
            rules,
        )

    @_spelled_out
    def forward_gradients(
        self,
        name: str,
        input: Tensor,
        memory: Tensor = None,
        *,
        grad_output: Tensor,
        outputs: str | Sequence[str] | None = None,
        **rules: Unpack[Rules],
    ) -> AnswerT:
        """``layer_gradients`` with the weights that the service keeps under ``name``. Raises: NotFound."""
        tensors = {"input": input, "memory": memory, "grad_output": grad_output}
        return self._computed(_layer_call(name, "gradients"), tensors, {"outputs": outputs}, rules)

    @_spelled_out
    def info(self, **asking: Unpack[Asking]) -> InfoT:
        """The service's version, device, dtypes, outputs and limits."""
        made: InfoT = self._perform(lambda: calls.info(**asking))
        return made

    @_spelled_out
    def is_ready(self, **asking: Unpack[Asking]) -> BoolT:
        """Whether the service would answer now; asked once. False too where nothing listens or comes in time."""
        made: BoolT = self._perform(lambda: calls.is_ready(**asking))
        return made

    def _computed(
        self,
        path: str | Callable[[], str],
        tensors: Mapping[str, Any],
        options: Mapping[str, Any],
        rules: Mapping[str, Any],
        *,
        layout: str | None = None,
    ) -> AnswerT:
        own, more, asking = _parted(rules)

        def make() -> Call[Any]:
            where = path if isinstance(path, str) else path()
            return calls.computation(where, {**tensors, **own}, {**more, **options}, layout=layout, **asking)

        made: AnswerT = self._perform(make)
        return made


def _layer_call(name: str, what: str) -> Callable[[], str]:
    return lambda: f"{calls.layer_path(name)}/{what}"


def _layout_options(layout: str, num_heads: int | None, num_kv_heads: int | None) -> dict[str, Any]:
    return {"layout": layout, "num_heads": num_heads, "num_kv_heads": num_kv_heads}


def _parted(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Tensors, options, and what is about the asking."""
    tensors = {name: given[name] for name in (*_WEIGHTS, *_RULE_TENSORS) if name in given}
    asking = {name: given[name] for name in _ASKING if name in given}
    return tensors, {name: given[name] for name in given if name not in tensors and name not in asking}, asking
