"""The small models' tokenizer: byte-level BPE trained on their own texts, with whole lines and blocks as tokens.

Digits stand alone, so that numbers are copied digit by digit; identifiers are split from the blank before them. What
every kernel repeats word for word (device functions, lines of addressing and launching) becomes one token each: such
*phrases* are found by counting in the answers. Nothing is ever lost: any text is encoded and decoded to itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from drk.training.tiny_model import SPECIAL, UNKNOWN, as_pretrained

PIECES = Regex(r"[A-Za-z_][A-Za-z_]*|[0-9]|\n[ ]*|[ ]+|[^A-Za-z_0-9\s]+|\s+")
"""Words, single digits, line breaks with their indentation, blanks, and runs of signs."""
PHRASE_SHARE = 0.004
"""A phrase stands in at least this share of the answers."""
USUAL_SHARE = 0.03
"""A word of at least this share of the answers is no name."""
SHORTEST = 12
SHORTEST_PART = 6
_WORD = re.compile(r"[A-Za-z0-9]+")
BLOCK_SHARE = 0.25
"""At most this share of the phrases are blocks of several lines."""


def train_tokenizer(texts: Iterable[str], *, vocabulary: int, context_tokens: int, phrases: Sequence[str] = ()) -> Any:
    """Return a byte-level BPE tokenizer with small models' roles and chat template.

    Args:
        texts: what it is trained on.
        vocabulary: entries at most, the 256 bytes, the special tokens and the phrases included.
        context_tokens: what the tokenizer states as its limit.
        phrases: texts that become one token wherever they stand, the longest first.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocabulary - len(phrases), 256 + len(SPECIAL)),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(texts, phrases), trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return as_pretrained(tokenizer, context_tokens)


def frequent_phrases(answers: Sequence[str], count: int) -> list[str]:
    """Return at most ``count`` texts that many of ``answers`` repeat, those that save most first.

    They are whole blocks, whole lines, and the parts of lines between words that are rare (names, constants). Only
    ASCII texts with a blank or a line break are taken: the decoder tells them from byte tokens by that.
    """
    least = max(2, int(len(answers) * PHRASE_SHARE))
    blocks: Counter[str] = Counter()
    for answer in answers:
        blocks.update({f"{block}\n\n\n" for block in answer.split("\n\n\n")[:-1] if block.count("\n") > 1})
    chosen = _best(blocks, least, int(count * BLOCK_SHARE), SHORTEST)
    rest = list(_without(answers, chosen))
    words = Counter(word for text in rest for word in set(_WORD.findall(text)))
    usual = {word for word, number in words.items() if number >= len(answers) * USUAL_SHARE and not word.isdigit()}
    parts: Counter[str] = Counter()
    for text in rest:
        for line in text.splitlines(keepends=True):
            found = _between(line, usual | {"0", "2"})
            parts.update([line, *found] if found != [line] else found)
    return [*chosen, *_best(parts, least, count - len(chosen), SHORTEST_PART)]


def _between(line: str, usual: set[str]) -> list[str]:
    """Return the parts of ``line`` between words that are not ``usual``."""
    parts, start = [], 0
    for word in _WORD.finditer(line):
        if word[0] not in usual:
            parts.append(line[start : word.start()])
            start = word.end()
    return [part for part in (*parts, line[start:]) if part]


def _best(counted: Counter[str], least: int, count: int, shortest: int) -> list[str]:
    usable = {
        text: number
        for text, number in counted.items()
        if number >= least
        and len(text) >= shortest
        and text.isascii()
        and (" " in text or "\n" in text)
        and text.strip()
    }
    return sorted(usable, key=lambda text: (-usable[text] * len(text), text))[:count]


def _without(texts: Iterable[str], phrases: Sequence[str]) -> Iterator[str]:
    """Yield the texts between phrases, so that merges are learned for what is left."""
    longest = sorted(phrases, key=len, reverse=True)
    for text in texts:
        left = text
        for phrase in longest:
            if phrase in left:
                left = left.replace(phrase, "\0")
        yield from (part for part in left.split("\0") if part)
