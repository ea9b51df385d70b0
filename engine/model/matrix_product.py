"""One matrix product of the fused decoder, with its weight packed for the CPU's 16-bit arithmetic where that helps.

Owns the weight: a packed product drops the plain one. Never changes the result beyond rounding, which is tested when a
weight is packed.
"""

from __future__ import annotations

import logging

import torch

from engine.model.arithmetic import relative_difference

_log = logging.getLogger(__name__)

# For 16 bits, where a product is summed in fp32 and rounded once.
_TOLERANCE = 0.01
_PROBED_ROWS = 2


class MatrixProduct:
    """``rows @ weight`` for a weight [in, out]; rows are [tokens, in].

    ``pack`` reorders the weight as oneDNN's kernels read it. Without that each product reorders it again: all products
    of a model of 0.6 billion parameters in bf16, on two cores with AVX-512, took 67 ms for one row plain and 22 packed,
    for 32 rows 126 and 71.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            assert self._weight is not None, "a product has its weight plain or packed"
            return torch.mm(rows, self._weight)
        return _packed_product(rows, self._packed)

    def added_to(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``states + rows @ weight``, [tokens, out], in one pass."""
        if self._packed is None:
            assert self._weight is not None, "a product has its weight plain or packed"
            return torch.addmm(states, rows, self._weight)
        return _packed_product(rows, self._packed, added_to=states)

    def pack(self) -> bool:
        """Reorder the weight and drop the plain one; False, with nothing changed, if this CPU cannot."""
        weight = self._weight
        if weight is None:
            return True
        probe = torch.ones((_PROBED_ROWS, weight.shape[0]), dtype=weight.dtype)
        expected = self(probe)
        try:
            self._packed = _reordered(weight.t())
            difference = relative_difference(self(probe).float(), expected.float())
        except (RuntimeError, AttributeError) as exc:  # another build of torch, or a CPU without these instructions
            self._packed = None
            _log.info("weights are not packed: %s", exc)
            return False
        if not difference < _TOLERANCE:
            self._packed = None
            _log.warning("weights are not packed: products would differ by %g, more than %g", difference, _TOLERANCE)
            return False
        self._weight = None
        return True


def is_packing_worthwhile(dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return whether a model's products are faster packed: on a CPU, in 16 bits, or in fp32 on several threads.

    In fp32 plain products go to MKL, which divides few rows badly: all products of a model of 0.6 billion parameters on
    two cores with AVX2 took, plain by packed, 1.3 for one row, 2.4 for 8 and 1.4 for 32, with one thread 0.9, 1.4 and
    1.1.
    """
    if device.type != "cpu":
        return False
    return dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and threads > 1)


# The operators with which Inductor replaces a linear whose weight is frozen; torch has no public name for them.


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] in the order of oneDNN's kernels. Raises RuntimeError without one for its type."""
    reordered: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001
    return reordered


def _packed_product(rows: torch.Tensor, packed: torch.Tensor, added_to: torch.Tensor | None = None) -> torch.Tensor:
    multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    product: torch.Tensor = (
        multiply(rows, packed, None, "none", [], "")
        if added_to is None
        else multiply.binary(rows, added_to, packed, None, "add")
    )
    return product
