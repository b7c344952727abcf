"""What may vary in a generated module without changing its graph: names, constants, comments, layout of statements.

A :class:`Dress` draws these from a generator of its own, so that the choices of structure (operations, shapes,
spellings) stay the same under another dress. It records the names and constants that reach a captured graph in the
order in which they were asked for; :func:`redress` puts those of one dress in the place of those of
:class:`CanonicalDress`, in the graph's JSON text. One capture (some 80 ms) then serves many texts.

Names are open: words that people use, joined, cut and numbered, and syllables that nobody has seen, so that copying
must be learned. Left out: names that a graph's own names could meet (operations, Triton's words).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Literal

Slot = Literal["input", "attribute", "argument", "class"]


def _items(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


_SYLLABLES = _items(
    "ba co du fe gi ho ka lu mi no pa que ri so ta vi wo xa ye zu bel dor fin gam kel mor nar pol rin sul tan"
)
_INPUT_WORDS = _items(
    "x h z u v q inputs input_tensor hidden hidden_states features feats value data act tokens state signal "
    "batch_in img image frames logits scores pred target pos emb seq obs reward a b left other src memory "
    "query ctx noise y t residual latents codes grid field points patches spec audio wave rays delta adv"
)
_ATTRIBUTE_WORDS = _items(
    "fc proj linear lin dense out_proj in_proj layer block mlp gate up down head body stem act activation "
    "nonlin norm ln bn gn norm1 fc1 fc2 scale shift gamma beta alpha weight bias_term temperature eps slope "
    "threshold limit margin factor offset momentum power pool drop conv conv1 dw pw mix gain lam kappa "
    "sharpness floor ceiling"
)
_ARGUMENT_WORDS = _items(
    "dim in_features out_features hidden_size channels in_channels out_channels d_model features n_in n_out "
    "size width embed_dim num_groups groups inner hidden_dim units"
)
_CLASS_WORDS = _items(
    "Model Net Block Layer Module Head Gate Fusion Scorer Mixer Unit Stage Cell Encoder Decoder Loss Norm "
    "Activation Branch Pool Field Filter Blend Adapter Bridge Core Tail"
)
_LOCAL_WORDS = _items(
    "x y z h out output res result tmp t s w a b mid hidden acc val feat scaled shifted gated normed "
    "centered mean var weights total denom numer diff dist energy inner squashed mixed combined update left "
    "right up act pre post"
)
_COMMENTS = _items(
    "fuse me|see the paper|kept in full precision|applied to every element|order matters here|TODO: make "
    "this faster|stabilise|scale before the nonlinearity|gate|broadcast over the batch|avoid overflow|same "
    "as in the original code|residual path|numerically safe|this is the hot path|(B, N, D)|normalise|"
    "per-channel|keep sign|element-wise",
    "|",
)
_DOCS = _items(
    "A small block.|Custom activation.|Common pattern in practice.|Applies the operations one after another.|"
    "Post-processing of the features.|Simple model that performs a sequence of operations.|Building block of "
    "the network.|Computes the output of the layer.|Head used for scoring.|Fused later, plain for now.",
    "|",
)
_RESERVED = frozenset(
    _items(
        "self torch nn F tl triton math Tensor in is as if or and not def del for from import pass "
        "class return with lambda index mask rows cols inner acc start pid"
    )
)
_LONG_NUMBER = re.compile(r"\d\.\d{5,}(?!\d*e)")


class Dress:
    """Draws names, constants and layout, and keeps what reaches a graph in ``names`` and ``constants``."""

    def __init__(self, rng: random.Random, fixed: Sequence[float] | None = None) -> None:
        self.rng = rng
        self.fixed = None if fixed is None else tuple(fixed)
        self.names: list[str] = []
        self.constants: list[float] = []
        self.taken: set[str] = set(_RESERVED)
        self.comments = rng.random() < 0.4
        self.reuse = rng.random() < 0.5
        self.nesting = rng.choice((0.15, 0.5, 0.85))
        self.habit = rng.random()

    def chance(self, probability: float) -> bool:
        """Return true with ``probability``."""
        return self.rng.random() < probability

    def name(self, slot: Slot) -> str:
        """Return a new name of the kind, and keep it."""
        found = self._class_name() if slot == "class" else self._fresh(self._words(slot))
        while found in self.names:
            found = self._class_name()
        self.names.append(found)
        return found

    def local(self) -> str:
        """Return a new name for a value inside ``forward``; these reach no graph."""
        return self._fresh(_LOCAL_WORDS)

    def constant(self, low: float, high: float) -> float:
        """Return a constant within the bounds, and keep it; where ``fixed`` were given, the next of those."""
        if self.fixed is not None:
            self.constants.append(self.fixed[len(self.constants)])
            return self.constants[-1]
        self.constants.append(self._small(high) if 0 < low <= 0.001 else self._number(low, high))
        return self.constants[-1]

    def _number(self, low: float, high: float) -> float:
        digits = self.rng.choice((1, 1, 2, 2, 3))
        value = round(self.rng.uniform(low, high), digits)
        if self.rng.random() < 0.2:
            value = self.rng.choice(
                [v for v in (0.1, 0.25, 0.5, 1.5, 2.0, 3.0, 127.0, -1.0, -0.5) if low <= v <= high] or [value]
            )
        value = value or round(high, 2)
        return int(value) if value == int(value) and self.rng.random() < 0.5 else value

    def _small(self, high: float) -> float:
        """Return what keeps a divisor from 0: a power of ten mostly."""
        found = self.rng.choice((1e-6, 1e-6, 1e-5, 1e-5, 1e-8, 1e-7, 1e-9, 1e-4, 1e-3, 1e-12))
        return round(self.rng.uniform(0.001, high), 3) if high > 0.01 and self.rng.random() < 0.25 else found

    def defaults(self, count: int) -> int:
        """Return how many of a constructor's last ``count`` arguments have defaults: none mostly, else often all."""
        if not count or self.rng.random() < 0.6:
            return 0
        return count if self.rng.random() < 0.5 else self.rng.randint(1, count)

    def comment(self) -> str:
        """Return a comment line, or an empty text."""
        return f"# {self.rng.choice(_COMMENTS)}" if self.comments and self.rng.random() < 0.25 else ""

    def docstring(self) -> str:
        """Return a sentence about a class."""
        return self.rng.choice(_DOCS)

    def _words(self, slot: Slot) -> Sequence[str]:
        return {"input": _INPUT_WORDS, "attribute": _ATTRIBUTE_WORDS}.get(slot, _ARGUMENT_WORDS)

    def _class_name(self) -> str:
        rng = self.rng
        if rng.random() < 0.4:
            return "Model"
        parts = rng.sample(_CLASS_WORDS[1:], rng.randint(1, 2))
        if rng.random() < 0.5:
            parts.insert(0, "".join(rng.choices(_SYLLABLES, k=2)).capitalize())
        return "".join(parts)

    def _fresh(self, words: Sequence[str]) -> str:
        while True:
            word = self._draw(words)
            if word.isidentifier() and word not in self.taken:
                self.taken.add(word)
                return word

    def _draw(self, words: Sequence[str]) -> str:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.45:
            word = rng.choice(words)
        elif kind < 0.65:
            word = f"{rng.choice(words)}_{rng.choice(words)}"
        else:
            parts = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 2))) for _ in range(rng.randint(1, 2))]
            word = rng.choice(("", "_")).join(parts)
            word = f"{rng.choice(words)}_{word}" if rng.random() < 0.3 else word
        return word + rng.choice(("", "", "", "", str(rng.randint(0, 9)), f"_{rng.randint(0, 9)}"))


class CanonicalDress(Dress):
    """The dress of a capture: names and constants that nothing else in a graph's text can be taken for."""

    def __init__(self, fixed: Sequence[float] | None = None) -> None:
        super().__init__(random.Random(0), fixed)
        self.comments = self.reuse = False
        self.nesting = 0.0

    def name(self, slot: Slot) -> str:
        """Return the next canonical name."""
        number = len(self.names)
        self.names.append(f"Zq{number:02d}zq" if slot == "class" else f"zq{number:02d}zq")
        return self.names[-1]

    def local(self) -> str:
        """Return a canonical local name."""
        self.taken.add(str(len(self.taken)))
        return f"zv{len(self.taken):03d}"

    def constant(self, low: float, high: float) -> float:
        """Return a constant within the bounds whose digits nothing else has, or the next fixed one."""
        if self.fixed is not None:
            return super().constant(low, high)
        number = len(self.constants)
        span = high - low
        value = round(low + span * (0.31 + 0.013 * number % 0.3), 3) + (7103 + 17 * number) * 1e-7
        value = round(value, 7)
        self.constants.append(value)
        return value


def redress(graph_text: str, canonical: Dress, dress: Dress) -> str:
    """Return the graph's JSON text in another dress of the same structure; fixed constants stay as they are.

    Raises:
        ValueError: the dresses do not belong to one structure, or a constant does not stand in the graph as it is.
    """
    if len(canonical.names) != len(dress.names) or len(canonical.constants) != len(dress.constants):
        raise ValueError("two dresses of different structures")
    table = dict(zip(canonical.names, dress.names, strict=True))
    text = graph_text
    for place, old in enumerate(canonical.constants if canonical.fixed is None else ()):
        pattern = rf"(?<![\d.\w]){re.escape(json.dumps(old))}(?![\d.])"
        text, count = re.subn(pattern, f"zc{place}zc", text)
        if not count:
            raise ValueError(f"the constant {old} does not stand in the graph")
    if canonical.fixed is None and _LONG_NUMBER.search(text):
        raise ValueError("the graph holds a number that was computed from a constant")
    text = re.sub(r"zc(\d+)zc", lambda found: json.dumps(dress.constants[int(found[1])]), text)
    return re.sub(r"[Zz]q\d\dzq", lambda found: table.get(found[0], found[0]), text)
