"""Why a rollout engine and a trainer, with the same weights, give tokens other log-probabilities.

The levels are asked in the order in which one makes the next meaningless: the tokens, the weights, what the
log-probability is of, the experts that were chosen, the operations, the shape of the passes. The first that differs is
the answer.
"""
