"""A whole decoder step as one native call."""

from collections.abc import Mapping
from ctypes import POINTER, byref, c_void_p, cast

import numpy as np
import torch

from engine.batch import LayerMarks
from engine.core_share import Loan
from engine.model_weights import LayerWeights, ModelWeights
from engine.native.adapters import AdapterTables
from engine.native.library import Engine, Enter, Geometry, Layer, Library, Model, Pool, Recall, StepArguments, Told
from engine.native.packing import describe
from engine.native.plan import plan
from engine.step import Step


class Engines:
    """The engine of a backend, and others for steps with more threads, made when they are first wanted. All have memory of
    their own to work in."""

    def __init__(self, library: Library, threads: int, own: Engine) -> None:
        self._library, self.own_threads = library, threads
        self._by_spare = {0: own}

    def with_spare(self, threads: int) -> Engine:
        """The one with so many threads more than the backend has; its own when the system has no more."""
        engine = self._by_spare.get(threads)
        if engine is None:
            try:
                engine = self._library.engine(self.own_threads + threads)
            except OSError:
                engine = self._by_spare[0]
            self._by_spare = {**self._by_spare, threads: engine}
        return engine

    def operation_seconds(self) -> Mapping[str, float]:
        """Where the time of all steps so far went. May be called from any thread."""
        each = [engine.operation_seconds() for engine in {id(one): one for one in self._by_spare.values()}.values()]
        return {name: sum(seconds[name] for seconds in each) for name in each[0]}


class NativeStep:
    """Implements engine.backend.WholeStep. Keeps the tensors that the call reads."""

    def __init__(
        self, library: Library, engines: Engines, rope: torch.Tensor, geometry: Geometry, pool: Pool, weights: ModelWeights
    ) -> None:
        self._call = library.step
        self._engines = engines
        self._kept = (weights, rope)
        self._layers = (Layer * len(weights.layers))(*(_layer(layer) for layer in weights.layers))
        self._vocabulary = weights.head.out_features
        self._adapters = AdapterTables(weights.adapters)
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

    def __call__(self, step: Step, marks: LayerMarks | None, loan: Loan) -> torch.Tensor:
        planned = plan(step)
        teller = _Teller(planned.arguments, marks)
        logits = torch.empty((step.logit_rows.size, self._vocabulary), dtype=torch.float32)
        planned.arguments.logits = logits.data_ptr()
        described = self._adapters.describe(step, planned.arguments)  # must live as long as the call
        borrowed = _Borrowed(planned.arguments, loan, self._engines.own_threads)
        engine = self._engines.with_spare(borrowed.most)
        if self._call(engine.address, byref(self._model), byref(planned.arguments)):
            raise MemoryError(f"no memory for a step of {step.positions.size} rows")
        del described, borrowed
        teller.finish()
        return logits

    def part_seconds(self) -> Mapping[str, float]:
        return self._engines.operation_seconds()


class _Borrowed:
    """What a step may use beside its own threads, as the call reads it; must live as long as the call."""

    def __init__(self, arguments: StepArguments, loan: Loan, own_threads: int) -> None:
        self._arguments = arguments
        arguments.own_threads, arguments.begin_threads = own_threads, own_threads + loan.threads
        self._use(loan)
        self.most = loan.threads
        if loan.later is None or loan.later.most == 0:
            return
        self._later = loan.later
        self.most = max(self.most, loan.later.most)
        self._watched = (c_void_p * len(loan.later.watched))(*loan.later.watched)
        self._call = Enter(self._enter)
        arguments.watch_count, arguments.watched, arguments.enter = len(self._watched), self._watched, self._call

    def _enter(self) -> int:
        loan = self._later.take()
        self._use(loan)
        return loan.threads

    def _use(self, loan: Loan) -> None:
        self._recalls = (Recall * len(loan.recalls))(*(Recall(each.address, each.seen) for each in loan.recalls))
        self._arguments.recall_count, self._arguments.recalls = len(self._recalls), self._recalls


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
