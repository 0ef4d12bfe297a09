"""Hypotheses about products, their sums over the ranks, and the tables at either end of the model."""
