"""What requests say to the contenders beside the service; the service itself passes over it."""

ANSWER_BYTES = "x-answer-bytes"
"""How many bytes the echo answers: as many as the context has."""
SHAPE = "x-shape"
"""Axes of query, key and value, with commas between: spares the bound and raw peers the reading of a header in JSON."""
TEXT_BYTES = "inference-header-content-length"
"""How much of the body stands before the tensors: Triton has to be told."""
HEAD_ALIGNMENT = 16
"""Heads are padded to a multiple of this, so that float32 behind them can be read in place."""
