"""specwave: choose which hidden layers a speculative drafter sees, distil it, and measure what the choice is worth."""

__version__ = "0.1.0"
