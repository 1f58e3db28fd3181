"""The keys of the reference spec for which no option is drawn, each with the reason."""

# keys that follow from other choices
FOLLOWS = {
    "batch.global": "microbatches · batch.micro · mesh.dp",
    "inputs.shape": "the model",
    "inputs.dtype": "the model",
    "inputs.high": "the model",
    "inputs.like": "the model",
    "inputs.joined": "the model",
    "inputs.batch_dim": "the model",
    "inputs.value": "the model",
    "loss": "depends on the outputs of the model",
    "data.packing": "the model",
}

# optimizer.name is not lion: where a gradient is nothing but rounding, its sign moves a parameter by lr; nor muon:
# it computes in bfloat16 whatever the model's dtype is (tests/numeric/test_muon.py)
EXCLUDED = {
    "optimizer.adjust_lr": "it is for muon, which is not drawn",
    "optimizer.split": "it is for muon, which is not drawn",
    "optimizer.options": "it is for classes of torch.optim (tests/numeric/test_update_rules.py)",
    "precision.gather": "it rounds the weights of the engine, and not those of one process",
    "batch.tokens": "it sets batch.global",
    "batch.statistics": "its other value is not exact",
    "tensor_parallel.infer_rules": "no drawn model has an op without a rule",
    "experts.imbalance": "it is for the predicted memory and time",
    "optimizer.schedule.decay": "it is for wsd, which is not drawn: one function gives the rates of both sides",
    "optimizer.schedule.power": "it is for polynomial, as optimizer.schedule.decay for wsd",
    "audit.tolerance": "the tolerance follows from the precision of the model, as in the comparison with one process",
    "emulate_precision_casts": "its other value rounds otherwise than one process",
    "attention": "cuDNN's kernel needs a GPU (tests/runtime/test_attention.py)",
    "data.objective": "it prepares batches and does not affect a step",
    "data.overlong": "it prepares batches",
    "data.mean_document": "it is for the predicted memory and time",
    "data.validation": "it prepares batches",
    "data.mixture": "it prepares batches",
    "data.inputs": "it prepares batches",
    "data.mask.share": "it prepares batches",
    "data.mask.ngram": "it prepares batches",
    "cluster": "it describes machines for the search and the time estimate, and does not affect a step",
    "devices": "it is for the search",
    "initialization.method": "it initializes missing weights, which one process could not start from",
    "initialization.std": "as initialization.method",
    "initialization.residual_scale": "as initialization.method",
}
