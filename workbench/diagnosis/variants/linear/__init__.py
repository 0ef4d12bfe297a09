"""Variants of linear layers: weight, bias, scale, input, order, shard, and the sum over ranks."""
