"""One matrix product of the fused decoder, with its weight packed for oneDNN's kernels where that helps.

Owns the weight, plain or packed. Packing changes results only by rounding, which is checked for each weight.
"""

from __future__ import annotations

import logging

import torch

from engine.model.arithmetic import relative_difference

_log = logging.getLogger(__name__)

# For 16-bit types, in which a product is summed in fp32 and rounded once.
_TOLERANCE = 0.01
_PROBED_OUTPUTS = 64


class MatrixProduct:
    """``rows @ weight`` for a plain weight [in, out], or for a packed one; rows are [tokens, in].

    A packed weight is in the order of oneDNN's kernels. Otherwise each product reorders it again: all products of a
    model of 0.6 billion parameters in bf16, on two cores with AVX-512, took 67 ms for one row plain and 22 packed, for
    32 rows 126 and 71.
    """

    def __init__(self, weight: torch.Tensor, *, is_packed: bool = False) -> None:
        self._weight = weight
        self._is_packed = is_packed

    @classmethod
    def packed(cls, weight: torch.Tensor) -> MatrixProduct | None:
        """Build the product from a reordered copy of a weight [out, in]; None if this CPU does not support it.

        Compares some outputs with those of the plain weight.
        """
        outputs = torch.linspace(0, len(weight) - 1, min(len(weight), _PROBED_OUTPUTS)).long()
        probe = torch.ones((1, weight.shape[1]), dtype=weight.dtype)
        try:
            product = cls(_reordered(weight), is_packed=True)
            found = product(probe)[:, outputs].float()
        except (RuntimeError, AttributeError) as exc:  # another build of torch, or a CPU without these instructions
            _log.info("weights are not packed: %s", exc)
            return None
        difference = relative_difference(found, probe.float() @ weight[outputs].float().t())
        if not difference < _TOLERANCE:
            _log.warning("weights are not packed: products would differ by %g, more than %g", difference, _TOLERANCE)
            return None
        return product

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return _packed_product(rows, self._weight) if self._is_packed else torch.mm(rows, self._weight)

    def added_to(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``states + rows @ weight``, [tokens, out], in one pass."""
        if self._is_packed:
            return _packed_product(rows, self._weight, added_to=states)
        return torch.addmm(states, rows, self._weight)


def is_packing_worthwhile(dtype: torch.dtype, device: torch.device, threads: int) -> bool:
    """Return whether packing makes a model's products faster: on a CPU, in 16 bits, or in fp32 with several threads.

    In fp32 plain products use MKL, which parallelizes few rows badly. The ratio of plain to packed time, for all
    products of a model of 0.6 billion parameters on two cores with AVX2, was 1.3 for one row, 2.4 for 8 and 1.4 for 32;
    with one thread 0.9, 1.4 and 1.1.
    """
    if device.type != "cpu":
        return False
    return dtype in (torch.bfloat16, torch.float16) or (dtype == torch.float32 and threads > 1)


# The operators to which Inductor lowers a linear with a frozen weight; torch has no public name for them.


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] in the order of oneDNN's kernels. Raises RuntimeError if its type has none."""
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
