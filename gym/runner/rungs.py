"""Lower precision rungs of a reference: the same module with the operands of its products rounded.

Used to name a downgrade (is a candidate's error that of TF32?), to check that the drawn inputs can tell a downgrade at
all, and to put the reference itself on the rung that a policy allows. Operands of matrix products and convolutions are
rounded to TF32 (10 explicit mantissa bits), bfloat16 or float16 and multiplied in float32, which is what tensor cores
do; it works alike on CPU and GPU. Limit: libraries that form products elsewhere (recurrent cells, sparse) stay as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

RUNGS = ("tf32", "bf16", "fp16")
_CONVOLUTIONS = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
}
_PRODUCTS = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot"),
    *("einsum", "tensordot", "bilinear", "scaled_dot_product_attention", "chain_matmul", "inner"),
}
_TF32_DROPPED_BITS = 13


def round_operand(tensor: torch.Tensor, rung: str) -> torch.Tensor:
    """Return a float32 tensor rounded to the rung's mantissa (to nearest, ties to even), still float32."""
    if tensor.dtype != torch.float32:
        return tensor
    if rung == "bf16":
        return tensor.bfloat16().float()
    if rung == "fp16":
        return tensor.half().float()
    bits = tensor.contiguous().view(torch.int32)
    half = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    even = (bits >> _TF32_DROPPED_BITS) & 1
    rounded = ((bits + half + even) >> _TF32_DROPPED_BITS) << _TF32_DROPPED_BITS
    return torch.where(torch.isfinite(tensor), rounded.view(torch.float32), tensor)


class RoundedOperands(TorchFunctionMode):
    """Rounds the float32 operands of products (or of convolutions only)."""

    def __init__(self, rung: str, *, convolutions_only: bool = False) -> None:
        super().__init__()
        self.rung = rung
        self.names = _CONVOLUTIONS if convolutions_only else _CONVOLUTIONS | _PRODUCTS

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round the operands of a product; leave everything else alone."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in self.names:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            rounded = [self._round(value) for value in args]
            named = {key: self._round(value) for key, value in kwargs.items()}
        return func(*rounded, **named)

    def _round(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return round_operand(value, self.rung)
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return [self._round(item) for item in value]
        return value


@contextmanager
def on_rung(rung: str | None, *, convolutions_only: bool = False) -> Iterator[None]:
    """Run what is inside with rounded operands; ``None`` changes nothing."""
    if rung is None:
        yield
        return
    with RoundedOperands(rung, convolutions_only=convolutions_only):
        yield


def set_precision(policy: str) -> None:
    """Set PyTorch's matmul precision for a policy; ``match`` leaves the user's own flags alone."""
    if policy == "match":
        return
    allowed = policy in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
