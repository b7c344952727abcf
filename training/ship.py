"""A checkpoint on its way: in few small files between machines, and in 8-bit integers for the repository.

:func:`pack_checkpoint` writes what a machine that returns little can return: at most three files of weights in
bfloat16, each at most 14 MB, and one tar with the rest (configuration, tokenizer, templates, a list of the tensors);
:func:`unpack_checkpoint` makes the folder again. :func:`export_nano` writes the form that ``drk optimize --model nano``
reads (:mod:`drk.assistant.llm.nano_weights`), at most 16 MiB in all. Both round: packing to bfloat16, exporting to 8
bits; :func:`export_error` measures what the latter changes.

Left out: optimizer states (they stay where they are) and anything that is not safetensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drk.assistant.llm.messages import Message, ModelFault
from drk.assistant.llm.nano_network import NanoNetwork, NetworkShape
from drk.assistant.llm.nano_tokenizer import NanoTokenizer
from drk.assistant.llm.nano_weights import INT8_FILE, PLAIN_FILE, TIED, read_config, read_weights, write_int8
from drk.training.errors import TrainingError
from drk.training.model_facts import FACTS

PART_BYTES = 14_000_000
PARTS = 3
SHIPPED_BYTES = 16 * 2**20
REST_FILE = "rest.tar"
MANIFEST = "tensors.json"
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json", FACTS)
OPTIONAL = ("chat_template.jinja", "generation_config.json", "special_tokens_map.json")


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's folder, a tied output left out.

    Raises:
        TrainingError: there are none, or they cannot be read.
    """
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise TrainingError(
            f"no {PLAIN_FILE} in {folder}", help="name the folder of a checkpoint, such as OUT/sft/final"
        )
    found: dict[str, Tensor] = {}
    try:
        for path in paths:
            found |= load_file(path)
    except (SafetensorError, OSError) as error:
        raise TrainingError(f"cannot read the weights in {folder}: {error}") from error
    if _config(folder).get("tie_word_embeddings"):
        found.pop(TIED, None)
    return found


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_config(folder)
    except ModelFault as error:
        raise TrainingError(error.message, help=error.help) from error


# --- Between machines ----------------------------------------------------------------------------------------


def pack_checkpoint(folder: Path, out: Path, *, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write the checkpoint in ``folder`` to ``out`` as at most four files and return them.

    Raises:
        TrainingError: it is no checkpoint, or too large.
    """
    tensors = {name: one.to(torch.bfloat16).contiguous() for name, one in checkpoint_tensors(folder).items()}
    parts = _parted(tensors, part_bytes)
    if len(parts) > PARTS:
        size = sum(one.nbytes for one in tensors.values())
        raise TrainingError(f"{size / 1e6:.1f} MB of weights do not fit in {PARTS} files of {part_bytes / 1e6:g} MB")
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("weights-*.safetensors"), out / REST_FILE):
        old.unlink(missing_ok=True)
    paths = []
    for number, part in enumerate(parts, 1):
        path = out / f"weights-{number}-of-{len(parts)}.safetensors"
        save_file(part, path, {"format": "pt"})
        paths.append(path)
    manifest = {
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths},
        "tensors": sorted(tensors),
    }
    rest = out / REST_FILE
    with tarfile.open(rest, "w") as tar:
        for path in _companions(folder):
            tar.add(path, arcname=str(path.relative_to(folder)))
        data = json.dumps(manifest, indent=1).encode()
        entry = tarfile.TarInfo(MANIFEST)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return [*paths, rest]


def _parted(tensors: dict[str, Tensor], part_bytes: int) -> list[dict[str, Tensor]]:
    """Return the tensors in parts of at most ``part_bytes``, headers included; the largest are placed first."""
    parts: list[dict[str, Tensor]] = []
    rooms: list[int] = []
    for name in sorted(tensors, key=lambda one: (-tensors[one].nbytes, one)):
        needed = tensors[name].nbytes + len(name) + 128  # its line in the header
        place = next((i for i, room in enumerate(rooms) if room >= needed), None)
        if place is None:
            if needed > part_bytes:
                raise TrainingError(f"{name} alone takes {needed / 1e6:.1f} MB")
            parts.append({})
            rooms.append(part_bytes - 64)
            place = len(parts) - 1
        parts[place][name] = tensors[name]
        rooms[place] -= needed
    return parts


def _companions(folder: Path) -> Iterator[Path]:
    """Yield the files beside the weights that a checkpoint needs.

    Raises:
        TrainingError: one is missing.
    """
    for name in NEEDED:
        if not (folder / name).is_file():
            raise TrainingError(
                f"no {name} in {folder}", help="name a folder that drk train wrote, such as OUT/sft/final"
            )
        yield folder / name
    yield from (folder / name for name in OPTIONAL if (folder / name).is_file())
    yield from sorted((folder / "templates").glob("*.j2"))


def unpack_checkpoint(packed: Path, out: Path) -> Path:
    """Make the checkpoint's folder again from what :func:`pack_checkpoint` wrote, in bfloat16, and return it.

    Raises:
        TrainingError: a file is missing or damaged, or ``out`` holds another checkpoint.
    """
    if (out / PLAIN_FILE).exists():
        raise TrainingError(f"{out} holds a checkpoint already", help="name a folder that is empty or not there")
    rest = packed / REST_FILE
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(rest) as tar:
            tar.extractall(out, filter="data")
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        (out / MANIFEST).unlink()
    except (OSError, tarfile.TarError, ValueError) as error:
        raise TrainingError(f"cannot read {rest}: {error}", help="fetch the folder again") from error
    tensors: dict[str, Tensor] = {}
    for name, digest in manifest["files"].items():
        path = packed / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            state = "damaged" if path.is_file() else "missing"
            raise TrainingError(f"{path} is {state}", help="fetch the folder again")
        tensors |= load_file(path)
    if sorted(tensors) != manifest["tensors"]:
        raise TrainingError(f"{packed} does not hold the tensors that it lists", help="fetch the folder again")
    save_file(tensors, out / PLAIN_FILE, {"format": "pt"})
    return out


# --- For the repository --------------------------------------------------------------------------------------


def export_nano(folder: Path, out: Path, *, limit_bytes: int = SHIPPED_BYTES) -> dict[str, Any]:
    """Write the checkpoint in ``folder`` to ``out`` in 8-bit integers, with all that is needed to ask it.

    Returns sizes and the number of parameters. Files in ``out`` that belong to no model (a card, packaging) stay.

    Raises:
        TrainingError: it is no checkpoint, of another kind, or larger than ``limit_bytes`` in all.
    """
    tensors, config = checkpoint_tensors(folder), _config(folder)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in _companions(folder):
        if path.name in ("generation_config.json", "special_tokens_map.json"):
            continue  # nobody reads them here
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        if path.name == "tokenizer.json":  # indentation is half of it
            text = json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":"))
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(path, target)
        written.append(target)
    try:
        weights_bytes = write_int8(out / INT8_FILE, tensors, config)
        shape = NetworkShape.read(config)
        NanoNetwork(read_weights(out, torch.float32, "cpu"), shape)
        NanoTokenizer(out)
    except (ValueError, ModelFault) as error:
        raise TrainingError(f"{folder} cannot be exported: {error}", help=getattr(error, "help", "")) from error
    total = weights_bytes + sum(path.stat().st_size for path in written)
    if total > limit_bytes:
        raise TrainingError(f"the exported model takes {total} bytes, and {limit_bytes} are allowed")
    return {
        "parameters": sum(one.numel() for one in tensors.values()),
        "weights_bytes": weights_bytes,
        "total_bytes": total,
        "context_tokens": shape.context,
    }


@dataclass(frozen=True)
class ExportError:
    """What rounding changed over ``tokens`` tokens: mean and largest KL in nats, and how often the likeliest agree."""

    tokens: int
    kl_mean: float
    kl_max: float
    same_top_share: float


def export_error(folder: Path, exported: Path, conversations: Sequence[tuple[Sequence[Message], str]]) -> ExportError:
    """Compare the exported model with its checkpoint on answers, token by token under teacher forcing.

    Args:
        folder: the checkpoint.
        exported: what :func:`export_nano` made of it.
        conversations: messages, and the text of the answer to them. Those that do not fit the context are left out.
    """
    shape = NetworkShape.read(_config(folder))
    plain = NanoNetwork({name: one.float() for name, one in checkpoint_tensors(folder).items()}, shape)
    rounded = NanoNetwork(read_weights(exported, torch.float32, "cpu"), shape)
    tokenizer = NanoTokenizer(exported)
    divergences, same = [], []
    for messages, answer in conversations:
        prompt = tokenizer.encode_chat(messages)
        ids = torch.tensor([*prompt, *tokenizer.encode(answer), tokenizer.end])
        if len(ids) > shape.context:
            continue
        with torch.inference_mode():
            left, right = (net.read_text(ids)[len(prompt) - 1 : -1].log_softmax(-1) for net in (plain, rounded))
        divergences.append((left.exp() * (left - right)).sum(-1))
        same.append((left.argmax(-1) == right.argmax(-1)).float())
    if not divergences:
        return ExportError(0, math.nan, math.nan, math.nan)
    every = torch.cat(divergences)
    return ExportError(len(every), float(every.mean()), float(every.max()), float(torch.cat(same).mean()))
