"""Weights that a checkpoint stores under other names or in other pieces than the model has, such as fused experts.

Applies transformers' own table of conversions to the weights that one stage needs. Used once, at start, and only for
weights that the files do not hold under the model's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from engine.core.errors import CheckpointError

# Reads the tensor that the files hold under a name.
_Reader = Callable[[str], torch.Tensor]


class Conversion:
    """Makes one weight of the model from ``sources``, pairs of a name in the files and the pattern it matched.

    Without a converter the one source is the weight itself, under another name.
    """

    def __init__(self, target: str, converter: WeightConverter | None, sources: Sequence[tuple[str, str]]) -> None:
        self._target = target
        self._converter = converter
        self.sources = sources

    def apply(self, read: _Reader, config: Any) -> torch.Tensor:
        """Make the weight. Raises CheckpointError, naming it, if its parts do not fit."""
        if self._converter is None:
            return read(self.sources[0][0])
        # A converter keeps its tensors, so each layer gets a copy of it.
        converter = deepcopy(self._converter)
        for source, pattern in self.sources:
            # It takes functions as well as futures, which its annotation does not say.
            part: Any = partial(read, source)
            converter.add_tensor(self._target, source, pattern, part)
        try:
            made = converter.convert(self._target, config=config)[self._target]
        except (RuntimeError, ValueError, KeyError, TypeError) as exc:
            raise CheckpointError(
                f"the weight {self._target} is made of {len(self.sources)} parts, {self.sources[0][0]} and on, which "
                f"must fit together, but: {exc}; config and weights are of different models"
            ) from exc
        weight: torch.Tensor = made[0] if isinstance(made, list) else made
        return weight


def conversions_of(model: Any, names: Iterable[str]) -> dict[str, Conversion]:
    """Return, by the model's name of a weight, how it is made from the files' ``names``."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, list[tuple[str, str]]] = defaultdict(list)
    # In natural order, because the tenth expert goes after the ninth.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if target != name:
            sources[target].append((name, pattern or ""))
    return {target: Conversion(target, by_pattern.get(found[0][1]), found) for target, found in sources.items()}
