"""Options of models with MoE layers: on a command line, in a Hydra config, on a page."""
