"""What runs inside a sandboxed Runner: loading and calling user code, timing, profiling, capture.

Nothing here is trusted by the Judge, and nothing here decides. Each module is imported by the zygote before it forks;
user code is imported only after the sandbox was entered.
"""
