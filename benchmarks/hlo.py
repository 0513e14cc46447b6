"""Counts what a compiled program executes, from its text after all of XLA's passes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")

# What names values, reserves memory, as do two calls on TPUs, or counts iterations.
_FREE = {"after-all", "bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
_FREE_CALL = re.compile(r'custom_call_target="(AllocateBuffer|ConcatBitcast)"')
# Products of cuBLAS and cuDNN have a workspace as a last result.
_WORKSPACE = re.compile(r'custom_call_target="__cu(blas|dnn)\$')
_COUNTER = re.compile(r"(pred|s32|u32)\[\]")
_SLICES = {"dynamic-slice", "gather", "slice"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of the program: ``%name = shape opcode(operands), attributes``."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @functools.cached_property
    def operand_names(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.-]+)", self.operands)

    def called(self, attribute: str) -> str:
        """Returns the name of the computation that an attribute names."""
        return re.search(rf"\b{attribute}=%?([\w.-]+)", self.attributes)[1]

    @property
    def is_free(self) -> bool:
        """Whether nothing is executed; of ``copy-start`` and ``copy-done`` one is."""
        return (
            self.opcode in _FREE
            or self.opcode.endswith("-start")
            or bool(_COUNTER.match(self.shape))
            or bool(_FREE_CALL.search(self.attributes))
        )


def count_executed(text: str) -> tuple[int, int]:
    """Counts the executed instructions and the bytes that they move.

    A fusion is one instruction. What only names values or computes an index does not
    count. The instructions of a loop count once for each iteration, or once if their
    number is not known; of branches, the longest counts. Bytes are those of operands
    and results in the device's main memory, HBM on a TPU, with the padding of their
    layouts. An instruction that takes or updates a slice moves only that slice.

    Args:
        text: The program, ``compiled.as_text()``.

    Returns:
        The number of instructions and the number of bytes.

    Example:
        >>> text = '''
        ... ENTRY %main (x: f32[5]) -> f32[5] {
        ...   %x = f32[5]{0} parameter(0)
        ...   ROOT %y = f32[5]{0} negate(%x)
        ... }'''
        >>> count_executed(text)
        (1, 40)
    """
    return _Program(text).count()


class _Program:
    """The computations of a program: instructions by name, the root last."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, current = "", {}
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                entry, name = start.groups()
                current = self.computations[name] = {}
                self.entry = name if entry else self.entry
            elif found := _INSTRUCTION.match(line):
                _, name, shape, opcode, rest = found.groups()
                operands, _, attributes = rest.partition("), ")
                current[name] = Instruction(name, shape, opcode, operands, attributes)

    def count(self) -> tuple[int, int]:
        return self._count(self.entry)

    def _count(self, name: str) -> tuple[int, int]:
        computation = self.computations[name]
        total = (0, 0)
        for instruction in computation.values():
            for times, counts in self._executed(computation, instruction):
                total = tuple(a + times * b for a, b in zip(total, counts, strict=True))
        return total

    def _executed(
        self, computation: dict[str, Instruction], instruction: Instruction
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields how often an instruction executes what, as instructions and bytes."""
        opcode = instruction.opcode
        if opcode == "while":
            times = self._iterations(instruction)
            yield times, self._count(instruction.called("condition"))
            yield times, self._count(instruction.called("body"))
        elif opcode == "conditional":
            names = re.findall(r"%([\w.-]+)", instruction.attributes)
            branches = [name for name in names if name in self.computations]
            yield 1, max(map(self._count, branches))
        elif opcode == "call":
            yield 1, self._count(instruction.called("to_apply"))
        elif not instruction.is_free:
            yield 1, (1, self._moved(computation, instruction))

    def _iterations(self, loop: Instruction) -> int:
        """Returns the length of a loop; 1 if it is not known.

        JAX's loops count from 0 to a constant, which the condition compares with.
        """
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        bounds = [
            int(number[0])
            for instruction in self.computations[loop.called("condition")].values()
            if instruction.opcode == "constant"
            and (number := re.match(r"\d+", instruction.operands))
        ]
        return bounds[0] if len(bounds) == 1 else 1

    def _moved(
        self, computation: dict[str, Instruction], instruction: Instruction
    ) -> int:
        """Returns the bytes that one execution reads from and writes to memory."""
        if instruction.opcode.endswith("-done"):
            return sum(map(_size, _ARRAY.findall(instruction.shape)))
        moved = self._written(computation, instruction)
        for position, name in enumerate(instruction.operand_names):
            operand = computation[name]
            arrays = [a for a in _ARRAY.findall(operand.shape) if _in_memory(a)]
            moved += self._read_by(
                computation, instruction, position, sum(map(_size, arrays))
            )
        return moved

    def _read_by(
        self,
        computation: dict[str, Instruction],
        user: Instruction,
        position: int,
        size: int,
    ) -> int:
        """Returns how many of an operand's bytes an instruction reads."""
        if user.opcode in _SLICES and position == 0:
            return min(size, sum(map(_size, _ARRAY.findall(user.shape))))
        if user.opcode == "dynamic-update-slice" and position == 0:
            return 0
        if user.opcode == "bitcast":
            return self._read(computation, user.name, size)
        if user.opcode == "fusion":
            fused = self.computations[user.called("calls")]
            (parameter,) = (
                instruction.name
                for instruction in fused.values()
                if instruction.opcode == "parameter"
                and int(instruction.operands.rstrip(")")) == position
            )
            return self._read(fused, parameter, size)
        return size

    def _read(self, computation: dict[str, Instruction], name: str, size: int) -> int:
        """Returns how many of a value's bytes are read within a fusion."""
        total = sum(
            self._read_by(computation, user, position, size)
            for user in computation.values()
            for position, operand in enumerate(user.operand_names)
            if operand == name
        )
        return min(size, total)

    def _written(
        self, computation: dict[str, Instruction], instruction: Instruction
    ) -> int:
        """Returns the bytes that an instruction writes to memory."""
        arrays = _ARRAY.findall(instruction.shape)
        if _WORKSPACE.search(instruction.attributes):
            arrays = [array for array in arrays if array[0] not in ("s8", "u8")]
        results = [instruction]
        if instruction.opcode == "fusion":
            computation = self.computations[instruction.called("calls")]
            results = [next(reversed(computation.values()))]
            if results[0].opcode == "tuple":
                results = [computation[name] for name in results[0].operand_names]
        sizes = [_size(array) if _in_memory(array) else 0 for array in arrays]
        if len(results) != len(sizes):
            return sum(sizes)
        return sum(
            min(size, self._updated(computation, result, size))
            for size, result in zip(sizes, results, strict=True)
        )

    def _updated(
        self, computation: dict[str, Instruction], result: Instruction, size: int
    ) -> int:
        """Returns the new bytes of a result: of an updated array, the slice."""
        while result.opcode == "bitcast":
            result = computation[result.operand_names[0]]
        if result.opcode != "dynamic-update-slice":
            return size
        update = computation[result.operand_names[1]]
        return sum(map(_size, _ARRAY.findall(update.shape)))


def _in_memory(array: tuple[str, str, str]) -> bool:
    """Returns whether an array is in main memory, not in one of the chip's own."""
    return not re.search(r"S\([1-9]", array[2])


def _size(array: tuple[str, str, str]) -> int:
    """Returns the bytes of an array, with the padding to the tiles of its layout."""
    dtype, shape, layout = array
    bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or [0])[0])
    sizes = [int(size) for size in shape.split(",") if size]
    order, _, tiles = layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", tiles)
    if tile and len(sizes) > 1:
        # Both from the axis that varies fastest.
        axes = [int(axis) for axis in order.split(",")]
        steps = [int(step) for step in reversed(tile[1].split(","))]
        for axis, step in zip(axes, steps, strict=False):
            sizes[axis] = -(-sizes[axis] // step) * step
    return math.prod(sizes) * bits // 8
