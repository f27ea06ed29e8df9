"""Train a DFlash drafter for a target: data, features, training, evaluation."""
