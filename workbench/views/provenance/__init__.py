"""Whose row of a paged cache is read: by the integers that an engine hands its attention, without a model."""
