"""Disassemble native objects and fail where a dot-product loop keeps a vector on the stack.

    python3 check_codegen.py liboctavo_native.so [more.o ...]

A loop is a backward jump inside one function; the innermost loops with dot instructions are looked at. A register that
is stored and reloaded there halves the speed of the product, and compilers bring it back quietly. The generic table
is scalar code without such an instruction: it is disassembled and has no loop to look at.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

DOTS = re.compile(r"\b(vpdpbusds?|vdpbf16ps|vpmaddubsw|tdpb\w+|sdot|usdot|[us]?mmla|bfdot|bfmmla)\b")
FLOAT_DOTS = re.compile(r"\b(vfmadd231ps|fmla)\b")  # in products only: elsewhere they are polynomials
ADAPTERS = re.compile(r"\b(shrink|expand)(_rows|_tile|_on_tiles)?[<(]")
PRODUCT = re.compile(r"\b(tile_\w+|score_tile|value_tile)<|" + ADAPTERS.pattern)
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(.*)$")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
JUMP = re.compile(r"^(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s.*?([0-9a-f]+) <")
X86_SPILL = re.compile(r"[yz]mm\d+.*\(%(rsp|rbp)|\(%(rsp|rbp).*[yz]mm\d+")
ARM_SPILL = re.compile(r"^(?:str|ldr|stp|ldp|stur|ldur)\s+q\d+.*\[sp")

Instruction = tuple[int, str]


def functions(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Name and (address, instruction) pairs of every function of a disassembly."""
    name, body = "", []
    for line in text.splitlines():
        if found := FUNCTION.match(line):
            if body:
                yield name, body
            name, body = found[1], []
        elif found := INSTRUCTION.match(line):
            body.append((int(found[1], 16), found[2].strip()))
    if body:
        yield name, body


def loops(name: str, body: list[Instruction]) -> list[tuple[int, int]]:
    """Address ranges of the innermost loops that hold a dot instruction."""
    product = PRODUCT.search(name)
    start, found = body[0][0], []
    for address, text in body:
        jump = JUMP.match(text)
        if jump and start <= int(jump[1], 16) <= address:
            found.append((int(jump[1], 16), address))
    dots = [address for address, text in body if DOTS.search(text) or (product and FLOAT_DOTS.search(text))]
    busy = [loop for loop in found if any(loop[0] <= a <= loop[1] for a in dots)]
    return [a for a in busy if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in busy)]


def is_spill(text: str, framed: bool) -> bool:
    found = X86_SPILL.search(text)
    if found:
        return framed or "rsp" in found.groups()
    return bool(ARM_SPILL.match(text))


def spills(path: str) -> tuple[int, int, list[str]]:
    """Number of dot loops in an object file, of those of adapters, and a line for each that touches the stack."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-C", path], check=True, capture_output=True, text=True
    ).stdout
    count, adapters, wrong = 0, 0, []
    for name, body in functions(text):
        framed = any(re.match(r"mov\s+%rsp,%rbp", instruction) for _, instruction in body)
        for first, last in loops(name, body):
            count += 1
            adapters += bool(ADAPTERS.search(name))
            bad = [t for a, t in body if first <= a <= last and is_spill(t, framed)]
            if bad:
                short = name.replace("octavo::(anonymous namespace)::", "").split("(")[0]
                wrong.append(f"{path}: {short} at {first:x}: {len(bad)} stack references, first: {bad[0]}")
    return count, adapters, wrong


def main(paths: list[str]) -> int:
    """Print what is wrong; 1 if anything is, or if a table for more than any processor has no dot loop at all."""
    wrong = [] if paths else ["no object to look at"]
    for path in paths:
        count, adapters, lines = spills(path)
        print(f"{path}: {count} dot loops, {adapters} of adapters, {len(lines)} with vectors on the stack")
        wrong += lines
        if 0 in (count, adapters) and "kernels_generic" not in path:
            wrong.append(f"{path}: no dot loop was found, or none of adapters")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
