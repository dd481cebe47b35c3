"""Conversations, prompts and the target's own answers."""

from specwave.data.conversations import Conversation, Sample, prompt_ids

__all__ = ["Conversation", "Sample", "prompt_ids"]
