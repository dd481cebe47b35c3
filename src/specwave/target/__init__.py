"""The frozen target LLM: loading, sessions with a KV cache, captured hidden states."""

from specwave.target.arch import Arch
from specwave.target.load import ModelConfig, Target, load_target
from specwave.target.session import Output, Session, Wants

__all__ = ["Arch", "ModelConfig", "Output", "Session", "Target", "Wants", "load_target"]
