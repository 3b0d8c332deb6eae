"""The published claims about Tutel.

Sources: ``announcement``: Microsoft's announcement of Tutel, November 2021; ``analysis``: a Chinese
technical analysis of it; ``paper``: arXiv 2206.03382, its abstract of the first version included;
``news``: an article of 2021 about the announcement.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One published claim."""

    number: int  # of the row
    text: str
    source: str  # who published it, with the set-up where it is known
    published: tuple[float, ...] = ()  # figures to compare, in order
    unit: str = "x"  # of the figures; x: times as fast
    test: str = ""  # the test that shows it
    formula: str = ""  # how the prediction is made
    reason: str = ""  # why it is not reached, or what holds in part
    like_for_like: bool = False  # whether a measurement has the claim's task and baseline
    partly: bool = False  # whether the test shows a part of the claim only


CLAIMS = (
    Claim(
        1,
        "one layer against fairseq's dense formulation, 8 and 512 GPUs",
        "announcement, figure 1; it names no shape, so figure 14's of the paper is taken",
        (8.49, 2.75),
        formula="products, passes over masks of T x E x C, all-to-alls (plan/layer.py)",
        reason="predicted 15.4 % low on 8 GPUs, within 2 % on 512",
    ),
    Claim(
        2,
        "end to end, Meta's 1.1T model, 8 and 512 GPUs",
        "announcement, table 1 and figure 3: +131 % and +40 %",
        (2.31, 1.40),
        formula="updates of configs/meta_1.1t.yaml, dense over this (plan/dense.py)",
        reason="predicted lower on 8 GPUs, higher on 512: the all-to-all there is faster on paper",
    ),
    Claim(
        3,
        "all-to-all on 512 GPUs, by CPU binding and adaptive routing of the fabric",
        "announcement, figure 2: messages of hundreds of MiB",
        (2.56, 5.93),
        reason="adaptive routing belongs to a fabric of 512 GPUs: neither predicted nor measured",
    ),
    Claim(
        4,
        "dispatch costs O(N^2), not O(N^3)",
        "announcement",
        test="tests/bench/test_dense_reference.py::test_dispatch_by_masks_grows_with_the_square",
    ),
    Claim(
        5,
        "slots against a cumulative sum of one-hot masks",
        "announcement: 24 times, no shape; here that of its 512 GPUs: 24,576 tokens, 512 experts",
        (24,),
        reason="on a CPU; 12 times with 64 experts, 1.4 with 8; with 4096 tokens 33, 2.0 and 0.64 "
        "times",
        like_for_like=True,
    ),
    Claim(
        6,
        "kernels compiled at run time for CUDA and ROCm",
        "announcement",
        test="tests/backends/triton/test_compile.py",
    ),
    Claim(
        7,
        "CPU-GPU binding, automatic and by hand",
        "announcement",
        test="tests/launch/test_launch_job.py::test_cores_that_the_user_gives",
    ),
    Claim(
        8,
        "any K, batch prioritised routing, input dropout and jitter, fp16, fp32, bf16",
        "announcement",
        test="tests/moe/test_router.py",
    ),
    Claim(
        9,
        "experts for vision, speech, language and translation",
        "announcement",
        test="tests/integrations/fairseq/test_replace_ffn_in_fairseq.py"
        "::test_wav2vec_gets_experts_and_trains",
    ),
    Claim(
        10,
        "share of communication in a step, down from 45 % by 2DH, fp16 and compact rows",
        "analysis: 45 to 28 %, most above 100 experts; here 128 experts on 8 ranks of the bed",
        (28,),
        unit="%",
        reason="down from 47.3 %, near which the bed's link was set: that share is no evidence. "
        "Casts and packing count as communication; the links alone take 22.6 %",
        like_for_like=True,
    ),
    Claim(
        11,
        "throughput at a utilisation of 89 % against 72 %",
        "analysis: SwinV2-MoE, 1.3 times",
        (1.3,),
        formula="the busiest rank decides: 89 / 72",
        reason="measured at forced loads; 4 ranks on 2 cores share what the busiest one needs. The "
        "routing by entropy that the analysis names gained nothing in a study",
    ),
    Claim(
        12,
        "activation checkpointing leaves 0.40 of the memory; 15 % by asynchronous recomputation",
        "analysis: 60 % less; here SwinV2-MoE, small, 16 images",
        (0.40,),
        unit="",
        reason="recomputation while rows travel: activation_memory (test_activation_memory.py)",
        like_for_like=True,
    ),
    Claim(
        13,
        "SwinV2-MoE against fairseq: training and inference on 128 GPUs",
        "paper, table 8; analysis: steps of 125 to 80 ms and 62 to 30 ms",
        (1.55, 2.11),
        reason="measured with 32 and 48 images; the gain grows with the batch, and "
        "by operations 26 and 44 images give the published figures",
        like_for_like=True,
    ),
    Claim(
        14,
        "1024 experts in 32 groups; units busy for over 0.90 of a step",
        "analysis; here the experts' products on a CPU, one rank of 32 with 1024 experts",
        (0.90,),
        unit="",
        reason="0.95 with experts of 1024/4096, 0.66 with those of 256/1024, where routing to 1024 "
        "experts weighs more; the analysis names no width",
        test="tests/distributed/test_groups.py",
    ),
    Claim(
        15,
        "a training of 45 days takes 27",
        "analysis; it names no machine, so the 1.1T model on 512 GPUs is taken",
        (1.67,),
        formula="updates of configs/meta_1.1t.yaml, dense over this",
    ),
    Claim(
        16,
        'MoELayer(num_experts=4, expert_fn=..., top_k=2, optimizer="adamw")',
        "analysis",
        test="tests/moe/test_own_experts.py::test_the_first_linear_layer_says_the_width",
        reason="all but optimizer=, which is refused with the two lines to write instead",
    ),
    Claim(
        17,
        "advice: at least 128 tokens per expert, groups above 256 experts",
        "analysis",
        test="tests/plan/test_plan_cli.py::test_advice_about_the_number_of_experts",
    ),
    Claim(
        18,
        "future: unlike devices, experts added in training, activations in fewer bytes",
        "analysis",
        test="tests/integrations/fairseq/test_growth.py",
        partly=True,
        reason="experts are added in training (test_growth.py), and activations kept in fp8 "
        "(--moe-activation-storage); unlike devices are not there",
    ),
    Claim(
        19,
        "adaptive parallelism against r = 1",
        "paper, first version; figure 12: 64 GPUs",
        (1.74,),
        formula="all-to-alls, gathers and products over r, largest gain of four capacity factors",
        reason="on the bed the same formula predicts 1.76, and r = 4 too",
    ),
    Claim(
        20,
        "adaptive pipelining against no overlap",
        "paper, first version",
        (2.00,),
        like_for_like=True,
    ),
    Claim(
        21,
        "2DH all-to-all against the linear one on 2,048 GPUs",
        "paper, first version; small messages, here 1 MiB per GPU",
        (20.7,),
        formula="starts, bytes and messages of both (distributed/exchanges)",
        reason="the formula has no congestion, which its cost of 3 us per message leaves out",
    ),
    Claim(
        22,
        "everything together, one layer against fairseq, 16 and 2,048 GPUs",
        "paper, figure 14",
        (4.96, 5.75),
        formula="as row 1, with the best exchange and overlap",
        reason="predicted higher on 16 GPUs and lower on 2,048, as in row 21; measured on 4 and 8 "
        "ranks, whose two cores also move the bytes, so that overlap hides little",
    ),
    Claim(
        23,
        "better accuracy than the dense model",
        "paper: ImageNet-22K and COCO; here handwritten digits, percent correct",
        unit="%",
        test="tests/plan/test_claims.py::test_measured_values_are_those_of_the_files",
        reason="detection is out of reach of two cores",
    ),
    Claim(
        24,
        "experts for any form of model",
        "news",
        test="tests/moe/test_replace.py",
    ),
)
