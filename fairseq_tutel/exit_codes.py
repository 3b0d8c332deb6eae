"""Exit codes that the launcher, the trainer and the batch scripts agree on (stdlib only)."""

# The training process exits with this code when it was asked (SIGUSR1) to make room: it has saved
# a checkpoint at the end of an update and wants to be queued again. The launcher passes the code
# through, and scripts/slurm/train.sbatch requeues the job on it. 85 is free of the shell's codes
# (126-165) and of those in sysexits.h (64-78).
EXIT_REQUEUE = 85

# A user's error, found before any rank was started (argparse uses the same code).
EXIT_USAGE = 2
