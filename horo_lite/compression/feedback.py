"""Error feedback around any compressor: what was not sent this step is added to the next step's gradient.

Seide et al. 2014 (1-bit SGD), Stich et al. 2018 (Sparsified SGD with Memory), Karimireddy et al. 2019 (Error Feedback
Fixes SignSGD). Costs one array of the gradient's size per parameter, and one addition and one subtraction a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from horo_lite.arrays import type_name
from horo_lite.compression.backend import backend_of, is_floating, quiet, work_type
from horo_lite.compression.base import Exchange, Method, State, remembered
from horo_lite.interfaces import Array, Compressor, Group, Parameter, Reduced


@dataclasses.dataclass(frozen=True, repr=False)
class WithFeedback(Method):
    """``residual = gradient + residual - contributed``, kept per parameter in ``state["residual"]``.

    So ``mean + mean(residual)`` is the true mean of what was put in, at every step. A step whose mean is not finite
    (which all ranks see alike, and loss scaling skips) leaves the residuals of the bucket as they were.
    """

    inner: Compressor

    @property
    def keeps_state(self) -> bool:
        return True

    def bind(self, parameters: Sequence[Parameter]) -> WithFeedback:
        return self.altered(inner=self.inner.bind(parameters))

    def __repr__(self) -> str:
        return f"with_feedback({self.inner!r})"

    def reduce(self, gradients: Sequence[Array], states: Sequence[State], group: Group) -> Exchange:
        if not gradients or not is_floating(gradients[0]):
            return (yield from self.inner.reduce(gradients, states, group))
        backend = backend_of(gradients[0])
        corrected = _corrected(gradients, states)
        mean, contributed = yield from self.inner.reduce(corrected, states, group)
        if backend.finite(backend.join(mean)):
            _keep_rest(corrected, contributed, states)
        own_type = type_name(gradients[0])
        return Reduced([backend.convert(m, own_type) for m in mean], contributed)


@quiet
def _corrected(gradients: Sequence[Array], states: Sequence[State]) -> list[Array]:
    """gradient + residual, in one new flat array so that the compressor sees a bucket without joining it."""
    backend, name = backend_of(gradients[0]), work_type(gradients[0])
    flat = backend.empty(sum(len(g) for g in gradients), name)
    corrected, start = [], 0
    for gradient, state in zip(gradients, states, strict=True):
        out = flat[start : start + len(gradient)]
        start += len(gradient)
        residual = remembered(state, "residual", len(gradient), backend, name)
        if residual is None:
            backend.assign(out, gradient)
        else:
            backend.xp.add(backend.convert(gradient, name), residual, out=out)
        corrected.append(out)
    return corrected


@quiet
def _keep_rest(
    corrected: Sequence[Array], contributed: Sequence[Array], states: Sequence[State]
) -> None:
    """Write what was left unsent, into the old residual where there is one of the right size and type."""
    for array, sent, state in zip(corrected, contributed, states, strict=True):
        backend, name = backend_of(array), type_name(array)
        old = state.get("residual")
        fits = old is not None and len(old) == len(array) and type_name(old) == name
        out = old if fits else backend.empty(len(array), name)
        backend.xp.subtract(array, backend.convert(sent, name), out=out)
        state["residual"] = out
