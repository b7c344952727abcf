"""Source text of sizes and distances: products and sums in which numbers are worked out.

Texts are Python expressions of launchers; those handed in need no parentheses as factors, sums are given them where
they become factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def is_number(text: str) -> bool:
    """Whether ``text`` is an integer, with or without a sign."""
    return text.removeprefix("-").isdigit()


def times(left: str, right: str) -> str:
    """The product of two factors' texts."""
    if is_number(left) and is_number(right):
        return str(int(left) * int(right))
    if "0" in (left, right):
        return "0"
    return right if left == "1" else left if right == "1" else f"{left} * {right}"


def product_text(factors: Sequence[str]) -> str:
    """The product of sizes' texts, numbers multiplied out."""
    number = math.prod(int(text) for text in factors if text.isdigit())
    texts = [text for text in factors if not text.isdigit()]
    return " * ".join([*texts, *([str(number)] if number != 1 or not texts else [])])


def sum_text(terms: Iterable[tuple[int, str]]) -> str:
    """The sum of signed terms (1 or -1 and a product's text), a number last, in parentheses unless it is one term."""
    number, texts = 0, list[tuple[int, str]]()
    for sign, text in terms:
        if is_number(text):
            number += sign * int(text)
        elif (-sign, text) in texts:
            texts.remove((-sign, text))
        else:
            texts.append((sign, text))
    texts.sort(key=lambda term: -term[0])
    texts += [(1 if number > 0 else -1, str(abs(number)))] if number or not texts else []
    (sign, first), *rest = texts
    if first == "0":
        return "0"
    text = (first if sign > 0 else f"-{first}") + "".join(f" {'+' if sign > 0 else '-'} {text}" for sign, text in rest)
    return f"({text})" if rest else text


def divided(text: str, divisors: Sequence[str]) -> str:
    """``text``, a factor, divided by ``divisors``, as a factor again."""
    by = [factor for factor in divisors if factor != "1"]
    return text if not by else f"({text} // {by[0]})" if len(by) == 1 else f"({text} // ({' * '.join(by)}))"
