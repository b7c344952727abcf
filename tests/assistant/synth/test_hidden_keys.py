"""Keys that a mask hides from a whole block of queries are not read, and all others are."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants

LENGTH = 300
INF = float("inf")
Q, K, V = torch.randn(3, 2, 1, LENGTH, 16)
PAST = torch.ones(LENGTH, LENGTH).tril()
PADDING = torch.arange(LENGTH)[None, None, None] < torch.tensor([150, 7]).view(2, 1, 1, 1)


def weights(change):
    return lambda s, q, k, v, m: change(q @ k.mT * 0.25, m).softmax(-1) @ v


CASES = {
    "buffer": (weights(lambda x, m: x.masked_fill(m == 0, -INF)), PAST),
    "bool": (weights(lambda x, m: x.masked_fill(m, -INF)), PAST == 0),
    "bias": (weights(lambda x, m: x + m), torch.zeros(LENGTH, LENGTH).masked_fill(PAST == 0, -INF)),
    "bias-in-front": (weights(lambda x, m: m + x), torch.zeros(LENGTH, LENGTH).masked_fill(PAST == 0, -INF)),
    "keep": (weights(lambda x, m: torch.where(m, x, -INF)), PADDING),
    "drop": (weights(lambda x, m: torch.where(m, -INF, x)), ~PADDING),
    "scaled-after": (weights(lambda x, m: x.masked_fill(~m, -INF) * 0.5 + 1), PADDING),
    "library": (lambda s, q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), PADDING),
}
LOOK = "while (seen == 0) & (last > 0)"


def compiled_attention(graph):
    written = [item for item in variants(graph) if item.rules.written_attention]
    return compile_graph(graph, (written or variants(graph))[0])


@pytest.mark.parametrize("name", CASES)
def test_hidden_keys_are_not_read(check, graph_of, interpreter, name):
    forward, mask = CASES[name]
    module = Function(forward)
    graph = graph_of(module, Q, K, V, mask)
    variant = next((item for item in variants(graph) if item.rules.written_attention), None)
    compiled = check(module, Q, K, V, mask, variant=variant, factor=3.0)
    assert LOOK in compiled.source
    # What none of the queries sees may be anything: it is not even multiplied by zero. Every query sees key 0 to 6.
    value, last = V.clone(), LENGTH // 128 * 128
    value[:, :, last:] = float("nan")
    (outputs,) = interpreter.run(compiled.source, {}, [[Q[:, :, :64], K, value, mask[..., :64, :]]])
    assert outputs[0].isfinite().all()


def test_the_last_key_counts_wherever_the_hidden_ones_are(check):
    holes = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    holes[:, 20:290] = False
    single = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    single[torch.arange(LENGTH), torch.arange(LENGTH).flip(0)] = True
    module = Function(lambda s, q, k, v, m: (q @ k.mT).masked_fill(~m, -INF).softmax(-1) @ v)
    check(module, Q, K, V, holes, calls=[[Q, K, V, single], [Q, K, V, PAST.bool()]], factor=3.0)


def test_two_masks_hide_together(check):
    def forward(s, q, k, v, padding):
        past = torch.ones(LENGTH, LENGTH, device=q.device).tril()
        return (q @ k.mT).masked_fill(~padding, -INF).masked_fill(past == 0, -INF).softmax(-1) @ v

    compiled = check(Function(forward), Q, K, V, PADDING, factor=3.0)
    assert "last, seen = tl.minimum(n_cols, (tile + 1) * BLOCK_M), 0" in compiled.source
    assert compiled.source.count("(bitwise_not == 0)") == 1  # the causal mask needs no look


@pytest.mark.parametrize(
    "change",
    [
        lambda x, m: x.masked_fill(m == 0, -INF).clamp_min(-9.0),
        lambda x, m: x.masked_fill(m == 0, -1e9),
        lambda x, m: torch.where(m == 0, -INF, x).exp(),
        lambda x, m: x.masked_fill(m == 0, -INF).masked_fill(m.mT == 0, 2.0),
        lambda x, m: torch.tanh(x + m),
    ],
    ids=range(5),
)
def test_keys_that_count_after_all_are_read(check, change):
    compiled = check(Function(weights(change)), Q, K, V, PAST, factor=3.0)
    assert [region.kind for region in compiled.regions] == ["attention"]
    assert LOOK not in compiled.source


def test_a_causal_mask_that_is_undone_skips_nothing(check):
    def forward(s, q, k, v):
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=q.device).triu(1)
        return (q @ k.mT).masked_fill(future, -INF).clamp_min(-3.0).softmax(-1) @ v

    compiled = check(Function(forward), Q, K, V, factor=3.0)
    assert "tl.minimum(n_cols, (tile + 1) * BLOCK_M)" not in compiled.source


def test_queries_that_see_nothing(interpreter, graph_of):
    mask = PAST.bool().clone()
    mask[:70] = False
    plain = graph_of(Function(CASES["bool"][0]), Q, K, V, ~mask)
    library = graph_of(Function(CASES["library"][0]), Q, K, V, mask)
    (nothing,) = interpreter.run(compiled_attention(plain).source, {}, [[Q, K, V, ~mask]])
    (zeros,) = interpreter.run(compiled_attention(library).source, {}, [[Q, K, V, mask]])
    assert nothing[0][:, :, :70].isnan().all()
    assert not nothing[0][:, :, 70:].isnan().any()
    assert (zeros[0][:, :, :70] == 0).all()


@pytest.mark.slow
def test_the_look_compiles_for_hopper(graph_of, offline_compile):
    module = Function(
        lambda _, x: (
            (x @ x.mT.contiguous() + x[:, :, :1, :1]).masked_fill(x.mean(-1)[:, :, None] > 0, -INF).softmax(-1)
            @ (x * 2)
        )
    )
    shape = [2, 4, 256, 64]
    rows = offline_compile(compiled_attention(graph_of(module, torch.randn(shape))).source, shape)
    kernel = next(row for row in rows if "attention" in row["name"])
    assert kernel["fits"]
    assert kernel["spill_bytes"] <= 64, kernel
