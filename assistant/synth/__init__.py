"""The builtin proposer: captured graph, rewrites, fusion plan, readable Triton source."""

from drk.assistant.synth.propose import BuiltinProposer, compile_graph

__all__ = ["BuiltinProposer", "compile_graph"]
