"""What the emitted pytest file holds beside results where the task's gradients were judged: gradients as good too.

Source text like :mod:`drk.assistant.artefact_test_template`, whose functions it calls.

Left out: second derivatives, which the kernels refuse.
"""

from __future__ import annotations

from string import Template

GRADIENT_TESTS = Template(
    '''

def gradients(model, args, kwargs):
    """Gradients of inputs and parameters: one call and its backward pass, from equal random states."""
    args, kwargs = copy.deepcopy((args, kwargs))
    inputs = [leaf.requires_grad_() for leaf in leaves([args, kwargs]) if leaf.is_floating_point()]
    parameters = part(model).parameters() if isinstance(model, torch.nn.Module) else ()
    torch.manual_seed(0)
    with torch.autocast(DEVICE, $autocast_dtype, enabled=$autocast):
        outputs = [leaf for leaf in leaves(part(model)(*args, **kwargs)) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in outputs]
    torch.autograd.backward(outputs, drawn)
    return [leaf.grad for leaf in (*inputs, *parameters) if leaf.grad is not None]


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_as_good_as_the_originals(seed):
    original = build()
    args, kwargs = draw(seed)
    expected = gradients(copy.deepcopy(original), args, kwargs)
    exact = $exact
    truth = gradients(exact, double(args), double(kwargs))
    model = optimize(copy.deepcopy(original))
    assert expected
    assert_as_good(gradients(model, args, kwargs), expected, truth)
    assert kernels.stats(model)["kernel_calls"] == 1, kernels.stats(model)
'''
)
"""Further tests where gradients were judged."""
