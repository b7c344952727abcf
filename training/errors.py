"""The training stack's error tree.

::

    TrainingError                root of everything that drk.training raises
    +-- ShapeError               tensors or id lists that do not fit together
    +-- OptionError              an unknown name or an impossible number among the options
    +-- NotFiniteError           a live number is NaN or infinite
    +-- EmptyBatchError          rejection left nothing to train on: never step on an empty batch

A wrong kernel or a fault of the gym is not an error here: the first is a row with a low reward, the second a row that
was left out before the batch was built (see :class:`drk.gym.reward.NotRewardable`).
"""

from __future__ import annotations


class TrainingError(Exception):
    """Root of the tree. ``help`` is the next step that a person can take, or an empty string."""

    def __init__(self, message: str, *, help: str = "") -> None:  # noqa: A002 - the word users read
        super().__init__(message)
        self.message = message
        self.help = help


class ShapeError(TrainingError, ValueError):
    """Tensors or id lists differ in length, a sample has one turn twice, or a turn number is below -1."""


class OptionError(TrainingError, ValueError):
    """An option's name is not known, or its value makes no sense."""


class NotFiniteError(TrainingError, ValueError):
    """A reward (or another number that a gradient would be made of) is NaN or infinite."""


class EmptyBatchError(TrainingError):
    """No token is left after masking and rejection."""
