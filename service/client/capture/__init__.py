"""The attention weights inside other people's models, while these run as they always do.

    with capture_attention(model) as captured:
        model(tokens)
    captured["encoder.layers.0.self_attn"].weights     # [batch, heads, queries, keys]

Fast kernels never hold the weights. A capture sees every call of ``scaled_dot_product_attention`` of its thread, and
computes the weights beside it, here or on a service. The model's numbers, gradients and random state stay what they
are, bit for bit. It needs torch and, unless a client does the work, attn_core.

What it sees, and how:

* ``scaled_dot_product_attention`` however it was imported, in TorchScript, under autocast, in checkpointed and
  backward passes: by the dispatcher of torch, below all names.
* ``nn.MultiheadAttention``, ``nn.TransformerEncoder`` and the like, on their fast path (nested tensors of padded
  batches too) and with ``need_weights=True``, where torch multiplies and normalises by hand.

What it cannot see, and says at the end where the model given has it: regions that ``torch.compile`` turned into code of
their own, ``flex_attention``, ``varlen_attn``, kernels of other libraries, attention written out as products and
softmax, ``nn.MultiheadAttention`` with ``need_weights=True`` inside TorchScript and its tracer. Not said, since no
model shows it: nested tensors given to ``scaled_dot_product_attention``, jagged or not, and ``torch.func.vmap``, which
torch takes apart before, ``multi_head_attention_forward`` imported by name, torch's own fused operators called
directly, and devices other than CPU, CUDA, XPU, MPS and torch's PrivateUse1. Calls of a model that is compiled with
``backend="eager"`` are seen, and have no names.
"""

from service.client.capture.calls import Captured, CapturedCall
from service.client.capture.capturing import Attends, IncompleteCapture, NothingCaptured, capture_attention

__all__ = ["Attends", "Captured", "CapturedCall", "IncompleteCapture", "NothingCaptured", "capture_attention"]
