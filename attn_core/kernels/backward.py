"""The backward kernel: gradients of one attention, its logits recomputed block by block."""
