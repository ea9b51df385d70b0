"""Stand-ins for a GPU: the attention kernel's documented arithmetic, and a tape in place of a graph.

A dry run and the tests take the same paths with them. They say nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["AskedForANumber", "kernel", "stand_ins", "taped"]

# Operations that make the host wait for a value on the device; no graph can contain one.
_WAITS: Final = frozenset(
    {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
)

_Compute = Callable[[], torch.Tensor]


class AskedForANumber(RuntimeError):
    """A recorded computation reads a tensor's value on the host."""


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """Compute paged attention as the kernel's documentation defines it; the window counts keys to the left."""
    assert cu_seq_k is None, "keys are found by the page table"
    assert enable_gqa, "heads share keys"
    assert num_splits == 1, "splits would make a row depend on its companions"
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}, "the kernel takes 32 bits"
    if max_q == 1:
        return _decodes(
            query,
            key,
            value,
            min(max_k, block_table.shape[1] * key.shape[1]),
            scale,
            window_size,
            seqused_k,
            block_table,
        )
    outputs = []
    for row, length in enumerate(seqused_k.tolist()):
        own = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        assert len(own) <= max_q, f"row {row} has {len(own)} queries, more than {max_q}"
        assert length <= max_k, f"row {row} has {length} keys, more than {max_k}"
        keys, values = (pool[block_table[row].long()].flatten(0, 1)[:length] for pool in (key, value))
        places = torch.arange(length, device=query.device)
        last = places[length - len(own) :, None]
        seen = places <= last + window_size[1]
        if window_size[0] >= 0:
            seen &= places >= last - window_size[0]
        heads_first = (states.transpose(0, 1)[None] for states in (own, keys, values))
        queries, seen_keys, seen_values = heads_first
        attended = scaled_dot_product_attention(
            queries, seen_keys, seen_values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _decodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    most: int,
    scale: float,
    window_size: tuple[int, int],
    lengths: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Compute it for one query a row, without reading a value on the host, as the kernel does."""
    places = -(-most // key.shape[1])
    keys, values = (pool[pages[:, :places].long()].flatten(1, 2)[:, :most].transpose(1, 2) for pool in (key, value))
    numbers = torch.arange(most, device=query.device)
    seen = numbers < lengths[:, None]
    if window_size[0] >= 0:
        seen = seen & (numbers >= lengths[:, None] - 1 - window_size[0])
    attended = scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
    )
    return attended[:, :, 0]


class _Tape(TorchDispatchMode):
    """Writes down every operation. Raises AskedForANumber for one that waits for a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.name().split(".")[0] in _WAITS:
            raise AskedForANumber(f"{func.name()} reads a value of the device on the host")
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output


def taped(device: torch.device) -> Callable[[_Compute], _Compute]:
    """Record as CUDA graphs do: a replay repeats the operations on the same tensors, without running Python code."""
    del device

    def record(compute: _Compute) -> _Compute:
        compute()
        with _Tape() as tape:
            recorded = compute()

        def replay() -> torch.Tensor:
            now: dict[int, torch.Tensor] = {}

            def current(value: Any) -> Any:
                return now.get(id(value), value) if isinstance(value, torch.Tensor) else value

            for func, args, kwargs, output in tape.calls:
                made = func(*tree_map(current, args), **tree_map(current, kwargs))
                for before, after in zip(tree_leaves(output), tree_leaves(made), strict=True):
                    if isinstance(before, torch.Tensor):
                        now[id(before)] = after
            return now[id(recorded)]

        return replay

    return record


@contextmanager
def stand_ins() -> Iterator[None]:
    """Make stages of this process compute on the CPU as on a GPU."""
    with ExitStack() as stack:
        for name, stand_in in (
            ("engine.model.varlen.varlen_attn", kernel),
            ("engine.model.stage_model.why_not_varlen", lambda *_, **__: None),
            ("engine.model.stage_model.why_no_graphs", _why_no_graphs),
            ("engine.model.stage_model.cuda_recorder", taped),
        ):
            stack.enter_context(mock.patch(name, stand_in))
        yield


def _why_no_graphs(device: torch.device, pool: Any, *, lean: bool) -> str | None:
    from engine.model.cuda_graphs import why_no_graphs

    del device
    return why_no_graphs(torch.device("cuda"), pool, lean=lean)
