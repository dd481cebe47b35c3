"""Conversations, prompts and the target's own answers."""

from specwave.data.conversations import Sample, prompt_ids

__all__ = ["Sample", "prompt_ids"]
