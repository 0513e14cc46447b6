"""What is counted in compiled programs."""

import jax
import jax.numpy as jnp

from benchmarks.hlo import count_executed

# As compiled for a TPU: S(1) is the chip's own memory, T(8,128) pads the last two axes.
LOOP = """
%slice_one (stack: f32[13,5,7], at: s32[]) -> f32[5,7] {
  %stack = f32[13,5,7]{2,1,0:T(8,128)} parameter(0)
  %at = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %one = f32[1,5,7]{2,1,0:T(8,128)} dynamic-slice(%stack, %at, %zero, %zero), sizes={1,5,7}
  ROOT %flat = f32[5,7]{1,0:T(8,128)} bitcast(%one)
}

%write_one (stack: f32[13,5,7], new: f32[5,7], at: s32[]) -> f32[13,5,7] {
  %stack = f32[13,5,7]{2,1,0:T(8,128)} parameter(0)
  %new = f32[5,7]{1,0:T(8,128)} parameter(1)
  %at = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  %update = f32[1,5,7]{2,1,0:T(8,128)} bitcast(%new)
  ROOT %all = f32[13,5,7]{2,1,0:T(8,128)} dynamic-update-slice(%stack, %update, %at, %zero, %zero)
}

%body (state: (s32[], f32[13,5,7], f32[13,5,7])) -> (s32[], f32[13,5,7], f32[13,5,7]) {
  %state = (s32[]{:T(128)}, f32[13,5,7]{2,1,0:T(8,128)}, f32[13,5,7]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %in = f32[13,5,7]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %out = f32[13,5,7]{2,1,0:T(8,128)} get-tuple-element(%state), index=2
  %step = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %step)
  %taken = f32[5,7]{1,0:T(8,128)S(1)} fusion(%in, %i), kind=kLoop, calls=%slice_one
  %sine = f32[5,7]{1,0:T(8,128)S(1)} sine(%taken)
  %kept = f32[13,5,7]{2,1,0:T(8,128)} fusion(%out, %sine, %i), kind=kLoop, calls=%write_one
  ROOT %new = (s32[]{:T(128)}, f32[13,5,7]{2,1,0:T(8,128)}, f32[13,5,7]{2,1,0:T(8,128)}) tuple(%next, %in, %kept)
}

%condition (state: (s32[], f32[13,5,7], f32[13,5,7])) -> pred[] {
  %state = (s32[]{:T(128)}, f32[13,5,7]{2,1,0:T(8,128)}, f32[13,5,7]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %length = s32[]{:T(128)} constant(13)
  ROOT %more = pred[]{:T(512)} compare(%i, %length), direction=LT
}

ENTRY %main (x: f32[13,5,7]) -> f32[13,5,7] {
  %x = f32[13,5,7]{2,1,0:T(8,128)} parameter(0)
  %start = s32[]{:T(128)} constant(0)
  %empty = f32[13,5,7]{2,1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %state = (s32[]{:T(128)}, f32[13,5,7]{2,1,0:T(8,128)}, f32[13,5,7]{2,1,0:T(8,128)}) tuple(%start, %x, %empty)
  %loop = (s32[]{:T(128)}, f32[13,5,7]{2,1,0:T(8,128)}, f32[13,5,7]{2,1,0:T(8,128)}) while(%state), condition=%condition, body=%body
  ROOT %result = f32[13,5,7]{2,1,0:T(8,128)} get-tuple-element(%loop), index=2
}
"""  # noqa: E501
# 5x7 floats, padded, and their index.
SLICE = 8 * 128 * 4 + 4

ASYNCHRONOUS = """
ENTRY %main (x: bf16[3,17,5]) -> bf16[3,17,5] {
  %x = bf16[3,17,5]{1,2,0:T(8,128)(2,1)} parameter(0)
  %start = (bf16[3,17,5]{1,2,0:T(8,128)(2,1)S(1)}, bf16[3,17,5]{1,2,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %done = bf16[3,17,5]{1,2,0:T(8,128)(2,1)S(1)} copy-done(%start)
  ROOT %y = bf16[3,17,5]{1,2,0:T(8,128)(2,1)} negate(%done)
}
"""  # noqa: E501

BRANCHES = """
%short (x: f32[11]) -> f32[11] {
  %x = f32[11]{0} parameter(0)
  ROOT %y = f32[11]{0} negate(%x)
}

%long (x: f32[11]) -> f32[11] {
  %x = f32[11]{0} parameter(0)
  %y = f32[11]{0} negate(%x)
  ROOT %z = f32[11]{0} sine(%y)
}

ENTRY %main (which: s32[], x: f32[11]) -> f32[11] {
  %which = s32[] parameter(0)
  %x = f32[11]{0} parameter(1)
  ROOT %y = f32[11]{0} conditional(%which, %x, %x), branch_computations={%long, %short}
}
"""

# As compiled for a GPU: a product whose workspace is a result.
WORKSPACE = """
ENTRY %main (x: f32[3,5], y: f32[5,7]) -> f32[3,7] {
  %x = f32[3,5]{1,0} parameter(0)
  %y = f32[5,7]{1,0} parameter(1)
  %both = (f32[3,7]{1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul"
  ROOT %z = f32[3,7]{1,0} get-tuple-element(%both), index=0
}
"""  # noqa: E501


def test_a_workspace_is_not_moved():
    assert count_executed(WORKSPACE) == (1, 4 * (3 * 5 + 5 * 7 + 3 * 7))


def test_loops_count_once_for_each_iteration_and_move_slices():
    # Each iteration runs two fusions and the sine, and moves one slice in and one out.
    assert count_executed(LOOP) == (13 * 3, 13 * 2 * SLICE)


def test_trip_count_of_the_compiler_comes_first():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    assert count_executed(LOOP.replace("body=%body", known))[0] == 7 * 3


def test_loops_of_unknown_length_count_once():
    unknown = LOOP.replace("%length = s32[]{:T(128)} constant(13)", "%length = %i")
    assert count_executed(unknown) == (3, 2 * SLICE)


def test_asynchronous_copies_count_once():
    # In, and back from the chip's own memory; 5 is padded to 8, 17 to 128.
    assert count_executed(ASYNCHRONOUS) == (2, 2 * 3 * 8 * 128 * 2)


def test_of_branches_the_longest_counts():
    assert count_executed(BRANCHES) == (2, 2 * 2 * 11 * 4)


def test_a_compiled_scan():
    def executed(length):
        def step(carry, x):
            return jnp.sin(carry @ x), carry.sum()

        stack = jnp.ones((length, 5, 5))
        function = jax.jit(lambda stack: jax.lax.scan(step, stack[0], stack))
        return count_executed(function.lower(stack).compile().as_text())

    (few, moved_few), (many, moved_many) = executed(13), executed(29)
    # At least the product and the sine.
    assert many - few >= 16 * 2 and (many - few) % 16 == 0
    # The stack is read slice by slice.
    assert moved_many < 29 / 13 * moved_few
