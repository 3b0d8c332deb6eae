"""Compiles every kernel for several targets without a GPU; run as a script by test_compile.py.

    python aot_compile.py cuda:80:one cuda:90:all hip:gfx942:all ...

``all`` compiles every variant, ``one`` the first of each kernel, both with its first tile;
Kernels with TMA loads are compiled with all their tiles for the targets that have TMA.
``tiles`` compiles the bf16 variants of tuned kernels with every other tile, and the fp32
variants of products without TF32 with the other tiles that they try. Prints one JSON line per
target and variant.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fairseq_tutel.backends.triton import _autotune as tiles
from fairseq_tutel.backends.triton import (
    _grouped,
    _grouped_tma,
    activation,
    adam,
    dispatch,
    gate_logits,
    gating,
    rows,
    slots,
    wire,
)
from fairseq_tutel.config import WIRE_FORMATS
from fairseq_tutel.config.formats import BLOCK

# always in both halves
ADAM = adam._adam16_max_kernel, adam._adam16_step_kernel, adam._adam16_small_kernel
TMA = ("90", "100")  # targets of NVIDIA that have it
FLOAT = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def _variants():
    """(kernel, dtype of the data pointers, constexpr values); tiles as on a GPU."""
    block_t, block_e = gating._tile(70)
    gate = {"E": 70, "TOP_K": 2, "BLOCK_T": block_t, "BLOCK_E": block_e}
    sums = {"E": 70, "BLOCK_P": tiles.SCAN_BLOCK_ROWS, "BLOCK_E": tiles.SCAN_BLOCK_COLS}
    plain = dict.fromkeys(("noise_ptr", "pad_ptr", "key_ptr"))
    for left_out in (("key_ptr",), ("noise_ptr", "pad_ptr"), plain):
        yield gating._topk_gating_fwd_kernel, "fp32", {**gate, **dict.fromkeys(left_out)}
    one = {"E": 1, "TOP_K": 1, **plain}  # the narrowest tiles
    yield gating._topk_gating_fwd_kernel, "fp32", {**one, "BLOCK_T": 32, "BLOCK_E": 1}
    yield gating._topk_gating_sums_kernel, "fp32", sums
    yield gating._topk_gating_bwd_kernel, "fp32", gate
    yield gating._scaled_dot_kernel, "fp32", {"E": 70, "BLOCK_E": 128}

    flat = {"B": 70, "BLOCK": tiles.FLAT_BLOCK}
    for half, largest in (("*bf16", {"largest_ptr": None}), ("*fp16", {})):
        given = {**flat, **largest, "out_ptr": half}
        copies = {"C": 70, "twice_ptr": half, "factor_ptr": half}
        for more in (copies, {"C": 0, "twice_ptr": None, "factor_ptr": None}):
            yield gate_logits._split_kernel, "fp32", {**given, **more}
        for two, add in ((True, False), (False, True)):
            yield gate_logits._join_kernel, "fp32", {**given, "TWO": two, "ADD": add}

    slot = {"E": 70, "TOP_K": 2, "BLOCK": tiles.SLOT_BLOCK}
    columns = {"BLOCK_E": tiles.SCAN_BLOCK_COLS, "BLOCK_B": tiles.SCAN_BLOCK_ROWS}
    yield slots._rank_in_block_kernel, "fp32", {**slot, "BLOCK_E": 128}
    yield slots._rank_in_block_kernel, "fp32", {**slot, "E": 1, "TOP_K": 1, "BLOCK_E": 2}
    yield slots._scan_blocks_kernel, "fp32", {"E": 70, "TOP_K": 2, **columns}
    yield slots._add_offset_kernel, "fp32", slot

    pairs = {"E": 70, "TOP_K": 2, "NORMALIZE": True, **rows._tile(2), "BLOCK_R": tiles.FLAT_BLOCK}
    pairs |= {"SLOTS": tiles.SLOT_BLOCK, "BLOCK_E": 128}
    for layout in ({"PADDED": True}, {"PADDED": False}, {"PADDED": False, "hist_ptr": None}):
        yield rows._assign_rows_fwd_kernel, "fp32", {**pairs, **layout}
    yield rows._assign_rows_bwd_kernel, "fp32", {"TOP_K": 2, "NORMALIZE": True, **rows._tile(2)}

    unbiased = {"bias_ptr": None, "expert_ptr": None}
    for dtype, weighted, top_k, given in (
        ("bf16", True, 2, unbiased), ("fp16", True, 2, {}), ("fp32", False, 2, unbiased),
        ("bf16", True, 6, {}),  # more choices than are unrolled
    ):  # fmt: skip
        move = {"M": 4096, "TOP_K": top_k, **given, **({} if weighted else {"weight_ptr": None})}
        dot = {} if weighted else {"dot_ptr": None, "other_ptr": None}
        both = {"E": 70, "BLOCK_K": triton.next_power_of_2(top_k), "BLOCK_E": 128}
        both["ROWS_PER_PROGRAM"] = tiles.ROWS_PER_PROGRAM
        share = {"share_ptr": None} if given else {}
        yield dispatch._token_to_rows_kernel, dtype, {**move, **dot, **both, **share}
        yield dispatch._rows_to_token_kernel, dtype, move

    half = (("bf16", "ieee"), ("fp16", "ieee"))
    for dtype, precision in (*half, ("fp32", "tf32"), ("fp32", "ieee")):
        product = {"A": 4096, "B": 16384, "PRECISION": precision, "UPCAST": False}
        strides = {"stride_e": 4096 * 16384, "stride_a": 1, "stride_b": 4096}
        experts = {"BLOCK_EXPERTS": 4}
        for source in ({"source_ptr": None, "TOP_K": 1}, {"TOP_K": 6}):
            given = {**product, **source}
            yield _grouped._rows_product_kernel, dtype, {**given, **strides, **experts}
            transposed = source.get("source_ptr", 0) is not None  # of which only gathered ones are
            given["TRANSPOSED"] = transposed
            yield _grouped._weight_gradient_kernel, dtype, given
    clearing = {"PROGRAMS": _grouped._CLEARING_PROGRAMS, "BLOCK": tiles.FLAT_BLOCK}
    yield _grouped._clear_unused_kernel, "bf16", {"AB": 4096 * 16384, **clearing}

    least_rows, most_rows = tiles.ACT_TILE_ROWS
    act = {"F": 4096, "TILE": least_rows, "BLOCK_EXPERTS": 4}
    fast = {"active_ptr": None, "dot_ptr": None, "weight_ptr": None}
    padded, unbiased = {"offsets_ptr": None}, {"bias_ptr": None}
    for dtype, name, dropout_p, given in (
        ("bf16", "gelu", 0.0, {}),
        ("fp16", "gelu_tanh", 0.1, padded),
        *(("fp32", name, 0.0, padded) for name in ("relu", "silu", "tanh")),
        ("bf16", "gelu", 0.0, {"GATED": True}),
        ("bf16", "silu", 0.0, {"GATED": True, **unbiased}),
        ("fp32", "silu", 0.0, {"GATED": True, **padded}),
    ):
        mode = {**act, "ACTIVATION": name, "GATED": False, "DROPOUT_P": dropout_p, **given}
        partial = {"partial_ptr": None} if "bias_ptr" in given else {}
        yield activation._bias_act_fwd_kernel, dtype, mode
        backward = {**mode, **partial, "BLOCKS": 32}
        backward |= {} if partial else {"TILE": most_rows}
        yield activation._bias_act_bwd_dh_kernel, dtype, {**backward, **fast}
        yield activation._bias_act_bwd_dh_kernel, dtype, backward
    sums = {**act, **padded, **fast, "TILE": most_rows, "BLOCKS": 32, "GATED": False}
    sums |= {"ACTIVATION": "linear", "DROPOUT_P": 0.0}
    sums |= {"h_ptr": None, "d_h_ptr": None}
    yield activation._bias_act_bwd_dh_kernel, "bf16", sums
    weighted = {
        name: value for name, value in sums.items() if name not in ("dot_ptr", "weight_ptr")
    }
    yield activation._bias_act_bwd_dh_kernel, "bf16", weighted
    blocks = {"BLOCK_Z": tiles.SUM_BLOCK_ROWS, "BLOCK_W": tiles.SUM_BLOCK_COLS}
    sums = {"W": 4096, "TILE": most_rows, "BLOCK_EXPERTS": 4, **blocks}
    for layout in ({}, padded):
        yield activation._bias_act_bwd_db_kernel, "bf16", {**sums, **layout}

    for chosen in WIRE_FORMATS.values():
        stored = "*u8" if chosen.mantissa else f"*{chosen.name}"
        sizes = {"M": 4000, "BLOCK": BLOCK, "BLOCK_N": tiles.WIRE_ROWS}
        sizes |= {"MANTISSA": chosen.mantissa, "BIAS": chosen.bias, "value_ptr": stored}
        scaled = chosen.exponent is not None
        scales = {"SCALED": scaled, "EXPONENT": chosen.exponent or 0, "B": 32, "NUM_SCALES": 32}
        yield wire._encode_rows_kernel, "fp32", {**sizes, **scales}
        if scaled:
            yield wire._decode_rows_kernel, "fp16", {**sizes, "CLAMP": True}

    for dtype in FLOAT:
        rounded = {"A": 2048, "BLOCK": 2048}
        yield wire._quantize_rows_kernel, dtype, rounded

    adam_blocks = {"BLOCK": tiles.ADAM_BLOCK}
    step_blocks = {"BLOCK_P": tiles.ADAM_PROGRAMS, "BLOCKS": tiles.ADAM_BLOCKS}
    for dtype in ("fp16", "bf16"):
        yield adam._adam16_max_kernel, dtype, adam_blocks
        yield adam._adam16_step_kernel, dtype, {**adam_blocks, **step_blocks}
        half = tl.float16 if dtype == "fp16" else tl.bfloat16
        yield adam._adam16_small_kernel, dtype, {**adam_blocks, "PARAM": half, "GRAD": half}


def _tma_variants():
    """(kernel, dtype, constexpr values and types of descriptors)."""
    sizes = {"A": 4096, "B": 16384, "UPCAST": False, "GROUP": _grouped_tma._GROUP}
    for dtype, tile, gathered in itertools.product(("fp16", "bf16"), TMA_TILES, (False, True)):
        given = {**sizes, **tile.sizes(), "TOP_K": 6}
        down, across, deep = (given[f"BLOCK_{letter}"] for letter in "RCD")

        def rows(*block, dtype=dtype, gathered=gathered):
            if gathered:
                return {"rows_ref": f"*{dtype}"}
            return {"rows_ref": f"tensordesc<{dtype}{[*block]}>", "source_ptr": None}

        for transposed in (True, False):
            block = (across, deep) if transposed else (deep, across)
            weight = f"tensordesc<{dtype}[1, {block[0]}, {block[1]}]>"
            more = {"TRANSPOSED": transposed, "BLOCK_EXPERTS": 4, "weight_desc": weight}
            all_given = {**given, **more, **rows(down, deep)}
            yield _grouped_tma._rows_product_tma_kernel, dtype, all_given
        if tile in _grouped_tma.TILES:
            d = f"tensordesc<{dtype}[1, 1, {deep}, {down}]>"
            given["num_stages"] += gathered * (tile.stages - 1)
            for transposed in (True, False) if gathered else (False,):
                more = {"d_desc": d, "TRANSPOSED": transposed, **rows(1, 1, deep, across)}
                yield _grouped_tma._weight_gradient_tma_kernel, dtype, {**given, **more}


TMA_TILES = (*_grouped_tma.TILES, *_grouped_tma.TILES_OF_FEW_ROWS)
_NAMES = {"int32": "*i32", "int64": "*i64", "uint8": "*u8", "bool": "*i1"} | FLOAT
_SCALARS = {"num_elements": "i64"} | dict.fromkeys(
    ("beta1", "beta2", "grad_weight", "square_weight", "step_size", "decay", "eps"), "fp32"
)


def _signature(function, dtype, constants):
    """Types of the arguments; those of pointers stand in their comments, else they are ``dtype``'s.

    A constant that is the name of a type, of a pointer or descriptor, is that.
    """
    signature = {}
    for name in function.arg_names:
        given = constants.get(name)
        if isinstance(given, str) and given.startswith(("*", "tensordesc")):
            signature[name] = given
        elif name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            stated = re.search(rf"\b{name},  # \(.*?\)(?: (\w+))?", function.src)[1]
            signature[name] = _NAMES.get(stated, FLOAT[dtype])
        else:
            signature[name] = _SCALARS.get(name, "i32")
    return signature


def _compile(kernel, dtype, constants, target, tile=0):
    function = kernel
    if isinstance(kernel, tiles.Tuned):
        function, constants = kernel.fn, {**constants, **kernel.tiles[tile]}
    options = {
        name: constants.pop(name)
        for name in ("num_warps", "num_stages", "maxnreg")
        if name in constants
    }
    signature = _signature(function, dtype, constants)
    constants = {name: value for name, value in constants.items() if signature[name] == "constexpr"}
    # allocations are aligned to 16 bytes at least, and the launch specializes on that
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names) if signature[name].startswith("*")
    }  # fmt: skip
    source = ASTSource(function, signature, constants, aligned)
    return function.__name__, triton.compile(source, target, options)


def narrow_products(ttir: str) -> list[str]:
    """The 32-bit products that some address depends on: they overflow from 2^31 elements on.

    From each pointer addition back to values that are loaded or carried by a loop.
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


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and of local memory, where spills go."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)
    return {{"REG": "registers"}.get(name, name.lower()): int(count) for name, count in found}


def amd_resources(amdgcn: str) -> dict[str, int]:
    """Registers of a thread, bytes of its stack, and vector registers that were spilled there.

    Scalar registers are spilled to lanes of vector registers.
    """
    count = {
        name: int(number)
        for name, number in re.findall(r"\.((?:vgpr|sgpr|private)\w*):\s*(\d+)", amdgcn)
    }
    stack, spilled = count["private_segment_fixed_size"], count["vgpr_spill_count"]
    return {"registers": count["vgpr_count"], "stack": stack, "spilled": spilled}


def _chosen(variants):
    """(kernel, dtype, constants, index of the tile)."""
    done = set()
    for kernel, dtype, constants in _variants():
        if variants == "tiles":
            if not isinstance(kernel, tiles.Tuned):
                continue
            count = len(kernel.tiles) if dtype == "bf16" else 0
            if dtype == "fp32" and constants.get("PRECISION") == "ieee":
                count = tiles.IEEE_TILES
            for tile in range(1, count):
                yield kernel, dtype, constants, tile
        elif variants == "all" or kernel not in done or kernel in ADAM:
            yield kernel, dtype, constants, 0
        done.add(kernel)


def compile_all(backend: str, arch: str, variants: str) -> None:
    cuda = backend == "cuda"
    target = GPUTarget(backend, int(arch) if cuda else arch, 32 if cuda else 64)
    chosen = list(_chosen(variants))
    if cuda and arch in TMA and variants != "tiles":
        chosen += [(*variant, 0) for variant in _tma_variants()]
    for kernel, dtype, constants, tile in chosen:
        name, binary = _compile(kernel, dtype, constants, target, tile)
        code = binary.asm["cubin" if cuda else "hsaco"]
        result = {"target": f"{backend}:{arch}", "kernel": name, "tile": tile, "size": len(code)}
        result["narrow"] = narrow_products(binary.asm["ttir"])
        if cuda:
            result["wide"] = wide_accesses(binary.asm["ptx"])
            result["branches"] = len(re.findall(r"\bbra\b", binary.asm["ptx"]))
            result |= resources(code)
            result["tma"] = binary.asm["ptx"].count("cp.async.bulk.tensor")
            # loops that are left of two, loads under way, and operands that pass through registers
            ir = binary.asm["ttgir"]
            result["loops"], result["detours"] = ir.count("scf.for"), ir.count("ttg.local_load")
            pending = map(int, re.findall(r"async_wait.*?num = (\d+)", ir))
            result["pending"] = max(pending, default=None)
            names = {"FLATTEN", "BLOCK_R", "source_ptr"} & constants.keys()
            result["given"] = {name: constants[name] for name in names}
            result["products"] = len(re.findall(r"(?:wgmma|tcgen05)\.mma", binary.asm["ptx"]))
        else:
            result |= amd_resources(binary.asm["amdgcn"])
        result["shared"], result["warps"] = binary.metadata.shared, binary.metadata.num_warps
        print(json.dumps(result))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        compile_all(*argument.split(":"))
