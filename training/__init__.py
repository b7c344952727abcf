"""The training stack: teaches models to write kernels (DESIGN section 9).

The numerical core is pure and small: :mod:`drk.training.advantages`, :mod:`drk.training.rejection`,
:mod:`drk.training.mismatch` and :mod:`drk.training.losses` need torch and nothing else. Rows are turns: one row is
one turn of one sample, its prompt the conversation so far, its completion that turn's answer. Importing this package
imports no torch.
"""
