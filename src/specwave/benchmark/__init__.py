"""Questions, measurement against plain decoding, results and their report."""

from typing import TYPE_CHECKING, Any

from specwave.benchmark.questions import Benchmark, Question, SpecBench

if TYPE_CHECKING:
    from specwave.benchmark.long_context import LongContext

__all__ = ["Benchmark", "LongContext", "Question", "SpecBench"]


def __getattr__(name: str) -> Any:
    """What counts tokens on first use: a report is written without torch."""
    if name == "LongContext":
        from specwave.benchmark.long_context import LongContext

        return LongContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
