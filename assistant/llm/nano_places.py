"""Where the nano model lies: its weights come apart from drk's own wheel, and are looked for in four places.

In this order: the folder that ``DRK_NANO`` names; the installed distribution ``drk-nano``; ``models/nano`` of a
checkout that drk was installed from in place; ``models/nano`` in the user's data folder. A folder counts when weights
and ``config.json`` are in it; ``DRK_NANO`` must hold them, and nothing else is tried then.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from drk.assistant.llm.messages import ModelFault
from drk.assistant.llm.nano_weights import weights_file

VARIABLE = "DRK_NANO"
DISTRIBUTION = "drk_nano"


def nano_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the nano model.

    Raises:
        ModelFault: it is not on this machine; says what to type.
    """
    named = (os.environ if environ is None else environ).get(VARIABLE, "")
    if named:
        folder = Path(named).expanduser()
        if not is_model_folder(folder):
            raise ModelFault(
                f"{VARIABLE} names no model: {folder}",
                cause="config.json and nano.safetensors or model.safetensors must be in it",
                help=f"{VARIABLE}=FOLDER drk optimize ... --model nano",
            )
        return folder
    places = nano_places()
    for place in places:
        if is_model_folder(place):
            return place
    raise ModelFault(
        "the nano model is not on this machine",
        cause="no weights in " + " or ".join(map(str, places)),
        help=missing_help(),
    )


def is_model_folder(folder: Path) -> bool:
    """Say whether a model of the nano model's kind lies in ``folder``."""
    return (folder / "config.json").is_file() and weights_file(folder) is not None


def nano_places() -> tuple[Path, ...]:
    """Return where the nano model may lie when nothing names it, best first."""
    spec = importlib.util.find_spec(DISTRIBUTION)
    installed = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
    return (*installed, checkout() / "models" / "nano", user_folder())


def checkout() -> Path:
    """Return what would be the repository's folder if drk was installed from it in place."""
    return Path(__file__).resolve().parents[2]


def user_folder() -> Path:
    """Return the place for the nano model in the user's data folder."""
    return Path(platformdirs.user_data_dir("drk")) / "models" / "nano"


def missing_help() -> str:
    """Return the line to type when there are no weights."""
    return (
        f"put a model's folder to {user_folder()}, or type: {VARIABLE}=FOLDER drk optimize ... --model nano "
        "(docs/nano-model.md says how one is made); --model builtin needs no weights"
    )
