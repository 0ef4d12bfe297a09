"""Variants of scores, mask, softmax and context, and of attention that runs in one kernel."""
