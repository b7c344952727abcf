"""The assistant: what a developer meets. Command line, intake, proposers, search, artefacts.

It stands on :mod:`drk.gym`, which judges what the assistant proposes, and knows nothing of training or editors (a test
holds the direction). Modules are imported by their own names, ``drk.assistant.cli`` and so on; importing this package
imports nothing, so that ``drk --help`` starts at once.
"""
