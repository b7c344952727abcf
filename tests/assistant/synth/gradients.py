"""Results and gradients of one call, by name: what tests compare between a module, its float64 copy and its kernels."""

import torch


def gradients(model, args):
    """Backpropagate fixed cotangents through one call in train mode, from equal random states."""
    args = [one.detach().clone().requires_grad_() if one.is_floating_point() else one for one in args]
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    outputs = model(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    asked = [one for one in outputs if one.requires_grad]
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(asked, [torch.randn(one.shape, generator=generator).to(one.dtype) for one in asked])
    found = {f"output {index}": one.detach() for index, one in enumerate(outputs)}
    found |= {f"input {index}": one.grad for index, one in enumerate(args) if one.is_floating_point()}
    found |= {name: one.grad for name, one in model.named_parameters()}
    return {name: one for name, one in found.items() if one is not None}
