"""Which operators of a graph draw random numbers: two calls then differ, and their order counts.

Left out: operators that draw inside other names; a new one is to be added here.
"""

from __future__ import annotations

from drk.gym.graph import Node

_WORDS = ("rand", "drop", "bernoulli", "normal_", "multinomial", "uniform", "exponential", "geometric", "poisson")
_ATTENTION = "scaled_dot_product_attention"
_DROPOUT_PLACE = 4


def draws(node: Node) -> bool:
    """Say whether ``node`` draws random numbers."""
    if node.bare_op == _ATTENTION:
        given = node.args[_DROPOUT_PLACE] if len(node.args) > _DROPOUT_PLACE else node.kwargs.get("dropout_p", 0.0)
        return bool(given)
    return any(word in node.op for word in _WORDS)
