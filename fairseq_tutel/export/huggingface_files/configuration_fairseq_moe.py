"""Config of a mixture-of-experts language model that was trained with fairseq."""

from dataclasses import field

from transformers import PreTrainedConfig


class FairseqMoEConfig(PreTrainedConfig):
    """Config of the model. Fields with transformers' usual names mean the usual.

    Args:
        ffn_dim: hidden width of layers without experts.
        moe_layers: layers with experts, counted from 0.
        num_experts, num_experts_per_tok, moe_ffn_dim: E, K and the hidden width of an expert.
        expert_network: "ffn" is ``down(act(up(x)))``, "swiglu" and "geglu" are
            ``down(act(gate(x)) * up(x))``; "clamped_swiglu" is ``down(g * sigmoid(gate_alpha * g) *
            (u + gate_shift))`` with g = gate(x) of at most ``gate_limit`` and u = up(x) within it.
        expert_bias: whether the experts' projections have biases (always True for "ffn").
        shared_expert_dim: hidden width of the shared expert, 0 for none.
        shared_expert_gate: whether a sigmoid per token multiplies its output.
        score_function: "softmax" or "sigmoid" of the router's logits.
        num_expert_groups: groups of neighbouring experts, 1 for no limit to groups.
        top_groups: groups that a token chooses from.
        group_score: score of a group, its two largest scores ("top2") or its largest ("max").
        norm_topk_prob: divide the K scores of a token by their sum.
        router_load_bias: whether a bias is added to scores for the selection of experts alone.
        router_fp32: compute the router's logits in fp32 from weights of any dtype.
        routed_scale, moe_output_scale: factors of an expert's weight and of a layer's output.
        position_embedding: "sinusoidal", "learned" or "none".
        scale_embedding: multiply token embeddings by the square root of ``hidden_size``.
        final_layer_norm: whether a norm follows the last layer.
    """

    model_type = "fairseq_moe"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 0
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    ffn_dim: int = 256
    activation_function: str = "gelu"
    moe_layers: list = field(default_factory=lambda: [1])
    num_experts: int = 2
    num_experts_per_tok: int = 1
    moe_ffn_dim: int = 256
    expert_network: str = "ffn"
    expert_bias: bool = True
    gate_limit: float = 7.0
    gate_alpha: float = 1.702
    gate_shift: float = 1.0
    shared_expert_dim: int = 0
    shared_expert_gate: bool = False
    score_function: str = "softmax"
    num_expert_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    norm_topk_prob: bool = True
    router_load_bias: bool = False
    router_fp32: bool = True
    routed_scale: float = 1.0
    moe_output_scale: float = 1.0
    max_position_embeddings: int = 1024
    position_embedding: str = "sinusoidal"
    scale_embedding: bool = True
    final_layer_norm: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int = 0
    pad_token_id: int = 1
    eos_token_id: int = 2
    tie_word_embeddings: bool = True
