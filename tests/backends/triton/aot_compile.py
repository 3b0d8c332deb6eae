"""Compiles every kernel for several targets without a GPU; run as a script by test_compile.py.

    python aot_compile.py cuda:80:one cuda:90:all hip:gfx942:all ...

``all`` compiles every variant, ``one`` the first of each kernel, both with the first tile of its
list; ``tiles`` compiles the bf16 variants of the autotuned kernels with every other tile. Prints
one JSON line per target and variant: kernel, tile, size of the binary in bytes, the 32-bit products
that addresses depend on, and on NVIDIA the number of 128-bit accesses and of branches.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fairseq_tutel.backends._wire_formats import WIRE_FORMATS
from fairseq_tutel.backends.triton import _autotune as tiles
from fairseq_tutel.backends.triton import (
    _grouped,
    activation,
    cumsum,
    dispatch,
    gating,
    rows,
    slots,
    wire,
)

FLOAT = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def _variants():
    """(kernel, dtype of the data pointers, constexpr values); tiles as on a GPU."""
    block_t, block_e = gating._tile(70)
    gate = {"E": 70, "TOP_K": 2, "BLOCK_T": block_t, "BLOCK_E": block_e}
    sums = {"E": 70, "BLOCK_P": 64, "BLOCK_E": tiles.SCAN_BLOCK_COLS}
    plain = {"HAS_NOISE": False, "HAS_PAD": False, "HAS_KEY": False}
    for given in ({"HAS_NOISE": True, "HAS_PAD": True}, {"HAS_KEY": True}, {}):
        yield gating._topk_gating_fwd_kernel, "fp32", {**gate, **plain, **given}
    one = {"E": 1, "TOP_K": 1, **plain}  # the narrowest tiles
    yield gating._topk_gating_fwd_kernel, "fp32", {**one, "BLOCK_T": 32, "BLOCK_E": 1}
    yield gating._topk_gating_sums_kernel, "fp32", sums
    given = {"HAS_GATE": True, "HAS_PROB_SUM": True, "HAS_LSE": True}
    yield gating._topk_gating_bwd_kernel, "fp32", {**gate, **given}

    slot = {"E": 70, "TOP_K": 2, "HAS_ORDER": True, "BLOCK": tiles.SLOT_BLOCK}
    columns = {"E": 70, "BLOCK_E": tiles.SCAN_BLOCK_COLS}
    scan = {**columns, "TOP_K": 2, "BLOCK_B": tiles.SCAN_BLOCK_ROWS}
    tile = {**columns, "BLOCK_T": 2 * tiles.SCAN_BLOCK_ROWS}
    yield slots._rank_in_block_kernel, "fp32", {**slot, "BLOCK_E": 128}
    yield slots._rank_in_block_kernel, "fp32", {**slot, "E": 1, "TOP_K": 1, "BLOCK_E": 2}
    yield slots._scan_blocks_kernel, "fp32", scan
    yield slots._add_offset_kernel, "fp32", slot
    yield cumsum._column_sums_kernel, "fp32", tile
    yield cumsum._cumsum_sub_one_kernel, "fp32", {**tile, "HAS_BEFORE": True}

    pairs = {"E": 70, "TOP_K": 2, "NORMALIZE": True, **rows._tile(2), "BLOCK_R": tiles.FLAT_BLOCK}
    for padded in (True, False):
        layout = {"PADDED": padded, "HAS_CAPACITY": padded}
        yield rows._assign_rows_fwd_kernel, "fp32", {**pairs, **layout}
    yield rows._assign_rows_bwd_kernel, "fp32", {"TOP_K": 2, "NORMALIZE": True, **rows._tile(2)}

    both = {"HAS_ROWS": True, "ROWS_PER_PROGRAM": tiles.ROWS_PER_PROGRAM}
    for dtype, weighted, top_k in (
        ("bf16", True, 2), ("fp16", True, 2), ("fp32", False, 2),
        ("bf16", True, 6),  # more choices than are unrolled
    ):  # fmt: skip
        move = {"M": 4096, "TOP_K": top_k, "HAS_WEIGHT": weighted}
        dot = {"HAS_DOT": weighted, "BLOCK_K": triton.next_power_of_2(top_k)}
        yield dispatch._token_to_rows_kernel, dtype, {**move, **dot, **both}
        yield dispatch._rows_to_token_kernel, dtype, move

    for dtype, precision in (("bf16", "ieee"), ("fp16", "ieee"), ("fp32", "tf32")):
        product = {"A": 4096, "B": 16384, "PRECISION": precision, "UPCAST": False}
        strides = {"stride_e": 4096 * 16384, "stride_a": 1, "stride_b": 4096}
        experts = {"e": 3, "BLOCK_EXPERTS": 4}
        yield _grouped._rows_product_kernel, dtype, {**product, **strides, **experts}
        yield _grouped._weight_gradient_kernel, dtype, product

    act = {"e": 3, "F": 4096, "TILE": tiles.ACT_TILE_ROWS, "BLOCK_EXPERTS": 4}
    cases = [("bf16", "gelu", True, 0.0), ("fp16", "gelu_tanh", False, 0.1)]
    cases += [("fp32", name, False, 0.0) for name in ("relu", "silu", "tanh")]
    for dtype, name, ragged, dropout_p in cases:
        mode = {"RAGGED": ragged, "ACTIVATION": name, "DROPOUT_P": dropout_p}
        yield activation._bias_act_fwd_kernel, dtype, {**act, **mode}
        yield activation._bias_act_bwd_dh_kernel, dtype, {**act, **mode, "HAS_DH": True}
    sums = {**act, "RAGGED": False, "ACTIVATION": "linear", "DROPOUT_P": 0.0, "HAS_DH": False}
    yield activation._bias_act_bwd_dh_kernel, "bf16", {**sums, "h_ptr": None, "d_h_ptr": None}
    for ragged in (False, True):
        blocks = {"BLOCK_Z": tiles.SCAN_BLOCK_ROWS, "BLOCK_F": tiles.SCAN_BLOCK_COLS}
        yield activation._bias_act_bwd_db_kernel, "bf16", {**act, "RAGGED": ragged, **blocks}

    for name, stored in (("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "u8"), ("e5m2", "u8")):
        chosen = WIRE_FORMATS[name]
        sizes = {"M": 4000, "BLOCK": 128, "BLOCK_N": tiles.WIRE_ROWS}
        sizes |= {"MANTISSA": chosen.mantissa, "BIAS": chosen.bias, "value_ptr": stored}
        scales = {"SCALED": name != "bf16", "EXPONENT": chosen.exponent or 0}
        scales |= {"B": 32, "NUM_SCALES": 32}
        yield wire._encode_rows_kernel, "fp32", {**sizes, **scales}
        if name != "bf16":
            yield wire._decode_rows_kernel, "fp16", {**sizes, "CLAMP": True}


_POINTERS = {
    "expert_ptr": "*i32", "choice_ptr": "*i32", "row_ptr": "*i32", "pair_ptr": "*i32",
    "dest_row_ptr": "*i32", "src_pair_ptr": "*i32", "position_ptr": "*i32", "end_ptr": "*i32",
    "num_routed_ptr": "*i32", "num_kept_ptr": "*i32",
    "rank_ptr": "*i32", "slot_ptr": "*i32", "hist_ptr": "*i32", "count_ptr": "*i32",
    "sum_ptr": "*i32", "out_ptr": "*i32", "before_ptr": "*i32", "offsets_ptr": "*i32",
    "scale_ptr": "*u8",
    "mask_ptr": "*i64", "order_ptr": "*i64", "seed_ptr": "*i64", "pad_ptr": "*i1",
}  # fmt: skip
_FP32 = {"weight_ptr", "dot_ptr", "partial_ptr"}


def _compile(kernel, dtype, constants, target, tile=0):
    function, options = kernel, {}
    if not isinstance(kernel, triton.JITFunction):  # an autotuned kernel wraps the compiled one
        function, config = kernel.fn, kernel.configs[tile]
        constants, options = {**constants, **config.kwargs}, {"num_warps": config.num_warps}
    signature = {}
    constants = dict(constants)
    stored = constants.pop("value_ptr", None)  # a dtype of its own
    for name in function.arg_names:
        if name == "value_ptr":
            signature[name] = f"*{stored}"
        elif name in constants:
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
    return function.__name__, triton.compile(source, target, options)


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


def _check_tiles() -> None:
    """Tiles of the autotuned kernels must divide what a program works on."""
    for config in tiles.move_configs():
        assert tiles.ROWS_PER_PROGRAM % config.kwargs["BLOCK_T"] == 0, config
    for config in tiles.act_configs():
        assert tiles.ACT_TILE_ROWS % config.kwargs["BLOCK_N"] == 0, config


def _chosen(variants):
    """(kernel, dtype, constants, index of the tile)."""
    done = set()
    for kernel, dtype, constants in _variants():
        if variants == "tiles":
            if not isinstance(kernel, triton.JITFunction) and dtype == "bf16":
                for tile in range(1, len(kernel.configs)):
                    yield kernel, dtype, constants, tile
        elif variants == "all" or kernel not in done:
            yield kernel, dtype, constants, 0
        done.add(kernel)


def compile_all(backend: str, arch: str, variants: str) -> None:
    cuda = backend == "cuda"
    target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    for kernel, dtype, constants, tile in _chosen(variants):
        name, binary = _compile(kernel, dtype, constants, target, tile)
        code = binary.asm["cubin" if cuda else "hsaco"]
        result = {"target": f"{backend}:{arch}", "kernel": name, "tile": tile, "size": len(code)}
        result["narrow"] = narrow_products(binary.asm["ttir"])
        if cuda:
            result["wide"] = wide_accesses(binary.asm["ptx"])
            result["branches"] = len(re.findall(r"\bbra\b", binary.asm["ptx"]))
        result["shared"] = binary.metadata.shared
        print(json.dumps(result))


if __name__ == "__main__":
    _check_tiles()
    for argument in sys.argv[1:]:
        compile_all(*argument.split(":"))
