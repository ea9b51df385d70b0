"""Converts weights that a checkpoint stores under other names or in other pieces than the model, such as fused experts.

Applies transformers' own table of conversions to the weights that one stage needs. Used once, at start, for weights
that the files do not have under the model's name.
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

# A function that reads the tensor of a name in the files.
_Reader = Callable[[str], torch.Tensor]


class Conversion:
    """Builds one weight of the model from ``sources``, pairs of a name in the files and the pattern that it matches.

    Without a converter the only source is the weight itself, under another name.
    """

    def __init__(self, target: str, converter: WeightConverter | None, sources: Sequence[tuple[str, str]]) -> None:
        self._target = target
        self._converter = converter
        self.sources = sources

    def apply(self, read: _Reader, config: Any) -> torch.Tensor:
        """Build the weight. Raises CheckpointError, which names it, if its parts do not fit."""
        if self._converter is None:
            return read(self.sources[0][0])
        # A converter keeps its tensors, so each layer gets a copy of the converter.
        converter = deepcopy(self._converter)
        for source, pattern in self.sources:
            # It takes functions as well as futures, contrary to its annotation.
            part: Any = partial(read, source)
            converter.add_tensor(self._target, source, pattern, part)
        try:
            made = converter.convert(self._target, config=config)[self._target]
        except (RuntimeError, ValueError, KeyError, TypeError) as exc:
            raise CheckpointError(
                f"the weight {self._target} has {len(self.sources)} parts, from {self.sources[0][0]} on, which must "
                f"fit together, but: {exc}; config and weights are from different models"
            ) from exc
        weight: torch.Tensor = made[0] if isinstance(made, list) else made
        return weight


def conversions_of(model: Any, names: Iterable[str]) -> dict[str, Conversion]:
    """Return the conversion of each weight, by its name in the model, from the files' ``names``."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, list[tuple[str, str]]] = defaultdict(list)
    # In natural order: the tenth expert follows the ninth.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if target != name:
            sources[target].append((name, pattern or ""))
    return {target: Conversion(target, by_pattern.get(found[0][1]), found) for target, found in sources.items()}
