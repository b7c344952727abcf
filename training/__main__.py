"""``python -m drk.training rl ...`` is ``drk train rl ...``; ``accelerate launch -m drk.training`` needs this door."""

from __future__ import annotations

import sys

from drk.assistant.cli import run

if __name__ == "__main__":
    sys.exit(run(["train", *sys.argv[1:]]))
