"""Names of ``tutel.moe``."""

# ruff: noqa: F401
from .layer import moe_layer
from .routing import (
    extract_critical,
    fast_cumsum_sub_one,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    get_reversed_sample_ids,
    get_topk_selection,
    top_k_routing,
)
