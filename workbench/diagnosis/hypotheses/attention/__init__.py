"""Hypotheses of attention: one tree of named points, edited at any of them, judged where it was recorded.

tree       `AttentionTree`: what goes in, its values at each point, what an edit gives
tensors    edits of any tensor with labelled axes
masks      which keys a query sees, cell by cell
softmaxes  other functions in the softmax's place
operands   other tensors in the place of q, k and v
numbers    scales, caps, sinks, factors, solved for
trials     what is tried on a sample, and made whole
attention  the generator: single edits, choices a slice, pairs
words      sentence and class of an edit
"""
