"""fairseq's trainer for models with experts, its checkpoints and logs."""
