"""Known bugs of inference engines, one module a family, each fault beside the functions that it puts in place.

To add a fault: append a `Fault` to its family's `FAULTS`. Family modules are imported by processes that only
list toggles, so they must not import torch at module level: the functions import what they need when a rank
calls them.
"""
