"""Commands that train each of fairseq's model classes, as small as they go; see architectures."""

from __future__ import annotations

from typing import NamedTuple

ENCODER = """
    --encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24
    --encoder-attention-heads 2
"""
DECODER = """
    --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24
    --decoder-attention-heads 2
"""
QUIET = " --dropout 0 --attention-dropout 0 --activation-dropout 0"
PAIR = ENCODER + DECODER + QUIET
SMOOTHED = " --criterion label_smoothed_cross_entropy"
NAT = "--task translation_lev --criterion nat_loss --share-all-embeddings --apply-bert-init" + PAIR
FULL_MASK = " --noise full_mask --pred-length-offset --length-loss-factor 0.1"
S2T = "--task speech_to_text --max-tokens 4000" + SMOOTHED
CONV = " --conv-channels 16"
CONFORMER = " --attn-type espnet --pos-enc-type rel_pos"
# a wav2vec model: a step of 20 samples, 16 numbers
WAVES = (
    """
    --conv-feature-layers [(16,10,5),(16,8,4)] --encoder-layers 2 --encoder-embed-dim 16
    --encoder-ffn-embed-dim 24 --encoder-attention-heads 2 --conv-pos 4 --conv-pos-groups 2
    --mask-length 2 --mask-prob 0.5 --encoder-layerdrop 0 --dropout-input 0 --dropout-features 0
    --final-dim 16 --required-seq-len-multiple 1
"""
    + QUIET
)
TUNED = " --layerdrop 0 --mask-prob 0.3 --mask-length 2 --final-dropout 0 --dropout-input 0"
TUNED += " --activation-dropout 0 --attention-dropout 0 --dropout 0 --feature-grad-mult 0.1"
AUTOREGRESSIVE = """
    --decoder-embed-dim 512 --decoder-ffn-embed-dim 24 --decoder-layers 2
    --decoder-attention-heads 2 --decoder-layerdrop 0 --decoder-dropout 0
    --decoder-attention-dropout 0 --decoder-activation-dropout 0
"""
FROM_W2V = " --w2v-path {folder}/wav2vec2.pt" + TUNED
FROM_HUBERT = " --w2v-path {folder}/hubert.pt" + TUNED
UNITS = (
    "--task speech_to_speech --max-tokens 4000 --target-is-code --target-code-size 16 --vocoder "
    "code_hifigan --criterion speech_to_unit --label-smoothing 0.1"
)
SPECTRA = (
    "--task speech_to_speech --max-tokens 4000 --criterion speech_to_spectrogram "
    "--n-frames-per-step 1 --prenet-dim 8 --prenet-dropout 0 --postnet-conv-dim 8 "
    "--postnet-layers 2 --postnet-dropout 0 --output-frame-dim 16"
)
SPECTRUM_DECODER = """
    --decoder-transformer-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24
    --decoder-attention-heads 2
"""


class Row(NamedTuple):
    """How one model class is trained, and which stacks get experts."""

    arch: str
    data: str  # folder of the generated data
    options: str
    stacks: tuple[str, ...] = ("encoder.layers", "decoder.layers")


W2V_STACK = "w2v_encoder.w2v_model.encoder.layers"
ROWS = {
    "transformer_lm": Row(
        "transformer_lm_big", "text", "--task language_modeling --criterion cross_entropy "
        "--tokens-per-sample 8" + DECODER + QUIET, ("decoder.layers",)),
    "roberta": Row(
        "roberta_base", "text", "--task masked_lm --criterion masked_lm --tokens-per-sample 12"
        + ENCODER + QUIET, ("encoder.sentence_encoder.layers",)),
    "sentence_prediction": Row(
        "roberta_base", "labelled", "--task sentence_prediction --num-classes 2 --init-token 0 "
        "--criterion sentence_prediction --pooler-dropout 0 --max-positions 16"
        + ENCODER + QUIET, ("encoder.sentence_encoder.layers",)),
    "masked_lm": Row(
        "masked_lm", "text", "--task masked_lm --criterion squared_output --tokens-per-sample 12 "
        "--dropout 0 --attention-dropout 0 --act-dropout 0" + ENCODER,
        ("encoder.sentence_encoder.layers",)),
    "xmod": Row(
        "xmod_base", "languages", "--task multilingual_masked_lm --criterion masked_lm "
        "--tokens-per-sample 12" + ENCODER + QUIET, ("encoder.sentence_encoder.layers",)),
    "bart": Row(
        "bart_base", "text", "--task denoising --criterion cross_entropy --tokens-per-sample 12 "
        "--mask 0.3 --mask-length span-poisson --replace-length 1 --share-all-embeddings" + PAIR),
    "transformer": Row(
        "transformer_iwslt_de_en", "pairs",
        "--task translation --criterion moe_label_smoothed_cross_entropy" + PAIR),
    "transformer_align": Row(
        "transformer_align", "pairs", "--task translation --criterion cross_entropy" + PAIR),
    "roberta_enc_dec": Row(
        "roberta_enc_dec_tiny", "pairs", "--task translation --share-all-embeddings" + SMOOTHED),
    "multilingual_transformer": Row(
        "multilingual_transformer", "pairs", "--task multilingual_translation --lang-pairs "
        "a-b,b-a --share-encoders" + SMOOTHED + PAIR,
        ("models.a-b.encoder.layers", "models.a-b.decoder.layers", "models.b-a.decoder.layers")),
    "nonautoregressive_transformer": Row(
        "nonautoregressive_transformer", "pairs", NAT + FULL_MASK),
    "nacrf_transformer": Row(
        "nacrf_transformer", "pairs", NAT + FULL_MASK + " --word-ins-loss-factor 0.5 "
        "--crf-lowrank-approx 8 --crf-beam-approx 4"),
    "iterative_nonautoregressive_transformer": Row(
        "iterative_nonautoregressive_transformer", "pairs", NAT + FULL_MASK + " --train-step 2"),
    "cmlm_transformer": Row(
        "cmlm_transformer", "pairs", NAT + " --noise full_mask --length-loss-factor 0.1"),
    "levenshtein_transformer": Row(
        "levenshtein_transformer", "pairs", NAT + " --noise random_delete"),
    "insertion_transformer": Row(
        "insertion_transformer", "pairs", NAT + " --noise random_delete"),
    "s2t_transformer": Row(
        "s2t_transformer_s", "speech", S2T + CONV + PAIR,
        ("encoder.transformer_layers", "decoder.layers")),
    "s2t_conformer": Row(
        "s2t_conformer", "speech", S2T + CONV + CONFORMER + PAIR,
        ("encoder.conformer_layers", "decoder.layers")),
    "convtransformer": Row(
        "convtransformer", "speech", S2T + " --conv-out-channels 8" + PAIR,
        ("encoder.transformer_layers", "decoder.layers")),
    "xm_transformer": Row(
        "xm_transformer_tiny", "sound", S2T + AUTOREGRESSIVE + FROM_W2V + " --adaptor-n-layers 1",
        ("encoder.w2v_encoder.w2v_model.encoder.layers", "decoder.layers")),
    "wav2vec2": Row(
        "wav2vec2", "waves", "--task audio_pretraining --criterion wav2vec --latent-vars 4 "
        "--latent-groups 2 --latent-dim 16 --num-negatives 5 --quantize-targets --infonce "
        "--loss-weights [0.1,10] --max-sample-size 2000 --min-sample-size 100"
        + WAVES, ("encoder.layers",)),
    "wav2vec_ctc": Row(
        "wav2vec_ctc", "waves", "--task audio_finetuning --labels ltr --criterion ctc "
        "--zero-infinity" + FROM_W2V, (W2V_STACK,)),
    "wav2vec_seq2seq": Row(
        "wav2vec_seq2seq", "waves", "--task audio_finetuning --labels ltr --autoregressive "
        "--criterion cross_entropy" + FROM_W2V + AUTOREGRESSIVE,
        ("encoder.w2v_model.encoder.layers", "decoder.layers")),
    "wav2vec_classification": Row(
        "wav2vec_classification", "waves", "--task audio_finetuning --labels ltr --criterion "
        "squared_output --pooling mean" + FROM_W2V, (W2V_STACK,)),
    "wav2vec2_laser": Row(
        "wav2vec2_laser", "waves", "--task audio_finetuning --labels ltr --criterion "
        "squared_output" + FROM_W2V, (W2V_STACK,)),
    "hubert": Row(
        "hubert", "waves", "--task hubert_pretraining --criterion hubert --labels ['km'] "
        "--label-rate 800 --pred-masked-weight 1 --untie-final-proj --max-sample-size 2000 "
        "--min-sample-size 100" + WAVES, ("encoder.layers",)),
    "hubert_seq2seq": Row(
        "hubert_seq2seq", "waves", "--task audio_finetuning --labels ltr --autoregressive "
        "--criterion cross_entropy" + FROM_HUBERT + AUTOREGRESSIVE.replace("512", "768"),
        ("encoder.w2v_model.encoder.layers", "decoder.layers")),
    "s2ut_transformer": Row(
        "s2ut_transformer", "units", UNITS + CONV + PAIR,
        ("encoder.transformer_layers", "decoder.layers")),
    "s2ut_conformer": Row(
        "s2ut_conformer", "units", UNITS + CONV + CONFORMER + PAIR,
        ("encoder.conformer_layers", "decoder.layers")),
    "s2spect_transformer": Row(
        "s2spect_transformer", "spectra", SPECTRA + CONV + ENCODER + QUIET + SPECTRUM_DECODER,
        ("encoder.transformer_layers", "decoder.transformer_layers")),
    "s2spect_conformer": Row(
        "s2spect_conformer", "spectra",
        SPECTRA + CONV + CONFORMER + ENCODER + QUIET + SPECTRUM_DECODER,
        ("encoder.conformer_layers", "decoder.transformer_layers")),
    "tts_transformer": Row(
        "tts_transformer", "voices", "--task text_to_speech --criterion tacotron2 "
        "--max-tokens 4000 --n-frames-per-step 1 --prenet-dim 8 --prenet-dropout 0 "
        "--postnet-conv-dim 8 --postnet-layers 2 --postnet-dropout 0 --output-frame-dim 16 "
        "--bce-pos-weight 1 "
        "--encoder-transformer-layers 2 --encoder-embed-dim 16 --encoder-conv-layers 1 "
        "--encoder-dropout 0 --encoder-attention-heads 2 --dropout 0 --attention-dropout 0 "
        "--activation-dropout 0" + SPECTRUM_DECODER,
        ("encoder.transformer_layers", "decoder.transformer_layers")),
    "transformer_ulm": Row(
        "transformer_ulm_tiny", "codes/config.json", "--task speech_unit_modeling --criterion "
        "speech_unit_lm_criterion --discrete-duration --discrete-f0 --ignore-f0-input"
        + DECODER + QUIET, ("decoder.layers",)),
    "speech_dlm": Row(
        "speech_dlm", "channels", "--task speech_dlm_task --criterion speech_dlm_criterion "
        "--channels a,b --general-unit-loss-weight 1 --next-unit-prediction True "
        "--edge-unit-prediction False --duration-prediction False --tokens-per-sample 8 "
        "--decoder-cross-layers 1" + DECODER + QUIET, ("decoder.layers",)),
}  # fmt: skip
