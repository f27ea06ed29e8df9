from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module

from neuronx_distributed.nxd_model import NxDModel
from neuronx_distributed.parallel_layers import parallel_state


class Trace(NamedTuple):
    """One graph: `run(weights, states, inputs)` -> (output, new states).

    Attributes:
        params: name and whether it is required, of all parameters of the model's `forward`.
        reset: has to be called before a run: tables that are no weights are constants, and what a
            graph writes into one is not kept.
        inputs: example inputs by name.
        weights, states: shapes and types by name.
    """

    run: Callable[..., Any]
    reset: Callable[[], None]
    params: list[tuple[str, bool]]
    inputs: dict[str, Tensor]
    weights: dict[str, tuple[torch.Size, torch.dtype]]
    states: dict[str, tuple[torch.Size, torch.dtype]]


class ModelBuilder:
    def __init__(
        self, model: nn.Module, weights_to_skip_layout_optimization: set[str] | None = None
    ) -> None:
        self.model = model
        self.world_size = parallel_state.get_tensor_model_parallel_size()
        self.traces: dict[str, Trace] = {}

    def trace(
        self,
        args: None | Tensor | tuple[Tensor, ...] = None,
        kwargs: dict[str, Tensor] | None = None,
        tag: str | None = None,
        spmd: bool = True,
    ) -> ModelBuilder:
        assert kwargs is None and spmd, "this stand-in knows nothing else"
        args = (args,) if isinstance(args, Tensor) else args
        if not isinstance(args, tuple) or not all(isinstance(each, Tensor) for each in args):
            raise ValueError("args is neither a tensor nor a tuple of tensors")
        if len({id(each) for each in args}) != len(args):
            raise ValueError("one tensor for two arguments would become one input of the graph")
        params = []
        for name, parameter in inspect.signature(self.model.forward).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise NotImplementedError("a forward without named parameters")
            if parameter.default not in (parameter.empty, None):
                raise ValueError(f"{name} has a default other than None")
            params.append((name, parameter.default is parameter.empty))
        missing = [name for name, required in params[len(args) :] if required]
        if missing:
            raise ValueError(f"arguments without which forward cannot run: {missing}")
        inputs = {name: tensor for (name, _), tensor in zip(params, args, strict=False)}
        self.traces[tag] = _trace(self.model, params, inputs)
        return self

    def compile(
        self,
        priority_model_key: str | None = None,
        compiler_workdir: str | Path | None = None,
        compiler_args: str | dict[str, str] | None = None,
        max_workers: int | None = None,
    ) -> NxDModel:
        if not self.traces:
            raise ValueError("nothing was traced")
        model = NxDModel(self.world_size)
        for key, trace in self.traces.items():
            model.add(key, trace)
        return model


def _trace(model: nn.Module, params: list[tuple[str, bool]], inputs: dict[str, Tensor]) -> Trace:
    parameters = dict(model.named_parameters())
    named = model.state_dict(keep_vars=True)
    buffers = {name: tensor for name, tensor in named.items() if name not in parameters}
    assigned: set[str] = set()

    def run(weights: dict, states: dict, arguments: dict) -> Any:
        with _reparametrize_module(model, weights | states):
            output = model(**arguments)
            new = {name: model.get_buffer(name) for name in states}
        assigned.update(name for name in states if new[name] is not states[name])
        return output, new

    graph = make_fx(run)(parameters, buffers, inputs)
    constants = {name: constant.clone() for name, constant in graph.named_buffers()}

    def reset() -> None:
        for name, constant in graph.named_buffers():
            constant.copy_(constants[name])

    # What is not assigned anew is a constant of the checkpoint, and has to be in it.
    states = {name: (buffers[name].shape, buffers[name].dtype) for name in sorted(assigned)}
    weights = {name: (w.shape, w.dtype) for name, w in named.items() if name not in assigned}
    return Trace(graph, reset, params, inputs, weights, states)
