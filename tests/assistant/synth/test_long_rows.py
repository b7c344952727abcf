"""Rows walked in blocks by one program each, against float64; infinities and NaN as PyTorch has them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Each, Function
from torch import nn

from drk.assistant.synth import long_rows, regions
from drk.assistant.synth.propose import compile_graph, variants

INFINITE, NAN = float("inf"), float("nan")


@pytest.fixture
def looped(monkeypatch):
    """Rows of every length are walked, so that small tensors test it."""
    monkeypatch.setattr(long_rows, "MAX_REGISTERS", 0)


def loops(compiled):
    """How many walks each kernel takes."""
    return [kernel.kernel.count("for start in range") for kernel in compiled.kernels]


REDUCTIONS = [
    lambda _, x: x.sum(-1) * 2,
    lambda _, x: x.mean(-1, keepdim=True),
    lambda _, x: x.amax(-1) + x.amin(-1),
    lambda _, x: x.var(-1),
    lambda _, x: (x * 0.01 + 1).prod(1),
    lambda _, x: x / x.abs().sum(1, keepdim=True),
    lambda _, x: F.softmax(x * 3, -1),
    lambda _, x: F.log_softmax(x, -1),
    lambda _, x: torch.logsumexp(x, -1),
    lambda _, x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-5),
    lambda _, x: torch.exp(x - x.amax(-1, keepdim=True)).mean(-1),
    lambda _, x: -(F.softmax(x, -1) * F.log_softmax(x, -1)).sum(-1),
]
WALKS = [1, 1, 1, 1, 1, 2, 2, 2, 1, 2, 1, 2]


@pytest.mark.usefixtures("looped")
def test_reductions_agree_with_float64_and_take_few_walks(check):
    def rows(*shape):
        return [torch.randn(shape) + 1 for _ in REDUCTIONS]

    compiled = check(Each(REDUCTIONS), *rows(2, 4097), calls=[rows(70, 37)], factor=4.0)
    assert loops(compiled) == WALKS


def rows_with_infinities(columns):
    x = torch.randn(11, columns) * 20
    x[0] = -INFINITE
    x[1, : columns - 1] = -INFINITE
    x[2, 1:] = -INFINITE
    x[3, columns // 2] = INFINITE
    x[4, columns - 1] = NAN
    x[5, 0] = NAN
    x[6] = -INFINITE
    x[6, 1] = NAN
    x[7, 0], x[7, columns - 1] = INFINITE, -INFINITE
    x[8] = INFINITE
    x[9, 2], x[9, columns - 2] = NAN, INFINITE
    return x


@pytest.mark.parametrize("columns", [2048, 4097])
@pytest.mark.usefixtures("looped")
def test_infinities_and_nan_are_those_of_pytorch(interpreter, graph_of, columns):
    module = Function(
        lambda _, x: (
            torch.logsumexp(x, -1),
            F.softmax(x, -1)[:, ::97] * 1.0,
            F.log_softmax(x, -1).amax(-1),
            x.amax(-1, keepdim=True),
            torch.exp(x - x.amax(-1, keepdim=True)).mean(-1),
        )
    )
    x = rows_with_infinities(columns)
    compiled = compile_graph(graph := graph_of(module, x), variants(graph)[0])
    (outputs,) = interpreter.run(compiled.source, {}, [[x]])
    for got, expected in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_logsumexp_of_infinities_in_registers_and_in_pieces(interpreter, graph_of):
    for rows, kind in ((rows_with_infinities(70), "row"), (rows_with_infinities(9000), "split")):
        module = Function(lambda _, x: torch.logsumexp(x, -1))
        compiled = compile_graph(graph := graph_of(module, rows), variants(graph)[0])
        assert [region.kind for region in compiled.regions] == [kind]
        ((got,),) = interpreter.run(compiled.source, {}, [[rows]])
        torch.testing.assert_close(got, module(rows), equal_nan=True)


def cross_entropy_with_penalty(_, x, labels):
    """Ignored labels, a class picked by other arithmetic on them, a penalty on the logarithm of the sum."""
    halved = x.float() * 0.5
    log_sum = torch.logsumexp(halved, dim=-1)
    picked = halved.gather(-1, torch.where(labels == -100, 0, labels).unsqueeze(-1)).squeeze(-1)
    return F.cross_entropy(x.float(), labels), log_sum - picked, halved.mean(-1), log_sum.square().sum()


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.integers(1, 5),
    st.sampled_from([2, 63, 2047, 2048, 2049, 6143, 8192]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.floats(0.1, 30.0),
)
def test_any_row_of_logits(check, rows, columns, dtype, scale):
    labels = torch.randint(columns, (rows,))
    labels[0] = -100 if rows > 1 else labels[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_rows, "MAX_REGISTERS", 0)
        logits = (torch.randn(rows, columns) * scale).to(getattr(torch, dtype))
        compiled = check(Function(cross_entropy_with_penalty), logits, labels, factor=8.0)
    assert "gather" not in compiled.source
    assert max(loops(compiled)) == 1


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(1, 3), st.sampled_from([1, 5, 300]), st.sampled_from([7, 2048, 4100]), st.booleans())
def test_any_normalised_row(check, batch, rows, columns, weighted):
    module = Function(
        lambda s, x, y: F.silu(s.norm(x + y)) * y, norm=nn.LayerNorm(columns, elementwise_affine=weighted)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_rows, "MAX_REGISTERS", 0)
        x = torch.randn(batch, rows if columns < 2048 else 2, columns) + 30
        compiled = check(module, x, torch.randn(columns), factor=4.0)
    assert loops(compiled) == [2]


@pytest.mark.usefixtures("looped")
def test_columns_in_groups_and_rows_by_their_own_index(check):
    norm = nn.GroupNorm(2, 6)
    check(Function(lambda s, x: F.silu(s.norm(x)) * 2, norm=norm), torch.randn(2, 6, 30, 31) + 1, factor=3.0)
    module = Function(lambda _, x: F.softmax(x.masked_fill(torch.arange(x.shape[-1]) > 2100, float("-inf")), -1))
    check(module, torch.randn(3, 2500))


@pytest.mark.usefixtures("looped")
def test_places_of_extremes_and_both_statistics(interpreter, graph_of):
    module = Function(lambda _, x: (x.argmax(-1), x.argmin(-1, keepdim=True), *x.max(-1), x.var(-1), x.mean(-1)))
    x = torch.randint(-50, 50, (3, 5000)).float()
    compiled = compile_graph(graph := graph_of(module, x), variants(graph)[0])
    assert loops(compiled) == [1]
    (outputs,) = interpreter.run(compiled.source, {}, [[x]])
    for got, expected in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-4)


# --- A language model's loss ---------------------------------------------------------------------------------


def lm_loss(_, logits, targets):
    """As tests/fixtures/twelve/loss.py has it."""
    logits = logits.float()
    log_z = torch.logsumexp(logits, dim=-1)
    keep = (targets != -100).float()
    picked = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((log_z - picked + 1e-4 * log_z.square()) * keep).sum() / keep.sum().clamp(min=1.0)


def language_loss(rows, columns):
    labels = torch.randint(columns, (rows,))
    labels[::3] = -100
    return (torch.randn(rows, columns) * 4).bfloat16(), labels


@pytest.mark.usefixtures("looped")
def test_a_language_models_loss_is_two_launches(check):
    compiled = check(Function(lm_loss), *language_loss(7, 4500), calls=[language_loss(30, 11)], factor=4.0)
    assert [len(compiled.kernels), max(loops(compiled))] == [2, 1]
    assert not any(word in compiled.source for word in ("torch.ops", "torch.arange", "gather"))


def test_variants_differ_in_blocks_and_warps(graph_of):
    module = Function(lambda _, x: F.softmax(x, -1))
    graph = graph_of(module.eval(), torch.empty(300, 33_000))
    sources = [compile_graph(graph, variant).source for variant in variants(graph)]
    found = {
        tuple(line.strip() for line in source.splitlines() if "block_n = " in line or "num_warps=" in line)
        for source in sources
    }
    assert len(found) == len(sources) == 4


def test_totals_of_what_rows_made_never_write_the_rows(check, monkeypatch):
    def distillation(_, student, teacher):
        parts = F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1)
        return F.kl_div(*parts, reduction="batchmean") * 4, (parts[1] * parts[0]).sum(), parts[1].square().mean()

    monkeypatch.setattr(long_rows, "MAX_REGISTERS", 0)
    compiled = check(Function(distillation), torch.randn(5, 2300), torch.randn(5, 2300), factor=8.0)
    written = [operand for region in compiled.regions for operand in region.outputs]
    assert not any(operand.meta.numel > 5 for operand in written)


# --- Which rows are walked -----------------------------------------------------------------------------------

CHOICES = [
    (lambda _, x: F.softmax(x, -1), (300, 16_384), "row", 0),
    (lambda _, x: F.softmax(x, -1), (300, 17_000), "row", 2),
    (lambda _, x: torch.logsumexp(x, -1), (300, 8192), "row", 0),
    (lambda _, x: torch.logsumexp(x, -1), (300, 9000), "row", 1),
    (lambda _, x: F.softmax(x, -1), (300, 60_000), "row", 2),
    (lambda _, x: (torch.logsumexp(x, -1), F.softmax(x, -1)), (300, 60_000), "row", 2),
    (lambda _, x: F.softmax(x, -1), (264, 60_000), "split", None),
    (lambda _, x: F.softmax(x, -1), (128, 17_000), "split", None),
    (lambda _, x: x.t().softmax(-1), (1000, 300), "row", 0),
    (lambda _, x: (x + torch.randn(9, 1, 1)).sum((1, 2, 3)), (300, 9, 64, 64), "split", None),
]


@pytest.mark.parametrize(("function", "shape", "kind", "walks"), CHOICES)
def test_how_rows_are_taken(graph_of, function, shape, kind, walks):
    compiled = compile_graph(graph := graph_of(Function(function).eval(), torch.empty(shape)), variants(graph)[0])
    assert [region.kind for region in compiled.regions] == [kind]
    assert walks is None or loops(compiled) == [walks]


@pytest.mark.long
def test_long_rows_compile_for_hopper(graph_of, offline_compile):
    module = Function(lambda _, x: (torch.logsumexp(x, -1), F.softmax(x, -1), x.argmax(-1))).eval()
    graph = graph_of(module, torch.empty(300, 33_000))
    for variant in variants(graph):
        rows = offline_compile(compile_graph(graph, variant).source, [300, 33_000])
        assert len(rows) == 1
        assert all(row["fits"] and row["spill_bytes"] == 0 for row in rows)


@pytest.fixture
def few_lines(monkeypatch):
    """Rows beside each other are walked from a few on, so that small tensors show it."""
    monkeypatch.setattr(long_rows, "LEAST_PROGRAMS", 1)
    monkeypatch.setattr(long_rows, "LEAST_WALK", 9)
    monkeypatch.setattr(long_rows, "PROGRAMS", 2)


def test_rows_beside_each_other_are_walked(check, few_lines):
    def several(_, x):
        return (x * 2).sum(1) + 1, x.mean(1, keepdim=True), x.amin(1), x.var(1), x.prod(1), x.sigmoid() * 2

    calls = [[torch.randn(1, 9, 5, 9)], [torch.randn(2, 40, 3, 40)]]
    compiled = check(Function(several), torch.randn(3, 21, 7, 9), calls=calls)
    assert "outer_row" in compiled.source and "for start in range" in compiled.source
    check(Function(lambda _, x: x.sum(0)), torch.randn(70, 70), calls=[[torch.randn(9, 1)]])
    check(Function(lambda _, x: x.half().sum(1)), torch.randn(2, 70, 45))


@pytest.mark.parametrize("walked", [True, False])
def test_maxima_with_their_places(interpreter, graph_of, few_lines, monkeypatch, walked):
    """In walks and in pieces: the first of equal ones, NaN before all, infinities."""
    if not walked:
        monkeypatch.setattr(regions, "MAX_TRANSPOSED", 9)
    module = Function(lambda _, x: (*torch.max(x, 1), *torch.min(x, 1), x.argmax(1, keepdim=True) * 2))
    x = torch.randint(0, 9, (3, 21, 50)).float()
    x[0, :, 1], x[1, :, 2], x[0, 5:, 3] = float("-inf"), float("inf"), float("-inf")
    x[0, 4, 4], x[0, 9, 4], x[2, 20, 5], x[2, 3, 5] = float("nan"), float("nan"), float("nan"), float("inf")
    graph = graph_of(module, x)
    source = compile_graph(graph, variants(graph)[0]).source
    assert ("_pass1_kernel" in source) == (not walked)
    (outputs,) = interpreter.run(source, {}, [[x]])
    for got, expected in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
