"""DFlash block-diffusion speculative decoding: models, checkpoints, decoding. No Ray."""
