"""The backward pass of attention, each step a pure function of tensors."""
