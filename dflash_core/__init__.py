"""DFlash block-diffusion speculative decoding: models, checkpoints, decoding. Independent of Ray."""
