"""Benchmarks: each prints ratios to a baseline that runs beside it. They are no tests and no part of CI."""
