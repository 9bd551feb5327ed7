"""One model over several ranks: whose part is what, and how ranks add what they have computed.

Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019, section 3): the projections to heads and
to the inner width are divided by their outputs, those back from them by their inputs, embedding and
head by the vocabulary. `division` says who has what, `cut` takes it from tensors, `group` is how
ranks speak with each other, `heads` norms that need the heads of all.
"""
