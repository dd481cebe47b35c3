"""Geometry of hidden states (ELSI): entropy, CKA, the filter and block means, searches, calibration."""

from specwave.layers.blocks import block_means, keep_positions
from specwave.layers.cka import cka_matrix, conditional_cka, linear_cka, transitions
from specwave.layers.entropy import matrix_entropy
from specwave.layers.groups import Group
from specwave.layers.search import elsi, elsi_c, exhaustive
from specwave.layers.selectors import Elsi, ElsiC, Exhaustive, Fixed, fixed_rule

__all__ = [
    "Elsi",
    "ElsiC",
    "Exhaustive",
    "Fixed",
    "Group",
    "block_means",
    "cka_matrix",
    "conditional_cka",
    "elsi",
    "elsi_c",
    "exhaustive",
    "fixed_rule",
    "keep_positions",
    "linear_cka",
    "matrix_entropy",
    "transitions",
]
