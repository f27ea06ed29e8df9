"""The same models on AWS's PyTorch/XLA stack, through neuronx-distributed (`parallel: nxd`).

One process drives all cores of a model. Nothing here but `layers` and `program`, when they are
used, needs that stack. What is relied on, in the source of neuronx-distributed 0.18:
`parallel_layers/{layers,mappings}.py`, `trace/{model_builder_v2,functions,parallel_context}.py` and
`trace/nxd_model/nxd_model.py`.
"""
