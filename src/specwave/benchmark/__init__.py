"""Questions, measurement against plain decoding, results and their report."""

from specwave.benchmark.long_context import LongContext
from specwave.benchmark.questions import Benchmark, Question, SpecBench

__all__ = ["Benchmark", "LongContext", "Question", "SpecBench"]
