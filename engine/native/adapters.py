"""Adapters and the rows that have them, as the kernels read them (see src/model.h)."""

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Array, cast
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine import model_weights
from engine.native.library import AdapterLayer, AdapterRows, AdapterRun, StepArguments, Update
from engine.native.packing import describe
from engine.step import AdapterRows as RowsOfAdapter
from engine.step import Step


@dataclass(frozen=True, slots=True)
class Described:
    """What a step's arguments point to."""

    runs: Array[AdapterRun]
    rows: NDArray[np.int32]


class AdapterTables:
    """The layers of all adapters of a model; keeps the tensors that they point to."""

    def __init__(self, adapters: Mapping[str, tuple[model_weights.AdapterLayer, ...]]) -> None:
        self._kept = adapters
        self._layers = {name: (AdapterLayer * len(layers))(*map(_layer, layers)) for name, layers in adapters.items()}

    def describe(self, step: Step, arguments: StepArguments) -> tuple[Described, ...]:
        """Write into the arguments which rows have adapters; what is returned must live as long as they."""
        if not step.adapted:
            return ()
        all_rows, wanted = self._described(step.adapted), self._described(step.adapted_logits)
        arguments.adapted, arguments.adapted_wanted = _arguments(all_rows), _arguments(wanted)
        return all_rows, wanted

    def _described(self, adapted: Sequence[RowsOfAdapter]) -> Described:
        runs, begin = [], 0
        for each in adapted:
            end = begin + each.rows.size
            runs.append(AdapterRun(cast(self._layers[each.adapter], POINTER(AdapterLayer)), begin, end))
            begin = end
        rows = [each.rows for each in adapted]
        return Described((AdapterRun * len(runs))(*runs), np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int32))


def _arguments(described: Described) -> AdapterRows:
    runs = cast(described.runs, POINTER(AdapterRun))
    return AdapterRows(len(described.runs), runs, described.rows.size, described.rows.ctypes.data)


def _layer(layer: model_weights.AdapterLayer) -> AdapterLayer:
    return AdapterLayer(_update(layer.qkv), _update(layer.output), _update(layer.gate_up), _update(layer.down))


def _update(update: model_weights.LowRank | None) -> Update:
    return Update() if update is None else Update(describe(update.down), describe(update.up))
