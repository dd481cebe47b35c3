"""Questions, measurement against plain decoding, results and their report."""

from specwave.benchmark.questions import Benchmark, Question

__all__ = ["Benchmark", "Question"]
