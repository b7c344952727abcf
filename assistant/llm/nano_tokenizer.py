"""The small models' tokenizer, read from ``tokenizer.json``: byte-level BPE with whole phrases as tokens.

It reads what :mod:`drk.training.tokenizer` writes and gives the same ids as the ``tokenizers`` package (a test
compares), so that the nano model needs no package beyond drk's own. Phrases and special tokens are found first,
leftmost and longest; what lies between is cut by the file's pattern and merged byte by byte.

Left out: everything else that such a file may ask for (normalisers, other splits); it is refused. Control characters
that Python and the pattern's own engine count as blanks differently are no matter in source code.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drk.assistant.llm.messages import Message, ModelFault

KEY_CHARS = 4
"""Phrases are looked up by their first characters."""


def byte_alphabet() -> dict[int, str]:
    """Return the character that stands for each byte: printable ones for themselves (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class NanoTokenizer:
    """Texts to ids and back. ``end`` is the id that ends an answer.

    Raises:
        ModelFault: the folder holds no such tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = folder / "tokenizer.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            self._read(data)
            said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            end = said["eos_token"]
            self.end: int = self._special[end["content"] if isinstance(end, dict) else end]
            template = said.get("chat_template") or (folder / "chat_template.jinja").read_text(encoding="utf-8")
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            self._template = environment.from_string(template)
        except (OSError, ValueError, KeyError, TypeError, IndexError, re.error, jinja2.TemplateError) as error:
            raise ModelFault(
                f"{path} cannot be read", cause=f"{type(error).__name__}: {error}"[:300], help="fetch the folder again"
            ) from error

    def _read(self, data: dict[str, Any]) -> None:
        model, split = data["model"], data["pre_tokenizer"]["pretokenizers"]
        kinds = [model["type"], data["decoder"]["type"], *(one["type"] for one in split)]
        if kinds != ["BPE", "ByteLevel", "Split", "ByteLevel"] or data.get("normalizer") or model.get("byte_fallback"):
            raise ValueError(f"a tokenizer of another kind: {kinds}")
        if split[0]["behavior"] != "Isolated" or split[0]["invert"] or split[1]["add_prefix_space"]:
            raise ValueError("its texts are split in another way")
        self._pieces = re.compile(split[0]["pattern"]["Regex"])
        self._ids: dict[str, int] = dict(model["vocab"])
        pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self._alphabet = byte_alphabet()
        self._bytes = {char: byte for byte, char in self._alphabet.items()}
        self._texts = {number: text for text, number in self._ids.items()}
        self._phrases: dict[str, list[tuple[str, int]]] = {}
        self._whole: dict[int, str] = {}
        self._special: dict[str, int] = {}
        for one in data["added_tokens"]:
            if one["normalized"] or one["single_word"] or one["lstrip"] or one["rstrip"]:
                raise ValueError(f"the phrase {one['content']!r} is found in another way")
            text, number = one["content"], one["id"]
            self._whole[number] = text
            self._phrases.setdefault(text[:KEY_CHARS], []).append((text, number))
            if one["special"]:
                self._special[text] = number
        for found in self._phrases.values():
            found.sort(key=lambda phrase: -len(phrase[0]))
        if any(len(key) < KEY_CHARS for key in self._phrases):
            raise ValueError(f"a phrase is shorter than {KEY_CHARS} characters")
        self._merged: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return max(*self._texts, *self._whole) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; special tokens that stand in it are found as well."""
        ids: list[int] = []
        for part in self._parts(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                for piece in self._pieces.findall(part):
                    ids += self._piece(piece)
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to where the next answer begins."""
        rows = [{"role": message.role, "content": message.content} for message in messages]
        return self.encode(self._template.render(messages=rows, add_generation_prompt=True))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, special tokens left out; bytes that are no UTF-8 become replacement signs."""
        special = set(self._special.values())
        found = bytearray()
        for number in ids:
            if number in special:
                continue
            if number in self._whole:
                found += self._whole[number].encode()
            else:
                found += bytes(self._bytes[char] for char in self._texts[number])
        return found.decode("utf-8", "replace")

    def _parts(self, text: str) -> Iterator[str | int]:
        """Yield phrases as ids, and the texts between them."""
        start = place = 0
        while place < len(text):
            for phrase, number in self._phrases.get(text[place : place + KEY_CHARS], ()):
                if text.startswith(phrase, place):
                    if start < place:
                        yield text[start:place]
                    yield number
                    place += len(phrase)
                    start = place
                    break
            else:
                place += 1
        if start < len(text):
            yield text[start:]

    def _piece(self, piece: str) -> list[int]:
        found = self._merged.get(piece)
        if found is None:
            parts = [self._alphabet[byte] for byte in piece.encode("utf-8", "surrogatepass")]
            found = self._merged[piece] = [self._ids[part] for part in self._merge(parts)]
        return found

    def _merge(self, parts: list[str]) -> list[str]:
        """Join neighbours, the pair of the lowest rank first, the leftmost among equals."""
        worst = len(self._ranks)
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, worst) for pair in itertools.pairwise(parts)]
            best = min(ranks)
            if best == worst:
                break
            place = ranks.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return parts
