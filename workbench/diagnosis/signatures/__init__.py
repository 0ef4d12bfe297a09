"""Signatures by the taps that they explain: each fits one transform and names the cause where it is the one."""
