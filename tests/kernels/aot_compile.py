"""Compiles every kernel for one target without a GPU; run as a script by test_compile.py.

    python aot_compile.py {cuda:80 | cuda:90 | cuda:100 | hip:gfx90a | hip:gfx942} {all | one}

Prints one JSON line per kernel variant: name, size of the binary in bytes, the 32-bit products
that addresses depend on, and on NVIDIA the number of 128-bit accesses. ``all`` compiles every
variant, ``one`` the first of each kernel.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fairseq_tutel.kernels import activation, dispatch, gating, slots

FLOAT = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def _variants():
    """(kernel, dtype of the data pointers, constexpr values)."""
    gate = {"E": 70, "TOP_K": 2, "BLOCK_T": 16, "BLOCK_E": 128}
    yield gating._topk_gating_fwd_kernel, "fp32", {**gate, "HAS_NOISE": True, "HAS_PAD": True}
    yield gating._topk_gating_fwd_kernel, "fp32", {**gate, "HAS_NOISE": False, "HAS_PAD": False}
    yield gating._topk_gating_sums_kernel, "fp32", {"E": 70, "BLOCK_P": 64, "BLOCK_E": 32}
    yield gating._topk_gating_bwd_kernel, "fp32", gate

    slot = {"E": 70, "TOP_K": 2, "HAS_ORDER": True, "BLOCK": 128}
    scan = {"E": 70, "TOP_K": 2, "BLOCK_B": 64, "BLOCK_E": 32}
    tile = {"E": 70, "BLOCK_T": 128, "BLOCK_E": 32}
    yield slots._rank_in_block_kernel, "fp32", {**slot, "BLOCK_E": 128}
    yield slots._scan_blocks_kernel, "fp32", scan
    yield slots._add_offset_kernel, "fp32", slot
    yield slots._invert_rows_kernel, "fp32", {"BLOCK": 1024}
    yield slots._column_sums_kernel, "fp32", tile
    yield slots._cumsum_sub_one_kernel, "fp32", {**tile, "HAS_BEFORE": True}

    move = {"M": 1024, "TOP_K": 2, "HAS_WEIGHT": True, "HAS_DOT": True, "BLOCK_K": 2,
            "BLOCK_T": 4, "BLOCK_M": 1024}
    plain = {**move, "HAS_WEIGHT": False, "HAS_DOT": False}
    for dtype in ("bf16", "fp16"):
        yield dispatch._token_to_rows_kernel, dtype, {**move, "HAS_ROWS": True}
        yield dispatch._rows_to_token_kernel, dtype, {**move, "HAS_SUM": True}
    yield dispatch._token_to_rows_kernel, "fp32", {**plain, "HAS_ROWS": True}
    yield dispatch._rows_to_token_kernel, "fp32", {**plain, "HAS_SUM": True}

    act = {"e": 3, "F": 4096, "TILE": 64, "BLOCK_EXPERTS": 4, "BLOCK_F": 1024}
    cases = [("bf16", "gelu", True, 0.0), ("fp16", "gelu_tanh", False, 0.1)]
    cases += [("fp32", name, False, 0.0) for name in ("relu", "silu", "tanh")]
    for dtype, name, ragged, dropout_p in cases:
        options = {**act, "RAGGED": ragged, "BLOCK_N": 4}
        mode = {"ACTIVATION": name, "DROPOUT_P": dropout_p}
        yield activation._bias_act_fwd_kernel, dtype, {**options, **mode}
        yield activation._bias_act_bwd_dh_kernel, dtype, {**options, **mode}
    for ragged in (False, True):
        sums = {**act, "RAGGED": ragged, "BLOCK_Z": 64, "BLOCK_F": 32}
        yield activation._bias_act_bwd_db_kernel, "bf16", sums


_POINTERS = {
    "expert_ptr": "*i32", "choice_ptr": "*i32", "row_ptr": "*i32", "pair_ptr": "*i32",
    "rank_ptr": "*i32", "slot_ptr": "*i32", "hist_ptr": "*i32", "count_ptr": "*i32",
    "sum_ptr": "*i32", "out_ptr": "*i32", "before_ptr": "*i32", "offsets_ptr": "*i32",
    "mask_ptr": "*i64", "order_ptr": "*i64", "seed_ptr": "*i64", "pad_ptr": "*i1",
}  # fmt: skip
_FP32 = {"weight_ptr", "dot_ptr", "partial_ptr"}


def _compile(kernel, dtype, constants, target):
    # an autotuned kernel wraps the compiled one
    function = kernel if isinstance(kernel, triton.JITFunction) else kernel.fn
    signature = {}
    for name in function.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in _FP32 else _POINTERS.get(name, FLOAT[dtype])
        else:
            signature[name] = "i32"
    # allocations are aligned to 16 bytes at least, and the launch specializes on that
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names) if name.endswith("_ptr")
    }  # fmt: skip
    source = ASTSource(function, signature, constants, aligned)
    return function.__name__, triton.compile(source, target=target)


def narrow_products(ttir: str) -> list[str]:
    """The 32-bit products that some address depends on.

    Such a product overflows once a tensor has 2^31 elements, also if it is widened afterwards.
    The walk goes backwards from each pointer addition through the definitions of its offset and
    stops at values that are loaded or carried by a loop.
    """
    defs = {}
    for line in ttir.splitlines():
        match = re.match(r"\s*(%\w+)(?::\d+)? = (\S+) (.*)", line)
        if match:
            defs[match[1]] = (match[2], re.findall(r"%\w+", match[3]), line.strip())
    offsets = [operands[1] for op, operands, _ in defs.values() if op == "tt.addptr"]
    assert offsets, "a kernel without addresses: the text was not understood"
    found, seen = [], set()
    while offsets:
        name = offsets.pop()
        if name in seen or name not in defs:
            continue
        seen.add(name)
        op, operands, line = defs[name]
        if op == "arith.muli" and re.search(r"\bi32|xi32>", line):
            found.append(line)
        if op not in ("tt.load", "scf.for", "scf.if"):
            offsets += operands
    return found


def wide_accesses(ptx: str) -> int:
    """Loads and stores of 128 bits."""
    return len(re.findall(r"(?:ld|st)\.global\.v4\.b32|(?:ld|st)\.global\.v2\.b64", ptx))


def main() -> None:
    backend, arch = sys.argv[1].split(":")
    if backend == "cuda":
        target = GPUTarget("cuda", int(arch), 32)
    else:
        target = GPUTarget("hip", arch, 64)
    done = set()
    for kernel, dtype, constants in _variants():
        if kernel in done and sys.argv[2] == "one":
            continue
        done.add(kernel)
        name, binary = _compile(kernel, dtype, constants, target)
        code = binary.asm["cubin" if backend == "cuda" else "hsaco"]
        result = {"kernel": name, "size": len(code)}
        result["narrow"] = narrow_products(binary.asm["ttir"])
        if backend == "cuda":
            result["wide"] = wide_accesses(binary.asm["ptx"])
        print(json.dumps(result))


if __name__ == "__main__":
    main()
