"""Benchmarks of unspool: each a ratio, with what it is compared to measured beside it in the same run."""
