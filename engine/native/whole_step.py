"""A whole decoder step as one native call."""

from collections.abc import Mapping
from ctypes import POINTER, byref, cast

import numpy as np
import torch

from engine.batch import LayerMarks
from engine.model_weights import LayerWeights, ModelWeights
from engine.native.library import Engine, Geometry, Layer, Library, Model, Pool, StepArguments, Told
from engine.native.packing import describe
from engine.native.plan import plan
from engine.step import Step


class NativeStep:
    """Implements engine.backend.WholeStep. Keeps the tensors that the call reads."""

    def __init__(
        self, library: Library, engine: Engine, rope: torch.Tensor, geometry: Geometry, pool: Pool, weights: ModelWeights
    ) -> None:
        self._call = library.step
        self._engine = engine
        self._kept = (weights, rope)
        self._layers = (Layer * len(weights.layers))(*(_layer(layer) for layer in weights.layers))
        self._vocabulary = weights.head.out_features
        self._model = Model(
            geometry=geometry,
            hidden=weights.embedding.shape[1],
            intermediate=weights.layers[0].down.in_features,
            pool=pool,
            rope=rope.data_ptr(),
            embedding=weights.embedding.data_ptr(),
            layers=cast(self._layers, POINTER(Layer)),
            final_norm=weights.final_norm.data_ptr(),
            head=describe(weights.head),
        )

    def __call__(self, step: Step, marks: LayerMarks | None) -> torch.Tensor:
        planned = plan(step)
        teller = _Teller(planned.arguments, marks)
        logits = torch.empty((step.logit_rows.size, self._vocabulary), dtype=torch.float32)
        planned.arguments.logits = logits.data_ptr()
        if self._call(self._engine.address, byref(self._model), byref(planned.arguments)):
            raise MemoryError(f"no memory for a step of {step.positions.size} rows")
        teller.finish()
        return logits

    def part_seconds(self) -> Mapping[str, float]:
        return self._engine.operation_seconds()


class _Teller:
    """Calls a step's marks from inside the native call, and keeps what they raise until it is over."""

    def __init__(self, arguments: StepArguments, marks: LayerMarks | None) -> None:
        self._error: BaseException | None = None
        if marks is None:
            return
        self._marks = marks
        self._layers = np.array(marks.layers, dtype=np.int32)
        self._call = Told(self._told)  # must live as long as the call
        arguments.told = self._call
        arguments.mark_count, arguments.marks = self._layers.size, self._layers.ctypes.data

    def finish(self) -> None:
        """Raise what a mark raised."""
        if self._error is not None:
            raise self._error

    def _told(self, layers: int) -> None:
        if self._error is not None:
            return
        try:
            self._marks.told(layers)
        except BaseException as error:  # noqa: BLE001 - raised again behind the call, which it may not pass through
            self._error = error


def _layer(layer: LayerWeights) -> Layer:
    return Layer(
        attention_norm=layer.attention_norm.data_ptr(),
        head_norms=None if layer.head_norms is None else layer.head_norms.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qkv=describe(layer.qkv),
        output=describe(layer.output),
        gate_up=describe(layer.gate_up),
        down=describe(layer.down),
    )
