"""Causal linear attention by Pallas kernels for TPUs, with features and state in VMEM.

Import it only where it is used: Pallas takes long to import.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from relattn.kernels.chunks import sum_causally
from relattn.kernels.feature_maps import (
    FeatureMap,
    feature_shapes,
    key_features,
    query_features,
)
from relattn.kernels.guards import divide_sums, scale_backward
from relattn.kernels.platform import has_program_per_device
from relattn.kernels.precision import compute_dtype, wide_einsum
from relattn.kernels.sums import check_causal, empty_causal_state

# The last axis of a block is a multiple of this.
_LANES = 128
# Tokens of a chunk. Small chunks wait for their transfers, in large ones most products
# are those of pairs.
_CHUNK = 2 * _LANES
# Largest size of the features and the state of a chunk: more does not fit into VMEM.
_MAX_NUMBERS = 2**19
# What feature maps may compute: these compile for a v5e.
_OPERATIONS = (
    "abs add broadcast_in_dim concatenate convert_element_type cos custom_jvp_call div "
    "dot_general exp integer_pow jit le log1p logistic lt max mul ne neg pjit "
    "reduce_max reduce_sum rsqrt select_n sin slice sqrt square stop_gradient sub "
    "tanh"
)
# Mosaic compiles products of these precisions.
_PRECISIONS = (None, (jax.lax.Precision.DEFAULT,) * 2, (jax.lax.Precision.HIGHEST,) * 2)


def fits_tpu(
    q: Array,
    k: Array,
    v: Array,
    feature_map: FeatureMap,
    precision: jax.lax.PrecisionLike = None,
) -> bool:
    """Returns whether `attend_on_tpu` takes these arguments and this feature map.

    It needs float32 or narrower, few enough features, and a precision and feature maps
    of operations that are known to compile. The compiler cannot divide a kernel: there
    must be one device, or each device its own program, as in `jax.pmap`.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: From ``[*batch, n, head_dim]`` to features, token by token; or a
            pair of such functions, of queries and of keys.
        precision: Passed to einsum.

    Returns:
        True if it does.
    """
    if any(map(is_symbolic_dim, v.shape)) or not v.size:
        return False
    if not has_program_per_device():
        return False
    if compute_dtype(q, k, v) != jnp.float32:
        return False
    dot = functools.partial(wide_einsum(precision), "...ie,...je->...ij")
    product = jax.make_jaxpr(dot)(v, v)
    if not _operations(product.jaxpr) <= set(_OPERATIONS.split()):
        return False
    maps = ((query_features, q), (key_features, k))
    if not all(_compiles(functools.partial(f, feature_map), x) for f, x in maps):
        return False
    features = feature_shapes(feature_map, k)
    check_causal(features)
    num_features = max(x.shape[-1] for x in jax.tree.leaves(features[:2]))
    return num_features * (_CHUNK + k.shape[-1] + v.shape[-1]) <= _MAX_NUMBERS


def _compiles(feature_map, x):
    """Returns whether a feature map can be part of a kernel."""

    def trace(*batch):
        shape = jax.ShapeDtypeStruct((*batch, 1, x.shape[-1]), x.dtype)
        return jax.make_jaxpr(feature_map)(shape)

    # Arrays with more axes may differ between heads.
    if any(c.ndim > 2 or c.dtype != jnp.float32 for c in trace(*x.shape[:-2]).consts):
        return False
    try:
        traced = trace()
    except (TypeError, ValueError):
        # It needs the axes of the batch.
        return False
    return _operations(traced.jaxpr) <= set(_OPERATIONS.split())


def _operations(jaxpr):
    """Returns the names of a program's operations, and of precisions Mosaic lacks."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    precisions = {
        equation.params["precision"]
        for equation in jaxpr.eqns
        if equation.primitive.name == "dot_general"
    }
    names |= {str(precision) for precision in precisions.difference(_PRECISIONS)}
    return names.union(*map(_operations, jax.extend.core.subjaxprs(jaxpr)))


def attend_on_tpu(
    q: Float[Array, "*batch n head_dim"],
    k: Float[Array, "*batch n head_dim"],
    v: Float[Array, "*batch n value_dim"],
    feature_map: FeatureMap,
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch n value_dim"]:
    """Computes `relattn.kernels.causal_linear_attention` by a kernel, and its gradient.

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i, S_i = sum_{j <= i} phi(k_j) v_j^T,
    z_i = sum_{j <= i} phi(k_j).

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, n, head_dim]``.
        v: Values, shape ``[*batch, n, value_dim]``.
        feature_map: One that `fits_tpu`.
        precision: Passed to einsum.

    Returns:
        Shape ``[*batch, n, value_dim]``, in the dtype of ``v``. It has only first
        derivatives, in reverse mode.
    """
    einsum = wide_einsum(precision)
    features = feature_shapes(
        feature_map, jax.ShapeDtypeStruct((1, k.shape[-1]), k.dtype)
    )
    bounded = features.bound is not None
    value = jax.ShapeDtypeStruct((1, v.shape[-1]), v.dtype)

    def empty():
        state = empty_causal_state(features, value)
        # With a bound, the shift stays zero.
        return state._replace(shift=None) if bounded else state

    def attend(state, tokens):
        # [phi(q_i)^T S_i, phi(q_i)^T z_i] and S, z after the chunk; then the quotient.
        if bounded:
            state = state._replace(shift=jnp.zeros((1, 1), state.sums.dtype))
        masked = (*tokens, None, None)
        state, sums, magnitudes = sum_causally(state, masked, feature_map, einsum)
        out, _ = divide_sums(sums, magnitudes, tokens[2].dtype)
        state = state._replace(shift=None) if bounded else state
        return state, out

    size = min(_CHUNK, -(-v.shape[-2] // _LANES) * _LANES)

    def scan(v, q, k):
        return scan_in_vmem(attend, empty, (q, k, v), size)

    return scale_backward(scan, v, q, k).astype(v.dtype)


def scan_in_vmem(
    body: Callable[[Any, Any], tuple[Any, Array]],
    empty: Callable[[], Any],
    tokens: Any,
    size: int,
) -> Float[Array, "*batch n width"]:
    """Scans over chunks of tokens by a kernel, and back by another.

    state_c, out_c = body(state_{c-1}, tokens_c), where the state before the first chunk
    is empty().

    What ``body`` computes stays in VMEM. HBM holds tokens, outputs and, for the
    backward pass, the state before each chunk: from it the second kernel computes the
    chunk again, last chunk first, and pulls the gradients back. In HBM the last axis is
    that of the tokens, so that narrow heads need no padding.

    Args:
        body: Maps a state and a chunk, arrays ``[size, width]``, to the next state and
            the output ``[size, width]``, by operations that Mosaic compiles. It may
            close over float arrays, which get gradients.
        empty: Returns the first state, a tree of matrices.
        tokens: A tree of arrays ``[*batch, n, width]``; zeros fill the last chunk.
        size: Number of tokens in a chunk, a multiple of 128.

    Returns:
        The outputs, shape ``[*batch, n, width]``, with first derivatives in reverse
        mode.
    """
    leaves, tree = jax.tree.flatten(tokens)
    *batch, length, _ = leaves[0].shape

    def transposed(state, chunk):
        state, out = body(state, tree.unflatten(x.T for x in chunk))
        return state, out.T

    chunk = [jax.ShapeDtypeStruct((x.shape[-1], size), x.dtype) for x in leaves]
    step, arrays, out = _hoist(transposed, jax.eval_shape(empty), chunk)

    def split(x):
        x = x.reshape(math.prod(batch), length, x.shape[-1])
        return jnp.pad(x, ((0, 0), (0, -length % size), (0, 0))).swapaxes(-2, -1)

    out = _make_scan(step, empty, out)(arrays, [split(x) for x in leaves])
    return out.swapaxes(-2, -1)[:, :length].reshape(*batch, length, -1)


def _hoist(step, *shapes):
    """Returns step with the arrays that it closes over as its first argument.

    Also returns these arrays, which a kernel takes as matrices, and the shape of step's
    second result.
    """
    closed, results = jax.make_jaxpr(step, return_shape=True)(*shapes)
    tree = jax.tree.structure(results)

    def hoisted(arrays, *arguments):
        pairs = zip(arrays, closed.consts, strict=True)
        arrays = [array.reshape(const.shape) for array, const in pairs]
        # JAX 0.12 exports Jaxpr under this name, which pyright takes for private.
        make = jax.extend.core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
        function = make(closed.jaxpr, arrays)
        leaves = jax.tree.leaves(arguments)
        return tree.unflatten(jax.extend.core.jaxpr_as_fun(function)(*leaves))

    return hoisted, [jnp.atleast_2d(x) for x in closed.consts], results[1]


def _make_scan(step, empty, out):
    """Returns a differentiable function of arrays and tokens [streams, width, n]."""
    state = jax.eval_shape(empty)
    size = out.shape[-1]

    def forward(arrays, tokens, save_states=False):
        """Returns the outputs and, if asked to, the state before each chunk."""
        streams, _, length = tokens[0].shape
        shapes = [_shape(out, streams, out.shape[0], length)]
        specs = [_of_tokens(out, size)]
        if save_states:
            states = jax.tree.map(
                lambda x: _shape(x, streams, length // size, *x.shape[::-1]), state
            )
            shapes.append(states)
            specs.append(jax.tree.map(_of_chunk, states))

        def kernel(arrays, tokens, out, *states_and_carry):
            *states, carry = states_and_carry

            # The first chunk of a stream begins with S = 0 and z = 0.
            @pl.when(pl.program_id(1) == 0)
            def _():
                _write(carry, empty())

            before = _read(carry)
            for saved in states:
                # Few rows, not few columns, which would be padded.
                _write(saved, jax.tree.map(jnp.transpose, before))
            # state_c, out_c = body(state_{c-1}, tokens_c)
            after, out[...] = step(_read(arrays), before, _read(tokens))
            _write(carry, after)

        return pl.pallas_call(
            kernel,
            grid=(streams, length // size),
            in_specs=[
                [_full_block(x) for x in arrays],
                [_of_tokens(x, size) for x in tokens],
            ],
            out_specs=specs,
            out_shape=shapes,
            **_options(state),
        )(arrays, tokens)

    def backward(residuals, cotangent):
        arrays, tokens, states = residuals
        streams, _, length = tokens[0].shape
        last = length // size - 1
        totals = [_shape(x, streams, *x.shape) for x in arrays]

        def kernel(arrays, tokens, states, cotangent, totals, gradients, carry):
            # Nothing depends on the state after the last chunk, which comes first.
            @pl.when(pl.program_id(1) == 0)
            def _():
                for refs in (totals, carry):
                    _write(refs, jax.tree.map(lambda x: jnp.zeros_like(x[...]), refs))

            # Pulls cotangents of state_c and out_c back to arrays, state_{c-1} and
            # tokens_c.
            before = jax.tree.map(jnp.transpose, _read(states))
            _, pullback = jax.vjp(step, _read(arrays), before, _read(tokens))
            of_arrays, of_state, of_tokens = pullback((_read(carry), cotangent[...]))
            _write(totals, jax.tree.map(jnp.add, _read(totals), of_arrays))
            _write(gradients, of_tokens)
            _write(carry, of_state)

        token_specs = [_of_tokens(x, size, last) for x in tokens]
        totals, gradients = pl.pallas_call(
            kernel,
            grid=(streams, last + 1),
            in_specs=[
                [_full_block(x) for x in arrays],
                token_specs,
                jax.tree.map(functools.partial(_of_chunk, last=last), states),
                _of_tokens(cotangent, size, last),
            ],
            out_specs=[[_of_stream(x) for x in totals], token_specs],
            out_shape=[totals, [_shape(x, *x.shape) for x in tokens]],
            **_options(state),
        )(arrays, tokens, states, cotangent)
        return [x.sum(axis=0) for x in totals], gradients

    @jax.custom_vjp
    def scan(arrays, tokens):
        return forward(arrays, tokens)[0]

    def scan_forward(arrays, tokens):
        out, states = forward(arrays, tokens, save_states=True)
        return out, (arrays, tokens, states)

    scan.defvjp(scan_forward, backward)
    return scan


def _options(state):
    """Returns a carried state in VMEM, and that only chunks need an order."""
    return {
        "scratch_shapes": [
            jax.tree.map(lambda x: pltpu.VMEM(x.shape, x.dtype), state),
        ],
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
    }


def _full_block(x):
    return pl.BlockSpec(x.shape, lambda stream, chunk: (0,) * x.ndim)


def _of_stream(x):
    return pl.BlockSpec(
        (None, *x.shape[1:]), lambda stream, chunk: (stream, *[0] * (x.ndim - 1))
    )


def _of_chunk(x, last=None):
    """Blocks of arrays [streams, chunks, ...], in reverse if ``last`` is given."""
    return pl.BlockSpec(
        (None, None, *x.shape[2:]),
        lambda stream, chunk: (stream, chunk if last is None else last - chunk, 0, 0),
    )


def _of_tokens(x, size, last=None):
    """Blocks of arrays [streams, width, n], in reverse if ``last`` is given."""
    return pl.BlockSpec(
        (None, x.shape[-2], size),
        lambda stream, chunk: (stream, 0, chunk if last is None else last - chunk),
    )


def _shape(x, *shape):
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _read(refs):
    return jax.tree.map(lambda ref: ref[...], refs)


def _write(refs, values):
    def write(ref, value):
        ref[...] = value

    jax.tree.map(write, refs, values)
