"""Language models as proposers: any OpenAI-compatible endpoint, a vLLM server, or a checkpoint in this process.

A :class:`~drk.assistant.llm.messages.Backend` answers one conversation; :mod:`~drk.assistant.llm.proposer` turns a
search's history into conversations and answers into candidates. Every call is journalled in the run's folder, so that
a killed run goes on without paying twice. Prompts stand in :mod:`drk.assistant.prompts`, parsing in
:mod:`drk.assistant.answer_parser`, limits in :mod:`drk.assistant.budget`.

Keys come from the environment only and appear in no log, configuration, event or sandbox. A missing key, extra or
endpoint is an error that names the setting; there is no other provider to fall back to.

Left out: providers with protocols of their own (a proxy that speaks chat completions serves them), tool use, images.
"""
